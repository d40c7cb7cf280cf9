// SPDX-License-Identifier: Apache-2.0
// One attention operator at a time on generated tensors, with every kernel that takes fp32.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>

#include "base/check.h"
#include "golden.h"
#include "kascade/attention.h"

namespace kascade::golden {
namespace {

// An independent float64 evaluation lands within 5e-6 of the stored fp32 outputs.
constexpr double kOutputTolerance = 1e-5;
// Two fp32 evaluations may order keys differently whose weights agree to this, relative.
constexpr double kTieGap = 1e-6;

/// A strategy in terms of the operator.
struct OpStrategy {
  bool sparse_prefill = true;
  bool remap = true;
  bool every_layer_selects = false;  // the oracles
  bool first_layer_dense = true;
  SetOwner owner = SetOwner::kKvHead;
  bool rolling = false;
};

/// By the authors' name. nullopt: its policy does not exist yet. Throws BadFile for a name that is not
/// theirs.
std::optional<OpStrategy> op_strategy(const std::string& name, const std::string& source) {
  const OpStrategy oracle{
      .every_layer_selects = true, .first_layer_dense = false, .owner = SetOwner::kQueryHead};
  OpStrategy oracle_dense_first = oracle;
  oracle_dense_first.first_layer_dense = true;
  const OpStrategy pooled{.owner = SetOwner::kAllHeads}, no_remap{.remap = false},
      decode_only{.sparse_prefill = false};
  static const std::map<std::string, std::optional<OpStrategy>> strategies = {
      {"kascade", OpStrategy{}},    {"kascade_rolling", OpStrategy{.rolling = true}},
      {"pooled", pooled},           {"pooled_kascade", pooled},
      {"no_remap", no_remap},       {"no_remap_kascade", no_remap},
      {"decode_only", decode_only}, {"decode_only_kascade", decode_only},
      {"oracle_topk", oracle},      {"oracle_topk_layer0_global", oracle_dense_first},
      {"quest", std::nullopt},      {"less_is_more", std::nullopt},
      {"omni_kv", std::nullopt},    {"sinked_sliding_window", std::nullopt},
  };
  const auto entry = strategies.find(name);
  require<BadFile>(entry != strategies.end(), "{}: field 'strategy': '{}' is unknown", source, name);
  return entry->second;
}

struct Case {
  std::string name;
  OpStrategy strategy;
  int32_t query_heads = 0, kv_heads = 0, head_dim = 0, length = 0, steps = 0, layers = 0, tile = 32;
  int32_t percent_hundredths = 0;
  uint64_t seed = 0;
  std::vector<int32_t> anchors;
  std::vector<std::vector<int32_t>> head_map;  // [layers][G]
  std::vector<int32_t> rows;                   // query positions of prefill_out
  Json json;

  bool is_anchor(int32_t layer) const {
    return std::find(anchors.begin(), anchors.end(), layer) != anchors.end();
  }
  int32_t sets() const {
    return strategy.owner == SetOwner::kAllHeads ? 1
           : strategy.owner == SetOwner::kKvHead ? kv_heads
                                                 : query_heads;
  }
};

Case read_case(const std::string& path, const std::string& name, const OpStrategy& strategy, Json json) {
  Case c;
  c.name = name;
  c.strategy = strategy;
  const auto integer = [&](const char* key, int64_t low, int64_t high) {
    return static_cast<int32_t>(json_int(json, key, low, high, path, ""));
  };
  c.query_heads = integer("H", 1, 1024);
  c.kv_heads = integer("G", 1, c.query_heads);
  c.head_dim = integer("d", 8, 1024);
  c.length = integer("L", 1, 1 << 16);
  c.steps = integer("decode_steps", 0, 1 << 10);
  c.layers = integer("layers", 1, 1 << 10);
  c.seed = static_cast<uint64_t>(json_int(json, "seed", 0, 1LL << 40, path, ""));
  c.percent_hundredths = static_cast<int32_t>(std::lround(100 * json_number(json, "pct", path, "")));
  if (json.contains("tile")) c.tile = integer("tile", 1, 128);
  if (json.contains("rolling")) c.strategy.rolling |= json.at("rolling").get<bool>();
  if (json.contains("rows")) c.rows = json.at("rows").get<std::vector<int32_t>>();
  for (const int32_t row : c.rows)
    require<BadFile>(row >= 0 && row < c.length, "{}: field 'rows': {} is not below L, {}", path, row,
                     c.length);
  if (c.strategy.every_layer_selects) {
    for (int32_t layer = 0; layer < c.layers; ++layer) c.anchors.push_back(layer);
  } else {
    c.anchors = json.at("anchors").get<std::vector<int32_t>>();
    c.head_map = json.at("head_map").get<std::vector<std::vector<int32_t>>>();
    require<BadFile>(!c.anchors.empty() && c.anchors.front() == 0, "{}: field 'anchors': must start with 0",
                     path);
    require<BadFile>(c.head_map.size() == static_cast<size_t>(c.layers),
                     "{}: field 'head_map': {} layers, not {}", path, c.head_map.size(), c.layers);
    for (const auto& heads : c.head_map)
      require<BadFile>(heads.size() == static_cast<size_t>(c.kv_heads),
                       "{}: field 'head_map': {} heads, not {}", path, heads.size(), c.kv_heads);
  }
  c.json = std::move(json);
  return c;
}

/// The generator of the golden format: exact in every language.
std::vector<float> generate(uint64_t stream, size_t count, float factor) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t z = stream + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const auto sum = static_cast<int64_t>((z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48));
    values[i] = factor * static_cast<float>(sum - 131070) / 32768.0f;
  }
  return values;
}

/// Floats aligned as the operator wants its rows.
class Rows {
 public:
  explicit Rows(size_t count = 0) : storage_((count + 3) / 4), count_(count) {}
  explicit Rows(const std::vector<float>& values) : Rows(values.size()) {
    std::copy(values.begin(), values.end(), data());
  }
  float* data() { return storage_.empty() ? nullptr : storage_.front().x; }
  const float* data() const { return storage_.empty() ? nullptr : storage_.front().x; }
  std::span<const float> values() const { return {data(), count_}; }

 private:
  struct alignas(16) Vector {
    float x[4];
  };
  std::vector<Vector> storage_;
  size_t count_;
};

struct Tensors {
  Rows q, k, v;
};

Tensors layer_tensors(const Case& c, int32_t layer) {
  const uint64_t stream = c.seed * 1000 + static_cast<uint64_t>(layer) * 10;
  const auto tokens = static_cast<size_t>(c.length + c.steps), width = static_cast<size_t>(c.head_dim);
  return {Rows(generate(stream, tokens * static_cast<size_t>(c.query_heads) * width, 2)),
          Rows(generate(stream + 1, tokens * static_cast<size_t>(c.kv_heads) * width, 1)),
          Rows(generate(stream + 2, tokens * static_cast<size_t>(c.kv_heads) * width, 1))};
}

/// Sets of one anchor.
struct IndexSets {
  std::vector<int32_t> positions, counts;
  int32_t capacity = 0;
};

/// One call: rows [first, first + count) of a layer, over all keys up to the last of them.
class OpCall {
 public:
  OpCall(const Case& c, int32_t first, int32_t count, TileRule rule) : case_(c), first_(first) {
    params_.tile_rule = rule;
    params_.tile = c.tile;
    params_.set_owner = c.strategy.owner;
    params_.batch = 1;
    params_.query_heads = c.query_heads;
    params_.kv_heads = c.kv_heads;
    params_.head_dim = c.head_dim;
    cu_q_[1] = count;
    kv_len_ = first + count;
    cu_kv_[1] = c.length + c.steps;
    params_.cu_seqlens_q = cu_q_;
    params_.seq_lens_kv = &kv_len_;
    params_.cu_seqlens_kv = cu_kv_;
    params_.q_head_stride = params_.out_head_stride = params_.k_head_stride = params_.v_head_stride =
        c.head_dim;
    params_.q_row_stride = params_.out_row_stride = int64_t{c.query_heads} * c.head_dim;
    params_.k_token_stride = params_.v_token_stride = int64_t{c.kv_heads} * c.head_dim;
    params_.budget = budget(rule);
    tile_offsets_[1] = static_cast<int32_t>(tiles_of(params_, count, kv_len_));
    params_.tile_offsets = tile_offsets_;
  }

  int32_t tiles() const { return tile_offsets_[1]; }

  IndexSets make_sets() const {
    IndexSets sets;
    sets.capacity = static_cast<int32_t>(required_capacity(params_));
    sets.counts.resize(static_cast<size_t>(tiles() * case_.sets()));
    sets.positions.resize(sets.counts.size() * static_cast<size_t>(sets.capacity));
    return sets;
  }

  /// Output [count, H, d]. sets: written by selecting roles, read by reuse; head_map: of a reuse call.
  Rows run(const AttentionKernel& kernel, const Tensors& tensors, Role role, IndexSets* sets,
           const int32_t* head_map) {
    params_.role = role;
    params_.q = tensors.q.data() + first_ * params_.q_row_stride;
    params_.k = tensors.k.data();
    params_.v = tensors.v.data();
    if (sets != nullptr) {
      params_.positions = sets->positions.data();
      params_.counts = sets->counts.data();
      params_.capacity = sets->capacity;
    }
    params_.head_map = head_map;
    Rows out(static_cast<size_t>(cu_q_[1] * params_.out_row_stride));
    params_.out = out.data();
    const size_t bytes = attention_workspace_bytes(params_, kernel, 1);
    struct alignas(64) Line {
      std::byte bytes[64];
    };
    std::vector<Line> workspace(bytes / sizeof(Line) + 1);
    attention(params_, kernel, workspace.data(), bytes, {});
    return out;
  }

 private:
  Budget budget(TileRule rule) const {
    if (case_.strategy.every_layer_selects)
      return {.percent_hundredths = case_.percent_hundredths,
              .floor = 5,
              .own_tile = OwnTile::kCandidate,
              .tile = 1,
              .rolling = false};
    // The decode-only strategy's budget was made for one-row tiles: nothing is charged.
    const bool one_row = rule == TileRule::kStep && !case_.strategy.sparse_prefill;
    return paper_budget(case_.percent_hundredths, one_row ? 1 : case_.tile, case_.strategy.rolling);
  }

  const Case& case_;
  int32_t first_, kv_len_;
  int32_t cu_q_[2] = {}, cu_kv_[2] = {}, tile_offsets_[2] = {};
  AttentionParams params_;
};

class OpRunner {
 public:
  OpRunner(const Case& c, const AttentionKernel& kernel, Tally& tally)
      : case_(c), kernel_(kernel), tally_(tally) {}

  void run(const std::string& prefix) {
    for (int32_t layer = 0; layer < case_.layers; ++layer) tensors_.push_back(layer_tensors(case_, layer));
    check_inputs();
    bool any = false;
    if (exists(prefix + ".prefill_out.npy")) {
      any = true;
      prefill(prefix);
    }
    if (exists(prefix + ".decode_out.npy")) {
      any = true;
      decode(prefix);
    }
    check(any, "no stored output beside it");
  }

 private:
  static bool exists(const std::string& path) { return std::filesystem::exists(path); }

  bool check(bool condition, const std::string& message) {
    return tally_.check(condition, case_.name, fmt::format("{}: {}", kernel_.name, message));
  }

  void check_inputs() {
    if (!case_.json.contains("input_check")) return;
    const Json& stored = case_.json.at("input_check");
    const auto same = [&](const char* key, std::span<const float> actual) {
      if (!stored.contains(key)) return;
      const auto expected = stored.at(key).get<std::vector<double>>();
      check(std::equal(expected.begin(), expected.end(), actual.begin(), actual.end()),
            fmt::format("the generator disagrees with input_check.{}", key));
    };
    same("q0_first4", tensors_.front().q.values().first(4));
    same("k0_first4", tensors_.front().k.values().first(4));
    same("v_last_last4", tensors_.back().v.values().last(4));
  }

  /// Stored sets of one call, [anchors, S, tiles, k], or none.
  struct Expected {
    Array<int32_t> sets;
    double gap = 0;  // smallest stored gap at the cut

    std::vector<int32_t> of(size_t anchor, size_t set, size_t tile) const {
      const auto heads = static_cast<size_t>(sets.shape[1]), tiles = static_cast<size_t>(sets.shape[2]),
                 width = static_cast<size_t>(sets.shape[3]);
      const auto begin =
          sets.values.begin() + static_cast<int64_t>(((anchor * heads + set) * tiles + tile) * width);
      std::vector<int32_t> members(begin, begin + static_cast<int64_t>(width));
      members.erase(std::remove(members.begin(), members.end(), -1), members.end());
      return members;
    }
  };

  /// True when the selected sets are the stored ones. A difference is a failure unless the stored gap calls
  /// it a tie.
  bool sets_agree(const IndexSets& sets, int32_t tiles, size_t anchor, const Expected& expected,
                  const std::string& where) {
    for (int32_t tile = 0; tile < tiles; ++tile) {
      for (int32_t set = 0; set < case_.sets(); ++set) {
        const auto index = static_cast<size_t>(tile * case_.sets() + set);
        const auto begin = sets.positions.begin() + static_cast<int64_t>(index) * sets.capacity;
        const std::vector<int32_t> members(begin, begin + sets.counts[index]);
        const auto stored = expected.of(anchor, static_cast<size_t>(set), static_cast<size_t>(tile));
        if (members == stored) continue;
        check(expected.gap < kTieGap && members.size() == stored.size(),
              fmt::format("{} tile {} set {}: other keys are selected ({} keys, stored {})", where, tile, set,
                          members.size(), stored.size()));
        return false;
      }
    }
    return true;
  }

  void store_sets(IndexSets& sets, int32_t tiles, size_t anchor, const Expected& expected) const {
    for (int32_t tile = 0; tile < tiles; ++tile) {
      for (int32_t set = 0; set < case_.sets(); ++set) {
        const auto index = static_cast<size_t>(tile * case_.sets() + set);
        const auto stored = expected.of(anchor, static_cast<size_t>(set), static_cast<size_t>(tile));
        sets.counts[index] = static_cast<int32_t>(stored.size());
        std::copy(stored.begin(), stored.end(),
                  sets.positions.begin() + static_cast<int64_t>(index) * sets.capacity);
      }
    }
  }

  /// All layers of one call; hands each layer's output to `compare`.
  void run_layers(OpCall& call, bool sparse, const Expected* expected, const std::string& phase,
                  const std::function<void(int32_t, const Rows&)>& compare) {
    IndexSets sets;
    size_t anchor = 0;
    for (int32_t layer = 0; layer < case_.layers; ++layer) {
      const Tensors& tensors = tensors_[static_cast<size_t>(layer)];
      if (!sparse) {
        compare(layer, call.run(kernel_, tensors, Role::kDense, nullptr, nullptr));
        continue;
      }
      if (!case_.is_anchor(layer)) {
        const bool mapped = case_.strategy.remap && case_.strategy.owner == SetOwner::kKvHead;
        const int32_t* map = mapped ? case_.head_map.at(static_cast<size_t>(layer)).data() : nullptr;
        compare(layer, call.run(kernel_, tensors, Role::kReuse, &sets, map));
        continue;
      }
      const bool dense_output = layer == 0 && case_.strategy.first_layer_dense;
      sets = call.make_sets();
      Rows out = call.run(kernel_, tensors, dense_output ? Role::kLayer0 : Role::kAnchor, &sets, nullptr);
      if (expected != nullptr &&
          !sets_agree(sets, call.tiles(), anchor, *expected, fmt::format("{} layer {}", phase, layer))) {
        // What follows is compared over the stored sets.
        store_sets(sets, call.tiles(), anchor, *expected);
        if (!dense_output) out = call.run(kernel_, tensors, Role::kReuse, &sets, nullptr);
      }
      compare(layer, out);
      ++anchor;
    }
  }

  void compare_rows(std::span<const float> actual, std::span<const float> expected,
                    const std::string& where) {
    double worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      const double difference = std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
      if (difference <= worst) continue;
      // A NaN lands here as well, and stays.
      worst = difference;
      at = i;
      if (std::isnan(difference)) break;
    }
    check(worst <= kOutputTolerance, fmt::format("{}: output differs by {} at element {}", where, worst, at));
  }

  void prefill(const std::string& prefix) {
    const Array<float> stored = load_floats(prefix + ".prefill_out.npy");
    const auto row_width = static_cast<size_t>(case_.query_heads * case_.head_dim);
    if (!check(stored.shape == std::vector<int64_t>{case_.layers, static_cast<int64_t>(case_.rows.size()),
                                                    case_.query_heads, case_.head_dim},
               "prefill_out has another shape than the settings"))
      return;
    // One-row tiles make every row a selection of its own, its key a candidate.
    Case one_row = case_;
    one_row.tile = 1;
    OpCall call(case_.strategy.every_layer_selects ? one_row : case_, 0, case_.length, TileRule::kAligned);
    std::optional<Expected> expected;
    if (exists(prefix + ".prefill_idx.npy")) {
      expected = Expected{.sets = load_ints(prefix + ".prefill_idx.npy"), .gap = prefill_gap()};
      if (!check(expected->sets.shape.size() == 4 &&
                     expected->sets.shape[0] == static_cast<int64_t>(case_.anchors.size()) &&
                     expected->sets.shape[1] == case_.sets() && expected->sets.shape[2] == call.tiles(),
                 "prefill_idx has another shape than the settings"))
        return;
    }
    run_layers(
        call, case_.strategy.sparse_prefill, expected ? &*expected : nullptr, "prefill",
        [&](int32_t layer, const Rows& out) {
          for (size_t r = 0; r < case_.rows.size(); ++r)
            compare_rows(
                out.values().subspan(static_cast<size_t>(case_.rows[r]) * row_width, row_width),
                std::span(stored.values)
                    .subspan((static_cast<size_t>(layer) * case_.rows.size() + r) * row_width, row_width),
                fmt::format("prefill layer {} row {}", layer, case_.rows[r]));
        });
  }

  double prefill_gap() const {
    double gap = 1;
    if (!case_.json.contains("prefill_boundary")) return gap;
    for (const Json& layer : case_.json.at("prefill_boundary"))
      if (layer.at("min_rel_gap").is_number()) gap = std::min(gap, layer.at("min_rel_gap").get<double>());
    return gap;
  }

  void decode(const std::string& prefix) {
    const Array<float> stored = load_floats(prefix + ".decode_out.npy");
    const auto row_width = static_cast<size_t>(case_.query_heads * case_.head_dim);
    if (!check(stored.shape ==
                   std::vector<int64_t>{case_.steps, case_.layers, case_.query_heads, case_.head_dim},
               "decode_out has another shape than the settings"))
      return;
    std::optional<Array<int32_t>> sets;
    if (exists(prefix + ".decode_idx.npy")) {
      sets = load_ints(prefix + ".decode_idx.npy");
      if (!check(sets->shape.size() == 4 && sets->shape[0] == case_.steps &&
                     sets->shape[1] == static_cast<int64_t>(case_.anchors.size()) &&
                     sets->shape[2] == case_.sets(),
                 "decode_idx has another shape than the settings"))
        return;
    }
    for (int32_t step = 0; step < case_.steps; ++step) {
      OpCall call(case_, case_.length + step, 1, TileRule::kStep);
      std::optional<Expected> expected;
      if (sets) expected = step_sets(*sets, step);
      run_layers(call, true, expected ? &*expected : nullptr, fmt::format("decode step {}", step),
                 [&](int32_t layer, const Rows& out) {
                   compare_rows(
                       out.values(),
                       std::span(stored.values)
                           .subspan(static_cast<size_t>(step * case_.layers + layer) * row_width, row_width),
                       fmt::format("decode step {} layer {}", step, layer));
                 });
    }
  }

  /// [anchors, S, 1, k] of one step.
  Expected step_sets(const Array<int32_t>& all, int32_t step) const {
    const auto size = static_cast<size_t>(all.shape[1] * all.shape[2] * all.shape[3]);
    const auto begin = all.values.begin() + static_cast<int64_t>(static_cast<size_t>(step) * size);
    Expected expected{.sets = {.shape = {all.shape[1], all.shape[2], 1, all.shape[3]},
                               .values = {begin, begin + static_cast<int64_t>(size)}},
                      .gap = 1};
    if (case_.json.contains("decode_min_rel_gap") && case_.json.at("decode_min_rel_gap").is_number())
      expected.gap = case_.json.at("decode_min_rel_gap").get<double>();
    return expected;
  }

  const Case& case_;
  const AttentionKernel& kernel_;
  Tally& tally_;
  std::vector<Tensors> tensors_;
};

void run_case(const std::string& prefix, const std::string& name, Tally& tally) {
  const std::string path = prefix + ".json";
  Json json = load_json(path);
  const std::string strategy_name = json_string(json, "strategy", path, "");
  const auto strategy = op_strategy(strategy_name, path);
  if (!strategy) return tally.skipped(name, strategy_name + " is not implemented yet");
  const Case c = read_case(path, name, *strategy, std::move(json));
  for (const AttentionKernel& kernel : attention_kernels())
    if (!kernel.on_device && kernel.available()) OpRunner(c, kernel, tally).run(prefix);
  tally.ran(fmt::format("{} ({})", name, strategy_name));
}

}  // namespace

void run_ops(const std::string& golden_dir, Tally& tally) {
  const std::string folder = golden_dir + "/ops/";
  for (const std::string& name : cases_in(folder, ".json")) {
    try {
      run_case(folder + name, name, tally);
    } catch (const std::exception& error) {
      tally.check(false, name, error.what());
    }
  }
}

}  // namespace kascade::golden
