// Calls of kernels, as addresses and numbers. What is compiled for each dtype so needs none of the headers of ops, which
// take longer to compile than a kernel does: those are for ops.cpp, which is compiled once and fills these in.
//
// Values are of the dtype that a kernel is compiled for, if nothing else is said; sizes are in values, and what has no
// strides is contiguous. A kernel uses at most `threads`.

#include <cstdint>

struct StoredRows {
  static constexpr const char* kName = "stored_rows";  // of the op
  const void *input, *const *weights, *bias;  // (rows, size), `count` times (rows_of[i], size), (size_out) or none
  void* output;                               // (rows, size_out)
  const int64_t* rows_of;
  int64_t rows, size, count, size_out, threads;
};

struct RoundedRows {
  static constexpr const char* kName = "rounded_rows";  // of the op
  const void* input;      // (rows, size)
  const uint8_t* weight;  // (size_out, lines, 64)
  const float* scales;    // (size_out, lines)
  const void* bias;       // (size_out) or none
  void* output;           // (rows, size_out)
  int64_t rows, size, lines, size_out, threads;
};

struct FewQueries {
  static constexpr const char* kName = "few_queries";  // of the op
  const void *query, *key, *value, *mask;  // (heads, queries, size), twice (heads, all_slots, size), (queries, all_slots)
  void* output;                            // as `query`
  int64_t rows, heads, queries, size, slots, all_slots, threads;  // heads of a row
  bool mask_of_rows;                                              // whether each row has a mask
  float scale;
};

struct ManyQueries {
  static constexpr const char* kName = "many_queries";  // of the op
  const void *query, *key, *value;  // (rows, heads, tokens, size)
  const bool* mask;                 // (queries, slots), for each row if it has strides, or none
  void* output;                     // (rows, queries, heads, size)
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_stride;  // of rows, heads and tokens; of rows
  int64_t rows, heads, shared, queries, size, slots, threads;               // `shared` heads have keys and values
  float scale;
};
