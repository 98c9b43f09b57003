// Decoder layers of Llama's kind, one after the other, in one call: RMSNorm, QKV, the rotary embedding (arXiv 2104.09864)
// of queries and keys, which may be normalised before, K/V stored in the cache, decode attention, output projection,
// RMSNorm and the gated MLP. Values are rounded to `Value` where models round them. See vectorized.h for `Value`.
//
// One team of threads runs all of it. Each member computes a share of the rows of every product, in tiles, and then what
// others have left of theirs; and all norms for itself, since that takes less time than waiting for another member.

#include "attend.h"
#include "rms_norm.h"

namespace {

constexpr int64_t kMinWorkPerThread = 32768;  // multiply-adds of a product; for fewer, another thread costs more
constexpr int64_t kMostAhead = 131072;  // bytes of weights that are fetched before they are needed
constexpr int64_t kLinesAhead = 64;     // of these, while a thread waits for others
constexpr int64_t kAheadTokens = 2;     // of passes that wait for the memory, and not for products

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

// y = y + x, both (count).
inline void add(const Value* x, Value* y, int64_t count) {
  for (int64_t d = 0; d < count; d += Floats::size())
    store(load(y + d, count - d) + load(x + d, count - d), y + d, count - d);
}

// y = gate / (1 + exp(-gate)) * up; as in models, the activation is rounded to `Value` before it is multiplied.
inline void silu_multiply(const Value* gate, const Value* up, Value* y, int64_t count) {
  for (int64_t d = 0; d < count; d += Floats::size()) {
    const Floats x = load(gate + d, count - d);
    store(x / (Floats(1.0f) + x.neg().exp()), y + d, count - d);
    store(load(y + d, count - d) * load(up + d, count - d), y + d, count - d);
  }
}

// Rows of a weight at a time, for a number of tokens: as many as the products keep in registers, or tiles.
#if defined(TIDE_AMX)
constexpr int64_t tile_rows(int64_t tokens) { return tokens <= 16 ? 128 : 64; }
#else
constexpr int64_t tile_rows(int64_t tokens) { return tokens <= 2 ? 128 : tokens <= 6 ? 64 : 48; }
#endif

struct Range {
  int64_t from, count;
};

struct Input {  // of products: some tokens, and what tells their values from others; see `RowsOfProduct`
  int64_t id;
  Range tokens;
};

// Phases of a layer, which have tiles: attention, and four products of up to kMaxRows tokens at a time.
constexpr int64_t phases(int64_t tokens) { return 1 + 4 * ((tokens + kMaxRows - 1) / kMaxRows); }

// What the members of a team share: results of QKV (tokens, heads of all three, head_size), of attention (tokens, heads,
// head_size) and of the MLP's activation (tokens, inner), and masks.
struct Shared {
  std::vector<Value> projected, attended, activated;
  std::vector<float> masks;
};

// One member's part of a call.
class Member {
 public:
  Member(const DecoderLayers& call, Shared& shared, Team& team, int64_t index)
      : call(call), shared(shared), team(team), index(index), tokens(call.rows * call.width),
        states(static_cast<Value*>(call.states)) {
    normalised.resize(tokens * read_size());
  }

  void run() {
    if (index == 0) add_masks();
    for (int64_t i = 0; i < call.count; ++i) {
      const DecoderLayer& layer = call.layers[i];
      project(layer);
      meet_before(layer.weights[3], call.size, call.heads * call.head_size);
      place_heads(layer);
      team.meet();
      attend_to(layer);
      team.meet();
      add_product(layer.weights[3], shared.attended.data(), call.heads * call.head_size, layer.biases[3]);
      meet_before(layer.weights[4], call.inner, call.size);
      activate(layer);
      meet_before(layer.weights[6], call.size, call.inner);
      add_product(layer.weights[6], shared.activated.data(), call.inner, nullptr);
      if (i + 1 < call.count) meet_before(call.layers[i + 1].weights[0], projected_size(), read_size());
      else team.meet();
      tap(i + 1);
    }
  }

 private:
  const DecoderLayers& call;
  Shared& shared;
  Team& team;
  const int64_t index, tokens;
  Value* const states;
  inline static thread_local std::vector<Value> normalised, product, head;

  int64_t phase = 0;
  Ahead ahead{};

  // Tiles of a number of units of rows, as many for each member.
  int64_t tiles_of(int64_t units, int64_t unit) const {
    const int64_t some = (units * unit + tile_rows(tokens) - 1) / tile_rows(tokens), members = team.members();
    return std::min(units, (some + members - 1) / members * members);
  }

  // Wait for the others, while the first weights of this member's share of the next product, of `all` rows, are fetched.
  void meet_before(const LinearWeight& weight, int64_t all, int64_t size) {
    if (tokens > kAheadTokens) return team.meet();
    const int64_t bits = weight.stored == Stored::kInt4 ? 4 : weight.stored == Stored::kInt8 ? 8
                         : weight.stored == Stored::kValues ? 8 * sizeof(Value) : 16;
    const int64_t unit = unit_of(weight), units = (all + unit - 1) / unit, tiles = tiles_of(units, unit), row = size * bits / 8;
    const int64_t first = units * (tiles * index / team.members()) / tiles * unit;
    const int64_t panels = weight.in_panels ? kTilePanels : 1, bytes = weight.in_panels ? row * kPanelRows : row;
    const int64_t groups = std::min(all / team.members() * row, kMostAhead) / (panels * bytes);
    ahead = {static_cast<const char*>(weight.values) + first * row, bytes, panels, groups};
    ahead.fetch(kLinesAhead);
    team.meet();
  }

  // Run parts of a phase, those of this member first.
  template <class Run>
  void for_parts(int64_t parts, const Run& run) {
    const int64_t members = team.members();
    for (int64_t i = 0; i < members; ++i) {
      const int64_t owner = (index + i) % members, first = parts * owner / members;
      int64_t part;
      while (team.claim(phase, owner, parts * (owner + 1) / members - first, part)) run(first + part);
    }
    ++phase;
  }

  // Run tiles of the rows of a product, `all`, in whole units, with up to kMaxRows tokens at a time.
  template <class Run>
  void for_tiles(int64_t all, int64_t unit, const Run& run) {
    const int64_t units = (all + unit - 1) / unit, tiles = tiles_of(units, unit);
    for (int64_t t = 0; t < tokens; t += kMaxRows) {
      const Input input{++last_input_id, {t, std::min(kMaxRows, tokens - t)}};
      for_parts(tiles, [&](int64_t tile) {
        const int64_t from = units * tile / tiles * unit, to = std::min(all, units * (tile + 1) / tiles * unit);
        run(Range{from, to - from}, input);
      });
    }
  }

  // The product of some tokens with rows of a weight (all, size), into (its tokens, stride) from its first column on.
  void multiply(const LinearWeight& weight, const Value* x, const Input& input, int64_t size, int64_t all, Range rows,
                const void* bias, Value* into, int64_t stride) {
    const auto* b = static_cast<const Value*>(bias);
    ::run<Value>(RowsOfProduct{&weight, input.id, x + input.tokens.from * size, b == nullptr ? b : b + rows.from, into, all,
                               input.tokens.count, size, rows.from, rows.count, stride});
  }

  // The mask as floats that are added to the scores, (masks, width, slots).
  void add_masks() {
    const float kMasked = -std::numeric_limits<float>::infinity();
    const int64_t width = call.width, slots = call.slots, masks = call.has_row_masks ? call.rows : 1;
    shared.masks.assign(masks * width * slots, 0.0f);
    for (int64_t i = 0; i < masks * width; ++i) {
      float* to = shared.masks.data() + i * slots;
      if (call.may_attend != nullptr) {
        const bool* from = call.may_attend + i * call.mask_slots;
        for (int64_t s = 0; s < slots; ++s)
          if (!from[s]) to[s] = kMasked;
      } else if (call.mask != nullptr) {
        at::vec::convert(static_cast<const Value*>(call.mask) + i * call.mask_slots, to, slots);
      } else {
        std::fill(to + slots - width + i % width + 1, to + slots, kMasked);
      }
    }
  }

  // How many values q, k and v are of a token, and how many they read.
  int64_t projected_size() const { return (call.heads + 2 * call.kv_heads) * call.head_size; }
  int64_t read_size() const { return call.beside == nullptr ? call.size : 2 * call.size; }

  // Normalise values (tokens, size), or the states, into rows of `stride` values, from a column on.
  void normalise(const void* weight, float eps, const Value* values, int64_t column, int64_t stride) {
    for (int64_t t = 0; t < tokens; ++t)
      rms_norm(values + t * call.size, static_cast<const Value*>(weight), normalised.data() + t * stride + column, call.size,
               eps);
  }

  // Copy a share of the states to where those after a number of layers are wanted, while others begin the next layer.
  void tap(int64_t depth) {
    const int64_t place = std::find(call.taps, call.taps + call.num_taps, depth) - call.taps, members = team.members();
    if (place == call.num_taps) return;
    for (int64_t t = tokens * index / members; t < tokens * (index + 1) / members; ++t)
      std::copy_n(states + t * call.size, call.size,
                  static_cast<Value*>(call.tapped) + (t * call.num_taps + place) * call.size);
  }

  // Multiply all tokens by some rows of the weights of queries, keys and values.
  void project(const DecoderLayer& layer) {
    const int64_t all = read_size();
    normalise(layer.norm, call.eps, states, all - call.size, all);
    if (call.beside != nullptr) normalise(call.beside_norm, call.eps, static_cast<const Value*>(call.beside), 0, all);
    const int64_t size = call.head_size, stride = projected_size();
    const int64_t firsts[] = {0, call.heads * size, (call.heads + call.kv_heads) * size, stride};
    int64_t unit = 1;
    for (int i = 0; i < 3; ++i) unit = std::max(unit, unit_of(layer.weights[i]));  // of which all three have whole numbers
    for_tiles(stride, unit, [&](Range rows, const Input& input) {
      for (int i = 0; i < 3; ++i) {
        const int64_t from = std::max(rows.from, firsts[i]), to = std::min(rows.from + rows.count, firsts[i + 1]);
        if (from >= to) continue;
        multiply(layer.weights[i], normalised.data(), input, all, firsts[i + 1] - firsts[i], {from - firsts[i], to - from},
                 layer.biases[i], shared.projected.data() + input.tokens.from * stride + from, stride);
      }
    });
  }

  // Normalise and rotate some heads of queries and keys in place, and store keys and values in the cache.
  void place_heads(const DecoderLayer& layer) {
    const int64_t size = call.head_size, heads = call.heads + 2 * call.kv_heads, members = team.members();
    head.resize(size);
    for (int64_t i = tokens * heads * index / members; i < tokens * heads * (index + 1) / members; ++i) {
      ahead.fetch(kSlotsAtOnce);
      const int64_t t = i / heads, h = i % heads, row = t / call.width, place = t % call.width;
      const int kind = h < call.heads ? 0 : h < call.heads + call.kv_heads ? 1 : 2;
      Value *from = shared.projected.data() + i * size, *to = from;
      if (kind > 0) {
        const int64_t kv_head = (h - call.heads) % call.kv_heads;
        auto* cache = static_cast<Value*>(kind == 1 ? layer.keys : layer.values);
        to = cache + ((row * call.kv_heads + kv_head) * call.all_slots + call.slots - call.width + place) * size;
      }
      if (kind == 2) {
        std::copy(from, from + size, to);
        continue;
      }
      const auto* norm = static_cast<const Value*>(layer.head_norms[kind]);
      if (norm != nullptr) rms_norm(from, norm, head.data(), size, call.head_eps);
      else std::copy(from, from + size, head.data());
      const int64_t angle = ((call.has_row_angles ? row * call.width : 0) + place) * size;
      rotate(head.data(), static_cast<const Value*>(call.cos) + angle, static_cast<const Value*>(call.sin) + angle, to, size);
    }
  }

  // Attend with some blocks of queries that share a head of keys and values.
  void attend_to(const DecoderLayer& layer) {
    const int64_t group = call.heads / call.kv_heads, queries = group * call.width, size = call.head_size;
    const bool is_few = call.rows * call.kv_heads * queries < 2 * kMaxQueries * team.members();
    const int64_t most = is_few ? 1 : kMaxQueries, blocks = (queries + most - 1) / most;
    for_parts(call.rows * call.kv_heads * blocks, [&](int64_t block) {
      const int64_t row = block / (call.kv_heads * blocks), kv_head = block / blocks % call.kv_heads;
      const int64_t first = block % blocks * most, count = std::min(most, queries - first);
      Queries some{};
      some.ahead = &ahead;
      for (int64_t m = 0; m < count; ++m) {
        const int64_t place = (first + m) / group, t = row * call.width + place, h = kv_head * group + (first + m) % group;
        some.values[m] = shared.projected.data() + (t * (call.heads + 2 * call.kv_heads) + h) * size;
        some.outputs[m] = shared.attended.data() + (t * call.heads + h) * size;
        some.masks[m] = shared.masks.data() + (call.has_row_masks ? t : place) * call.slots;
      }
      const int64_t kv = (row * call.kv_heads + kv_head) * call.all_slots * size;
      const bool is_causal = call.may_attend == nullptr && call.mask == nullptr;
      const int64_t later = is_causal ? call.width - 1 - (first + count - 1) / group : 0;  // slots that none attends to
      kByQueries[count - 1](some, static_cast<const Value*>(layer.keys) + kv, static_cast<const Value*>(layer.values) + kv,
                            call.slots - later, size, call.scale);
    });
  }

  // Add some columns of a product to the states.
  void add_product(const LinearWeight& weight, const Value* x, int64_t size, const void* bias) {
    for_tiles(call.size, unit_of(weight), [&](Range rows, const Input& input) {
      const auto [first, count] = input.tokens;
      product.resize(count * rows.count);
      multiply(weight, x, input, size, call.size, rows, bias, product.data(), rows.count);
      for (int64_t t = 0; t < count; ++t)
        add(product.data() + t * rows.count, states + (first + t) * call.size + rows.from, rows.count);
    });
  }

  // Compute some of the MLP's activations.
  void activate(const DecoderLayer& layer) {
    normalise(layer.mlp_norm, call.mlp_eps, states, 0, call.size);
    for_tiles(call.inner, std::max(unit_of(layer.weights[4]), unit_of(layer.weights[5])), [&](Range rows, const Input& input) {
      const auto [first, count] = input.tokens;
      product.resize(2 * count * rows.count);
      Value *gate = product.data(), *up = gate + count * rows.count;
      multiply(layer.weights[4], normalised.data(), input, call.size, call.inner, rows, nullptr, gate, rows.count);
      multiply(layer.weights[5], normalised.data(), input, call.size, call.inner, rows, nullptr, up, rows.count);
      for (int64_t t = 0; t < count; ++t)
        silu_multiply(gate + t * rows.count, up + t * rows.count,
                      shared.activated.data() + (first + t) * call.inner + rows.from, rows.count);
    });
  }
};

}  // namespace

template <>
void run<Value>(const DecoderLayers& call) {
  thread_local Shared shared;
  const int64_t tokens = call.rows * call.width, projected = call.heads * call.head_size;
  shared.projected.resize(tokens * (call.heads + 2 * call.kv_heads) * call.head_size);
  shared.attended.resize(tokens * projected);
  shared.activated.resize(tokens * call.inner);
  const int64_t threads = std::min(call.threads, 1 + tokens * call.size * projected / kMinWorkPerThread);
  Shared& own = shared;  // of this thread, in all members
  on_team(threads, phases(tokens) * call.count, [&](Team& team, int64_t index) { Member(call, own, team, index).run(); });
}
