// Kernel arguments, as pointers and sizes. binding.cpp fills these structs in and calls `run` for the dtype; each kernel
// is compiled once per dtype.
//
// `void` pointers point to values of the kernel's dtype. Sizes and strides count values; tensors without strides
// are contiguous. A kernel uses at most `threads` threads.
#pragma once

#include <atomic>
#include <cstdint>

// The weight of a linear layer, (out, in): values of the kernel's dtype, values in half precision for a kernel in float32,
// or integers. Each row of integers is in `groups` groups of equal size, with a scale each. With `has_zeros`, each scale is
// followed by a zero: a weight is scale * integer + zero.
// - int8: scales (out, groups). If there are several groups, or zeros, a group has a multiple of 16 integers.
// - int4, less 8: as `_convert_weight_to_int4pack_for_cpu` packs them, see int4_weight.h; scales (groups, out), with zeros.
// - In panels of 16 rows, see panels.h: values in half precision, int8, and int4 from 0 to 15. Scales are (out) or, with
//   zeros, (out / 16, groups, 2, 16), in float or in half precision.
enum class Stored { kValues, kBFloat16, kHalf, kInt8, kInt4 };

constexpr int64_t kPanelRows = 16;

struct LinearWeight {
  const void* values;
  Stored stored;
  const void* scales;
  int64_t groups;
  bool has_zeros, in_panels, has_half_scales;
};

// The product of all rows of an input (rows, size) with rows from `first` on of a weight of `all` rows, in whole units
// (`unit_of` in vectorized.h), by one thread; output (rows, stride), from its first column on. Products with the same
// `input_id` have the same input, which a thread converts once.
struct RowsOfProduct {
  const LinearWeight* weight;
  int64_t input_id;
  const void *input, *bias;  // of the first row, or null
  void* output;
  int64_t all, rows, size, first, count, stride;
};

inline std::atomic<int64_t> last_input_id{0};
constexpr int64_t kMaxRows = 256;  // of an input at a time, to bound a thread's copy of it

struct SkinnyGemm {
  static constexpr const char* kName = "skinny_gemm";  // of the op
  const void *input, *bias;                            // (rows, size), (size_out) or null
  const LinearWeight* weights;                               // `count` times (sizes_out[i], size)
  void* output;                                        // (rows, size_out)
  const int64_t* sizes_out;
  int64_t rows, size, count, size_out, threads;
};

struct DecodeAttention {
  static constexpr const char* kName = "decode_attention";  // of the op
  const void *query, *key, *value, *mask;  // (heads, queries, size), twice (heads, all_slots, size), (queries, all_slots)
  void* output;                            // as `query`
  int64_t rows, heads, queries, size, slots, all_slots, threads;  // `heads` per row
  bool has_row_masks;                                             // else one mask for all rows
  float scale;
};

struct PrefillAttention {
  static constexpr const char* kName = "prefill_attention";  // of the op
  const void *query, *key, *value;  // (rows, heads, tokens, size)
  const bool* mask;                 // (queries, slots), per row unless mask_stride is 0; null for causal
  void* output;                     // (rows, queries, heads, size)
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_stride;  // of row, head, token; of a row's mask
  int64_t rows, heads, kv_heads, queries, size, slots, threads;
  float scale;
};

constexpr int64_t kMaxTop = 16;

struct TopTokens {
  static constexpr const char* kName = "top_tokens";  // of the op
  const void* input;                                  // (rows, size)
  float* values;                                      // (rows, count), and their places in the row
  int64_t* places;
  float* log_sums;  // (rows), of the exponentials of all values; or null
  int64_t rows, size, count, threads;  // count: at most kMaxTop, and size
};

// What each decoder layer of Llama's kind holds.
struct DecoderLayer {
  const void *norm, *mlp_norm;    // of RMSNorm before attention and before the MLP, (size) each
  const void* head_norms[2];      // of queries and keys, (head_size) each; or null
  const void* biases[4];          // of queries, keys, values and the output projection; or null
  const LinearWeight* weights;    // of q, k, v, o, gate, up, down
  void *keys, *values;            // (rows, kv_heads, all_slots, head_size); the pass fills the slots before `slots`
};

struct DecoderLayers {
  static constexpr const char* kName = "decoder_layers";  // of the op
  void* states;                          // (rows, width, size), in place
  const void *cos, *sin;                 // (width, head_size), per row if has_row_angles
  const bool* may_attend;                // (width, mask_slots), per row if has_row_masks; or null
  const void* mask;                      // the same, added to the scores; or null. Without both, attention is causal
  const DecoderLayer* layers;            // `count`
  const void *beside, *beside_norm;      // what q, k and v read before the states, normalised, and its norm; or null
  void* tapped;                          // (rows, width, num_taps, size): the states after some layers, by their number
  const int64_t* taps;
  int64_t num_taps;
  int64_t count, rows, width, size, inner, heads, kv_heads, head_size, slots, all_slots, mask_slots, threads;
  bool has_row_angles, has_row_masks;
  float eps, mlp_eps, head_eps, scale;
};

template <class Value>  // float, c10::BFloat16 or c10::Half
void run(const SkinnyGemm& call);
template <class Value>
void run(const DecodeAttention& call);
template <class Value>
void run(const PrefillAttention& call);
template <class Value>
void run(const DecoderLayers& call);
template <class Value>
void run(const TopTokens& call);
template <class Value>
void run(const RowsOfProduct& call);
