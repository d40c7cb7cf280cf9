// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/json.h"
#include "eval/bench_attention_cuda.h"
#include "eval/eval_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::message_of;
using ::testing::HasSubstr;
using ::testing::Not;

template <class Change>
std::string refusal(Change change) {
  AttentionBenchOptions options;
  change(options);
  return message_of<BadArgument>([&] { check_attention_bench(options); });
}

TEST(BenchAttentionOptions, OutOfRangeIsNamed) {
  EXPECT_NO_THROW(check_attention_bench({}));
  EXPECT_THAT(refusal([](auto& o) { o.roles = {0, 0, 0}; }), HasSubstr("roles (all) is 0"));
  EXPECT_THAT(refusal([](auto& o) { o.tile = 129; }), HasSubstr("tile is 129"));
  EXPECT_THAT(refusal([](auto& o) { o.needed = {1}; }), HasSubstr("needed has 1 entries"));
  // Rows, keys and pages that 32 bits do not count.
  EXPECT_THAT(refusal([](auto& o) {
                o.phase = Phase::kPrefill;
                o.batch = 4096;
                o.context = int64_t{1} << 24;
              }),
              HasSubstr("batch x context is 68719476736"));
  EXPECT_THAT(refusal([](auto& o) {
                o.page_size = 1;
                o.batch = 4096;
                o.context = int64_t{1} << 24;
              }),
              HasSubstr("batch x pages is 68719476736"));
}

TEST(BenchAttention, RunsOnTheCpu) {
  AttentionBenchOptions options;
  options.context = 200;
  options.threads = 1;
  options.repetitions = 1;
  options.kernel = "reference";  // which is held against no limits: what else runs here changes nothing
  const AttentionBenchResult result = bench_attention(options, {}, nullptr);
  const Json document = parse_json(bench_attention_json(result), "report");
  EXPECT_EQ(document["machine"]["device"], "cpu");
  EXPECT_EQ(document["machine"]["threads"], 1);
  for (const char* role : kTimedRoleNames) EXPECT_GT(document["roles"][role]["ms"], 0) << role;
  EXPECT_THAT(bench_attention_table(result), HasSubstr(", 1 threads, kernel reference"));
}

/// Numbers that no GPU gave.
AttentionBenchResult made_up_result() {
  AttentionBenchResult result;
  result.kernel = "cuda-sm90";
  result.machine = "a GPU";
  result.device = "cuda";
  result.read_gb_per_s = 4000;
  for (const char* name : kTimedRoleNames) result.roles.push_back({.name = name, .ms = 1, .gb_per_s = 2000});
  result.least_captured = -1;
  return result;
}

TEST(BenchAttentionReport, AGpuHasNoThreadsAndMultipliesBf16) {
  AttentionBenchResult result = made_up_result();
  const std::string decode = bench_attention_table(result);
  EXPECT_THAT(decode, HasSubstr("decode on a GPU, kernel cuda-sm90"));
  EXPECT_THAT(decode, Not(HasSubstr("threads")));
  EXPECT_THAT(decode, Not(HasSubstr("TFLOP/s")));  // not measured in decode
  result.options.phase = Phase::kPrefill;
  result.options.dtype = DType::kF16;
  result.bf16_tflop_per_s = result.peak_tflop_per_s = 800;
  EXPECT_THAT(bench_attention_table(result), HasSubstr("800.000 TFLOP/s bf16"));
}

#ifdef KASCADE_CUDA
template <class E, class Change>
std::string refused_by_a_gpu(Change change) {
  AttentionBenchOptions options;
  change(options);
  return message_of<E>([&] { bench_attention_cuda(options, {}, nullptr); });
}

TEST(BenchAttentionCuda, RefusesBeforeItTouchesADevice) {
  EXPECT_THAT(refused_by_a_gpu<BadArgument>([](auto& o) { o.roles = {0, 0, 0}; }), HasSubstr("roles"));
  EXPECT_THAT(refused_by_a_gpu<BadArgument>([](auto& o) { o.kernel = "avx2"; }), HasSubstr("cuda-sm90"));
  EXPECT_THAT(refused_by_a_gpu<BadArgument>([](auto& o) { o.threads = 2; }), HasSubstr("threads"));
  EXPECT_THAT(refused_by_a_gpu<Unsupported>([](auto& o) { o.dtype = DType::kF32; }), HasSubstr("f32"));
}
#else
TEST(BenchAttentionCuda, NeedsABuildWithCuda) {
  EXPECT_THAT(message_of<Unsupported>([] { bench_attention_cuda({}, {}, nullptr); }), HasSubstr("no CUDA"));
}
#endif

}  // namespace
}  // namespace kascade
