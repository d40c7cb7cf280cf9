// SPDX-License-Identifier: Apache-2.0
// Prefill calls (tile rule `aligned`) against the reference.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/cuda/test/cuda_test.h"
#include "base/cuda/launch.h"

namespace kascade::cuda_test {
namespace {

constexpr Role kRoles[] = {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse};

Case prefill(Role role) {
  Case c;
  c.role = role;
  c.tile_rule = TileRule::kAligned;
  c.head_dim = 128;
  // Small enough that tiles of a few hundred keys have something to select.
  c.budget = Budget{.percent_hundredths = 1000, .round_up = true, .floor = 24, .recent = 16};
  return c;
}

/// The rows of sequence b in an outcome.
std::vector<float> rows_of(const Case& c, const Outcome& o, size_t b) {
  const auto width = static_cast<int64_t>(c.query_heads) * c.head_dim;
  const int64_t first =
      std::accumulate(c.q_lens.begin(), c.q_lens.begin() + static_cast<int64_t>(b), int64_t{0});
  return {o.out.begin() + first * width, o.out.begin() + (first + c.q_lens[b]) * width};
}

/// Every instantiation of a type once.
void run_instantiations(DType dtype) {
  for (const int32_t d : {128, 64, 256})
    for (const Role role : kRoles) {
      Case c = prefill(role);
      c.dtype = dtype;
      c.out_dtype = role == Role::kReuse ? dtype : DType::kF32;
      c.head_dim = d;
      // Small, as sanitizers run it, but more blocks of keys than a kernel's ring of tiles holds.
      c.query_heads = 4;
      c.kv_heads = 1;
      c.q_lens = {40, 33};
      c.kv_lens = {40, 450};
      c.by_products = true;
      c.name = text("prefill role %d, %s, d %d", int(role), dtype_name(dtype), d);
      run_case(c, Placement{.paged = role == Role::kLayer0 || role == Role::kReuse, .page_size = 32});
    }
}

}  // namespace

// A test for each type, as the race checker takes most of a minute over one.
void test_prefill_bf16_instantiations() { run_instantiations(DType::kBF16); }
void test_prefill_fp16_instantiations() { run_instantiations(DType::kF16); }

void test_prefill_shapes() {
  struct Heads {
    int32_t h, g, tile;
  };
  int n = 0;
  for (const Role role : kRoles)
    for (const Heads heads :
         {Heads{1, 1, 32}, Heads{6, 2, 16}, Heads{6, 1, 64}, Heads{5, 1, 32}, Heads{7, 1, 33},
          Heads{8, 1, 32}, Heads{16, 1, 64}, Heads{4, 4, 128}, Heads{4, 2, 1}}) {
      Case c = prefill(role);
      c.head_dim = 64;
      c.tile = heads.tile;
      c.dtype = n % 2 == 0 ? DType::kBF16 : DType::kF16;
      c.out_dtype = n % 3 == 0 ? c.dtype : DType::kF32;
      c.query_heads = heads.h;
      c.kv_heads = heads.g;
      c.q_lens = {77, 40};
      c.kv_lens = {77, 290};
      c.by_products = n % 2 == 0;
      c.k_scale = n % 4 == 0 ? 1.0f : 0.5f;
      c.v_scale = n % 4 == 0 ? 1.0f : 3.0f;
      c.seed = 500 + static_cast<uint64_t>(n);
      if (role == Role::kReuse && heads.g > 1) c.head_map.assign(static_cast<size_t>(heads.g), heads.g - 1);
      c.name = text("prefill role %d, heads %d/%d, tile %d", int(role), heads.h, heads.g, heads.tile);
      Placement placement;
      placement.paged = n % 3 != 0;
      placement.page_size = n % 3 == 1 ? 16 : n % 2 == 0 ? 7 : 256;
      placement.head_major = n % 2 == 1;
      placement.slack = n % 5;
      run_case(c, placement);
      ++n;
    }
}

void test_prefill_lengths() {
  for (const Role role : kRoles) {
    Case c = prefill(role);
    c.query_heads = 2;
    c.kv_heads = 1;
    c.head_dim = 64;
    c.by_products = true;
    for (const int length : {1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 160, 161, 200}) {
      c.q_lens.push_back(length);
      c.kv_lens.push_back(length);
    }
    // Chunks that begin or end inside tiles, more rows than keys, nothing at all.
    for (const auto& [rows, keys] : {std::pair{1, 129},
                                     {5, 128},
                                     {31, 250},
                                     {32, 257},
                                     {33, 256},
                                     {40, 255},
                                     {0, 300},
                                     {40, 10},
                                     {3, 0},
                                     {0, 0},
                                     {64, 385},
                                     {1, 1}}) {
      c.q_lens.push_back(rows);
      c.kv_lens.push_back(keys);
    }
    for (const int size : {0, 1, 16, 64}) {
      c.name = text("prefill lengths, role %d, pages of %d", int(role), size);
      run_case(c, Placement{.paged = size != 0, .page_size = std::max(size, 1)});
    }
  }
}

void test_prefill_budgets_and_owners() {
  int n = 0;
  for (const Role role : {Role::kLayer0, Role::kAnchor, Role::kReuse})
    for (const SetOwner owner : {SetOwner::kKvHead, SetOwner::kAllHeads, SetOwner::kQueryHead})
      for (int kind = 0; kind < 6; ++kind) {
        Case c = prefill(role);
        c.set_owner = owner;
        c.query_heads = 6;
        c.kv_heads = 2;
        c.head_dim = 64;
        c.q_lens = {60, 5, 33};
        c.kv_lens = {420, 5, 100};
        c.budget = kind == 0   ? default_budget(2000)
                   : kind == 1 ? paper_budget(1000, 32, true)
                   : kind == 2 ? paper_budget()
                   : kind == 3 ? kernel_budget()
                   : kind == 4 ? Budget{.percent_hundredths = 500,
                                        .floor = 64,
                                        .sinks = 5,
                                        .recent = 40,
                                        .forced_charged = true}
                               : Budget{.percent_hundredths = 10000, .floor = 0};
        if (kind == 4) c.budget_lens = {900, 100, 650};
        if (role == Role::kLayer0 && kind % 2 == 0) c.needed = {0, 1};
        if (role == Role::kReuse) c.head_map = {1, 1};
        c.by_products = kind != 3;
        c.seed = 700 + static_cast<uint64_t>(n++);
        c.name = text("prefill budget %d, owner %d, role %d", kind, int(owner), int(role));
        run_case(c, Placement{.paged = n % 2 == 0});
      }
  // A row is a tile of its own, and its own key a candidate.
  Case c = prefill(Role::kAnchor);
  c.tile = 1;
  c.budget.own_tile = OwnTile::kCandidate;
  c.q_lens = {20, 3};
  c.kv_lens = {150, 3};
  c.by_products = true;
  c.name = "prefill own key is a candidate";
  run_case(c, Placement{});
}

void test_prefill_values() {
  for (const Values values : {Values::kEqualScores, Values::kRamp, Values::kOneHuge, Values::kMassTies})
    for (const Role role : {Role::kLayer0, Role::kAnchor}) {
      Case c = prefill(role);
      c.values = values;
      c.q_lens = {40, 33};
      c.kv_lens = {5500, 700};
      c.query_heads = 2;
      c.kv_heads = 1;
      c.head_dim = 64;
      c.name = text("prefill values %d, role %d", int(values), int(role));
      run_case(c, Placement{});
    }
  Case c = prefill(Role::kAnchor);
  c.peak = 12;
  c.q_lens = {33};
  c.kv_lens = {3000};
  c.name = "prefill peaked softmax";
  run_case(c, Placement{});
}

/// One-shot, chunked and prefix-cached prefill, alone and in a batch, in any pages: the same bits.
void test_prefill_chunks_and_batches() {
  struct Kind {
    Role role;
    int32_t head_dim;
    DType dtype;
  };
  for (const auto [role, head_dim, dtype] : {Kind{Role::kDense, 64, DType::kBF16},
                                             {Role::kLayer0, 64, DType::kBF16},
                                             {Role::kAnchor, 64, DType::kBF16},
                                             {Role::kDense, 128, DType::kBF16},
                                             {Role::kLayer0, 128, DType::kBF16},
                                             {Role::kAnchor, 128, DType::kBF16},
                                             {Role::kAnchor, 64, DType::kF16},
                                             {Role::kLayer0, 128, DType::kF16}}) {
    Case whole = prefill(role);
    whole.head_dim = head_dim;
    whole.dtype = dtype;
    whole.q_lens = {250};
    whole.kv_lens = {250};
    whole.name = text("prefill whole, role %d, d %d, %s", int(role), head_dim, dtype_name(dtype));
    // At a head dim of 128, pages that are not fetched in boxes of eight keys or more have a loop of their
    // own, which rounds differently.
    const int odd_page = head_dim == 128 ? 40 : 5;
    const HostData data = make_data(whole);
    const Outcome all = run_case(whole, Placement{});
    for (const int chunk : {32, 64, 96, 160}) {
      current =
          text("prefill chunks of %d, role %d, d %d, %s", chunk, int(role), head_dim, dtype_name(dtype));
      std::vector<float> out;
      std::vector<int32_t> counts, positions;
      try {
        for (int first = 0; first < 250; first += chunk) {
          Case part = whole;
          part.q_lens = {std::min(chunk, 250 - first)};
          part.kv_lens = {first + part.q_lens[0]};
          // Budgets roll with the tile, but are given the final length all the same.
          part.budget_lens = {250};
          HostData part_data = data;
          const auto q_row = static_cast<int64_t>(whole.query_heads) * whole.head_dim;
          const auto kv_row = static_cast<int64_t>(whole.kv_heads) * whole.head_dim;
          part_data.q.assign(data.q.begin() + first * q_row, data.q.begin() + part.kv_lens[0] * q_row);
          part_data.k.resize(static_cast<size_t>(part.kv_lens[0] * kv_row));
          part_data.v.resize(static_cast<size_t>(part.kv_lens[0] * kv_row));
          part_data.cu_q = {0, part.q_lens[0]};
          part_data.cu_kv = {0, part.kv_lens[0]};
          part_data.tile_offsets = {0, (part.q_lens[0] + 31) / 32};
          Placement placement{.paged = chunk != 64, .page_size = chunk == 32 ? 16 : odd_page, .seed = 3};
          placement.slack = all.capacity;  // so that capacity is no less
          DeviceRun run(part, part_data, placement);
          run.launch();
          const Outcome got = run.results();
          out.insert(out.end(), got.out.begin(), got.out.end());
          if (role == Role::kDense) continue;
          counts.insert(counts.end(), got.counts.begin(), got.counts.end());
          for (size_t set = 0; set < got.counts.size(); ++set) {
            const auto begin = got.positions.begin() + static_cast<int64_t>(set) * got.capacity;
            positions.insert(positions.end(), begin, begin + got.counts[set]);
          }
        }
      } catch (const std::exception& error) {
        fail(error.what());
      }
      EXPECT(same_bits(out, all.out), "outputs differ from those of one call");
      if (role == Role::kDense) continue;
      EXPECT(counts == all.counts, "counts differ from those of one call");
      std::vector<int32_t> members;
      for (size_t set = 0; set < all.counts.size(); ++set) {
        const auto begin = all.positions.begin() + static_cast<int64_t>(set) * all.capacity;
        members.insert(members.end(), begin, begin + all.counts[set]);
      }
      EXPECT(positions == members, "sets differ from those of one call");
    }
    Case batch = whole;
    batch.q_lens = {40, 0, 250, 7};
    batch.kv_lens = {200, 50, 250, 90};
    batch.name = text("prefill batch, role %d, d %d, %s", int(role), head_dim, dtype_name(dtype));
    const Outcome mixed = run_case(batch, Placement{.paged = true, .page_size = 8, .slack = 3});
    EXPECT(same_bits(rows_of(batch, mixed, 2), all.out), "a sequence differs in a batch and in pages");
  }
}

/// Whole units of 128 packed rows at a head dim of 128, whose queries and output go by boxes where eight rows
/// are whole tokens and 16 bits wide, after units that are not whole.
void test_prefill_row_boxes() {
  struct Heads {
    int32_t h, g;
  };
  int n = 0;
  for (const Role role : kRoles)
    for (const Heads heads :
         {Heads{1, 1}, Heads{4, 2}, Heads{8, 2}, Heads{8, 1}, Heads{6, 2}, Heads{5, 1}, Heads{16, 1}}) {
      Case c = prefill(role);
      c.dtype = n % 2 == 0 ? DType::kBF16 : DType::kF16;
      c.out_dtype = n % 5 == 0   ? DType::kF32
                    : n % 3 == 0 ? (n % 2 == 0 ? DType::kF16 : DType::kBF16)  // not that of q
                                 : c.dtype;
      c.query_heads = heads.h;
      c.kv_heads = heads.g;
      c.q_lens = {140, 20, 130};
      c.kv_lens = {140, 200, 300};
      c.seed = 900 + static_cast<uint64_t>(n);
      c.name = text("prefill row boxes, role %d, heads %d/%d, %s to %s", int(role), heads.h, heads.g,
                    dtype_name(c.dtype), dtype_name(c.out_dtype));
      run_case(c, Placement{.paged = n % 3 == 1, .row_padding = n % 4 == 3 ? 0 : 8 * (n % 4 + 1)});
      ++n;
    }
}

/// Units whose first block of keys is not whole, after others of several blocks, at a head dim of 128.
void test_prefill_partial_blocks() {
  for (const Role role : kRoles) {
    Case c = prefill(role);
    c.query_heads = 4;
    c.kv_heads = 1;
    c.q_lens = {650, 130, 333, 650};
    c.kv_lens = {650, 1130, 333, 650};
    for (const int size : {0, 16, 64}) {
      c.name = text("prefill partial blocks, role %d, pages of %d", int(role), size);
      run_case(c, Placement{.paged = size != 0, .page_size = std::max(size, 1)});
    }
    if (role == Role::kReuse) continue;
    current = text("prefill partial blocks on one multiprocessor, role %d", int(role));
    try {
      const HostData data = make_data(c);
      DeviceRun all(c, data, Placement{}), one(c, data, Placement{.multiprocessors = 1});
      all.launch();
      const Outcome expected = all.results();
      for (int i = 0; i < 3; ++i) {
        one.launch();
        EXPECT(same(expected, one.results()), "results differ");
      }
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }
}

/// One multiprocessor does all units in turn, among them more without keys than a queue of units has places.
void test_prefill_many_without_keys() {
  for (const Role role : {Role::kDense, Role::kLayer0, Role::kAnchor})
    for (const int head_dim : {64, 128}) {
      Case c = prefill(role);
      c.head_dim = head_dim;
      c.query_heads = 2;
      c.kv_heads = 1;
      c.q_lens = {150};
      c.kv_lens = {300};
      for (int i = 0; i < 9; ++i) {
        c.q_lens.push_back(30);
        c.kv_lens.push_back(0);
      }
      c.q_lens.insert(c.q_lens.end(), {600, 20});
      c.kv_lens.insert(c.kv_lens.end(), {10, 200});
      current = text("prefill on one multiprocessor, role %d, d %d", int(role), head_dim);
      try {
        const HostData data = make_data(c);
        DeviceRun all(c, data, Placement{}), one(c, data, Placement{.multiprocessors = 1});
        all.launch();
        one.launch();
        EXPECT(same(all.results(), one.results()), "results differ");
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
}

/// Sampled rows of long prompts: chunks behind a long prefix, past the ranges and bins of selection.
void test_prefill_long() {
  for (const Role role : kRoles) {
    Case c = prefill(role);
    c.query_heads = 2;
    c.kv_heads = 1;
    c.budget = default_budget();
    c.q_lens = {40};
    c.kv_lens = {40000 + 11};
    c.name = text("prefill long, role %d", int(role));
    run_case(c, Placement{.paged = role == Role::kAnchor, .page_size = 64});
  }
}

/// With so many keys stated that there is no room for the pooled weights of all tiles at a time (and with the
/// larger number none for the marks of selection): the same as with room.
void test_prefill_chunks_of_weights() {
  const auto members = [](const Outcome& o) {
    std::vector<int32_t> all;
    for (size_t set = 0; set < o.counts.size(); ++set) {
      const auto begin = o.positions.begin() + static_cast<int64_t>(set) * o.capacity;
      all.insert(all.end(), begin, begin + o.counts[set]);
    }
    return all;
  };
  for (const auto& [role, needed] : {std::pair{Role::kAnchor, std::vector<uint8_t>{}},
                                     {Role::kLayer0, {1, 1, 1, 1, 1, 1, 1, 1}},
                                     {Role::kLayer0, {0, 1, 0, 0, 1, 0, 0, 1}},
                                     {Role::kLayer0, {0, 0, 0, 0, 0, 0, 0, 0}}}) {
    Case c = prefill(role);
    c.head_dim = 64;
    c.query_heads = c.kv_heads = 8;
    c.needed = needed;
    c.q_lens = {900, 33};
    c.kv_lens = {1000, 100};
    c.budget = Budget{.percent_hundredths = 1, .floor = 48};
    c.name = text("prefill chunks of weights, role %d, %d heads needed", int(role),
                  std::accumulate(needed.begin(), needed.end(), 0));
    const Outcome expected = run_case(c, Placement{});
    try {
      for (const int32_t more : {1 << 19, 1 << 22}) {
        DeviceRun run(c, make_data(c), Placement{.more_keys = more});
        run.launch();
        const Outcome got = run.results();
        EXPECT(same_bits(got.out, expected.out), "outputs differ with %d more keys stated", more);
        EXPECT(got.counts == expected.counts, "counts differ with %d more keys stated", more);
        EXPECT(members(got) == members(expected), "sets differ with %d more keys stated", more);
      }
    } catch (const std::exception& error) {
      fail(error.what());
    }
  }
}

void test_prefill_graph_and_clamping() {
  current = "prefill graph";
  Case longest = prefill(Role::kAnchor);
  longest.head_dim = 64;
  longest.q_lens = {100, 100};
  longest.kv_lens = {600, 600};
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
    const Outcome first = replay({600, 600});
    DeviceRun plain(longest, data, Placement{.paged = true, .seed = 3});
    plain.launch();
    EXPECT(same(first, plain.results()), "a replay differs from a plain call");
    const Outcome cut = replay({300, 0});
    EXPECT(cut.status == 0, "status is %u", cut.status);
    for (size_t i = cut.out.size() / 2; i < cut.out.size(); ++i)
      if (cut.out[i] != 0) {
        fail("a sequence without keys is not zero");
        break;
      }
    const Outcome clamped = replay({1000000, 600});
    EXPECT(clamped.status == kStatusKvClamped, "status of a too long sequence is %u", clamped.status);
    EXPECT(same_bits(clamped.out, first.out), "a clamped sequence differs from one at the maximum");
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);

    // Members that a caller made up are not followed.
    Case reuse = longest;
    reuse.role = Role::kReuse;
    Outcome wild = first;
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

}  // namespace kascade::cuda_test
