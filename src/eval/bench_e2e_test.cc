// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_e2e.h"

#include "base/json.h"
#include "base/svg_test_util.h"
#include "eval/bench_e2e_device.h"
#include "eval/eval_test_util.h"
#include "eval/model_shapes.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::count_of;
using test::expect_well_formed;
using test::message_of;
using test::tiny_model;
using ::testing::HasSubstr;
using ::testing::Not;

E2eRun made_up_run(const std::string& policy, double seconds) {
  E2eRun run;
  run.policy = policy;
  run.description = policy + " <b>&\x01\xff";
  run.seconds = seconds;
  run.min_seconds = seconds * 0.9;
  run.parts[Part::kProducts] = 0.4 * seconds;
  run.parts[Part::kDense] = policy == "dense" ? 0.5 * seconds : 0;
  run.parts[Part::kAnchor] = run.parts[Part::kReuse] = 0.2 * seconds;
  run.parts[Part::kRest] = 0.1 * seconds;
  run.memory_bytes = 85'000'000'000;
  return run;
}

// Numbers that no machine gave.
E2eReport made_up_report() {
  E2eReport report;
  report.device = "cuda";
  report.machine = "GPU <one> & only";
  report.random_weights = true;
  report.config = shape_model("llama-3.1-8b", 1)->config();
  report.weight_bytes = 16'000'000'000;
  report.limits = {4000, 700, 650};
  report.steps = 32;
  report.repetitions = 3;
  report.plan = "published";
  E2eWorkResult decode;
  decode.work = {Phase::kDecode, 4, 131072};
  decode.runs = {made_up_run("dense", 0.025), made_up_run("kascade", 0.01)};
  decode.dense_bytes = 8e10;
  E2eWorkResult prefill;
  prefill.work = {Phase::kPrefill, 1, 32768};
  prefill.runs = {made_up_run("dense", 1.5), made_up_run("kascade", 1.25)};
  prefill.product_flop = 3.15e14;
  prefill.dense_attention_flop = 3e14;
  report.works = {decode, prefill};
  return report;
}

TEST(BenchE2eWork, ParsesAndNames) {
  EXPECT_EQ(parse_e2e_work("decode:4x128K"), (E2eWork{Phase::kDecode, 4, 131072}));
  EXPECT_EQ(parse_e2e_work("decode:100"), (E2eWork{Phase::kDecode, 1, 100}));
  EXPECT_EQ(parse_e2e_work("prefill:32K"), (E2eWork{Phase::kPrefill, 1, 32768}));
  EXPECT_EQ(e2e_work_name({Phase::kPrefill, 1, 1000}), "prefill:1000");
  for (const char* name : {"decode:4x128K", "decode:1x100", "prefill:32K"})
    EXPECT_EQ(e2e_work_name(parse_e2e_work(name)), name);
}

TEST(BenchE2eWork, RefusesWhatIsNone) {
  for (const char* text :
       {"", ":", "decode", "decode:", "decode:x", "decode:4x", "decode:x128K", "decode:0x128K", "decode:4x0",
        "decode:4x4x4", "decode:-1x5", "decode:4 x 128K", "prefill:4x32K", "prefill:", "Prefill:32K",
        "train:4K", "decode:99999999999x1", "decode:4x128k"})
    EXPECT_THAT(message_of<BadArgument>([&] { parse_e2e_work(text); }), HasSubstr("--work")) << text;
}

TEST(BenchE2eReport, JsonHoldsRatiosAndShares) {
  const Json document = parse_json(bench_e2e_json(made_up_report()), "report");
  EXPECT_EQ(document["bench"], "e2e");
  EXPECT_EQ(document["model"]["weights"], "random");
  EXPECT_TRUE(document["commit"].is_null());
  const Json& decode = document["work"][0];
  EXPECT_EQ(decode["name"], "decode:4x128K");
  EXPECT_DOUBLE_EQ(decode["runs"][1]["ratio_to_dense"], 2.5);
  EXPECT_DOUBLE_EQ(decode["runs"][1]["tokens_per_s"], 400);
  EXPECT_DOUBLE_EQ(decode["runs"][0]["share_of_read_limit"], 0.8);  // 20 ms at 4 TB/s, of 25
  EXPECT_TRUE(decode["runs"][1]["share_of_read_limit"].is_null());
  EXPECT_FALSE(decode["runs"][0].contains("products_share_of_peak"));
  const Json& prefill = document["work"][1];
  EXPECT_DOUBLE_EQ(prefill["runs"][0]["ratio_to_dense"], 1);
  EXPECT_NEAR(prefill["runs"][0]["products_tflop_per_s"], 525, 1e-6);
  EXPECT_NEAR(prefill["runs"][0]["products_share_of_peak"], 0.75, 1e-9);      // 525 TFLOP/s of 700
  EXPECT_NEAR(prefill["runs"][0]["dense_attention_tflop_per_s"], 400, 1e-6);  // 3e14 in 0.75 s
  double shares = 0;
  for (const auto& [name, part] : prefill["runs"][1]["parts"].items()) shares += part["share"].get<double>();
  EXPECT_NEAR(shares, 1, 1e-12);
}

TEST(BenchE2eReport, UnknownStaysUnknown) {
  E2eReport report = made_up_report();
  report.limits = {};
  report.works[0].runs[0].policy = "sliding";
  report.works[0].runs[1].parts = {};
  const Json document = parse_json(bench_e2e_json(report), "report");
  EXPECT_TRUE(document["machine"]["read_gb_per_s"].is_null());
  EXPECT_TRUE(document["work"][0]["runs"][1]["ratio_to_dense"].is_null());
  EXPECT_TRUE(document["work"][0]["runs"][1]["parts"].is_null());
  EXPECT_TRUE(document["work"][1]["runs"][0]["products_share_of_peak"].is_null());
  EXPECT_THAT(bench_e2e_table(report), Not(HasSubstr("inf")));
  EXPECT_THAT(bench_e2e_table(report), Not(HasSubstr("nan")));
}

TEST(BenchE2eReport, TableNamesEveryRun) {
  const std::string table = bench_e2e_table(made_up_report());
  EXPECT_THAT(table, HasSubstr("decode:4x128K"));
  EXPECT_THAT(table, HasSubstr("25.00 ms"));
  EXPECT_THAT(table, HasSubstr("2.50"));
  EXPECT_EQ(count_of(table, "kascade"), 2u);
}

TEST(BenchE2eFigure, OneBarAPolicyAndOneBlockAPart) {
  const E2eReport report = made_up_report();
  const std::string svg = bench_e2e_svg(report);
  expect_well_formed(svg);
  EXPECT_THAT(svg, HasSubstr("GPU &lt;one&gt; &amp; only"));
  EXPECT_THAT(svg, HasSubstr("2.50x"));
  EXPECT_THAT(svg, HasSubstr("decode, 4 x 128K"));
  EXPECT_EQ(count_of(svg, ">kascade<"), 2u);
  // Background, six in the legend, five parts of each dense bar and four of each other.
  EXPECT_EQ(count_of(svg, "<rect"), 1u + 6 + 2 * (5 + 4));
  EXPECT_EQ(bench_e2e_svg(report), svg);
}

TEST(BenchE2eFigure, WithoutPartsOrWork) {
  E2eReport report = made_up_report();
  for (E2eWorkResult& work : report.works)
    for (E2eRun& run : work.runs) run.parts = {};
  expect_well_formed(bench_e2e_svg(report));
  EXPECT_EQ(count_of(bench_e2e_svg(report), "<rect"), 1u + 4);
  for (E2eWorkResult& work : report.works)
    for (E2eRun& run : work.runs) run.seconds = 0;
  expect_well_formed(bench_e2e_svg(report));
  report.works.clear();
  expect_well_formed(bench_e2e_svg(report));
}

E2eBenchOptions tiny_options(const std::vector<const char*>& works) {
  const ModelIdentity identity = tiny_model()->model().identity();
  const Plan plan = published_plan(identity);
  E2eBenchOptions options;
  for (const char* work : works) options.works.push_back(parse_e2e_work(work));
  options.policies = {make_policy("dense", {}, identity, nullptr),
                      make_policy("kascade", {}, identity, &plan)};
  options.steps = 2;
  options.repetitions = 2;
  options.threads = 1;
  return options;
}

TEST(BenchE2e, RunsEveryWorkOnTheCpu) {
  E2eBenchOptions options = tiny_options({"decode:3x40", "prefill:64", "decode:1x512"});
  double share = 0;
  options.progress = [&](double done, const std::string&) {
    EXPECT_GE(done, share);
    EXPECT_LE(done, 1);
    share = done;
  };
  const E2eReport report = bench_e2e(tiny_model(), options);
  EXPECT_EQ(report.device, "cpu");
  EXPECT_FALSE(report.machine.empty());
  ASSERT_EQ(report.works.size(), 3u);
  for (const E2eWorkResult& work : report.works) {
    ASSERT_EQ(work.runs.size(), 2u);
    for (const E2eRun& run : work.runs) {
      EXPECT_GT(run.seconds, 0);
      EXPECT_GT(run.min_seconds, 0);
      EXPECT_LE(run.min_seconds, run.seconds);
      EXPECT_EQ(run.parts_seconds(), 0);
      EXPECT_GT(run.memory_bytes, 0u);
    }
    EXPECT_GT(e2e_ratio_to_dense(work, work.runs[1]), 0);
  }
  // Weights of three layers and the head, and the keys and values of a step, in bf16.
  const ModelConfig& c = tiny_model()->config();
  const double matrices =
      c.layers * (2.0 * c.hidden * c.head_dim * (c.query_heads + c.kv_heads) + 3.0 * c.hidden * c.ffn) +
      double{1} * c.vocabulary * c.hidden;
  const double keys = 3 * 39.5 * 2 * c.layers * c.kv_heads * c.head_dim;
  EXPECT_DOUBLE_EQ(report.works[0].dense_bytes, 2 * (matrices + keys));
}

TEST(BenchE2e, RefusesWhatCannotRun) {
  const auto refused = [](const std::vector<const char*>& works, auto change) {
    E2eBenchOptions options = tiny_options(works);
    change(options);
    return message_of<Error>([&] { bench_e2e(tiny_model(), options); });
  };
  const auto nothing = [](E2eBenchOptions&) {};
  EXPECT_THAT(refused({"decode:1x513"}, nothing), HasSubstr("513 tokens, but the model's context is 512"));
  EXPECT_THAT(refused({"prefill:1K"}, nothing), HasSubstr("1024 tokens"));
  EXPECT_THAT(refused({"decode:1x5"}, nothing), HasSubstr("it has 5"));
  // Said before a cache is filled: the first work would run.
  EXPECT_THAT(refused({"decode:1x8", "decode:600x8"}, nothing),
              HasSubstr("decode:600x8: 600 rows a step, but an engine here takes 512"));
  EXPECT_THAT(refused({}, nothing), HasSubstr("work"));
  EXPECT_THAT(refused({"prefill:8"}, [](auto& o) { o.policies.clear(); }), HasSubstr("policies"));
  EXPECT_THAT(refused({"prefill:8"}, [](auto& o) { o.steps = 0; }), HasSubstr("steps"));
  EXPECT_THAT(refused({"prefill:8"}, [](auto& o) { o.repetitions = 0; }), HasSubstr("repetitions"));
  static const std::atomic<bool> stop{true};
  EXPECT_THAT(refused({"decode:1x8"}, [](auto& o) { o.cancel = &stop; }), HasSubstr("interrupted"));
}

TEST(ModelShapes, HaveTheSizesOfTheirNames) {
  const auto parameters = [](const ModelConfig& c) {
    const double layer = 2.0 * c.hidden * c.head_dim * (c.query_heads + c.kv_heads) + 3.0 * c.hidden * c.ffn;
    return c.layers * layer + (c.tied_embeddings ? 1.0 : 2.0) * c.vocabulary * c.hidden;
  };
  EXPECT_NEAR(parameters(shape_model("llama-3.1-8b", 1)->config()), 8.03e9, 0.01e9);
  EXPECT_NEAR(parameters(shape_model("qwen3-8b", 1)->config()), 8.19e9, 0.01e9);
  EXPECT_NEAR(parameters(shape_model("qwen2.5-1.5b", 1)->config()), 1.54e9, 0.01e9);
  EXPECT_EQ(shape_model("qwen3-8b", 131072)->config().context, 131072);
  EXPECT_EQ(shape_model("llama-3.1-8b", 5)->config().context, 131072);
  EXPECT_THAT(message_of<BadArgument>([] { shape_model("gpt-5", 1); }), HasSubstr("qwen2.5-1.5b"));
}

TEST(ModelShapes, PlansFit) {
  for (const std::string& name : model_shape_names()) {
    const ModelIdentity identity = shape_model(name, 1)->identity();
    const Plan plan = published_plan(identity);
    validate_plan(plan);
    check_plan_model(plan, identity, false);
    EXPECT_EQ(plan.anchors.size(), 5u) << name;
    make_policy("kascade", {}, identity, &plan);
  }
  const Plan llama = published_plan(shape_model("llama-3.1-8b", 1)->identity());
  EXPECT_EQ(llama.anchors, (std::vector<int>{0, 2, 8, 13, 14}));
  EXPECT_EQ(llama.needed_heads(0), (std::vector<uint8_t>{1, 0, 0, 0, 0, 0, 0, 0}));
  const Plan published =
      import_npy(KASCADE_FIXTURES "/reference_plans/Meta-Llama-3.1-8B-Instruct_layers_0_2_8_13_14.npy", {});
  EXPECT_EQ(llama.head_map, published.head_map);
  EXPECT_EQ(published_plan(shape_model("qwen3-8b", 1)->identity()).head_map,
            import_npy(KASCADE_FIXTURES "/reference_plans/Qwen3-8B_layers_0_2_7_14_23.npy", {}).head_map);
}

#ifdef KASCADE_CUDA
TEST(GpuMemoryPlan, CountsWhatIsThere) {
  const ModelConfig config = shape_model("llama-3.1-8b", 1)->config();
  const GpuMemoryPlan plan = plan_gpu_memory(config, 131072, 4);
  // 8.03e9 parameters in bf16, and rounding of each matrix to its alignment.
  EXPECT_NEAR(static_cast<double>(plan.weight_bytes), 16.06e9, 0.02e9);
  EXPECT_EQ(plan.kv_bytes, uint64_t{4} * 131072 * 32 * 2 * 8 * 128 * 2);
  EXPECT_GT(plan.scratch_bytes, 1'000'000'000u);
  EXPECT_LT(plan.scratch_bytes, 8'000'000'000u);
  EXPECT_EQ(plan.total(), plan.weight_bytes + plan.kv_bytes + plan.scratch_bytes);
  EXPECT_GT(plan_gpu_memory(config, 65537, 1).kv_bytes, plan_gpu_memory(config, 65536, 1).kv_bytes);
  // logits() takes up to 512 rows; what grows may grow by an eighth more than it needs.
  const uint64_t head_row = uint64_t{4096} * (4 + 2) + uint64_t{128256} * 4;
  const auto scratch = [&](int64_t batch) { return plan_gpu_memory(config, 64, batch).scratch_bytes; };
  EXPECT_EQ(scratch(1), scratch(512));
  EXPECT_EQ(scratch(1024) - scratch(512), 512 * head_row / 8 * 9);
}

TEST(GpuMemoryPlan, RefusesWhatAGpuRefuses) {
  ModelConfig config = shape_model("llama-3.1-8b", 1)->config();
  EXPECT_THAT(message_of<Unsupported>([&] { plan_gpu_memory(config, 131073, 1); }),
              HasSubstr("131073 tokens, but the model's context is 131072"));
  config.head_dim = 80;
  EXPECT_THAT(message_of<Unsupported>([&] { plan_gpu_memory(config, 1024, 1); }),
              HasSubstr("head_dim is 80"));
  config.head_dim = 128;
  config.ffn = 14340;
  EXPECT_THAT(message_of<Unsupported>([&] { plan_gpu_memory(config, 1024, 1); }), HasSubstr("14340"));
}

TEST(GpuMemoryPlan, NumbersThatNothingHoldsAreNamed) {
  ModelConfig config = shape_model("llama-3.1-8b", 1)->config();
  config.context = INT64_MAX;
  const auto refusal = [&](int64_t context, int64_t batch) {
    return message_of<BadArgument>([&] { plan_gpu_memory(config, context, batch); });
  };
  EXPECT_THAT(refusal(0, 1), HasSubstr("context"));
  EXPECT_THAT(refusal(1024, 0), HasSubstr("batch"));
  EXPECT_THAT(refusal(1024, -1), HasSubstr("batch"));
  EXPECT_THAT(refusal(INT64_MAX, 1), HasSubstr("9223372036854775807 tokens"));
  EXPECT_THAT(refusal(131072, INT64_MAX), HasSubstr("9223372036854775807 sequences"));
  EXPECT_THAT(refusal(64, 8193), HasSubstr("8193"));  // more than the rows of a step
  EXPECT_NO_THROW(plan_gpu_memory(config, 64, 8192));
}
#else
TEST(GpuMemoryPlan, NeedsABuildWithCuda) {
  const auto model = shape_model("llama-3.1-8b", 1);
  EXPECT_THAT(message_of<Unsupported>([&] { plan_gpu_memory(model->config(), 1024, 1); }),
              HasSubstr("no CUDA"));
  EXPECT_THAT(message_of<Unsupported>([&] { random_gpu_model(model, 1); }), HasSubstr("random weights"));
}
#endif

}  // namespace
}  // namespace kascade
