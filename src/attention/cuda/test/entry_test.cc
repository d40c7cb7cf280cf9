// SPDX-License-Identifier: Apache-2.0
// The ways into the operator on CUDA - cuda_attention(), attention() and the C interface: what each refuses,
// in which words, and that all give the same.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attention/cuda/c_api.h"
#include "attention/cuda/cuda_attention.h"
#include "attention/cuda/test/cuda_test.h"
#include "attention/params.h"
#include "kascade/error.h"

namespace kascade::cuda_test {
namespace {

using Change = std::function<void(AttentionParams&)>;

template <class T = void>
T* nowhere(uintptr_t place) {
  return reinterpret_cast<T*>(place << 16);  // NOLINT(performance-no-int-to-ptr): nothing lies there
}

/// A call of one sequence that no check refuses, with addresses where nothing is: it must not be launched.
AttentionParams whole_call(TileRule rule) {
  AttentionParams p;
  p.role = Role::kAnchor;
  p.tile_rule = rule;
  p.batch = 1;
  p.query_heads = 4;
  p.kv_heads = 2;
  p.head_dim = 64;
  p.q_dtype = p.kv_dtype = p.out_dtype = DType::kBF16;
  p.max_q_len = p.max_total_q = p.max_tiles = 2;
  p.max_kv_len = 1000;
  p.capacity = static_cast<int32_t>(required_capacity(p));
  p.q = nowhere(1);
  p.out = nowhere(2);
  p.k = nowhere(3);
  p.v = nowhere(4);
  p.cu_seqlens_q = nowhere<int32_t>(5);
  p.seq_lens_kv = nowhere<int32_t>(6);
  p.cu_seqlens_kv = nowhere<int32_t>(7);
  p.tile_offsets = nowhere<int32_t>(8);
  p.counts = nowhere<int32_t>(9);
  p.positions = nowhere<int32_t>(10);
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.out_head_stride = 64;
  p.q_row_stride = p.out_row_stride = 256;
  p.k_token_stride = p.v_token_stride = 128;
  return p;
}

void to_pages(AttentionParams& p, int32_t page_size) {
  p.cu_seqlens_kv = nullptr;
  p.page_table = nowhere<int32_t>(11);
  p.page_size = page_size;
  p.k_page_stride = p.v_page_stride = 128 * page_size;
}

kascade_attention_params to_c(const AttentionParams& p) {
  kascade_attention_params c = {};
  c.role = static_cast<int32_t>(p.role);
  c.set_owner = static_cast<int32_t>(p.set_owner);
  c.batch = p.batch;
  c.query_heads = p.query_heads;
  c.kv_heads = p.kv_heads;
  c.head_dim = p.head_dim;
  c.q_dtype = static_cast<int32_t>(p.q_dtype);
  c.out_dtype = static_cast<int32_t>(p.out_dtype);
  c.kv_dtype = static_cast<int32_t>(p.kv_dtype);
  c.page_size = p.page_size;
  c.capacity = p.capacity;
  c.max_q_len = p.max_q_len;
  c.max_kv_len = p.max_kv_len;
  c.max_total_q = p.max_total_q;
  c.max_tiles = p.max_tiles;
  c.softmax_scale = p.softmax_scale;
  c.k_scale = p.k_scale;
  c.v_scale = p.v_scale;
  c.budget = {p.budget.percent_hundredths,
              p.budget.round_up,
              p.budget.floor,
              p.budget.round_to,
              p.budget.sinks,
              p.budget.recent,
              p.budget.forced_charged,
              static_cast<int32_t>(p.budget.own_tile),
              p.budget.tile,
              p.budget.rolling,
              p.budget.rolling_min_rows,
              p.budget.rolling_capped};
  c.q = p.q;
  c.out = p.out;
  c.lse = p.lse;
  c.q_row_stride = p.q_row_stride;
  c.q_head_stride = p.q_head_stride;
  c.out_row_stride = p.out_row_stride;
  c.out_head_stride = p.out_head_stride;
  c.lse_row_stride = p.lse_row_stride;
  c.cu_seqlens_q = p.cu_seqlens_q;
  c.seq_lens_kv = p.seq_lens_kv;
  c.budget_lens = p.budget_lens;
  c.k = p.k;
  c.v = p.v;
  c.k_page_stride = p.k_page_stride;
  c.k_token_stride = p.k_token_stride;
  c.k_head_stride = p.k_head_stride;
  c.v_page_stride = p.v_page_stride;
  c.v_token_stride = p.v_token_stride;
  c.v_head_stride = p.v_head_stride;
  c.page_table = p.page_table;
  c.page_table_stride = p.page_table_stride;
  c.cu_seqlens_kv = p.cu_seqlens_kv;
  c.positions = p.positions;
  c.counts = p.counts;
  c.tile_offsets = p.tile_offsets;
  c.head_map = p.head_map;
  c.needed = p.needed;
  c.status = p.status;
  return c;
}

/// f throws E, whose message has `part`.
template <class E>
void expect_thrown(const std::string& what, const std::string& part, const std::function<void()>& f) {
  try {
    f();
    fail(what + ": no error; expected '" + part + "'");
  } catch (const E& error) {
    if (std::strstr(error.what(), part.c_str()) == nullptr)
      fail(what + ": the message lacks '" + part + "': " + error.what());
  } catch (const std::exception& error) {
    fail(what + ": another error: " + error.what());
  }
}

constexpr TileRule kRules[] = {TileRule::kStep, TileRule::kAligned};

std::string name_of(TileRule rule) { return rule == TileRule::kStep ? "decode" : "prefill"; }

/// Refused by calls of a rule, and when their workspace is asked for.
template <class E>
void expect_refused(TileRule rule, const std::string& part, const Change& change) {
  AttentionParams p = whole_call(rule);
  change(p);
  expect_thrown<E>(name_of(rule) + " workspace", part, [&] { cuda_attention_workspace_bytes(p); });
  expect_thrown<E>(name_of(rule), part, [&] { cuda_attention(p, nowhere(20), size_t{1} << 60, nullptr, 0); });
  expect_thrown<E>(name_of(rule) + " by attention()", part,
                   [&] { attention(p, cuda_sm90_kernel, nowhere(20), size_t{1} << 60, {}); });
}
template <class E>
void expect_refused(const std::string& part, const Change& change) {
  for (const TileRule rule : kRules) expect_refused<E>(rule, part, change);
}

void expect_accepted(TileRule rule, const char* what, const Change& change) {
  AttentionParams p = whole_call(rule);
  change(p);
  try {
    EXPECT(cuda_attention_workspace_bytes(p) > 0, "%s, %s: no workspace", name_of(rule).c_str(), what);
  } catch (const std::exception& error) {
    fail(name_of(rule) + ", " + what + ": " + error.what());
  }
}

void test_refused_shapes() {
  for (const TileRule rule : kRules) expect_accepted(rule, "the call", [](AttentionParams&) {});
  expect_refused<Unsupported>("head_dim is 96; supported: 64, 128, 256",
                              [](AttentionParams& p) { p.head_dim = 96; });
  expect_refused<Unsupported>("kv_dtype is f32; supported: f16, bf16",
                              [](AttentionParams& p) { p.q_dtype = p.kv_dtype = DType::kF32; });
  expect_refused<Unsupported>("q_dtype is f16; supported: kv_dtype, bf16",
                              [](AttentionParams& p) { p.q_dtype = DType::kF16; });
  expect_refused<Unsupported>("selection_k is given; supported: null",
                              [](AttentionParams& p) { p.selection_k = p.k; });
  expect_refused<BadArgument>("query_heads is 34: 17 per KV head (kv_heads 2), must be 1..16",
                              [](AttentionParams& p) { p.query_heads = 34; });
  // Nothing is divided by it before it is checked.
  expect_refused<BadArgument>("kv_heads is 0, must be 1 or more", [](AttentionParams& p) { p.kv_heads = 0; });
  expect_refused<BadArgument>(TileRule::kAligned, "tile is 0, must be in 1..128",
                              [](AttentionParams& p) { p.tile = 0; });
  // Lengths are on the device, so maxima must be stated.
  const char* stated = " is 0; supported: a stated maximum of 1 or more";
  expect_refused<Unsupported>(TileRule::kStep, "max_q_len is 0; supported: 1..8",
                              [](AttentionParams& p) { p.max_q_len = 0; });
  expect_refused<Unsupported>(TileRule::kStep, "max_q_len is 9; supported: 1..8",
                              [](AttentionParams& p) { p.max_q_len = 9; });
  expect_refused<Unsupported>(TileRule::kAligned, std::string("max_q_len") + stated,
                              [](AttentionParams& p) { p.max_q_len = 0; });
  expect_refused<Unsupported>(std::string("max_kv_len") + stated,
                              [](AttentionParams& p) { p.max_kv_len = 0; });
  expect_refused<Unsupported>(std::string("max_total_q") + stated,
                              [](AttentionParams& p) { p.max_total_q = 0; });
  expect_refused<Unsupported>(std::string("max_tiles") + stated, [](AttentionParams& p) { p.max_tiles = 0; });
  // What 32 bits count.
  expect_refused<Unsupported>(
      "max_total_q is 536870912; supported: at most 2147483647 rows and heads in a call",
      [](AttentionParams& p) { p.max_total_q = 1 << 29; });
  expect_refused<Unsupported>(TileRule::kStep,
                              "batch is 536870912; supported: at most 2147483647 units of work in a call",
                              [](AttentionParams& p) { p.batch = 1 << 29; });
  expect_refused<Unsupported>(
      TileRule::kAligned, "batch is 1073741824; supported: at most 2147483647 units of 128 rows in a call",
      [](AttentionParams& p) { p.batch = 1 << 30; });
  const auto pool = [](int32_t heads) {
    return [heads](AttentionParams& p) {
      p.set_owner = SetOwner::kAllHeads;
      p.query_heads = heads;
      p.kv_heads = heads / 8;
      p.max_q_len = p.max_total_q = 8;
    };
  };
  expect_accepted(TileRule::kStep, "512 rows and heads", pool(64));
  expect_refused<Unsupported>(TileRule::kStep,
                              "query_heads is 72; supported: at most 512 rows and heads pooled into a set",
                              pool(72));
}

/// Kernels multiply indices and strides in 32 bits, in the largest power of two of bytes that divides the
/// strides; here 16 bytes, as some stride is an odd multiple of eight elements.
void test_refused_strides() {
  const std::string reach = "; supported: 0 or more, and offsets below 4294967296 units of 16 bytes";
  constexpr int64_t kFar = (int64_t{1} << 35) + 8;  // 2^32 + 1 units
  constexpr int64_t kTokens = (int64_t{1} << 30) + 8;
  expect_refused<Unsupported>("k_token_stride is 34359738376" + reach,
                              [](AttentionParams& p) { p.k_token_stride = kFar; });
  expect_refused<Unsupported>("v_token_stride is 34359738376" + reach,
                              [](AttentionParams& p) { p.v_token_stride = kFar; });
  expect_refused<Unsupported>("k_token_stride is -8" + reach,
                              [](AttentionParams& p) { p.k_token_stride = -8; });
  expect_refused<Unsupported>("k_page_stride is 34359738376" + reach, [](AttentionParams& p) {
    to_pages(p, 16);
    p.k_page_stride = kFar;
  });
  expect_refused<Unsupported>("v_page_stride is 34359738376" + reach, [](AttentionParams& p) {
    to_pages(p, 16);
    p.v_page_stride = kFar;
  });
  // The last key of a sequence, or of a page: index 31 is reached, 32 is not.
  for (const TileRule rule : kRules) {
    expect_accepted(rule, "32 keys", [](AttentionParams& p) {
      p.max_kv_len = 32;
      p.k_token_stride = kTokens;
    });
    expect_accepted(rule, "pages of 32 keys", [](AttentionParams& p) {
      to_pages(p, 32);
      p.v_token_stride = kTokens;
    });
    // A larger unit reaches further.
    expect_accepted(rule, "strides of 2^35", [](AttentionParams& p) {
      p.max_kv_len = 4000;
      p.k_token_stride = p.v_token_stride = int64_t{1} << 35;
    });
    // Strides that are not used: of pages that do not exist, of keys in pages of one.
    expect_accepted(rule, "packed keys with strides of pages",
                    [](AttentionParams& p) { p.k_page_stride = p.v_page_stride = kFar; });
    expect_accepted(rule, "pages of one key", [](AttentionParams& p) {
      to_pages(p, 1);
      p.k_token_stride = p.v_token_stride = -1;
      p.k_page_stride = int64_t{1} << 35;
    });
  }
  expect_refused<Unsupported>("k_token_stride is 1073741832" + reach, [](AttentionParams& p) {
    p.max_kv_len = 33;
    p.k_token_stride = kTokens;
  });
  expect_refused<Unsupported>("v_token_stride is 1073741832" + reach, [](AttentionParams& p) {
    to_pages(p, 33);
    p.v_token_stride = kTokens;
  });
  // Decode's rows of q are found in 64 bits.
  expect_refused<Unsupported>(TileRule::kAligned, "q_row_stride is 34359738376" + reach,
                              [](AttentionParams& p) { p.q_row_stride = kFar; });
  expect_refused<Unsupported>(TileRule::kAligned, "q_row_stride is 1073741832" + reach,
                              [](AttentionParams& p) {
                                p.max_total_q = 33;
                                p.q_row_stride = kTokens;
                              });
  expect_refused<Unsupported>(TileRule::kAligned, "q_head_stride is 34359738376" + reach,
                              [](AttentionParams& p) { p.q_head_stride = kFar; });
  expect_accepted(TileRule::kAligned, "one row", [](AttentionParams& p) {
    p.max_total_q = p.max_q_len = 1;
    p.q_row_stride = -1;
  });
}

void test_refused_launches() {
  for (const TileRule rule : kRules) {
    const AttentionParams p = whole_call(rule);
    const size_t bytes = cuda_attention_workspace_bytes(p);
    const auto refused = [&](const std::string& part, void* workspace, size_t size, int spare) {
      expect_thrown<BadArgument>(name_of(rule), part,
                                 [&] { cuda_attention(p, workspace, size, nullptr, spare); });
      AttentionContext context;
      context.spare_multiprocessors = spare;
      expect_thrown<BadArgument>(name_of(rule) + " by attention()", part,
                                 [&] { attention(p, cuda_sm90_kernel, workspace, size, context); });
      kascade_attention_params c = to_c(p);
      c.spare_multiprocessors = spare;
      const int code = rule == TileRule::kStep ? kascade_cuda_decode(&c, workspace, size, nullptr)
                                               : kascade_cuda_prefill(&c, p.tile, workspace, size, nullptr);
      EXPECT(code == KASCADE_BAD_ARGUMENT, "C interface, %s: code %d, expected '%s'", name_of(rule).c_str(),
             code, part.c_str());
      EXPECT(std::strstr(kascade_cuda_last_error(), part.c_str()) != nullptr,
             "C interface, %s: the message lacks '%s': %s", name_of(rule).c_str(), part.c_str(),
             kascade_cuda_last_error());
    };
    refused(text("workspace_bytes is %zu, must be at least %zu", bytes - 1, bytes), nowhere(20), bytes - 1,
            0);
    refused("workspace is ", nullptr, bytes, 0);
    auto* misaligned = static_cast<std::byte*>(nowhere(20)) + 64;
    refused("workspace is at address 1310784, must be 256-byte aligned", misaligned, bytes, 0);
    refused("spare_multiprocessors is -1, must be 0 or more", nowhere(20), bytes, -1);
  }
}

void test_refused_by_c_interface() {
  size_t bytes = 0;
  kascade_attention_params shape = {};
  shape.head_dim = 7;
  EXPECT(kascade_cuda_decode_workspace(&shape, &bytes) == KASCADE_BAD_ARGUMENT, "decode takes a bad shape");
  for (const TileRule rule : kRules) {
    const bool decode = rule == TileRule::kStep;
    const kascade_attention_params whole = to_c(whole_call(rule));
    const auto ask = [&](const kascade_attention_params* c, size_t* to) {
      return decode ? kascade_cuda_decode_workspace(c, to) : kascade_cuda_prefill_workspace(c, 32, to);
    };
    const auto call = [&](const kascade_attention_params* c) {
      return decode ? kascade_cuda_decode(c, nowhere(20), size_t{1} << 60, nullptr)
                    : kascade_cuda_prefill(c, 32, nowhere(20), size_t{1} << 60, nullptr);
    };
    EXPECT(ask(&whole, &bytes) == KASCADE_OK && bytes == cuda_attention_workspace_bytes(whole_call(rule)),
           "%s: %zu bytes of workspace: %s", name_of(rule).c_str(), bytes, kascade_cuda_last_error());
    const auto expect_code = [&](int code, int expected, const char* part) {
      EXPECT(code == expected, "%s: code %d, expected %d, '%s'", name_of(rule).c_str(), code, expected, part);
      EXPECT(std::strstr(kascade_cuda_last_error(), part) != nullptr, "%s: the message lacks '%s': %s",
             name_of(rule).c_str(), part, kascade_cuda_last_error());
    };
    expect_code(ask(nullptr, &bytes), KASCADE_BAD_ARGUMENT, "params");
    expect_code(ask(&whole, nullptr), KASCADE_BAD_ARGUMENT, "bytes is null");
    expect_code(call(nullptr), KASCADE_BAD_ARGUMENT, "params is null");
    const auto refused = [&](int code, const char* part, void (*change)(kascade_attention_params&)) {
      kascade_attention_params c = whole;
      change(c);
      expect_code(call(&c), code, part);
    };
    using Params = kascade_attention_params;
    refused(KASCADE_BAD_ARGUMENT, "role is 4, must be in 0..3", [](Params& c) { c.role = 4; });
    refused(KASCADE_BAD_ARGUMENT, "set_owner is 255, must be in 0..2", [](Params& c) { c.set_owner = -1; });
    refused(KASCADE_BAD_ARGUMENT, "budget.own_tile is 3, must be in 0..2",
            [](Params& c) { c.budget.own_tile = 3; });
    refused(KASCADE_BAD_ARGUMENT, "budget.percent_hundredths is 10001, must be in 0..10000",
            [](Params& c) { c.budget.percent_hundredths = 10001; });
    refused(KASCADE_BAD_ARGUMENT, "capacity is 1, must be at least ", [](Params& c) { c.capacity = 1; });
    refused(KASCADE_BAD_ARGUMENT, "k_scale is 0, must be positive and finite",
            [](Params& c) { c.k_scale = 0; });
    refused(KASCADE_BAD_ARGUMENT, "q is null, must be given", [](Params& c) { c.q = nullptr; });
    refused(KASCADE_BAD_ARGUMENT, "k_token_stride is 12, must be a multiple of 8",
            [](Params& c) { c.k_token_stride = 12; });
    refused(KASCADE_UNSUPPORTED, "head_dim is 32; supported: 64, 128, 256",
            [](Params& c) { c.head_dim = 32; });
    refused(KASCADE_UNSUPPORTED, "kv_dtype is f32; supported: f16, bf16",
            [](Params& c) { c.q_dtype = c.kv_dtype = KASCADE_F32; });
    refused(KASCADE_UNSUPPORTED, "max_kv_len is 0; supported: a stated maximum",
            [](Params& c) { c.max_kv_len = 0; });
  }
  const kascade_attention_params whole = to_c(whole_call(TileRule::kAligned));
  EXPECT(kascade_cuda_prefill(&whole, 129, nowhere(20), size_t{1} << 60, nullptr) == KASCADE_BAD_ARGUMENT,
         "prefill takes tiles of 129");
  EXPECT(std::strstr(kascade_cuda_last_error(), "tile is 129, must be in 1..128") != nullptr,
         "the message is %s", kascade_cuda_last_error());
}

/// All ways in give the same, with all multiprocessors and with more spared than there are.
void test_ways_in() {
  for (const TileRule rule : kRules) {
    Case c;
    c.role = Role::kAnchor;
    c.tile_rule = rule;
    c.q_lens = {3, 1};
    c.kv_lens = {700, 260};
    current = "ways in, " + name_of(rule);
    const HostData data = make_data(c);
    DeviceRun plain(c, data, Placement{.paged = true});
    plain.launch();
    const Outcome expected = plain.results();
    for (const int spare : {0, 100000}) {
      DeviceRun by_operator(c, data, Placement{.paged = true});
      AttentionContext context;
      context.spare_multiprocessors = spare;
      attention(by_operator.params(), cuda_sm90_kernel, by_operator.workspace().as<void>(),
                by_operator.workspace().bytes(), context);
      EXPECT(same(by_operator.results(), expected), "attention() differs, %d spared", spare);
      DeviceRun by_c(c, data, Placement{.paged = true});
      kascade_attention_params params = to_c(by_c.params());
      params.spare_multiprocessors = spare;
      void* workspace = by_c.workspace().as<void>();
      const size_t bytes = by_c.workspace().bytes();
      const int code = rule == TileRule::kStep
                           ? kascade_cuda_decode(&params, workspace, bytes, nullptr)
                           : kascade_cuda_prefill(&params, c.tile, workspace, bytes, nullptr);
      EXPECT(code == KASCADE_OK, "the C interface failed, %d spared: %s", spare, kascade_cuda_last_error());
      EXPECT(same(by_c.results(), expected), "the C interface differs, %d spared", spare);
    }
  }
}

const Registered kTests[] = {
    {10, "refused shapes", test_refused_shapes, "host all sanitize"},
    {10, "refused strides", test_refused_strides, "host all sanitize"},
    {10, "refused launches", test_refused_launches, "host all sanitize"},
    {10, "refused by the C interface", test_refused_by_c_interface, "host all sanitize"},
    {10, "ways in", test_ways_in, "all"}};

}  // namespace
}  // namespace kascade::cuda_test
