// What a decoder layer of Llama's kind computes before its attention: RMSNorm, QKV in one skinny GEMM, and the rotary
// embedding (arXiv 2104.09864) of queries and keys, which may be normalised before. See vectorized.h for `Value`.

#include <vector>

#include "rms_norm.h"

namespace {

// Rotate a head: the halves of its values are the coordinates of its pairs, as in transformers' `rotate_half`.
inline void rotate(const Value* x, const Value* cos, const Value* sin, Value* y, int64_t size) {
  constexpr int64_t kSize = Floats::size();
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d += kSize) {
    const int64_t left = half - d;
    const Floats first = load(x + d, left), second = load(x + half + d, left);
    store(first * load(cos + d, left) - second * load(sin + d, left), y + d, left);
    store(second * load(cos + half + d, left) + first * load(sin + half + d, left), y + half + d, left);
  }
}

}  // namespace

template <>
void run<Value>(const QkvRope& call) {
  const int64_t tokens = call.rows * call.width, size = call.size, head_size = call.head_size;
  const int64_t rotated = call.heads + call.kv_heads, heads = rotated + call.kv_heads;
  const auto *x = static_cast<const Value*>(call.input), *norm = static_cast<const Value*>(call.norm);
  thread_local std::vector<Value> normalised, packed, bias, head;
  normalised.resize(tokens * size), packed.resize(tokens * heads * head_size), head.resize(head_size);
  for (int64_t t = 0; t < tokens; ++t) rms_norm(x + t * size, norm, normalised.data() + t * size, size, call.eps);
  SkinnyGemm product{};
  product.input = normalised.data(), product.weights = call.weights;
  product.output = packed.data(), product.rows = tokens, product.size = size, product.threads = call.threads;
  const int64_t sizes_out[] = {call.heads * head_size, call.kv_heads * head_size, call.kv_heads * head_size};
  product.sizes_out = sizes_out, product.count = 3, product.size_out = heads * head_size;
  if (call.biases != nullptr) {
    bias.clear();
    for (int i = 0; i < 3; ++i) {
      const auto* one = static_cast<const Value*>(call.biases[i]);
      bias.insert(bias.end(), one, one + sizes_out[i]);
    }
    product.bias = bias.data();
  }
  run<Value>(product);
  const auto *cos = static_cast<const Value*>(call.cos), *sin = static_cast<const Value*>(call.sin);
  auto* y = static_cast<Value*>(call.output);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = t / call.width, place = t % call.width;
    const int64_t angle = ((call.has_row_angles ? row * call.width : 0) + place) * head_size;
    for (int64_t h = 0; h < heads; ++h) {
      const Value* from = packed.data() + (t * heads + h) * head_size;
      Value* to = y + ((row * heads + h) * call.width + place) * head_size;
      if (h >= rotated) {
        std::copy(from, from + head_size, to);
        continue;
      }
      if (call.head_norms != nullptr) {
        const void* weight = call.head_norms[h < call.heads ? 0 : 1];
        rms_norm(from, static_cast<const Value*>(weight), head.data(), head_size, call.head_eps);
        from = head.data();
      }
      rotate(from, cos + angle, sin + angle, to, head_size);
    }
  }
}
