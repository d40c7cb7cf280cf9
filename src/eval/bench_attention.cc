// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_attention.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "attention/cpu/limits.h"
#include "base/check.h"
#include "eval/processor.h"
#include "eval/random.h"
#include "kascade/attention.h"
#include "kascade/thread_pool.h"
#include "policy/preset_budgets.h"

namespace kascade {
namespace {

constexpr int kRoles = kTimedRoleNames.size();
constexpr Role kRole[kRoles] = {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse, Role::kReuse};
constexpr int kRandomReuse = 4;
// Queries are stretched so that a few dozen keys hold most of a row's probability, as in real models.
constexpr float kQueryDeviation = 3;
// Uniform in (-sqrt(3), sqrt(3)): deviation 1.
constexpr float kRootThree = 1.7320508f;

float uniform(SplitMix& random) {
  return static_cast<float>(static_cast<int32_t>(random.next() >> 32)) * (kRootThree * 0x1p-31f);
}

/// Memory in huge pages where the system has them, as a cache of this size would be.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(std::max<int64_t>(bytes, 1))) {
    void* data =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require<OutOfMemory>(data != MAP_FAILED, "bench: {} bytes could not be reserved", bytes_);
    madvise(data, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(data);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  template <class T = std::byte>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Index sets of a call.
struct Sets {
  std::vector<int32_t> positions;  // [tiles, G, capacity]
  std::vector<int32_t> counts;     // [tiles, G]
};

/// What one copy of the cache has of its own.
struct Call {
  std::vector<float> q;  // [rows, H, D]
  Sets layer0, anchor, random;
};

class Bench {
 public:
  Bench(const AttentionBenchOptions& options, const std::function<void(double, const std::string&)>& progress,
        const std::atomic<bool>* cancel)
      : o_((check_attention_bench(options), options)),
        progress_(progress),
        cancel_(cancel),
        kernel_(select_attention_kernel(options.kernel)),
        pool_(options.threads),
        decode_(options.phase != Phase::kPrefill),
        rows_(decode_ ? 1 : options.context),
        pages_(pages_of(options)),
        page_tokens_(options.page_size > 0 ? options.page_size : options.context),
        cache_bytes_(static_cast<int64_t>(dtype_bytes(options.dtype)) * options.batch * pages_ *
                     page_tokens_ * options.kv_heads * options.head_dim),
        copies_(std::max<int64_t>(4, 4 * cpu::last_level_cache_bytes() / (2 * cache_bytes_) + 2)),
        caches_(2 * copies_ * cache_bytes_) {
    PolicyOptions policy;
    policy.budget = o_.budget;
    policy.percent = o_.percent;
    const PresetBudgets budgets = preset_budgets(policy, o_.tile);
    budget_ = decode_ ? budgets.decode : budgets.prefill;
  }

  AttentionBenchResult run() {
    result_.options = o_;
    result_.kernel = kernel_.name;
    result_.threads = pool_.threads();
    result_.machine = processor_name();
    say(0, "filling the cache");
    fill();
    say(0.1, "measuring the machine");
    measure_machine();
    prepare_calls();
    time_roles();
    say(0.9, "checking the answers");
    check_answers();
    measure_machine();
    report();
    return result_;
  }

 private:
  static int64_t pages_of(const AttentionBenchOptions& o) {
    return o.page_size > 0 ? (o.context + o.page_size - 1) / o.page_size : 1;
  }

  void say(double share, const std::string& doing) {
    require_running();
    if (progress_) progress_(share, doing);
  }

  void require_running() const {
    if (cancel_ != nullptr && cancel_->load(std::memory_order_relaxed)) throw Cancelled("bench: cancelled");
  }

  std::byte* cache(int64_t copy, bool values) const {
    return caches_.as() + (2 * copy + (values ? 1 : 0)) * cache_bytes_;
  }

  void fill() {
    constexpr int64_t kPiece = 1 << 16;  // elements
    const auto element = static_cast<int64_t>(dtype_bytes(o_.dtype));
    const int64_t elements = 2 * copies_ * cache_bytes_ / element;
    pool_.parallel_for((elements + kPiece - 1) / kPiece, [&](int64_t piece, int) {
      require_running();
      SplitMix random(static_cast<uint64_t>(piece) * 7919 + 1);
      const int64_t end = std::min((piece + 1) * kPiece, elements);
      for (int64_t i = piece * kPiece; i < end; ++i) {
        const float x = uniform(random);
        if (o_.dtype == DType::kF32) caches_.as<float>()[i] = x;
        if (o_.dtype == DType::kF16) caches_.as<F16>()[i] = to_f16(x);
        if (o_.dtype == DType::kBF16) caches_.as<BF16>()[i] = to_bf16(x);
      }
    });
  }

  void measure_machine() {
    const cpu::Kernels* kernels = cpu::kernels_of(kernel_);
    if (kernels == nullptr) return;
    const cpu::Limits limits = cpu::measure_limits(*kernels, pool_, caches_.as(),
                                                   std::min(2 * copies_ * cache_bytes_, int64_t{1} << 30));
    result_.read_gb_per_s = std::max(result_.read_gb_per_s, limits.read_gb_per_s);
    result_.f32_tflop_per_s = std::max(result_.f32_tflop_per_s, limits.f32_tflop_per_s);
    result_.bf16_tflop_per_s = std::max(result_.bf16_tflop_per_s, limits.bf16_tflop_per_s);
    result_.peak_tflop_per_s = o_.dtype == DType::kBF16 ? result_.bf16_tflop_per_s : result_.f32_tflop_per_s;
  }

  /// Everything that calls share, and what each copy has of its own: queries and sets.
  void prepare_calls() {
    const int64_t total_rows = o_.batch * rows_;
    cu_rows_.resize(static_cast<size_t>(o_.batch) + 1);
    for (size_t b = 0; b < cu_rows_.size(); ++b)
      cu_rows_[b] = static_cast<int32_t>(static_cast<int64_t>(b) * rows_);
    lengths_.assign(static_cast<size_t>(o_.batch), static_cast<int32_t>(o_.context));
    cu_keys_.resize(cu_rows_.size());
    for (size_t b = 0; b < cu_keys_.size(); ++b)
      cu_keys_[b] = static_cast<int32_t>(static_cast<int64_t>(b) * o_.context);
    SplitMix random(42);
    page_table_.resize(static_cast<size_t>(o_.batch * pages_));
    std::iota(page_table_.begin(), page_table_.end(), 0);
    for (size_t i = page_table_.size(); i > 1; --i)
      std::swap(page_table_[i - 1], page_table_[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);

    const AttentionParams shape = base_params(Role::kAnchor);
    tile_offsets_.assign(1, 0);
    for (int32_t b = 0; b < o_.batch; ++b)
      tile_offsets_.push_back(tile_offsets_.back() +
                              static_cast<int32_t>(tiles_of(shape, rows_, o_.context)));
    capacity_ = static_cast<int32_t>(required_capacity(shape));
    const int64_t sets = int64_t{tile_offsets_.back()} * o_.kv_heads;
    const int64_t vector = o_.query_heads * o_.head_dim;
    out_.resize(static_cast<size_t>(total_rows * vector));
    lse_.resize(static_cast<size_t>(total_rows * o_.query_heads));
    for (int64_t copy = 0; copy < copies_; ++copy) {
      Call call;
      call.q.resize(static_cast<size_t>(total_rows * vector));
      for (float& x : call.q) x = uniform(random) * kQueryDeviation;
      for (Sets* s : {&call.anchor, &call.random, &call.layer0}) {
        s->positions.resize(static_cast<size_t>(sets * capacity_));
        s->counts.resize(static_cast<size_t>(sets));
      }
      calls_.push_back(std::move(call));
    }
    size_t workspace = 0;
    for (int role = 0; role < kRoles; ++role)
      workspace = std::max(workspace, attention_workspace_bytes(params(role, 0), kernel_, pool_.threads()));
    workspace_ = std::make_unique<Memory>(static_cast<int64_t>(workspace));
    for (int64_t copy = 0; copy < copies_; ++copy) {
      say(0.1 + 0.1 * static_cast<double>(copy) / static_cast<double>(copies_), "selecting sets");
      run_role(kAnchor, copy);
      draw_sets(calls_[static_cast<size_t>(copy)], random);
    }
  }

  AttentionParams base_params(Role role) const {
    AttentionParams p;
    p.role = role;
    p.tile_rule = decode_ ? TileRule::kStep : TileRule::kAligned;
    p.tile = o_.tile;
    p.batch = o_.batch;
    p.query_heads = o_.query_heads;
    p.kv_heads = o_.kv_heads;
    p.head_dim = o_.head_dim;
    p.kv_dtype = o_.dtype;
    p.budget = budget_;
    p.cu_seqlens_q = cu_rows_.data();
    p.seq_lens_kv = lengths_.data();
    p.q_head_stride = p.out_head_stride = o_.head_dim;
    p.q_row_stride = p.out_row_stride = int64_t{o_.query_heads} * o_.head_dim;
    if (o_.page_size > 0) {
      p.page_size = o_.page_size;
      p.page_table = page_table_.data();
      p.page_table_stride = pages_;
      p.k_token_stride = o_.head_dim;
      p.k_head_stride = int64_t{o_.page_size} * o_.head_dim;
      p.k_page_stride = p.k_head_stride * o_.kv_heads;
    } else {
      p.cu_seqlens_kv = cu_keys_.data();
      p.k_head_stride = o_.head_dim;
      p.k_token_stride = int64_t{o_.kv_heads} * o_.head_dim;
    }
    p.v_token_stride = p.k_token_stride;
    p.v_head_stride = p.k_head_stride;
    p.v_page_stride = p.k_page_stride;
    return p;
  }

  AttentionParams params(int role, int64_t copy) {
    Call& call = calls_[static_cast<size_t>(copy)];
    AttentionParams p = base_params(kRole[role]);
    p.q = call.q.data();
    p.out = out_.data();
    p.lse = lse_.data();
    p.lse_row_stride = o_.query_heads;
    p.k = cache(copy, false);
    p.v = cache(copy, true);
    if (p.role == Role::kDense) return p;
    Sets& sets = role == kLayer0 ? call.layer0 : role == kRandomReuse ? call.random : call.anchor;
    p.positions = sets.positions.data();
    p.counts = sets.counts.data();
    p.tile_offsets = tile_offsets_.data();
    p.capacity = capacity_;
    if (p.role == Role::kLayer0 && !o_.needed.empty()) p.needed = o_.needed.data();
    return p;
  }

  /// Seconds of one call.
  double run_role(int role, int64_t copy) {
    require_running();
    const AttentionParams p = params(role, copy);
    // In a model the pool has just finished another loop, so its workers are awake.
    pool_.parallel_for(pool_.threads(), [](int64_t, int) {});
    const auto begin = std::chrono::steady_clock::now();
    attention(p, kernel_, workspace_->as(), workspace_->bytes(), {.pool = &pool_});
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  /// As many random candidates of every tile as its anchor chose, ascending.
  void draw_sets(Call& call, SplitMix& random) const {
    call.random.counts = call.anchor.counts;
    for (size_t set = 0; set < call.anchor.counts.size(); ++set) {
      const auto tile = static_cast<int64_t>(set) / o_.kv_heads;
      const int64_t of_sequence = tile % (tile_offsets_.back() / o_.batch);
      const int64_t candidates = decode_ ? candidates_of_step() : of_sequence * o_.tile;
      int64_t wanted = call.anchor.counts[set];
      int32_t* out = call.random.positions.data() + static_cast<int64_t>(set) * capacity_;
      for (int64_t j = 0; j < candidates && wanted > 0; ++j) {
        // Selection sampling: each key is taken with the probability that is left.
        if (random.below(candidates - j) >= wanted) continue;
        *out++ = static_cast<int32_t>(j);
        --wanted;
      }
    }
  }

  int64_t candidates_of_step() const {
    return budget_.own_tile == OwnTile::kOnTop ? o_.context - 1 : o_.context;
  }

  void time_roles() {
    const int repetitions = o_.repetitions > 0 ? o_.repetitions : decode_ ? 15 : 3;
    std::array<std::vector<double>, kRoles> seconds;
    int64_t next = 0;
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      for (int role = 0; role < kRoles; ++role) {
        say(0.2 + 0.7 * (repetition + role / double{kRoles}) / repetitions,
            std::string("timing ") + kTimedRoleNames[static_cast<size_t>(role)]);
        seconds[static_cast<size_t>(role)].push_back(run_role(role, next++ % copies_));
      }
    }
    for (int role = 0; role < kRoles; ++role) {
      auto& times = seconds[static_cast<size_t>(role)];
      std::sort(times.begin(), times.end());
      AttentionBenchRole entry;
      entry.name = kTimedRoleNames[static_cast<size_t>(role)];
      entry.ms = times[times.size() / 2] * 1e3;
      entry.min_ms = times.front() * 1e3;
      result_.roles.push_back(entry);
    }
  }

  // ---- What a role has to do at least.

  /// Keys that the tile of a set attends besides its own, summed over the sets of a call.
  int64_t members() const {
    const std::vector<int32_t>& counts = calls_[0].anchor.counts;
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }

  double bytes_of(int role) const {
    const double all = static_cast<double>(o_.batch) * static_cast<double>(o_.context) * o_.kv_heads *
                       o_.head_dim * static_cast<double>(dtype_bytes(o_.dtype));
    const double own = budget_.own_tile == OwnTile::kOnTop ? static_cast<double>(o_.batch) * o_.kv_heads : 0;
    const double chosen =
        (static_cast<double>(members()) + own) * o_.head_dim * static_cast<double>(dtype_bytes(o_.dtype));
    if (role <= kLayer0) return 2 * all;
    if (role == kAnchor) return all + chosen;
    return 2 * chosen + 4.0 * static_cast<double>(members());
  }

  double operations_of(int role) const {
    const auto length = static_cast<double>(o_.context);
    const double product = 2.0 * o_.head_dim;  // of one row and key, Q with K or P with V
    const double all = o_.batch * length * (length + 1) / 2 * o_.query_heads * product;
    double attended = 0;  // (row, key) pairs of all KV heads
    const std::vector<int32_t>& counts = calls_[0].anchor.counts;
    const int64_t tiles = tile_offsets_.back() / o_.batch;
    for (size_t set = 0; set < counts.size(); ++set) {
      const int64_t tile = static_cast<int64_t>(set) / o_.kv_heads % tiles;
      const double rows = static_cast<double>(std::min<int64_t>(o_.tile, o_.context - tile * o_.tile));
      attended += rows * counts[set] + rows * (rows + 1) / 2;
    }
    const int64_t group_heads = o_.query_heads / o_.kv_heads;
    const double chosen = attended * static_cast<double>(group_heads) * product;
    if (role <= kLayer0) return 2 * all;
    if (role == kAnchor) return all + chosen;
    return 2 * chosen;
  }

  void report() {
    for (int role = 0; role < kRoles; ++role) {
      AttentionBenchRole& entry = result_.roles[static_cast<size_t>(role)];
      const double seconds = entry.ms * 1e-3;
      if (decode_) {
        entry.gb_per_s = bytes_of(role) * 1e-9 / seconds;
        entry.share_of_limit = result_.read_gb_per_s > 0 ? entry.gb_per_s / result_.read_gb_per_s : 0;
      } else {
        entry.tflop_per_s = operations_of(role) * 1e-12 / seconds;
        entry.share_of_limit =
            result_.peak_tflop_per_s > 0 ? entry.tflop_per_s / result_.peak_tflop_per_s : 0;
      }
      if (entry.share_of_limit > 1)
        throw_error<Unsupported>(
            "bench: {} took {:.3f} ms, {:.2f} of what this machine can do; something was cached or "
            "the measured limit is too low",
            entry.name, entry.ms, entry.share_of_limit);
    }
    double layers = 0, total = 0;
    for (size_t i = 0; i < o_.roles.size(); ++i) {
      layers += o_.roles[i];
      total += o_.roles[i] * result_.roles[i + 1].ms;
    }
    result_.mean_ms = total / layers;
    result_.speedup = result_.roles[kDense].ms / result_.mean_ms;
  }

  // ---- Answers.

  /// The reference's output of one row in a call of its own, over all keys or over the sets of its tile.
  std::vector<float> reference_row(int role, int64_t copy, int64_t b, int64_t row) {
    AttentionParams p = params(role, copy);
    const int64_t position = decode_ ? o_.context - 1 : row;
    const int64_t tile = tile_offsets_[static_cast<size_t>(b)] + (decode_ ? 0 : row / o_.tile);
    const int64_t width = int64_t{o_.query_heads} * o_.head_dim;
    one_sequence(&p, b, 1, position + 1, (b * rows_ + row) * width);
    if (p.role == Role::kLayer0) p.role = Role::kDense;
    if (p.role == Role::kAnchor) p.role = Role::kReuse;
    if (p.role != Role::kDense) at_tile(&p, tile);
    std::vector<float> out(static_cast<size_t>(width));
    p.out = out.data();
    p.lse = nullptr;
    run_reference(p);
    return out;
  }

  /// Narrows a call to q_len rows of sequence b that end at kv_len.
  void one_sequence(AttentionParams* p, int64_t b, int64_t q_len, int64_t kv_len, int64_t first_element) {
    p->batch = 1;
    p->q = static_cast<const float*>(p->q) + first_element;
    one_rows_ = {0, static_cast<int32_t>(q_len)};
    one_length_ = static_cast<int32_t>(kv_len);
    p->cu_seqlens_q = one_rows_.data();
    p->seq_lens_kv = &one_length_;
    p->budget_lens = lengths_.data() + b;
    if (p->page_table != nullptr) p->page_table += b * p->page_table_stride;
    if (p->cu_seqlens_kv != nullptr) p->cu_seqlens_kv += b;
  }

  void at_tile(AttentionParams* p, int64_t tile) {
    one_tile_ = {0, 1};
    p->tile_offsets = one_tile_.data();
    p->positions += tile * o_.kv_heads * capacity_;
    p->counts += tile * o_.kv_heads;
  }

  void run_reference(const AttentionParams& p) {
    const AttentionKernel& reference = select_attention_kernel("reference");
    const Memory workspace(static_cast<int64_t>(attention_workspace_bytes(p, reference, 1)));
    attention(p, reference, workspace.as(), workspace.bytes(), {});
  }

  void check_answers() {
    // Outputs are sums of values of deviation 1 by weights that sum to 1. With 16-bit products every weight
    // carries 2^-8 and every score, of deviation 3 and at most some 12, about 2^-9 of itself.
    const bool rounds = o_.dtype == DType::kBF16 && std::strstr(kernel_.name, "bf16") != nullptr;
    result_.allowed_error = rounds ? 0.02 : 2e-5;
    const int64_t last = rows_ - 1;
    for (int role = 0; role < kRoles; ++role) {
      run_role(role, 0);
      for (const int64_t row : {int64_t{0}, last / 3, last}) {
        const int64_t b = row == last ? o_.batch - 1 : 0;
        const std::vector<float> expected = reference_row(role, 0, b, row);
        const float* actual = out_.data() + (b * rows_ + row) * static_cast<int64_t>(expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
          const double error = std::fabs(static_cast<double>(actual[i]) - static_cast<double>(expected[i]));
          if (!(error <= result_.largest_error)) result_.largest_error = error;
        }
        if (decode_) break;
      }
    }
    require<Unsupported>(result_.largest_error <= result_.allowed_error,
                         "bench: an output differs from the reference by {}, must be within {}",
                         result_.largest_error, result_.allowed_error);
    check_selection();
  }

  /// Mass that a tile's sets capture, against the best of as many members by the reference's weights.
  void check_selection() {
    // A whole tile of the reference is slow: prefill checks one that starts at 2,000 keys or before.
    const int64_t tile = decode_ ? 0 : std::min<int64_t>(2000, o_.context - 1) / o_.tile;
    const int64_t first = decode_ ? 0 : tile * o_.tile;
    const int64_t q_len = decode_ ? 1 : std::min<int64_t>(o_.tile, o_.context - first);
    const int64_t kv_len = decode_ ? o_.context : first + q_len;
    AttentionParams p = params(kAnchor, 0);
    const int32_t* chosen = p.positions + tile * o_.kv_heads * capacity_;
    const int32_t* counts = p.counts + tile * o_.kv_heads;
    one_sequence(&p, 0, q_len, kv_len, first * o_.query_heads * o_.head_dim);
    std::vector<float> weights(static_cast<size_t>(kv_len * o_.kv_heads)), out(out_.size());
    std::vector<int32_t> positions(static_cast<size_t>(int64_t{o_.kv_heads} * capacity_)),
        own_counts(static_cast<size_t>(o_.kv_heads));
    at_tile(&p, 0);
    p.positions = positions.data();
    p.counts = own_counts.data();
    p.out = out.data();
    p.lse = nullptr;
    p.pooled_weights = weights.data();
    p.pooled_head_stride = kv_len;
    p.pooled_tile_stride = kv_len * o_.kv_heads;
    run_reference(p);
    result_.least_captured = 1;
    for (int32_t head = 0; head < o_.kv_heads; ++head) {
      const auto mass = [&](const int32_t* members, int64_t count) {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i)
          sum += static_cast<double>(weights[static_cast<size_t>(head * kv_len + members[i])]);
        return sum;
      };
      const double best =
          mass(positions.data() + int64_t{head} * capacity_, own_counts[static_cast<size_t>(head)]);
      const double here = mass(chosen + int64_t{head} * capacity_, counts[head]);
      if (best > 0) result_.least_captured = std::min(result_.least_captured, here / best);
    }
    require<Unsupported>(result_.least_captured >= 0.999,
                         "bench: a set captures {} of the best set's mass, must be 0.999",
                         result_.least_captured);
  }

  static constexpr int kDense = 0, kLayer0 = 1, kAnchor = 2;

  const AttentionBenchOptions o_;
  const std::function<void(double, const std::string&)>& progress_;
  const std::atomic<bool>* cancel_;
  const AttentionKernel& kernel_;
  ThreadPool pool_;
  const bool decode_;
  const int64_t rows_;   // new rows of a sequence
  const int64_t pages_;  // of a sequence
  const int64_t page_tokens_;
  const int64_t cache_bytes_;  // of K, or of V
  const int64_t copies_;
  const Memory caches_;  // [copies][K, V]
  Budget budget_;
  std::vector<int32_t> cu_rows_, lengths_, cu_keys_, page_table_, tile_offsets_;
  std::array<int32_t, 2> one_rows_{}, one_tile_{};
  int32_t one_length_ = 0;
  int32_t capacity_ = 0;
  std::vector<Call> calls_;
  std::vector<float> out_, lse_;
  std::unique_ptr<Memory> workspace_;
  AttentionBenchResult result_;
};

}  // namespace

void check_attention_bench(const AttentionBenchOptions& o) {
  const auto range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    require<BadArgument>(value >= low && value <= high, "{} is {}, must be in {}..{}", name, value, low,
                         high);
  };
  range("batch", o.batch, 1, 4096);
  range("context", o.context, 1, int64_t{1} << 24);
  range("kv_heads", o.kv_heads, 1, 1024);
  range("query_heads", o.query_heads, 1, 16384);
  range("head_dim", o.head_dim, 8, 1024);
  range("page_size", o.page_size, 0, 65536);
  range("tile", o.tile, 1, 128);
  range("threads", o.threads, 0, 1024);
  range("repetitions", o.repetitions, 0, 10000);
  // Rows, keys and pages of all sequences are counted in 32 bits.
  const int64_t keys = o.batch * o.context;
  if (o.phase == Phase::kPrefill || o.page_size == 0) range("batch x context", keys, 1, INT32_MAX);
  if (o.page_size > 0)
    range("batch x pages", o.batch * ((o.context + o.page_size - 1) / o.page_size), 1, INT32_MAX);
  for (const int32_t count : o.roles) range("roles", count, 0, 100000);
  range("roles (all)", int64_t{o.roles[0]} + o.roles[1] + o.roles[2], 1, 300000);
  require<BadArgument>(o.needed.empty() || o.needed.size() == static_cast<size_t>(o.kv_heads),
                       "needed has {} entries, must have kv_heads, {}", o.needed.size(), o.kv_heads);
}

AttentionBenchResult bench_attention(const AttentionBenchOptions& options,
                                     const std::function<void(double, const std::string&)>& progress,
                                     const std::atomic<bool>* cancel) {
  return Bench(options, progress, cancel).run();
}

}  // namespace kascade
