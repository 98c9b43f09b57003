// PyTorch ops for the kernels. An op checks its inputs, allocates its output and calls the kernel that Python has
// registered for the dtype.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace {

using at::Tensor;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

template <class Call>
struct Kernel {
  using Run = void(const Call&);
  static inline Run* by_dtype[std::size(kDtypes)] = {};

  static void run(const Call& call, const Tensor& values) {
    const auto* dtype = std::find(std::begin(kDtypes), std::end(kDtypes), values.scalar_type());
    auto* kernel = dtype == std::end(kDtypes) ? nullptr : by_dtype[dtype - kDtypes];
    TORCH_CHECK(kernel != nullptr, Call::kName, ": no kernel for ", values.dtype());
    kernel(call);
  }

  static void set(std::string_view name, int64_t dtype, void* kernel) {
    if (name == Call::kName) by_dtype[dtype] = reinterpret_cast<Run*>(kernel);
  }
};

const void* contiguous_data(const char* name, const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == like.scalar_type(), name,
              ": not contiguous, or of another dtype");
  return tensor.const_data_ptr();
}

// The bias, or a contiguous copy of a strided bias; the result has to outlive the kernel call.
Tensor contiguous_bias(const char* name, const std::optional<Tensor>& bias, int64_t size) {
  if (!bias.has_value()) return {};
  TORCH_CHECK(bias->numel() == size, name, ": bias of the wrong size");
  return bias->contiguous();
}

const void* bias_data(const char* name, const Tensor& bias, const Tensor& like) {
  return bias.defined() ? contiguous_data(name, bias, like) : nullptr;
}

Tensor empty_rows(const Tensor& input, int64_t size_out) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = size_out;
  return at::empty(sizes, input.options());
}

// input (..., in), weights (out, in) each, bias (sum of out) -> (..., sum of out).
Tensor skinny_gemm(const Tensor& given, at::TensorList weights, const std::optional<Tensor>& given_bias) {
  const char* name = SkinnyGemm::kName;
  const Tensor input = given.contiguous();
  SkinnyGemm call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size, call.count = static_cast<int64_t>(weights.size());
  std::vector<const void*> data;
  std::vector<int64_t> sizes_out;
  for (const Tensor& weight : weights) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == call.size, name, ": weights of the wrong size");
    data.push_back(contiguous_data(name, weight, input));
    sizes_out.push_back(weight.size(0));
    call.size_out += weight.size(0);
  }
  const Tensor output = empty_rows(input, call.size_out), bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weights = data.data(), call.sizes_out = sizes_out.data();
  call.bias = bias_data(name, bias, input), call.output = output.mutable_data_ptr();
  call.threads = at::get_num_threads();
  Kernel<SkinnyGemm>::run(call, input);
  return output;
}

// input (..., in) of at most eight rows, weights (out, groups, 64), scales (out, groups), bias (out) -> (..., out).
Tensor groupwise_gemm(const Tensor& given, const Tensor& weight, const Tensor& scales,
                    const std::optional<Tensor>& given_bias) {
  const char* name = GroupwiseGemm::kName;
  const Tensor input = given.contiguous();
  GroupwiseGemm call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size;
  call.size_out = weight.size(0), call.groups = weight.size(1);
  TORCH_CHECK(call.rows >= 1 && call.rows <= 8, name, ": ", call.rows, " rows");
  TORCH_CHECK(weight.is_contiguous() && weight.size(2) == 64 && call.groups == (call.size + 63) / 64 &&
                  scales.is_contiguous() && scales.numel() == call.size_out * call.groups,
              name, ": weights of the wrong size");
  const Tensor output = empty_rows(input, call.size_out), bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weight = weight.const_data_ptr<uint8_t>();
  call.scales = scales.const_data_ptr<float>(), call.bias = bias_data(name, bias, input);
  call.output = output.mutable_data_ptr(), call.threads = at::get_num_threads();
  Kernel<GroupwiseGemm>::run(call, input);
  return output;
}

// query (rows, heads, queries, size), key and value (rows, heads, all slots, size) -> as query. Slots from `end` on are
// not read. The mask (rows or 1, 1, queries, all slots) is added to the scores.
Tensor decode_attention(const Tensor& given, const Tensor& key, const Tensor& value, const Tensor& mask,
                        const Tensor& end, double scale) {
  const char* name = DecodeAttention::kName;
  const Tensor query = given.contiguous(), output = at::empty_like(query);
  DecodeAttention call{};
  call.query = query.const_data_ptr(), call.output = output.mutable_data_ptr();
  call.key = contiguous_data(name, key, query), call.value = contiguous_data(name, value, query);
  call.mask = contiguous_data(name, mask, query), call.has_row_masks = mask.size(0) > 1;
  call.rows = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  call.slots = *end.const_data_ptr<int64_t>(), call.all_slots = key.size(2);
  TORCH_CHECK(call.slots >= 1 && call.slots <= call.all_slots, name, ": ", call.slots, " slots");
  call.scale = static_cast<float>(scale), call.threads = at::get_num_threads();
  Kernel<DecodeAttention>::run(call, query);
  return output;
}

// query (rows, heads, queries, size), key and value (rows, KV heads, slots, size) -> (rows, queries, heads, size). Only
// the last dimension has to be contiguous. The mask (rows or 1, 1, queries, slots) is true where a query attends to a
// slot; without a mask, query i attends to the slots up to slots - queries + i.
Tensor prefill_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                    double scale) {
  const char* name = PrefillAttention::kName;
  PrefillAttention call{};
  call.rows = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  call.kv_heads = key.size(1), call.slots = key.size(2);
  const auto take = [&](const Tensor& tensor, int64_t* strides) {
    TORCH_CHECK(tensor.stride(3) == 1 && tensor.scalar_type() == query.scalar_type(), name,
                ": last dimension not contiguous, or of another dtype");
    std::copy_n(tensor.strides().begin(), 3, strides);
    return tensor.const_data_ptr();
  };
  call.query = take(query, call.query_strides), call.key = take(key, call.key_strides);
  call.value = take(value, call.value_strides);
  const Tensor may_attend = mask.has_value() ? mask->contiguous() : Tensor();
  call.mask = mask.has_value() ? may_attend.const_data_ptr<bool>() : nullptr;
  call.mask_stride = mask.has_value() && may_attend.size(0) > 1 ? call.queries * call.slots : 0;
  const Tensor output = at::empty({call.rows, call.queries, call.heads, call.size}, query.options());
  call.output = output.mutable_data_ptr(), call.scale = static_cast<float>(scale);
  call.threads = at::get_num_threads();
  Kernel<PrefillAttention>::run(call, query);
  return output;
}

}  // namespace

// Register `kernel`, which takes the arguments of the op `name`, for the dtype at index `dtype` of kDtypes.
extern "C" void register_kernel(const char* name, int64_t dtype, void* kernel) {
  Kernel<SkinnyGemm>::set(name, dtype, kernel);
  Kernel<GroupwiseGemm>::set(name, dtype, kernel);
  Kernel<DecodeAttention>::set(name, dtype, kernel);
  Kernel<PrefillAttention>::set(name, dtype, kernel);
}

TORCH_LIBRARY_FRAGMENT(tide_hf, library) {
  const auto add = [&](const char* schema, auto function) {
    library.def(schema, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
  };
  add("skinny_gemm(Tensor input, Tensor[] weights, Tensor? bias) -> Tensor", TORCH_FN(skinny_gemm));
  add("groupwise_gemm(Tensor input, Tensor weight, Tensor scales, Tensor? bias) -> Tensor", TORCH_FN(groupwise_gemm));
  add("decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float scale) -> Tensor",
      TORCH_FN(decode_attention));
  add("prefill_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
      TORCH_FN(prefill_attention));
}
