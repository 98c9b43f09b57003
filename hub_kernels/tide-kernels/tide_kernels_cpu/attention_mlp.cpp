// What a decoder layer of Llama's kind computes from its queries and K/V on: decode attention, output projection,
// RMSNorm and the gated MLP, with both residual connections. See vectorized.h for `Value`.

#include <limits>
#include <vector>

#include "rms_norm.h"

namespace {

// The mask that is added to the scores, (masks, group * width, all_slots): a group's query heads are further queries.
// Slots from `slots` on are not read.
void expand_mask(const AttentionMlp& call, std::vector<Value>& into) {
  const int64_t width = call.width, slots = call.slots, all = call.all_slots, group = call.heads / call.kv_heads;
  const int64_t masks = call.has_row_masks ? call.rows : 1;
  const Value kMasked(-std::numeric_limits<float>::infinity());
  into.assign(masks * group * width * all, Value(0.0f));
  for (int64_t i = 0; i < masks * group * width; ++i) {
    const int64_t place = i % width, given = i / (group * width) * width + place;
    Value* to = into.data() + i * all;
    if (call.may_attend != nullptr) {
      const bool* from = call.may_attend + given * all;
      for (int64_t s = 0; s < slots; ++s)
        if (!from[s]) to[s] = kMasked;
    } else if (call.mask != nullptr) {
      const Value* from = static_cast<const Value*>(call.mask) + given * all;
      std::copy(from, from + slots, to);
    } else {
      std::fill(to + slots - width + place + 1, to + slots, kMasked);
    }
  }
}

// y = x + y, both (count).
inline void add(const Value* x, Value* y, int64_t count) {
  for (int64_t d = 0; d < count; d += Floats::size())
    store(load(x + d, count - d) + load(y + d, count - d), y + d, count - d);
}

// gate = gate / (1 + exp(-gate)) * up; as in models, the activation is rounded to `Value` before it is multiplied.
inline void silu_multiply(Value* gate, const Value* up, int64_t count) {
  for (int64_t d = 0; d < count; d += Floats::size()) {
    const Floats x = load(gate + d, count - d);
    store(x / (Floats(1.0f) + x.neg().exp()), gate + d, count - d);
    store(load(gate + d, count - d) * load(up + d, count - d), gate + d, count - d);
  }
}

}  // namespace

template <>
void run<Value>(const AttentionMlp& call) {
  const int64_t tokens = call.rows * call.width, size = call.size, inner = call.inner, width = call.width;
  const int64_t group = call.heads / call.kv_heads, projected = call.heads * call.head_size;
  thread_local std::vector<Value> mask, attended, ordered, normalised, gated, activated;
  expand_mask(call, mask);
  attended.resize(tokens * projected), normalised.resize(tokens * size);
  gated.resize(tokens * 2 * inner), activated.resize(tokens * inner);
  DecodeAttention attention{};
  attention.query = call.query, attention.key = call.key, attention.value = call.value, attention.mask = mask.data();
  attention.output = attended.data(), attention.rows = call.rows, attention.heads = call.kv_heads;
  attention.queries = group * width, attention.size = call.head_size, attention.scale = call.scale;
  attention.slots = call.slots, attention.all_slots = call.all_slots, attention.threads = call.threads;
  attention.has_row_masks = call.has_row_masks;
  run<Value>(attention);
  const Value* heads = attended.data();
  if (width > 1) {  // (rows, heads, width, head_size) -> (rows, width, heads, head_size)
    ordered.resize(attended.size());
    for (int64_t i = 0; i < tokens * call.heads; ++i) {
      const int64_t row = i / (width * call.heads), place = i / call.heads % width, head = i % call.heads;
      const Value* from = attended.data() + ((row * call.heads + head) * width + place) * call.head_size;
      std::copy(from, from + call.head_size, ordered.data() + i * call.head_size);
    }
    heads = ordered.data();
  }
  const auto multiply = [&](int first, int64_t count, const Value* from, int64_t in, int64_t out, const void* bias,
                            Value* to) {
    const int64_t sizes_out[] = {out, out};
    SkinnyGemm product{};
    product.input = from, product.weights = call.weights + first, product.bias = bias, product.output = to;
    product.sizes_out = sizes_out, product.rows = tokens, product.size = in, product.count = count;
    product.size_out = count * out, product.threads = call.threads;
    run<Value>(product);
  };
  const auto *x = static_cast<const Value*>(call.input), *norm = static_cast<const Value*>(call.norm);
  auto* y = static_cast<Value*>(call.output);
  multiply(0, 1, heads, projected, size, call.bias, y);
  add(x, y, tokens * size);
  for (int64_t t = 0; t < tokens; ++t) rms_norm(y + t * size, norm, normalised.data() + t * size, size, call.eps);
  multiply(1, 2, normalised.data(), size, inner, nullptr, gated.data());
  for (int64_t t = 0; t < tokens; ++t) {
    Value* gate = gated.data() + t * 2 * inner;
    silu_multiply(gate, gate + inner, inner);
    std::copy(gate, gate + inner, activated.data() + t * inner);
  }
  multiply(3, 1, activated.data(), inner, size, nullptr, normalised.data());
  add(normalised.data(), y, tokens * size);
}
