// The kernels as ops of PyTorch. An op checks what it is given, makes room for what it returns, and calls the kernel
// that is there for the dtype; Python tells which that is.

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

  static void use(std::string_view name, int64_t dtype, void* kernel) {
    if (name == Call::kName) by_dtype[dtype] = reinterpret_cast<Run*>(kernel);
  }
};

const void* contiguous_data(const char* name, const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == like.scalar_type(), name, ": strided, or another dtype");
  return tensor.const_data_ptr();
}

// A bias may be strided. It is kept until the kernel has run.
Tensor contiguous_bias(const char* name, const std::optional<Tensor>& bias, int64_t size) {
  if (!bias.has_value()) return {};
  TORCH_CHECK(bias->numel() == size, name, ": a bias of another size");
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

// input (..., in) by weights (out, in) each, and a bias (sum of out): (..., sum of out).
Tensor stored_rows(const Tensor& given, at::TensorList weights, const std::optional<Tensor>& given_bias) {
  const char* name = StoredRows::kName;
  const Tensor input = given.contiguous();
  StoredRows call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size, call.count = static_cast<int64_t>(weights.size());
  std::vector<const void*> data;
  std::vector<int64_t> rows_of;
  for (const Tensor& weight : weights) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == call.size, name, ": weights of another size");
    data.push_back(contiguous_data(name, weight, input));
    rows_of.push_back(weight.size(0));
    call.size_out += weight.size(0);
  }
  const Tensor output = empty_rows(input, call.size_out), bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weights = data.data(), call.rows_of = rows_of.data();
  call.bias = bias_data(name, bias, input), call.output = output.mutable_data_ptr();
  call.threads = at::get_num_threads();
  Kernel<StoredRows>::run(call, input);
  return output;
}

// input (..., in), of at most eight rows, by weights (out, lines, 64) with scales (out, lines), and a bias (out):
// (..., out).
Tensor rounded_rows(const Tensor& given, const Tensor& weight, const Tensor& scales,
                    const std::optional<Tensor>& given_bias) {
  const char* name = RoundedRows::kName;
  const Tensor input = given.contiguous();
  RoundedRows call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size;
  call.size_out = weight.size(0), call.lines = weight.size(1);
  TORCH_CHECK(call.rows >= 1 && call.rows <= 8, name, ": ", call.rows, " rows");
  TORCH_CHECK(weight.is_contiguous() && weight.size(2) == 64 && call.lines == (call.size + 63) / 64 &&
                  scales.is_contiguous() && scales.numel() == call.size_out * call.lines,
              name, ": weights of another size");
  const Tensor output = empty_rows(input, call.size_out), bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weight = weight.const_data_ptr<uint8_t>();
  call.scales = scales.const_data_ptr<float>(), call.bias = bias_data(name, bias, input);
  call.output = output.mutable_data_ptr(), call.threads = at::get_num_threads();
  Kernel<RoundedRows>::run(call, input);
  return output;
}

// query (rows, heads, queries, size); key and value (rows, heads, all slots, size), of which those up to `end` are read;
// mask (rows or 1, 1, queries, all slots), added to the scores. As `query`.
Tensor few_queries(const Tensor& given, const Tensor& key, const Tensor& value, const Tensor& mask, const Tensor& end,
                   double scale) {
  const char* name = FewQueries::kName;
  const Tensor query = given.contiguous(), output = at::empty_like(query);
  FewQueries call{};
  call.query = query.const_data_ptr(), call.output = output.mutable_data_ptr();
  call.key = contiguous_data(name, key, query), call.value = contiguous_data(name, value, query);
  call.mask = contiguous_data(name, mask, query), call.mask_of_rows = mask.size(0) > 1;
  call.rows = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  call.slots = *end.const_data_ptr<int64_t>(), call.all_slots = key.size(2);
  TORCH_CHECK(call.slots >= 1 && call.slots <= call.all_slots, name, ": ", call.slots, " slots");
  call.scale = static_cast<float>(scale), call.threads = at::get_num_threads();
  Kernel<FewQueries>::run(call, query);
  return output;
}

// query (rows, heads, queries, size), key and value (rows, shared, slots, size), with strides of their own but for the
// last dimension. A mask (rows or 1, 1, queries, slots) says what is seen; without one query i sees keys up to
// slots - queries + i. (rows, queries, heads, size).
Tensor many_queries(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                    double scale) {
  const char* name = ManyQueries::kName;
  ManyQueries call{};
  call.rows = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  call.shared = key.size(1), call.slots = key.size(2);
  const auto take = [&](const Tensor& tensor, int64_t* strides) {
    TORCH_CHECK(tensor.stride(3) == 1 && tensor.scalar_type() == query.scalar_type(), name, ": turned, or another dtype");
    std::copy_n(tensor.strides().begin(), 3, strides);
    return tensor.const_data_ptr();
  };
  call.query = take(query, call.query_strides), call.key = take(key, call.key_strides);
  call.value = take(value, call.value_strides);
  const Tensor seen = mask.has_value() ? mask->contiguous() : Tensor();
  call.mask = mask.has_value() ? seen.const_data_ptr<bool>() : nullptr;
  call.mask_stride = mask.has_value() && seen.size(0) > 1 ? call.queries * call.slots : 0;
  const Tensor output = at::empty({call.rows, call.queries, call.heads, call.size}, query.options());
  call.output = output.mutable_data_ptr(), call.scale = static_cast<float>(scale);
  call.threads = at::get_num_threads();
  Kernel<ManyQueries>::run(call, query);
  return output;
}

}  // namespace

// Lets the op `name` call `kernel`, a function that takes a call of its own, for values of the dtype at that place.
extern "C" void use(const char* name, int64_t dtype, void* kernel) {
  Kernel<StoredRows>::use(name, dtype, kernel);
  Kernel<RoundedRows>::use(name, dtype, kernel);
  Kernel<FewQueries>::use(name, dtype, kernel);
  Kernel<ManyQueries>::use(name, dtype, kernel);
}

TORCH_LIBRARY_FRAGMENT(tide_hf, library) {
  const auto add = [&](const char* schema, auto function) {
    library.def(schema, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
  };
  add("stored_rows(Tensor input, Tensor[] weights, Tensor? bias) -> Tensor", TORCH_FN(stored_rows));
  add("rounded_rows(Tensor input, Tensor weight, Tensor scales, Tensor? bias) -> Tensor", TORCH_FN(rounded_rows));
  add("few_queries(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float scale) -> Tensor",
      TORCH_FN(few_queries));
  add("many_queries(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor",
      TORCH_FN(many_queries));
}
