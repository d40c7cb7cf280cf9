// SPDX-License-Identifier: Apache-2.0
// Step calls against the reference, and the list of all tests of the operator.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "attention/cuda/bench/attention_bench.h"
#include "attention/cuda/cuda_attention.h"
#include "attention/cuda/test/cuda_test.h"
#include "attention/cuda/test/device_case.h"
#include "attention/params.h"
#include "base/cuda/launch.h"

namespace kascade::cuda_test {

bool same(const Outcome& a, const Outcome& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && a.counts == b.counts &&
         (a.capacity != b.capacity || a.positions == b.positions);
}

namespace {

// Half a unit in the last place, relative.
double rounding(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kBF16 ? 0x1p-9 : 0x1p-12;
}

struct Worst {
  double out = 0;   // error over the bound
  double cut = 0;   // relative distance from the cut of a key on the wrong side
  double mass = 1;  // captured over exact
};

/// Output and lse against exact arithmetic on the same sets. A probability is rounded to the type of V before
/// it meets V (u relative, each), so an output is off by at most u * sum(p |v|); twice that is allowed, plus
/// the output's rounding. fp32 exponentials and sums add a few 2^-20.
void compare_outputs(const Case& c, const HostData& data, const Outcome& exact, const Outcome& got,
                     const Outcome* given, Worst& worst) {
  HostData magnitudes = data;
  for (uint16_t& v : magnitudes.v) v &= 0x7FFF;
  Case plain = c;
  if (c.role == Role::kLayer0) plain.role = Role::kDense;
  if (c.role == Role::kAnchor) plain.role = Role::kReuse;
  const Outcome bound = run_reference(plain, magnitudes, given);
  const double u = rounding(c.dtype);
  for (size_t i = 0; i < exact.out.size(); ++i) {
    const double allowed =
        2 * (u + 0x1p-18) * bound.out[i] + 2 * rounding(c.out_dtype) * std::fabs(exact.out[i]) + 1e-6;
    const double error = std::fabs(double{exact.out[i]} - got.out[i]);
    if (!(error <= allowed)) {
      fail(text("out[%zu] is %g, exact %g, allowed error %g", i, double{got.out[i]}, double{exact.out[i]},
                allowed));
      return;
    }
    worst.out = std::max(worst.out, error / allowed);
  }
  for (size_t i = 0; i < exact.lse.size(); ++i) {
    const bool same = exact.lse[i] == got.lse[i];
    const double allowed = 2e-5 * (1 + std::fabs(exact.lse[i]));
    if (!same && !(std::fabs(exact.lse[i] - got.lse[i]) <= allowed)) {
      fail(text("lse[%zu] is %g, exact %g", i, double{got.lse[i]}, double{exact.lse[i]}));
      return;
    }
  }
}

/// Sets: counts as the reference's, ascending, in range, -1 up to capacity; every difference from the exact
/// set is a key whose weight is within 1e-2 of the cut (scores are kept in 16 bits between passes); captured
/// mass.
void compare_sets(const Case& c, const HostData& data, const Outcome& exact, const Outcome& got,
                  Worst& worst) {
  const int64_t sets = sets_of(c);
  for (size_t b = 0; b < c.q_lens.size(); ++b)
    for (int64_t tile = data.tile_offsets[b]; tile < data.tile_offsets[b + 1]; ++tile)
      for (int64_t s = 0; s < sets; ++s) {
        const auto at = static_cast<size_t>(tile * sets + s);
        const int32_t count = got.counts[at];
        if (count != exact.counts[at]) {
          fail(text("count of tile %d set %d is %d, exact %d", int(tile), int(s), count, exact.counts[at]));
          return;
        }
        const int32_t* members = got.positions.data() + at * static_cast<size_t>(got.capacity);
        const int32_t* best = exact.positions.data() + at * static_cast<size_t>(exact.capacity);
        for (int32_t m = 0; m < got.capacity; ++m) {
          const bool fine = m >= count ? members[m] == -1
                                       : members[m] >= 0 && members[m] < c.kv_lens[b] &&
                                             (m == 0 || members[m] > members[m - 1]);
          if (!fine) {
            fail(text("position %d of tile %d set %d (%d members) is %d", m, int(tile), int(s), count,
                      members[m]));
            return;
          }
        }
        if (count == 0) continue;
        const float* weights = exact.pooled.data() + at * static_cast<size_t>(exact.pooled_stride);
        std::vector<uint8_t> in_best(static_cast<size_t>(c.kv_lens[b])), in_got(in_best);
        double best_mass = 0, got_mass = 0;
        for (int32_t m = 0; m < count; ++m) {
          in_best[static_cast<size_t>(best[m])] = 1;
          in_got[static_cast<size_t>(members[m])] = 1;
          best_mass += weights[best[m]];
          got_mass += weights[members[m]];
        }
        double lost = 0, gained = INFINITY;
        for (int32_t j = 0; j < c.kv_lens[b]; ++j) {
          if (in_best[static_cast<size_t>(j)] && !in_got[static_cast<size_t>(j)])
            lost = std::max<double>(lost, weights[j]);
          if (!in_best[static_cast<size_t>(j)] && in_got[static_cast<size_t>(j)])
            gained = std::min<double>(gained, weights[j]);
        }
        if (lost > 0) {
          const double apart = (lost - gained) / lost;
          worst.cut = std::max(worst.cut, apart);
          EXPECT(apart <= 1e-2, "tile %d set %d: a key of weight %g was left out for one of %g", int(tile),
                 int(s), lost, gained);
        }
        if (best_mass > 0) {
          worst.mass = std::min(worst.mass, got_mass / best_mass);
          EXPECT(got_mass >= 0.9999 * best_mass, "tile %d set %d captures %.6f of the exact set's mass",
                 int(tile), int(s), got_mass / best_mass);
        }
      }
}

/// Pooled weights to 1e-3 (0.7e-3 from the 16-bit scores, the rest fp32), own mass likewise.
void compare_by_products(const Case& c, const HostData& data, const Outcome& exact, const Outcome& got) {
  if (got.pooled.empty()) return;
  const int64_t sets = sets_of(c);
  for (size_t b = 0; b < c.q_lens.size(); ++b)
    for (int64_t tile = data.tile_offsets[b]; tile < data.tile_offsets[b + 1]; ++tile)
      for (int64_t s = 0; s < sets; ++s) {
        const auto at = static_cast<size_t>(tile * sets + s);
        if (exact.counts[at] == 0) continue;
        if (!got.own_mass.empty())
          EXPECT(std::fabs(exact.own_mass[at] - got.own_mass[at]) <= 1e-3 * exact.own_mass[at] + 1e-7,
                 "own mass is %g, exact %g", double{got.own_mass[at]}, double{exact.own_mass[at]});
        const int64_t index = tile - data.tile_offsets[b], start = std::max(c.kv_lens[b] - c.q_lens[b], 0);
        const int64_t own = c.tile_rule == TileRule::kAligned
                                ? c.kv_lens[b] - (start / c.tile + index) * c.tile -
                                      (c.budget.own_tile == OwnTile::kCandidate ? 1 : 0)
                            : c.budget.own_tile == OwnTile::kOnTop ? c.q_lens[b]
                                                                   : c.q_lens[b] - 1 - index;
        for (int64_t j = 0; j < c.kv_lens[b] - own; ++j) {
          const double w =
              exact.pooled[at * static_cast<size_t>(exact.pooled_stride) + static_cast<size_t>(j)];
          const double x = got.pooled[at * static_cast<size_t>(got.pooled_stride) + static_cast<size_t>(j)];
          if (!(std::fabs(w - x) <= 1e-3 * w + 1e-30)) {
            fail(text("pooled weight of key %d is %g, exact %g", int(j), x, w));
            return;
          }
        }
      }
}

void report(const Worst& worst, const Case& c) {
  std::printf("  %-34s output error %.2f of the bound", c.name.c_str(), worst.out);
  if (selects(c.role)) std::printf("; captured mass %.7f, cut apart by %.1e", worst.mass, worst.cut);
  std::printf("\n");
  std::fflush(stdout);  // what ran last is known even where a kernel hangs
}

}  // namespace

Outcome run_case(const Case& c, const Placement& placement) {
  current = c.name;
  Worst worst;
  Outcome got;
  try {
    const HostData data = make_data(c);
    Outcome given;
    if (c.role == Role::kReuse) {
      Case anchor = c;
      anchor.role = Role::kAnchor;
      anchor.seed = c.seed + 1;
      given = run_reference(anchor, make_data(anchor));
    }
    DeviceRun run(c, data, placement, c.role == Role::kReuse ? &given : nullptr);
    run.launch();
    got = run.results();
    EXPECT(got.status == 0, "status is %u", got.status);
    run.launch();
    EXPECT(same(got, run.results()), "a second run differs");
    if (selects(c.role)) {
      const Outcome exact = run_reference(c, data);
      compare_sets(c, data, exact, got, worst);
      compare_by_products(c, data, exact, got);
    }
    if (c.role == Role::kDense || c.role == Role::kLayer0) {
      Case dense = c;
      dense.role = Role::kDense;
      compare_outputs(c, data, run_reference(dense, data), got, nullptr, worst);
    } else {
      const Outcome& sets = c.role == Role::kReuse ? given : got;
      Case reuse = c;
      reuse.role = Role::kReuse;
      if (c.role == Role::kAnchor) reuse.head_map.clear();
      Case bounds = c;
      if (c.role == Role::kAnchor) bounds.head_map.clear();
      compare_outputs(bounds, data, run_reference(reuse, data, &sets), got, &sets, worst);
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
  report(worst, c);
  return got;
}

namespace {

Budget paper() { return paper_budget(); }

void test_roles_and_shapes() {
  struct Heads {
    int32_t h, g, d;
  };
  int n = 0;
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse})
    for (const Heads heads : {Heads{4, 1, 128}, Heads{8, 2, 64}, Heads{12, 2, 128}, Heads{5, 1, 64},
                              Heads{7, 1, 128}, Heads{3, 3, 64}, Heads{16, 1, 128}, Heads{4, 2, 256}}) {
      Case c;
      c.role = role;
      c.dtype = n % 2 == 0 ? DType::kBF16 : DType::kF16;
      c.out_dtype = n % 3 == 0 ? DType::kF32 : c.dtype;
      c.query_heads = heads.h;
      c.kv_heads = heads.g;
      c.head_dim = heads.d;
      c.q_lens = {1, 1, 2};
      c.kv_lens = {2500, 517, 1300};
      c.k_scale = n % 4 == 0 ? 1.0f : 0.5f;
      c.v_scale = n % 4 == 0 ? 1.0f : 3.0f;
      c.seed = 100 + static_cast<uint64_t>(n);
      if (role == Role::kReuse && heads.g > 1) c.head_map.assign(static_cast<size_t>(heads.g), heads.g - 1);
      c.name =
          text("role %d, heads %d/%d, d %d, %s", int(role), heads.h, heads.g, heads.d, dtype_name(c.dtype));
      Placement placement;
      placement.paged = n % 3 != 0;
      placement.page_size = n % 3 == 1 ? 16 : 7;
      placement.head_major = n % 2 == 1;
      placement.slack = n % 5;
      run_case(c, placement);
      ++n;
    }
}

void test_lengths() {
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse})
    for (const int rows : {1, 3, 8}) {
      Case c;
      c.role = role;
      c.query_heads = 4;
      c.kv_heads = 2;
      c.dtype = rows == 3 ? DType::kF16 : DType::kBF16;
      for (const int length : {0,   1,   2,   7,   8,   9,   15,  16,  17,  127,  128,  129,  136,  137,
                               255, 256, 257, 264, 511, 512, 513, 520, 521, 1023, 1024, 1025, 2047, 2049}) {
        c.q_lens.push_back(rows);
        c.kv_lens.push_back(length);
      }
      c.q_lens.push_back(0);
      c.kv_lens.push_back(300);
      c.by_products = true;
      c.name = text("lengths, role %d, %d rows", int(role), rows);
      for (const int size : {0, 1, 16}) {
        Placement placement;
        placement.paged = size != 0;
        placement.page_size = std::max(size, 1);
        run_case(c, placement);
      }
    }
}

void test_budgets_and_owners() {
  int n = 0;
  for (const Role role : {Role::kLayer0, Role::kAnchor, Role::kReuse})
    for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead})
      for (int kind = 0; kind < 5; ++kind) {
        Case c;
        c.role = role;
        c.set_owner = owner;
        c.query_heads = 6;
        c.kv_heads = 2;
        c.head_dim = 64;
        c.q_lens = {2, 1, 5};
        c.kv_lens = {1900, 3, 700};
        c.budget = kind == 0   ? default_budget(2000)
                   : kind == 1 ? paper()
                   : kind == 2 ? kernel_decode_budget()
                   : kind == 3 ? Budget{.percent_hundredths = 500,
                                        .floor = 64,
                                        .sinks = 5,
                                        .recent = 40,
                                        .forced_charged = true}
                               : Budget{.percent_hundredths = 10000, .floor = 0};
        if (kind == 3) c.budget_lens = {4000, 100, 650};
        if (role == Role::kLayer0 && kind % 2 == 0) c.needed = {0, 1};
        if (role == Role::kReuse) c.head_map = {1, 1};
        c.by_products = kind != 4;
        c.seed = 300 + static_cast<uint64_t>(n++);
        c.name = text("budget %d, owner %d, role %d", kind, int(owner), int(role));
        run_case(c, Placement{.paged = n % 2 == 0});
      }
}

void test_values() {
  for (const Values values : {Values::kEqualScores, Values::kRamp, Values::kOneHuge, Values::kMassTies})
    for (const Role role : {Role::kLayer0, Role::kAnchor}) {
      Case c;
      c.role = role;
      c.values = values;
      c.q_lens = {1, 4};
      c.kv_lens = {9000, 3000};
      c.name = text("values %d, role %d", int(values), int(role));
      run_case(c, Placement{});
      // Many lists, which single blocks and small clusters select.
      c.q_lens.assign(40, 1);
      c.kv_lens.assign(40, 700);
      c.kv_lens[7] = 3000;
      c.name += ", 40 sequences";
      run_case(c, Placement{});
    }
  Case c;
  c.role = Role::kAnchor;
  c.peak = 12;
  c.q_lens = {1};
  c.kv_lens = {20000};
  c.name = "peaked softmax";
  run_case(c, Placement{});
}

/// Ties are counted with the other blocks of a cluster shortly before these may leave; whether one leaves too
/// early is a matter of chance.
void test_ties_again() {
  current = "ties again and again";
  Case c;
  c.role = Role::kAnchor;
  c.values = Values::kEqualScores;
  for (const int sequences : {1, 6, 40}) {
    c.q_lens.assign(static_cast<size_t>(sequences), 1);
    c.kv_lens.assign(static_cast<size_t>(sequences), sequences > 6 ? 3000 : 9000);
    try {
      DeviceRun run(c, make_data(c), Placement{});
      run.launch();
      const Outcome first = run.results();
      for (int i = 0; i < 200; ++i) run.launch();
      EXPECT(same(first, run.results()), "the last of many runs differs");
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }
}

void test_long() {
  for (const Role role : {Role::kAnchor, Role::kLayer0}) {
    Case c;
    c.role = role;
    c.query_heads = 4;
    c.kv_heads = 1;
    c.head_dim = 64;
    c.q_lens = {1};
    c.kv_lens = {131072 + 77};
    c.name = text("128K, role %d", int(role));
    run_case(c, Placement{.paged = true, .page_size = 64});
  }
  // So few multiprocessors that blocks of many threads select.
  for (const Values values : {Values::kNormal, Values::kEqualScores, Values::kOneHuge, Values::kMassTies}) {
    Case c;
    c.role = Role::kAnchor;
    c.values = values;
    c.q_lens = {3};
    c.kv_lens = {81003};
    c.name = text("81003 keys, 4 multiprocessors, values %d", int(values));
    run_case(c, Placement{.multiprocessors = 4});
  }
  Case c;
  c.role = Role::kAnchor;
  c.query_heads = 1;
  c.kv_heads = 1;
  c.head_dim = 64;
  c.q_lens = {1};
  c.kv_lens = {1000003};
  c.name = "1M keys";
  run_case(c, Placement{});
}

void test_far_pages() {
  // 4 GiB of K and as much of V: offsets of elements pass 2^31, those of bytes 2^32.
  Case c;
  c.role = Role::kAnchor;
  c.q_lens = {1, 2};
  c.kv_lens = {900, 2000};
  c.name = "strides past 2^31";
  run_case(c, Placement{.paged = true, .page_size = 16, .spare_pages = int64_t{1} << 20});
}

void test_batch_invariance() {
  current = "batch invariance";
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor}) {
    Case c;
    c.role = role;
    c.q_lens = {1, 3, 1, 2};
    c.kv_lens = {5000, 777, 2048, 1500};
    c.name = text("batch, role %d", int(role));
    const Outcome all = run_case(c, Placement{.slack = 5});
    size_t row = 0;
    const auto width = static_cast<size_t>(c.query_heads * c.head_dim);
    for (size_t b = 0; b < c.q_lens.size(); ++b) {
      Case one = c;
      one.q_lens = {c.q_lens[b]};
      one.kv_lens = {c.kv_lens[b]};
      one.name += text(", sequence %d alone", int(b));
      const Outcome alone = run_case(one, Placement{.paged = true, .page_size = 5, .seed = 99});
      const std::vector<float> part(
          all.out.begin() + static_cast<int64_t>(row * width),
          all.out.begin() + static_cast<int64_t>((row + static_cast<size_t>(c.q_lens[b])) * width));
      EXPECT(same_bits(part, alone.out), "sequence %d differs alone and in pages", int(b));
      row += static_cast<size_t>(c.q_lens[b]);
    }
  }
}

/// In large batches warps merge groups of splits on their own, in all but the last sequences: in registers
/// (up to 8 rows that share keys), or in the workspace.
void test_groups_of_splits() {
  struct Shape {
    int32_t query_heads, rows;
  };
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor})
    for (const Shape shape : {Shape{8, 1}, Shape{16, 3}, Shape{16, 5}}) {
      Case c;
      c.role = role;
      c.query_heads = shape.query_heads;
      c.kv_heads = 4;
      c.head_dim = 128;
      c.budget = default_budget(3000);
      c.q_lens.assign(120, 1);
      c.kv_lens.assign(120, 40);
      c.q_lens[0] = c.q_lens[2] = shape.rows;
      c.kv_lens[0] = 2100;
      c.kv_lens[2] = 2049;
      c.kv_lens[119] = 2100;
      c.name = text("groups of splits, role %d, heads %d, %d rows", int(role), shape.query_heads, shape.rows);
      const Outcome all = run_case(c, Placement{});
      Case one = c;
      one.q_lens = {shape.rows};
      one.kv_lens = {2100};
      one.name += ", alone";
      const Outcome alone = run_case(one, Placement{});
      const auto values = static_cast<int64_t>(alone.out.size());
      EXPECT(same_bits({all.out.begin(), all.out.begin() + values}, alone.out), "a sequence differs alone");
    }
}

void test_large_batch() {
  Case c;
  c.query_heads = 2;
  c.kv_heads = 1;
  c.role = Role::kAnchor;
  Random random(5);
  for (int b = 0; b < 65600; ++b) {
    c.q_lens.push_back(b % 7 == 0 ? 0 : 1);
    c.kv_lens.push_back(static_cast<int32_t>(random.in(0, 6)));
  }
  c.name = "batch of 65600";
  run_case(c, Placement{});
  for (const int batch : {0, 1, 3}) {
    Case small;
    small.q_lens.assign(static_cast<size_t>(batch), 1);
    small.kv_lens.assign(static_cast<size_t>(batch), 200);
    small.name = text("batch of %d", batch);
    run_case(small, Placement{});
  }
}

void test_graph_and_clamping() {
  current = "graph";
  Case longest;
  longest.role = Role::kAnchor;
  longest.q_lens = {1, 1};
  longest.kv_lens = {6000, 6000};
  Case shorter = longest;
  shorter.kv_lens = {1000, 0};
  try {
    const HostData data = make_data(longest);
    DeviceRun run(longest, data, Placement{.paged = true});
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cuda::check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate", "test");
    cuda::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture",
                     "test");
    run.launch(stream);
    cuda::check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture", "test");
    cuda::check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate", "test");
    const auto replay = [&](const std::vector<int32_t>& lengths) {
      cuda::check_cuda(cudaMemcpy(const_cast<int32_t*>(run.params().seq_lens_kv), lengths.data(), 8,
                                  cudaMemcpyHostToDevice),
                       "cudaMemcpy", "test");
      cuda::check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch", "test");
      return run.results();
    };
    const Outcome first = replay({6000, 6000});
    DeviceRun plain(longest, data, Placement{.paged = true, .seed = 3});
    plain.launch();
    EXPECT(same(first, plain.results()), "a replay differs from a plain call");
    const Outcome cut = replay({1000, 0});
    EXPECT(cut.status == 0, "status is %u", cut.status);
    EXPECT(cut.counts[0] == 128 + 128 && cut.counts[2] == 0, "counts after a shorter replay are %d, %d",
           cut.counts[0], cut.counts[2]);
    for (size_t i = cut.out.size() / 2; i < cut.out.size(); ++i)
      if (cut.out[i] != 0) {
        fail("a sequence without keys is not zero");
        break;
      }
    const Outcome clamped = replay({1000000, 6000});
    EXPECT(clamped.status == kStatusKvClamped, "status of a too long sequence is %u", clamped.status);
    EXPECT(same_bits(clamped.out, first.out), "a clamped sequence differs from one at the maximum");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void test_reuse_of_own_sets() {
  current = "reuse of an anchor's own sets";
  Case c;
  c.role = Role::kAnchor;
  c.q_lens = {1, 2};
  c.kv_lens = {4000, 900};
  try {
    const HostData data = make_data(c);
    DeviceRun anchor(c, data, Placement{});
    anchor.launch();
    const Outcome sets = anchor.results();
    Case reuse = c;
    reuse.role = Role::kReuse;
    DeviceRun again(reuse, data, Placement{.paged = true}, &sets);
    again.launch();
    EXPECT(same_bits(sets.out, again.results().out), "output differs from the anchor's");
    // Members that a caller made up are not followed.
    Outcome wild = sets;
    for (size_t i = 0; i < wild.positions.size(); i += 3) wild.positions[i] = i % 2 == 0 ? INT32_MAX : -5;
    for (int32_t& count : wild.counts) count = INT32_MAX;
    DeviceRun hostile(reuse, data, Placement{}, &wild);
    hostile.launch();
    for (const float x : hostile.results().out)
      if (!std::isfinite(x)) {
        fail("made-up members reached the output");
        break;
      }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

/// The bench's own answers: it runs on pages and packed, and what it checks is right.
void test_bench() {
  current = "bench";
  for (const bool prefill : {false, true})
    for (const int32_t page_size : {0, 16}) {
      CudaAttentionBenchOptions options;
      options.prefill = prefill;
      options.batch = 3;
      options.context = prefill ? 650 : 3000;
      options.budget = default_budget();
      options.needed = {1, 0, 0, 0, 0, 0, 0, 0};
      options.page_size = page_size;
      options.repetitions = 3;
      try {
        const CudaAttentionBenchResult result =
            bench_attention_by_role(options, [](double, const std::string&) {});
        EXPECT(result.largest_error <= result.allowed_error, "error %g, allowed %g", result.largest_error,
               result.allowed_error);
        if (prefill) {
          EXPECT(result.member_rows > static_cast<double>(result.members), "%g rows times members",
                 result.member_rows);
          EXPECT(result.bf16_tflop_per_s > 0, "no products");
        } else {
          EXPECT(result.members == 3 * 8 * (300 + 128), "%d members", static_cast<int>(result.members));
        }
        for (const double ms : result.ms) EXPECT(ms > 0 && std::isfinite(ms), "a role took %g ms", ms);
        EXPECT(result.read_gb_per_s > 0, "no bandwidth");
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
}

/// Results do not depend on how many multiprocessors a call leaves to others. How splits are dealt out does:
/// here a warp takes one at a time, several, a whole group, or shares a group with the block (one sequence).
void test_spare_multiprocessors() {
  struct Shape {
    int32_t query_heads, kv_heads, head_dim;
  };
  for (const Shape shape : {Shape{8, 2, 128}, Shape{3, 1, 64}, Shape{4, 2, 256}, Shape{16, 1, 128}})
    for (const int sequences : {1, 4, 12}) {
      Case c;
      c.role = Role::kAnchor;
      c.query_heads = shape.query_heads;
      c.kv_heads = shape.kv_heads;
      c.head_dim = shape.head_dim;
      c.budget = default_budget(3000);
      for (int i = 0; i < sequences; ++i) {
        c.q_lens.push_back(i == 2 ? 2 : 1);
        c.kv_lens.push_back(sequences == 1 ? 3000 : sequences == 4 ? i * 1000 : i * 131);
      }
      c.name = text("spare multiprocessors, heads %d/%d, d %d, %d sequences", shape.query_heads,
                    shape.kv_heads, shape.head_dim, sequences);
      const Outcome all = run_case(c, Placement{});
      try {
        const HostData data = make_data(c);
        for (const int few : {33, 20, 16, 11, 8, 4, 2, 1, -1000}) {
          current = text("%s, %d left", c.name.c_str(), few);
          DeviceRun run(c, data, Placement{.paged = few % 2 == 0, .multiprocessors = few});
          run.launch();
          EXPECT(same(all, run.results()), "results differ with few multiprocessors");
        }
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
}

/// Every instantiation once: types, head dimensions, 8, 16 and 32 rows a unit, all roles; on few
/// multiprocessors, as compute-sanitizer takes its time for every block, and warps then have several units.
void test_instantiations() {
  for (const Role role : {Role::kLayer0, Role::kAnchor})
    for (const DType dtype : {DType::kBF16, DType::kF16})
      for (const int32_t d : {64, 128, 256})
        for (const int rows : {1, 3, 5}) {
          Case c;
          c.role = role;
          c.dtype = dtype;
          c.head_dim = d;
          c.query_heads = 4;
          c.kv_heads = 1;
          c.q_lens = {rows, 1};
          c.kv_lens = {600, 150};
          int32_t multiprocessors = 4;
          if (rows == 1) {
            // So few groups of splits, and so few blocks, that blocks share the groups of a single tile.
            c.q_lens = {1};
            c.kv_lens = {1300};
            c.budget = default_budget(3000);
            multiprocessors = d / 64;
          }
          c.name = text("role %d, %s, d %d, %d rows", int(role), dtype_name(dtype), d, rows);
          run_case(c, Placement{.paged = rows == 5, .multiprocessors = multiprocessors});
        }
}

/// Selection by clusters of two blocks, of few threads and of many, which the short lists of the
/// instantiations never come to; no more keys than that takes, for the sanitizers.
void test_selection_in_clusters() {
  for (const int keys : {9000, 66003})
    for (const Values values : {Values::kNormal, Values::kEqualScores}) {
      Case c;
      c.role = Role::kAnchor;
      c.query_heads = c.kv_heads = 2;
      c.values = values;
      c.q_lens = {1};
      c.kv_lens = {keys};
      c.name = text("clusters, %d keys, values %d", keys, int(values));
      run_case(c, Placement{.multiprocessors = 4});
    }
}

const Registered kTests[] = {
    {10, "decode instantiations", test_instantiations, "all sanitize"},
    {10, "decode selection in clusters", test_selection_in_clusters, "all sanitize"},
    {10, "roles and shapes", test_roles_and_shapes, "all"},
    {10, "lengths", test_lengths, "all"},
    {10, "budgets and owners", test_budgets_and_owners, "all"},
    {10, "values", test_values, "all"},
    {10, "ties again", test_ties_again, "all"},
    {10, "long", test_long, "all"},
    {10, "far pages", test_far_pages, "all"},
    {10, "batch invariance", test_batch_invariance, "all"},
    {10, "groups of splits", test_groups_of_splits, "all"},
    {10, "large batch", test_large_batch, "all"},
    {10, "graph and clamping", test_graph_and_clamping, "all sanitize"},
    {10, "reuse of own sets", test_reuse_of_own_sets, "all sanitize"},
    {10, "spare multiprocessors", test_spare_multiprocessors, "all"},
    {10, "bench", test_bench, "all"},
    {10, "prefill instantiations, bf16", test_prefill_bf16_instantiations, "all sanitize"},
    {10, "prefill instantiations, fp16", test_prefill_fp16_instantiations, "all sanitize"},
    {10, "prefill shapes", test_prefill_shapes, "all"},
    {10, "prefill lengths", test_prefill_lengths, "all"},
    {10, "prefill budgets and owners", test_prefill_budgets_and_owners, "all"},
    {10, "prefill values", test_prefill_values, "all"},
    {10, "prefill chunks and batches", test_prefill_chunks_and_batches, "all"},
    {10, "prefill row boxes", test_prefill_row_boxes, "all"},
    {10, "prefill partial blocks", test_prefill_partial_blocks, "all"},
    {10, "prefill many without keys", test_prefill_many_without_keys, "all"},
    {10, "prefill long", test_prefill_long, "all"},
    {10, "prefill chunks of weights", test_prefill_chunks_of_weights, "all"},
    {10, "prefill graph and clamping", test_prefill_graph_and_clamping, "all"}};

}  // namespace
}  // namespace kascade::cuda_test
