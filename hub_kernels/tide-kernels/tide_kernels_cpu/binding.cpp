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

// Check that a weight is (out, in); int4 weights hold two in a byte.
void check_weight(const char* name, const Tensor& weight, int64_t out, int64_t in) {
  const bool is_int4 = weight.scalar_type() == ScalarType::Byte;
  STD_TORCH_CHECK(!is_int4 || (in % 2 == 0 && weight.dim() == 2 && weight.size(0) % 64 == 0), name,
                  ": int4 weights in an odd number, or not of 64 rows at a time");
  check_sizes(name, "weight", weight, {out, is_int4 ? in / 2 : in});
}

// Weights in int8 with scales (out), (out, groups), or (out, groups, 2) with zeros, or in int4 with (groups, out, 2).
LinearWeight integers(const char* name, const Tensor& weight, const Tensor& scales) {
  const bool is_int4 = weight.scalar_type() == ScalarType::Byte;
  const int64_t out = weight.size(0), in = is_int4 ? 2 * weight.size(1) : weight.size(1), dims = scales.dim();
  LinearWeight found{};
  found.values = contiguous_data(name, weight, is_int4 ? ScalarType::Byte : ScalarType::Char);
  found.scales = static_cast<const float*>(contiguous_data(name, scales, ScalarType::Float));
  found.has_zeros = dims == 3, found.stored = is_int4 ? Stored::kInt4 : Stored::kInt8;
  found.groups = dims > 1 ? scales.size(is_int4 ? 0 : 1) : 1;
  const bool fits = dims >= 1 && dims <= 3 && (!is_int4 || dims == 3) && scales.size(is_int4 ? 1 : 0) == out &&
                    (dims < 3 || scales.size(2) == 2) && found.groups > 0 && in % found.groups == 0;
  STD_TORCH_CHECK(fits, name, ": scales of the wrong size");
  STD_TORCH_CHECK((found.groups == 1 && !found.has_zeros) || in / found.groups % 16 == 0, name,
                  ": groups not of 16 weights at a time");
  return found;
}

// A weight of the kernel's dtype, or in half precision for a kernel in float32.
LinearWeight values(const char* name, const Tensor& weight, ScalarType dtype) {
  const ScalarType own = dtype == ScalarType::Float ? weight.scalar_type() : dtype;
  if (own == ScalarType::BFloat16) return {contiguous_data(name, weight, own), dtype == own ? Stored::kValues : Stored::kBFloat16};
  if (own == ScalarType::Half) return {contiguous_data(name, weight, own), dtype == own ? Stored::kValues : Stored::kHalf};
  return {contiguous_data(name, weight, dtype), Stored::kValues};
}

// Weights of products, with their scales: none at all, or for each weight, empty for those that are no integers. The
// tensors have to outlive the result.
std::vector<LinearWeight> products(const char* name, const std::vector<Tensor>& given, const std::vector<Tensor>& scales,
                             ScalarType dtype) {
  STD_TORCH_CHECK(scales.empty() || scales.size() == given.size(), name, ": scales for some of the weights");
  std::vector<LinearWeight> found;
  for (size_t i = 0; i < given.size(); ++i) {
    if (scales.empty() || scales[i].numel() == 0) found.push_back(values(name, given[i], dtype));
    else found.push_back(integers(name, given[i], scales[i]));
  }
  return found;
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

int64_t filled_slots(const char* name, const Tensor& end) {
  STD_TORCH_CHECK(end.scalar_type() == ScalarType::Long && end.numel() == 1, name, ": `end` is not one int64");
  return *static_cast<const int64_t*>(end.const_data_ptr());
}

Tensor empty_rows(const Tensor& input, int64_t size_out) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = size_out;
  return torch::stable::new_empty(input, sizes);
}

// input (..., in), weights (out, in) each, bias (sum of out) -> (..., sum of out). Weights are of the input's dtype, in
// half precision if that is float32, or integers with scales in float32, as `integers` takes them.
Tensor skinny_gemm(const Tensor& given, const std::vector<Tensor>& weights, const std::optional<Tensor>& given_bias,
                   const std::vector<Tensor>& all_scales) {
  const char* name = SkinnyGemm::kName;
  const Tensor input = in_order(given);
  STD_TORCH_CHECK(input.dim() > 0 && input.size(-1) > 0, name, ": an empty input");
  SkinnyGemm call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size, call.count = static_cast<int64_t>(weights.size());
  std::vector<int64_t> sizes_out;
  for (const Tensor& weight : weights) {
    check_weight(name, weight, -1, call.size);
    sizes_out.push_back(weight.size(0));
    call.size_out += weight.size(0);
  }
  const auto all = products(name, weights, all_scales, input.scalar_type());
  const Tensor output = empty_rows(input, call.size_out);
  const auto bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weights = all.data(), call.sizes_out = sizes_out.data();
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
  call.slots = filled_slots(name, end), call.all_slots = key.size(2);
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

// hidden states (rows, width, D), norm (D); weights of queries, keys and values (heads * head_size, D), with biases or
// none and, if integers, scales; norms of queries' and keys' heads (head_size), or none; cosines and sines (rows or 1, width,
// head_size) -> (rows, heads + 2 * KV heads, width, head_size): queries, keys, values.
Tensor qkv_rope(const Tensor& given, const Tensor& norm, double eps, const std::vector<Tensor>& weights,
                const std::vector<Tensor>& biases, const std::vector<Tensor>& scales,
                const std::vector<Tensor>& head_norms, double head_eps, const Tensor& given_cos, const Tensor& given_sin) {
  const char* name = QkvRope::kName;
  check_sizes(name, "input", given, {-1, -1, -1});
  const Tensor input = in_order(given), cos = in_order(given_cos), sin = in_order(given_sin);
  const ScalarType dtype = input.scalar_type();
  QkvRope call{};
  call.rows = input.size(0), call.width = input.size(1), call.size = input.size(2);
  check_sizes(name, "norm", norm, {call.size});
  check_sizes(name, "cosine", cos, {cos.dim() > 0 && cos.size(0) == 1 ? 1 : call.rows, call.width, -1});
  call.head_size = cos.size(2), call.has_row_angles = cos.size(0) > 1;
  check_sizes(name, "sine", sin, {cos.size(0), call.width, call.head_size});
  STD_TORCH_CHECK(call.head_size > 0 && call.head_size % 2 == 0, name, ": heads of odd size");
  STD_TORCH_CHECK(weights.size() == 3 && (biases.empty() || biases.size() == 3), name, ": not three products");
  check_weight(name, weights[0], -1, call.size);
  call.heads = weights[0].size(0) / call.head_size, call.kv_heads = weights[1].size(0) / call.head_size;
  const int64_t sizes_out[] = {call.heads * call.head_size, call.kv_heads * call.head_size, call.kv_heads * call.head_size};
  std::vector<const void*> bias_pointers, norm_pointers;
  for (int i = 0; i < 3; ++i) {
    check_weight(name, weights[i], sizes_out[i], call.size);
    if (biases.empty()) continue;
    check_sizes(name, "bias", biases[i], {sizes_out[i]});
    bias_pointers.push_back(contiguous_data(name, biases[i], dtype));
  }
  for (const Tensor& one : head_norms) {
    check_sizes(name, "norm of the heads", one, {call.head_size});
    norm_pointers.push_back(contiguous_data(name, one, dtype));
  }
  STD_TORCH_CHECK(head_norms.empty() || head_norms.size() == 2, name, ": not two norms of heads");
  const auto all = products(name, weights, scales, dtype);
  const Tensor output =
      torch::stable::new_empty(input, {call.rows, call.heads + 2 * call.kv_heads, call.width, call.head_size});
  call.input = input.const_data_ptr(), call.norm = contiguous_data(name, norm, dtype);
  call.weights = all.data();
  call.biases = biases.empty() ? nullptr : bias_pointers.data();
  call.head_norms = head_norms.empty() ? nullptr : norm_pointers.data();
  call.cos = contiguous_data(name, cos, dtype), call.sin = contiguous_data(name, sin, dtype);
  call.output = output.mutable_data_ptr(), call.eps = static_cast<float>(eps);
  call.head_eps = static_cast<float>(head_eps);
  run_for(dtype, call);
  return output;
}

// hidden states (rows, width, D) before the layer, queries (rows, heads, width, head_size), K/V (rows, KV heads, slots,
// head_size), mask (rows or 1, 1, width, slots), bool or added to the scores, without which attention is causal; slots
// from `end` on are not read; norm (D); weights of o, gate, up and down, with scales if integers; bias of o (D), or none
// -> (rows, width, D).
Tensor attention_mlp(const Tensor& given, const Tensor& given_query, const Tensor& given_key, const Tensor& given_value,
                     const std::optional<Tensor>& given_mask, const std::optional<Tensor>& end, double scale,
                     const Tensor& norm, double eps, const std::vector<Tensor>& weights,
                     const std::optional<Tensor>& given_bias, const std::vector<Tensor>& scales) {
  const char* name = AttentionMlp::kName;
  check_sizes(name, "input", given, {-1, -1, -1});
  const Tensor input = in_order(given), query = in_order(given_query), key = in_order(given_key);
  const Tensor value = in_order(given_value);
  const ScalarType dtype = input.scalar_type();
  AttentionMlp call{};
  call.rows = input.size(0), call.width = input.size(1), call.size = input.size(2);
  check_sizes(name, "query", query, {call.rows, -1, call.width, -1});
  call.heads = query.size(1), call.head_size = query.size(3);
  check_sizes(name, "key", key, {call.rows, -1, -1, call.head_size});
  call.kv_heads = key.size(1), call.all_slots = key.size(2);
  check_sizes(name, "value", value, {call.rows, call.kv_heads, call.all_slots, call.head_size});
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0, name, ": ", call.heads, " heads share ",
                  call.kv_heads);
  call.slots = end.has_value() ? filled_slots(name, *end) : call.all_slots;
  STD_TORCH_CHECK(call.slots >= call.width && call.slots <= call.all_slots, name, ": ", call.slots, " slots");
  STD_TORCH_CHECK(weights.size() == 4, name, ": not four products");
  check_sizes(name, "norm", norm, {call.size});
  check_weight(name, weights[0], call.size, call.heads * call.head_size);
  check_weight(name, weights[1], -1, call.size);
  call.inner = weights[1].size(0);
  check_weight(name, weights[2], call.inner, call.size);
  check_weight(name, weights[3], call.size, call.inner);
  std::optional<Tensor> mask;
  if (given_mask.has_value()) {
    mask = in_order(*given_mask);
    check_sizes(name, "mask", *mask, {mask->dim() > 0 && mask->size(0) == 1 ? 1 : call.rows, 1, call.width, call.all_slots});
    call.has_row_masks = mask->size(0) > 1;
    if (mask->scalar_type() == ScalarType::Bool) call.may_attend = static_cast<const bool*>(mask->const_data_ptr());
    else call.mask = contiguous_data(name, *mask, dtype);
  }
  const auto all = products(name, weights, scales, dtype);
  const auto bias = contiguous_bias(name, given_bias, call.size);
  const Tensor output = torch::stable::new_empty(input, input.sizes());
  call.input = input.const_data_ptr(), call.query = contiguous_data(name, query, dtype);
  call.key = contiguous_data(name, key, dtype), call.value = contiguous_data(name, value, dtype);
  call.norm = contiguous_data(name, norm, dtype), call.bias = bias_data(name, bias, input);
  call.weights = all.data();
  call.output = output.mutable_data_ptr();
  call.scale = static_cast<float>(scale), call.eps = static_cast<float>(eps);
  run_for(dtype, call);
  return output;
}

// Store keys and values (rows, heads + 2 * KV heads, width, head_size), behind the queries in `given`, in the slots before
// `end` of a static cache, (rows, KV heads, slots, head_size) each.
void store(const char* name, const Tensor& given, int64_t end, const Tensor& keys, const Tensor& values) {
  const int64_t rows = given.size(0), width = given.size(2), size = given.size(3), kv_heads = keys.size(1);
  const int64_t slots = keys.size(2), bytes = static_cast<int64_t>(given.element_size()), heads = given.size(1);
  STD_TORCH_CHECK(end >= width && end <= slots, name, ": ", end, " slots");
  const auto* from = static_cast<const char*>(contiguous_data(name, given, keys.scalar_type()));
  int64_t first = heads - 2 * kv_heads;
  for (const Tensor* cache : {&keys, &values}) {
    check_sizes(name, "cache", *cache, {rows, kv_heads, slots, size});
    contiguous_data(name, *cache, given.scalar_type());
    auto* to = static_cast<char*>(cache->mutable_data_ptr());
    for (int64_t i = 0; i < rows * kv_heads; ++i) {
      const char* head = from + (i / kv_heads * heads + first + i % kv_heads) * width * size * bytes;
      std::copy(head, head + width * size * bytes, to + (i * slots + end - width) * size * bytes);
    }
    first += kv_heads;
  }
}

// A whole layer on a static cache: qkv_rope, K/V stored in the last of the `end` filled slots, and attention_mlp. Arguments
// are as of these two.
Tensor decoder_layer(const Tensor& input, const Tensor& cos, const Tensor& sin, const Tensor& mask, const Tensor& end,
                     const Tensor& keys, const Tensor& values, const Tensor& norm, double eps,
                     const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                     const std::vector<Tensor>& scales, const std::vector<Tensor>& head_norms, double head_eps,
                     double scale, const Tensor& mlp_norm, double mlp_eps, const std::vector<Tensor>& mlp_weights,
                     const std::optional<Tensor>& bias, const std::vector<Tensor>& mlp_scales) {
  const char* name = "decoder_layer";
  check_sizes(name, "key cache", keys, {-1, -1, -1, -1});
  const Tensor heads = qkv_rope(input, norm, eps, weights, biases, scales, head_norms, head_eps, cos, sin);
  const int64_t queries = heads.size(1) - 2 * keys.size(1);
  STD_TORCH_CHECK(queries == weights[0].size(0) / heads.size(3), name, ": the key cache is of the wrong size");
  store(name, heads, filled_slots(name, end), keys, values);
  const Tensor query = torch::stable::narrow(const_cast<Tensor&>(heads), 1, 0, queries);
  return attention_mlp(input, query, keys, values, mask, end, scale, mlp_norm, mlp_eps, mlp_weights, bias, mlp_scales);
}

}  // namespace

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("skinny_gemm(Tensor input, Tensor[] weights, Tensor? bias, Tensor[] scales) -> Tensor");
  library.def("groupwise_gemm(Tensor input, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
  library.def("decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float scale) -> Tensor");
  library.def("prefill_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  library.def("qkv_rope(Tensor hidden_states, Tensor norm, float eps, Tensor[] weights, Tensor[] biases, Tensor[] scales, "
              "Tensor[] head_norms, float head_eps, Tensor cos, Tensor sin) -> Tensor");
  library.def("attention_mlp(Tensor hidden_states, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? end, "
              "float scale, Tensor norm, float eps, Tensor[] weights, Tensor? bias, Tensor[] scales) -> Tensor");
  library.def("decoder_layer(Tensor hidden_states, Tensor cos, Tensor sin, Tensor mask, Tensor end, Tensor(a!) keys, "
              "Tensor(b!) values, Tensor norm, float eps, Tensor[] weights, Tensor[] biases, Tensor[] scales, "
              "Tensor[] head_norms, float head_eps, float scale, Tensor mlp_norm, float mlp_eps, Tensor[] mlp_weights, "
              "Tensor? bias, Tensor[] mlp_scales) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("skinny_gemm", TORCH_BOX(&skinny_gemm));
  library.impl("groupwise_gemm", TORCH_BOX(&groupwise_gemm));
  library.impl("decode_attention", TORCH_BOX(&decode_attention));
  library.impl("prefill_attention", TORCH_BOX(&prefill_attention));
  library.impl("qkv_rope", TORCH_BOX(&qkv_rope));
  library.impl("attention_mlp", TORCH_BOX(&attention_mlp));
  library.impl("decoder_layer", TORCH_BOX(&decoder_layer));
}
