// PyTorch ops for the CPU kernels, on PyTorch's stable ABI. An op refuses inputs that its kernel would read beyond their
// ends, allocates its output and calls the kernel for the dtype.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

#include "arguments.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Call>
void run_for(ScalarType dtype, Call& call) {
  call.threads = torch::stable::get_num_threads();
  switch (dtype) {
#ifdef TIDE_FLOAT  // as stage.py says
    case ScalarType::Float: return run<float>(call);
#endif
#ifdef TIDE_BFLOAT16
    case ScalarType::BFloat16: return run<c10::BFloat16>(call);
#endif
#ifdef TIDE_HALF
    case ScalarType::Half: return run<c10::Half>(call);
#endif
    default: STD_TORCH_CHECK(false, Call::kName, ": no kernel for this dtype");
  }
}

// Check the dimensions of a tensor; -1 stands for any size.
void check_sizes(const char* name, const char* which, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) fits = sizes.begin()[i] == -1 || tensor.size(i) == sizes.begin()[i];
  STD_TORCH_CHECK(fits, name, ": the ", which, " is of the wrong size");
}

Tensor in_order(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

const void* contiguous_data(const char* name, const Tensor& tensor, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.scalar_type() == dtype, name,
                  ": not contiguous, or of another dtype");
  return tensor.const_data_ptr();
}

// The bias, or a contiguous copy of a strided bias; the result has to outlive the kernel call.
std::optional<Tensor> contiguous_bias(const char* name, const std::optional<Tensor>& bias, int64_t size) {
  if (!bias.has_value()) return bias;
  STD_TORCH_CHECK(bias->numel() == size, name, ": bias of the wrong size");
  return in_order(*bias);
}

const void* bias_data(const char* name, const std::optional<Tensor>& bias, const Tensor& like) {
  return bias.has_value() ? contiguous_data(name, *bias, like.scalar_type()) : nullptr;
}

Tensor empty_rows(const Tensor& input, int64_t size_out) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = size_out;
  return torch::stable::new_empty(input, sizes);
}

// input (..., in), weights (out, in) each, bias (sum of out) -> (..., sum of out). Weights are of the input's dtype, or
// int8 with scales (out) float32 each.
Tensor skinny_gemm(const Tensor& given, const std::vector<Tensor>& weights, const std::optional<Tensor>& given_bias,
                   const std::vector<Tensor>& all_scales) {
  const char* name = SkinnyGemm::kName;
  const Tensor input = in_order(given);
  STD_TORCH_CHECK(input.dim() > 0 && input.size(-1) > 0, name, ": an empty input");
  SkinnyGemm call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size, call.count = static_cast<int64_t>(weights.size());
  std::vector<const void*> data;
  std::vector<int64_t> sizes_out;
  const bool is_scaled = !all_scales.empty();
  STD_TORCH_CHECK(!is_scaled || all_scales.size() == weights.size(), name, ": scales for some of the weights");
  for (const Tensor& weight : weights) {
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == call.size, name, ": weights of the wrong size");
    data.push_back(contiguous_data(name, weight, is_scaled ? ScalarType::Char : input.scalar_type()));
    sizes_out.push_back(weight.size(0));
    call.size_out += weight.size(0);
  }
  std::vector<const float*> scales;
  for (const Tensor& some : all_scales) {
    const auto* values = contiguous_data(name, some, ScalarType::Float);
    STD_TORCH_CHECK(some.numel() == sizes_out[scales.size()], name, ": scales of the wrong size");
    scales.push_back(static_cast<const float*>(values));
  }
  const Tensor output = empty_rows(input, call.size_out);
  const auto bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weights = data.data(), call.sizes_out = sizes_out.data();
  call.scales = is_scaled ? scales.data() : nullptr;
  call.bias = bias_data(name, bias, input), call.output = output.mutable_data_ptr();
  run_for(input.scalar_type(), call);
  return output;
}

// input (..., in) of at most eight rows, weights (out, groups, 64), scales (out, groups), bias (out) -> (..., out).
Tensor groupwise_gemm(const Tensor& given, const Tensor& weight, const Tensor& scales,
                      const std::optional<Tensor>& given_bias) {
  const char* name = GroupwiseGemm::kName;
  const Tensor input = in_order(given);
  STD_TORCH_CHECK(input.dim() > 0 && input.size(-1) > 0 && weight.dim() == 3, name, ": an empty input");
  GroupwiseGemm call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size;
  call.size_out = weight.size(0), call.groups = weight.size(1);
  STD_TORCH_CHECK(call.rows >= 1 && call.rows <= 8, name, ": ", call.rows, " rows");
  STD_TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == ScalarType::Byte && weight.size(2) == 64 &&
                      call.groups == (call.size + 63) / 64 && scales.is_contiguous() &&
                      scales.scalar_type() == ScalarType::Float && scales.numel() == call.size_out * call.groups,
                  name, ": weights of the wrong size or dtype");
  const Tensor output = empty_rows(input, call.size_out);
  const auto bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weight = static_cast<const uint8_t*>(weight.const_data_ptr());
  call.scales = static_cast<const float*>(scales.const_data_ptr()), call.bias = bias_data(name, bias, input);
  call.output = output.mutable_data_ptr();
  run_for(input.scalar_type(), call);
  return output;
}

// query (rows, heads, queries, size), key and value (rows, heads, all slots, size) -> as query. Slots from `end` on are
// not read. The mask (rows or 1, 1, queries, all slots) is added to the scores.
Tensor decode_attention(const Tensor& given, const Tensor& key, const Tensor& value, const Tensor& mask,
                        const Tensor& end, double scale) {
  const char* name = DecodeAttention::kName;
  check_sizes(name, "query", given, {-1, -1, -1, -1});
  const int64_t rows = given.size(0), heads = given.size(1), queries = given.size(2), size = given.size(3);
  check_sizes(name, "key", key, {rows, heads, -1, size});
  check_sizes(name, "value", value, {rows, heads, key.size(2), size});
  check_sizes(name, "mask", mask, {mask.dim() > 0 && mask.size(0) == 1 ? 1 : rows, 1, queries, key.size(2)});
  const Tensor query = in_order(given), output = torch::stable::new_empty(query, query.sizes());
  DecodeAttention call{};
  call.query = query.const_data_ptr(), call.output = output.mutable_data_ptr();
  call.key = contiguous_data(name, key, query.scalar_type()), call.value = contiguous_data(name, value, query.scalar_type());
  call.mask = contiguous_data(name, mask, query.scalar_type()), call.has_row_masks = mask.size(0) > 1;
  call.rows = rows, call.heads = heads, call.queries = queries, call.size = size;
  STD_TORCH_CHECK(end.scalar_type() == ScalarType::Long && end.numel() == 1, name, ": `end` is not one int64");
  call.slots = *static_cast<const int64_t*>(end.const_data_ptr()), call.all_slots = key.size(2);
  STD_TORCH_CHECK(call.slots >= 1 && call.slots <= call.all_slots, name, ": ", call.slots, " slots");
  call.scale = static_cast<float>(scale);
  run_for(query.scalar_type(), call);
  return output;
}

// query (rows, heads, queries, size), key and value (rows, KV heads, slots, size) -> (rows, queries, heads, size). Only
// the last dimension has to be contiguous. The mask (rows or 1, 1, queries, slots) is true where a query attends to a
// slot; without a mask, query i attends to the slots up to slots - queries + i.
Tensor prefill_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double scale) {
  const char* name = PrefillAttention::kName;
  PrefillAttention call{};
  check_sizes(name, "query", query, {-1, -1, -1, -1});
  call.rows = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  check_sizes(name, "key", key, {call.rows, -1, -1, call.size});
  call.kv_heads = key.size(1), call.slots = key.size(2);
  check_sizes(name, "value", value, {call.rows, call.kv_heads, call.slots, call.size});
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0, name, ": ", call.heads, " heads share ",
                  call.kv_heads);
  const auto take = [&](const Tensor& tensor, int64_t* strides) {
    STD_TORCH_CHECK(tensor.stride(3) == 1 && tensor.scalar_type() == query.scalar_type(), name,
                    ": last dimension not contiguous, or of another dtype");
    std::copy_n(tensor.strides().begin(), 3, strides);
    return tensor.const_data_ptr();
  };
  call.query = take(query, call.query_strides), call.key = take(key, call.key_strides);
  call.value = take(value, call.value_strides);
  std::optional<Tensor> may_attend;
  if (mask.has_value()) {
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool, name, ": the mask is not of dtype bool");
    const int64_t masks = mask->dim() > 0 && mask->size(0) == 1 ? 1 : call.rows;
    check_sizes(name, "mask", *mask, {masks, 1, call.queries, call.slots});
    may_attend = in_order(*mask);
    call.mask = static_cast<const bool*>(may_attend->const_data_ptr());
    call.mask_stride = may_attend->size(0) > 1 ? call.queries * call.slots : 0;
  }
  const Tensor output = torch::stable::new_empty(query, {call.rows, call.queries, call.heads, call.size});
  call.output = output.mutable_data_ptr(), call.scale = static_cast<float>(scale);
  run_for(query.scalar_type(), call);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("skinny_gemm(Tensor input, Tensor[] weights, Tensor? bias, Tensor[] scales) -> Tensor");
  library.def("groupwise_gemm(Tensor input, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
  library.def("decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float scale) -> Tensor");
  library.def("prefill_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("skinny_gemm", TORCH_BOX(&skinny_gemm));
  library.impl("groupwise_gemm", TORCH_BOX(&groupwise_gemm));
  library.impl("decode_attention", TORCH_BOX(&decode_attention));
  library.impl("prefill_attention", TORCH_BOX(&prefill_attention));
}
