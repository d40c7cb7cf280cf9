// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "attention/cpu/launch.h"

namespace kascade::cpu {
namespace {

// What a wave of tiles keeps between its loops, unless one tile alone needs more.
constexpr int64_t kArenaBytes = int64_t{64} << 20;
constexpr int64_t kWaveGroups = 2048;

int64_t splits_of(int64_t keys) { return std::max<int64_t>((keys + kSplitKeys - 1) / kSplitKeys, 1); }

/// One loop over the keys of a group: its splits and their partial results.
struct Loop {
  KeySource keys;
  int64_t first_item = 0;
  int64_t splits = 0;
  int64_t pending = 0;       // splits that are not done; whoever takes the last one merges
  float* maximum = nullptr;  // [splits, rows]
  float* sum = nullptr;      // [splits, rows]
  float* partial = nullptr;  // [splits, rows, padded head dim]; null: scores only
};

struct Group {
  RowBlock rows;
  CacheView cache;
  Loop first;             // all keys, or the set of a reuse call
  Loop second;            // an anchor's own set; no splits when there is none
  float* kept = nullptr;  // [rows, kept_stride]
  int64_t kept_stride = 0;
  float* row_maximum = nullptr;  // [rows]
  float* row_sum = nullptr;
  int64_t owner = -1;  // of the set that the group selects, -1 when it selects none
};

/// A set to select, and the groups that vote.
struct Owner {
  SetWork set;
  int64_t first_group = 0;
  int32_t groups = 0;
  int64_t pending = 0;
};

/// Cuts pieces from the arena; without a base it only measures.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  float* floats(int64_t count) {
    float* piece = base_ != nullptr ? reinterpret_cast<float*>(base_ + bytes_) : nullptr;
    bytes_ += round_up_bytes(count * static_cast<int64_t>(sizeof(float)));
    return piece;
  }
  int64_t bytes() const { return bytes_; }
  void rewind(int64_t bytes) { bytes_ = bytes; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

class DecodeCall {
 public:
  DecodeCall(const AttentionParams& params, const Kernels& kernels, char* workspace, ThreadPool* pool)
      : p_(params),
        kernels_(kernels),
        pool_(pool),
        maxima_(resolve_maxima(params)),
        groups_of_tile_(params),
        shape_(params, kernels, maxima_),
        group_(reinterpret_cast<Group*>(workspace)),
        owner_(reinterpret_cast<Owner*>(workspace + shape_.group_bytes)),
        arena_(workspace + shape_.group_bytes + shape_.owner_bytes),
        scratch_(workspace + shape_.group_bytes + shape_.owner_bytes + shape_.arena_bytes) {}

  static size_t workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads) {
    const Shape shape(params, kernels, resolve_maxima(params));
    return static_cast<size_t>(shape.group_bytes + shape.owner_bytes + shape.arena_bytes +
                               threads * shape.scratch_bytes);
  }

  void run() {
    for (int32_t b = 0; b < p_.batch; ++b) {
      const Sequence sequence = sequence_at(p_, maxima_, b);
      if (sequence.q_len <= 0) continue;
      const int64_t tiles = p_.role == Role::kDense ? 1 : sequence.tiles;
      for (int64_t tile = 0; tile < tiles; ++tile) add_tile(b, sequence, tile);
    }
    run_wave();
  }

 private:
  /// Sizes of the workspace under the stated maxima.
  struct Shape {
    int64_t tile_groups = 0;
    int64_t wave_tiles = 0;
    int64_t group_bytes = 0, owner_bytes = 0, arena_bytes = 0;
    int64_t scratch_bytes = 0;  // of one worker

    Shape(const AttentionParams& p, const Kernels& kernels, const Maxima& maxima) {
      const Groups groups(p);
      const bool per_row = p.role != Role::kDense && own_key_is_candidate(p);
      const int64_t tiles = per_row ? maxima.total_q : std::min<int64_t>(p.batch, maxima.total_q);
      const int64_t rows = (per_row ? 1 : maxima.q_len) * groups.heads;
      tile_groups = groups.count;
      wave_tiles = std::clamp<int64_t>(kWaveGroups / tile_groups, 1, std::max<int64_t>(tiles, 1));
      group_bytes = round_up_bytes(wave_tiles * tile_groups * static_cast<int64_t>(sizeof(Group)));
      owner_bytes = selects(p.role)
                        ? round_up_bytes(wave_tiles * sets_per_tile(p) * static_cast<int64_t>(sizeof(Owner)))
                        : 0;
      const int64_t set_keys = p.capacity + maxima.q_len;
      const int64_t tile_bytes =
          tile_groups *
          bytes_of_group(p, kernels, rows,
                         p.role == Role::kReuse ? std::min(set_keys, maxima.kv_len + 1) : maxima.kv_len,
                         p.role == Role::kAnchor ? std::min(set_keys, maxima.kv_len + 1) : 0);
      arena_bytes = std::max(tile_bytes, std::min(tile_bytes * std::min(tiles, wave_tiles), kArenaBytes));
      scratch_bytes = round_up_bytes(static_cast<int64_t>(kernels.decode_scratch_bytes(
          p.head_dim, p.role == Role::kReuse ? p.capacity : 0, selects(p.role) ? maxima.kv_len : 0)));
    }
  };

  static int64_t bytes_of_group(const AttentionParams& p, const Kernels& kernels, int64_t rows, int64_t keys,
                                int64_t set_keys) {
    Arena arena(nullptr);
    Group group;
    lay_out(p, kernels, rows, splits_of(keys), p.role == Role::kAnchor ? splits_of(set_keys) : 0, true,
            &arena, &group);
    return arena.bytes();
  }

  /// Room for a group. An anchor whose set covers all keys multiplies values in its first loop.
  static void lay_out(const AttentionParams& p, const Kernels& kernels, int64_t rows, int64_t splits,
                      int64_t set_splits, bool keeps, Arena* arena, Group* group) {
    const int64_t dim = kernels.padded_head_dim(p.head_dim);
    const auto take = [&](Loop& loop, int64_t count, bool values) {
      loop.splits = count;
      loop.maximum = arena->floats(count * rows);
      loop.sum = arena->floats(count * rows);
      loop.partial = values ? arena->floats(count * rows * dim) : nullptr;
    };
    take(group->first, splits, p.role != Role::kAnchor || set_splits == 0);
    if (set_splits > 0) take(group->second, set_splits, true);
    if (!selects(p.role)) return;
    group->row_maximum = arena->floats(rows);
    group->row_sum = arena->floats(rows);
    group->kept_stride = splits * kSplitKeys;
    if (keeps) group->kept = arena->floats(rows * group->kept_stride);
  }

  // ---- Filling a wave.

  void add_tile(int32_t b, const Sequence& sequence, int64_t index) {
    Tile tile;
    if (p_.role == Role::kDense) {
      tile.row_end = sequence.q_len;
    } else {
      tile = tile_at(p_, sequence, index);
    }
    const int64_t before = arena_cut_.bytes();
    if (tiles_ == shape_.wave_tiles || !add_groups(b, sequence, tile)) {
      arena_cut_.rewind(before);
      run_wave();
      add_groups(b, sequence, tile);
    }
    ++tiles_;
  }

  /// False when the arena is full.
  bool add_groups(int32_t b, const Sequence& sequence, const Tile& tile) {
    const int64_t tokens = tile.row_end - tile.row_begin;
    const int64_t end = std::max<int64_t>(sequence.start + tile.row_end, 0);
    const int64_t first_group = tiles_ * shape_.tile_groups;
    for (int32_t g = 0; g < shape_.tile_groups; ++g) {
      Group& group = group_[first_group + g];
      group = Group();
      group.rows = row_block(p_, sequence, groups_of_tile_, g, tile.row_begin, tokens);
      group.cache = cache_view(p_, b, groups_of_tile_.kv_head(g));
      if (!add_loops(&group, tile, g, end)) return false;
    }
    return true;
  }

  bool add_loops(Group* group, const Tile& tile, int32_t g, int64_t end) {
    const int32_t set = groups_of_tile_.set(p_, g);
    const bool stored = selects(p_.role) && tile.set >= 0;
    const bool selecting = stored && set_needed(p_, set);
    int64_t set_splits = 0;
    if (p_.role == Role::kReuse || (p_.role == Role::kAnchor && !selecting)) {
      group->first.keys = set_keys(p_, groups_of_tile_, g, tile, end);
    } else {
      group->first.keys.range_end = end;
      if (p_.role == Role::kAnchor && !tile.budget.covers_all())
        set_splits = splits_of(tile.budget.members() + std::max<int64_t>(end - tile.budget.candidates, 0));
    }
    bool pools = false;
    if (stored) {
      const SetWork work = set_work(p_, tile, set, end);
      pools = !work.covers_all() || work.pooled != nullptr || work.own_tile_mass != nullptr;
      if (selecting) {
        add_owner(group, work, set, g);
      } else {
        clear_set(work);
      }
    }
    Arena cut = arena_cut_;
    lay_out(p_, kernels_, group->rows.rows(), splits_of(group->first.keys.size()), set_splits,
            selecting && pools, &cut, group);
    if (cut.bytes() > shape_.arena_bytes) return false;
    arena_cut_ = cut;
    return true;
  }

  void add_owner(Group* group, const SetWork& work, int32_t set, int32_t g) {
    const int64_t index = tiles_ * sets_per_tile(p_) + set;
    Owner& owner = owner_[index];
    const bool joint = p_.set_owner == SetOwner::kAllHeads;
    if (!joint || g == 0) {
      owner = Owner();
      owner.set = work;
      owner.first_group = tiles_ * shape_.tile_groups + g;
      owner.groups = joint ? static_cast<int32_t>(shape_.tile_groups) : 1;
    }
    group->owner = index;
  }

  // ---- Running a wave.

  void run_wave() {
    const int64_t groups = tiles_ * shape_.tile_groups;
    int64_t items = 0, set_items = 0;
    for (int64_t g = 0; g < groups; ++g) {
      items = start_loop(&group_[g].first, items);
      set_items = start_loop(&group_[g].second, set_items);
      if (group_[g].owner >= 0) owner_[group_[g].owner].pending = owner_[group_[g].owner].groups;
    }
    run_loops<&Group::first>(items, groups, [this](Group& group, const DecodeSplit& split, int worker) {
      finish_first(group, split, worker);
    });
    run_loops<&Group::second>(set_items, groups, [this](Group& group, const DecodeSplit& split, int worker) {
      finish_second(group, split, worker);
    });
    tiles_ = 0;
    arena_cut_.rewind(0);
  }

  /// Calls finish(group, split, worker) for every item. Items are handed out in runs, long at first and short
  /// at last, so that none waits long for another in the end. A worker takes a run before it finishes the one
  /// before, as rows are fetched across items.
  template <Loop Group::*kLoop, class Finish>
  void run_loops(int64_t items, int64_t groups, const Finish& finish) {
    const int64_t threads = threads_of(pool_);
    int64_t taken = 0;
    for_each_item(pool_, std::min(items, threads), [&](int64_t, int worker) {
      int64_t end = 0;
      int64_t item = take_run(&taken, items, threads, &end);
      if (item < 0) return;
      Group* group = &group_at<kLoop>(item, groups);
      DecodeSplit split = split_of(*group, group->*kLoop, item, worker);
      while (item >= 0) {
        const int64_t next_item = item + 1 < end ? item + 1 : take_run(&taken, items, threads, &end);
        Group* next_group = nullptr;
        DecodeSplit next;
        if (next_item >= 0) {
          next_group = &group_at<kLoop>(next_item, groups);
          next = split_of(*next_group, next_group->*kLoop, next_item, worker);
          split.next = &next;
        }
        finish(*group, split, worker);
        item = next_item;
        group = next_group;
        split = next;
      }
    });
  }

  /// The first item of a run that ends before *end; -1 when all are taken.
  static int64_t take_run(int64_t* taken, int64_t items, int64_t threads, int64_t* end) {
    int64_t begin = __atomic_load_n(taken, __ATOMIC_RELAXED);
    do {
      if (begin >= items) return -1;
      *end = begin + std::max<int64_t>((items - begin) / (2 * threads), 1);
    } while (!__atomic_compare_exchange_n(taken, &begin, *end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return begin;
  }

  static int64_t start_loop(Loop* loop, int64_t items) {
    loop->first_item = items;
    loop->pending = loop->splits;
    return items + loop->splits;
  }

  template <Loop Group::*kLoop>
  Group& group_at(int64_t item, int64_t groups) {
    return *(std::upper_bound(group_, group_ + groups, item,
                              [](int64_t i, const Group& group) { return i < (group.*kLoop).first_item; }) -
             1);
  }

  char* scratch_of(int worker) const { return scratch_ + worker * shape_.scratch_bytes; }

  DecodeSplit split_of(const Group& group, const Loop& loop, int64_t item, int worker) const {
    const int64_t split = item - loop.first_item;
    const int64_t rows = group.rows.rows();
    DecodeSplit work;
    work.rows = group.rows;
    work.cache = group.cache;
    work.keys = loop.keys;
    work.begin = split * kSplitKeys;
    work.count = static_cast<int32_t>(std::clamp<int64_t>(loop.keys.size() - work.begin, 0, kSplitKeys));
    work.list_size = p_.role == Role::kReuse ? p_.capacity : 0;
    work.values = loop.partial != nullptr;
    work.kept = group.kept;
    work.kept_stride = group.kept_stride;
    work.maximum = loop.maximum + split * rows;
    work.sum = loop.sum + split * rows;
    if (work.values) work.partial = loop.partial + split * rows * kernels_.padded_head_dim(p_.head_dim);
    work.scratch = scratch_of(worker);
    return work;
  }

  /// Whether the caller has taken the last one.
  static bool take(int64_t* pending) { return __atomic_sub_fetch(pending, 1, __ATOMIC_ACQ_REL) == 0; }

  void finish_first(Group& group, const DecodeSplit& split, int worker) {
    Loop& loop = group.first;
    kernels_.decode_split(split);
    if (!take(&loop.pending)) return;
    DecodeMerge merge = merge_of(group, loop);
    merge.row_maximum = group.row_maximum;
    merge.row_sum = group.row_sum;
    kernels_.decode_merge(merge, false);
    if (group.owner >= 0 && take(&owner_[group.owner].pending)) select(owner_[group.owner], worker);
  }

  static DecodeMerge merge_of(const Group& group, const Loop& loop) {
    DecodeMerge merge;
    merge.rows = group.rows;
    merge.splits = loop.splits;
    merge.maximum = loop.maximum;
    merge.sum = loop.sum;
    merge.partial = loop.partial;
    return merge;
  }

  void select(const Owner& owner, int worker) {
    Group* groups = group_ + owner.first_group;
    DecodeSelect work;
    work.set = owner.set;
    work.groups = owner.groups;
    work.rows = groups->rows.rows();
    work.splits = groups->first.splits;
    work.kept = groups->kept;
    work.kept_stride = groups->kept_stride;
    work.maximum = groups->first.maximum;
    work.row_sum = groups->row_sum;
    if (owner.groups > 1) {
      // All groups of a tile are laid out alike, one after the other.
      work.kept_group_stride = groups[1].kept - groups[0].kept;
      work.group_stride = groups[1].first.maximum - groups[0].first.maximum;
      work.row_group_stride = groups[1].row_sum - groups[0].row_sum;
    }
    work.scratch = scratch_of(worker);
    kernels_.decode_select(work);
    for (int32_t g = 0; g < owner.groups; ++g) {
      if (groups[g].second.splits == 0) continue;
      KeySource& keys = groups[g].second.keys;
      keys.list = owner.set.members;
      keys.list_count = *owner.set.count;
      keys.own_begin = owner.set.candidates;
      keys.own_end = owner.set.own_end;
    }
  }

  /// An anchor attends to what it selected, with the probabilities that its first loop kept.
  void finish_second(Group& group, const DecodeSplit& split, int worker) {
    Loop& loop = group.second;
    DecodeKept kept;
    kept.split = split;
    kept.factors = group.first.maximum;
    kept.row_maximum = group.row_maximum;
    kernels_.decode_kept(kept);
    if (!take(&loop.pending)) return;
    const DecodeMerge merge = merge_of(group, loop);
    if (kernels_.decode_merge(merge, true)) return;
    for (int64_t i = 0; i < loop.splits; ++i) {
      DecodeSplit afresh = split_of(group, loop, loop.first_item + i, worker);
      afresh.kept = nullptr;
      kernels_.decode_split(afresh);
    }
    kernels_.decode_merge(merge, false);
  }

  const AttentionParams& p_;
  const Kernels& kernels_;
  ThreadPool* pool_;
  const Maxima maxima_;
  const Groups groups_of_tile_;
  const Shape shape_;
  Group* group_;  // [wave tiles, groups of a tile]
  Owner* owner_;  // [wave tiles, sets of a tile]
  char* arena_;
  char* scratch_;
  int64_t tiles_ = 0;  // in the wave
  Arena arena_cut_{arena_};
};

}  // namespace

size_t decode_workspace_bytes(const AttentionParams& params, const Kernels& kernels, int threads) {
  return DecodeCall::workspace_bytes(params, kernels, threads);
}

void launch_decode(const AttentionParams& params, const Kernels& kernels, void* workspace, ThreadPool* pool) {
  DecodeCall(params, kernels, static_cast<char*>(workspace), pool).run();
}

}  // namespace kascade::cpu
