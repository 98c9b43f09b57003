// PyTorch ops for the CPU kernels, on PyTorch's stable ABI. An op refuses inputs that its kernel would read beyond their
// ends, allocates its output and calls the kernel for the dtype.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <tuple>
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

// Sizes of a weight, (out, in): int4 weights hold two in a byte, and panels are (out / 16, in / (n * per byte), 16, n).
int64_t size_out(const Tensor& weight) { return weight.dim() == 4 ? kPanelRows * weight.size(0) : weight.size(0); }
int64_t size_in(const Tensor& weight) {
  const int64_t values = weight.scalar_type() == ScalarType::Byte ? 2 : 1;
  return values * (weight.dim() == 4 ? weight.size(1) * weight.size(3) : weight.size(1));
}

// Check that a weight is (out, in); -1 stands for any size.
void check_weight(const char* name, const Tensor& weight, int64_t out, int64_t in) {
  STD_TORCH_CHECK(weight.dim() == 2 || weight.dim() == 4, name, ": the weight is of the wrong size");
  const ScalarType dtype = weight.scalar_type();
  const bool is_int4 = dtype == ScalarType::Byte, in_panels = weight.dim() == 4;
  if (in_panels) {
    const int64_t together = is_int4 || dtype == ScalarType::Char ? 4 : dtype == ScalarType::BFloat16 ? 2 : 1;
    STD_TORCH_CHECK(weight.size(2) == kPanelRows && weight.size(3) == together, name, ": panels of the wrong size");
  }
  STD_TORCH_CHECK(!is_int4 || in_panels || weight.size(0) % 64 == 0, name, ": int4 weights not of 64 rows at a time");
  STD_TORCH_CHECK((out == -1 || size_out(weight) == out) && (in == -1 || size_in(weight) == in), name,
                  ": the weight is of the wrong size");
}

// Integers with scales: in int8 (out), (out, groups), or (out, groups, 2) with zeros, in int4 (groups, out, 2); in panels
// (out) or, in float or half precision, (out / 16, groups, 2, 16).
LinearWeight integers(const char* name, const Tensor& weight, const Tensor& scales) {
  const bool is_int4 = weight.scalar_type() == ScalarType::Byte;
  const int64_t out = size_out(weight), in = size_in(weight), dims = scales.dim();
  LinearWeight found{};
  found.values = contiguous_data(name, weight, is_int4 ? ScalarType::Byte : ScalarType::Char);
  found.has_half_scales = dims == 4 && scales.scalar_type() == ScalarType::Half;
  found.scales = contiguous_data(name, scales, found.has_half_scales ? ScalarType::Half : ScalarType::Float);
  found.stored = is_int4 ? Stored::kInt4 : Stored::kInt8, found.in_panels = weight.dim() == 4;
  bool fits;
  if (found.in_panels) {
    found.has_zeros = dims == 4, found.groups = dims == 4 ? scales.size(1) : 1;
    fits = dims == 4 ? scales.size(0) == weight.size(0) && scales.size(2) == 2 && scales.size(3) == kPanelRows
                     : dims == 1 && !is_int4 && scales.size(0) == out;
  } else {
    found.has_zeros = dims == 3, found.groups = dims > 1 ? scales.size(is_int4 ? 0 : 1) : 1;
    fits = dims >= 1 && dims <= 3 && (!is_int4 || dims == 3) && scales.size(is_int4 ? 1 : 0) == out &&
           (dims < 3 || scales.size(2) == 2);
  }
  STD_TORCH_CHECK(fits && found.groups > 0 && in % found.groups == 0, name, ": scales of the wrong size");
  STD_TORCH_CHECK((found.groups == 1 && !found.has_zeros) || in / found.groups % 16 == 0, name,
                  ": groups not of 16 weights at a time");
  return found;
}

// A weight of the kernel's dtype, or in half precision for a kernel in float32; panels are in half precision.
LinearWeight values(const char* name, const Tensor& weight, ScalarType dtype) {
  LinearWeight found{};
  found.in_panels = weight.dim() == 4;
  const ScalarType stored = weight.scalar_type();
  const bool is_half = stored == ScalarType::BFloat16 || stored == ScalarType::Half;
  STD_TORCH_CHECK(!found.in_panels || is_half, name, ": panels of another dtype");
  if (is_half && dtype == ScalarType::Float)
    found.stored = stored == ScalarType::Half ? Stored::kHalf : Stored::kBFloat16, dtype = stored;
  found.values = contiguous_data(name, weight, dtype);
  return found;
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
    sizes_out.push_back(size_out(weight));
    call.size_out += size_out(weight);
  }
  const auto all = products(name, weights, all_scales, input.scalar_type());
  const Tensor output = empty_rows(input, call.size_out);
  const auto bias = contiguous_bias(name, given_bias, call.size_out);
  call.input = input.const_data_ptr(), call.weights = all.data(), call.sizes_out = sizes_out.data();
  call.bias = bias_data(name, bias, input), call.output = output.mutable_data_ptr();
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

// Decoder layers, one after the other: hidden states (rows, width, D), cosines and sines (rows or 1, width, head_size), mask
// (rows or 1, 1, width, slots), bool or added to the scores, without which attention is causal -> (rows, width, D). The K/V
// of the pass are stored in the slots before `end` of each layer's caches, (rows, KV heads, slots, head_size), and slots from
// `end` on are not read. Of all layers in turn: weights of q, k, v, o, gate, up and down, and their scales, empty for those
// that are no integers; norms before attention and before the MLP (D); biases of q, k, v and o, empty for none, or none at
// all; norms of queries' and keys' heads (head_size), or none. `beside` is empty, or values (rows, width, D) and the weight of
// their RMSNorm (D): q, k and v of a single layer then read these, normalised, before the states. `tapped`, if given,
// (rows, width, number of taps, D), gets the states after as many layers as `taps` says.
Tensor decoder_layers(const Tensor& given, const Tensor& given_cos, const Tensor& given_sin,
                      const std::optional<Tensor>& given_mask, const Tensor& filled, const std::vector<Tensor>& keys,
                      const std::vector<Tensor>& values, const std::vector<Tensor>& weights, const std::vector<Tensor>& scales,
                      const std::vector<Tensor>& norms, const std::vector<Tensor>& biases,
                      const std::vector<Tensor>& head_norms, double eps, double mlp_eps, double head_eps, double scale,
                      const std::vector<Tensor>& beside, const std::optional<Tensor>& tapped, const std::vector<int64_t>& taps) {
  const char* name = DecoderLayers::kName;
  check_sizes(name, "input", given, {-1, -1, -1});
  const ScalarType dtype = given.scalar_type();
  const Tensor output = torch::stable::new_empty(given, given.sizes()), cos = in_order(given_cos), sin = in_order(given_sin);
  torch::stable::copy_(const_cast<Tensor&>(output), given);
  DecoderLayers call{};
  const size_t count = keys.size();
  const auto is_list = [&](const std::vector<Tensor>& list, size_t each) { return list.size() == each * count; };
  STD_TORCH_CHECK(count > 0 && is_list(values, 1) && is_list(weights, 7) && is_list(scales, 7) && is_list(norms, 2) &&
                      (biases.empty() || is_list(biases, 4)) && (head_norms.empty() || is_list(head_norms, 2)),
                  name, ": lists of the wrong length");
  call.rows = given.size(0), call.width = given.size(1), call.size = given.size(2);
  check_sizes(name, "cosine", cos, {cos.dim() > 0 && cos.size(0) == 1 ? 1 : call.rows, call.width, -1});
  call.head_size = cos.size(2), call.has_row_angles = cos.size(0) > 1;
  check_sizes(name, "sine", sin, {cos.size(0), call.width, call.head_size});
  STD_TORCH_CHECK(call.head_size > 0 && call.head_size % 2 == 0, name, ": heads of odd size");
  check_sizes(name, "key cache", keys[0], {call.rows, -1, -1, call.head_size});
  call.kv_heads = keys[0].size(1), call.all_slots = keys[0].size(2);
  const int64_t end = call.slots = filled_slots(name, filled);
  STD_TORCH_CHECK(end >= call.width && end <= call.all_slots, name, ": ", end, " slots");
  const int64_t read = beside.empty() ? call.size : 2 * call.size;
  STD_TORCH_CHECK(beside.empty() || (beside.size() == 2 && count == 1), name, ": values beside those of several layers");
  std::optional<Tensor> beside_states;
  if (!beside.empty()) {
    beside_states = in_order(beside[0]);
    check_sizes(name, "input beside", *beside_states, {call.rows, call.width, call.size});
    check_sizes(name, "norm beside", beside[1], {call.size});
    call.beside = contiguous_data(name, *beside_states, dtype), call.beside_norm = contiguous_data(name, beside[1], dtype);
  }
  if (tapped.has_value()) {
    call.taps = taps.data(), call.num_taps = static_cast<int64_t>(taps.size());
    check_sizes(name, "buffer of tapped states", *tapped, {call.rows, call.width, call.num_taps, call.size});
    contiguous_data(name, *tapped, dtype);
    call.tapped = tapped->mutable_data_ptr();
  }
  check_weight(name, weights[0], -1, read);
  call.heads = size_out(weights[0]) / call.head_size;
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads > 0 && call.heads % call.kv_heads == 0, name, ": ", call.heads,
                  " heads share ", call.kv_heads);
  check_weight(name, weights[4], -1, call.size);
  call.inner = size_out(weights[4]);
  const int64_t projected = call.heads * call.head_size, kv = call.kv_heads * call.head_size;
  const int64_t outs[] = {projected, kv, kv, call.size, call.inner, call.inner, call.size};
  const int64_t ins[] = {read, read, read, projected, call.size, call.size, call.inner};
  const auto all = products(name, weights, scales, dtype);
  std::vector<DecoderLayer> layers(count);
  for (size_t i = 0; i < count; ++i) {
    DecoderLayer& layer = layers[i];
    layer.weights = all.data() + 7 * i;
    for (size_t j = 0; j < 7; ++j) check_weight(name, weights[7 * i + j], outs[j], ins[j]);
    const auto vector = [&](const Tensor& tensor, int64_t size) {
      check_sizes(name, "norm or bias", tensor, {size});
      return contiguous_data(name, tensor, dtype);
    };
    layer.norm = vector(norms[2 * i], call.size), layer.mlp_norm = vector(norms[2 * i + 1], call.size);
    for (size_t j = 0; j < 4 && !biases.empty(); ++j)
      if (biases[4 * i + j].numel() > 0) layer.biases[j] = vector(biases[4 * i + j], outs[j]);
    for (size_t j = 0; j < 2 && !head_norms.empty(); ++j) layer.head_norms[j] = vector(head_norms[2 * i + j], call.head_size);
    for (const Tensor* cache : {&keys[i], &values[i]}) {
      check_sizes(name, "cache", *cache, {call.rows, call.kv_heads, call.all_slots, call.head_size});
      contiguous_data(name, *cache, dtype);
    }
    layer.keys = keys[i].mutable_data_ptr(), layer.values = values[i].mutable_data_ptr();
  }
  std::optional<Tensor> mask;
  if (given_mask.has_value()) {
    mask = in_order(*given_mask);
    check_sizes(name, "mask", *mask, {mask->dim() > 0 && mask->size(0) == 1 ? 1 : call.rows, 1, call.width, -1});
    call.mask_slots = mask->size(3), call.has_row_masks = mask->size(0) > 1;
    STD_TORCH_CHECK(call.mask_slots >= end, name, ": a mask for too few slots");
    if (mask->scalar_type() == ScalarType::Bool) call.may_attend = static_cast<const bool*>(mask->const_data_ptr());
    else call.mask = contiguous_data(name, *mask, dtype);
  }
  call.states = output.mutable_data_ptr(), call.layers = layers.data(), call.count = static_cast<int64_t>(count);
  call.cos = contiguous_data(name, cos, dtype), call.sin = contiguous_data(name, sin, dtype);
  call.eps = static_cast<float>(eps), call.mlp_eps = static_cast<float>(mlp_eps);
  call.head_eps = static_cast<float>(head_eps), call.scale = static_cast<float>(scale);
  run_for(dtype, call);
  return output;
}

// The `count` largest values of each row, in descending order, as floats, and their places: (..., size) -> (..., count) each;
// and, `with_sums`, the logarithm of the sum of the exponentials of all its values, (..., 1), else nothing, (0).
std::tuple<Tensor, Tensor, Tensor> top_tokens(const Tensor& given, int64_t count, bool with_sums) {
  const char* name = TopTokens::kName;
  const Tensor input = in_order(given);
  STD_TORCH_CHECK(input.dim() > 0 && count > 0 && count <= std::min(kMaxTop, input.size(-1)), name, ": the best ", count);
  TopTokens call{};
  call.size = input.size(-1), call.rows = input.numel() / call.size, call.count = count;
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = count;
  const Tensor values = torch::stable::new_empty(input, sizes, ScalarType::Float);
  const Tensor places = torch::stable::new_empty(input, sizes, ScalarType::Long);
  sizes.back() = 1;
  const Tensor sums = torch::stable::new_empty(input, with_sums ? sizes : std::vector<int64_t>{0}, ScalarType::Float);
  call.input = input.const_data_ptr();
  call.values = static_cast<float*>(values.mutable_data_ptr()), call.places = static_cast<int64_t*>(places.mutable_data_ptr());
  if (with_sums) call.log_sums = static_cast<float*>(sums.mutable_data_ptr());
  if (call.rows > 0) run_for(input.scalar_type(), call);
  return {values, places, sums};
}

// Whether each sample (count) holds every step-th value of its contiguous weight. Each value costs a wait for memory, unless
// many are fetched at once.
bool are_samples(const std::vector<Tensor>& weights, const std::vector<Tensor>& samples, const std::vector<int64_t>& steps) {
  const char* name = "are_samples";
  constexpr int64_t kAhead = 32;
  STD_TORCH_CHECK(weights.size() == samples.size() && weights.size() == steps.size(), name, ": lists of the wrong length");
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t count = samples[i].numel(), size = static_cast<int64_t>(weights[i].element_size());
    STD_TORCH_CHECK(steps[i] > 0 && (count - 1) * steps[i] < weights[i].numel(), name, ": samples beyond their weight");
    const auto* sample = static_cast<const char*>(contiguous_data(name, samples[i], weights[i].scalar_type()));
    const auto* weight = static_cast<const char*>(contiguous_data(name, weights[i], weights[i].scalar_type()));
    for (int64_t k = 0; k < count; ++k) {
      if (k + kAhead < count) __builtin_prefetch(weight + (k + kAhead) * steps[i] * size);
      if (std::memcmp(weight + k * steps[i] * size, sample + k * size, size) != 0) return false;
    }
  }
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, library) {
  library.def("skinny_gemm(Tensor input, Tensor[] weights, Tensor? bias, Tensor[] scales) -> Tensor");
  library.def("decode_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor end, float scale) -> Tensor");
  library.def("prefill_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  library.def("decoder_layers(Tensor hidden_states, Tensor cos, Tensor sin, Tensor? mask, Tensor end, Tensor(a!)[] keys, "
              "Tensor(b!)[] values, Tensor[] weights, Tensor[] scales, Tensor[] norms, Tensor[] biases, Tensor[] head_norms, "
              "float eps, float mlp_eps, float head_eps, float scale, Tensor[] beside, Tensor(c!)? tapped, "
              "int[] taps) -> Tensor");
  library.def("are_samples(Tensor[] weights, Tensor[] samples, int[] steps) -> bool");
  library.def("top_tokens(Tensor input, int count, bool with_sums) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, library) {
  library.impl("skinny_gemm", TORCH_BOX(&skinny_gemm));
  library.impl("decode_attention", TORCH_BOX(&decode_attention));
  library.impl("prefill_attention", TORCH_BOX(&prefill_attention));
  library.impl("decoder_layers", TORCH_BOX(&decoder_layers));
  library.impl("are_samples", TORCH_BOX(&are_samples));
  library.impl("top_tokens", TORCH_BOX(&top_tokens));
}
