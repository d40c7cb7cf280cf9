// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_e2e.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/amount.h"
#include "base/check.h"
#include "base/text.h"
#include "eval/bench_e2e_device.h"
#include "eval/random.h"

namespace kascade {
namespace {

using Clock = std::chrono::steady_clock;

// Before every timed run: the first step of a shape runs eagerly, the second is captured in a graph.
constexpr int64_t kWarmUpSteps = 3;
constexpr int64_t kPartSteps = 3;
constexpr double kWeightBytes = 2;        // bf16, as are keys and values
constexpr int64_t kMostSequences = 8192;  // rows of a step

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

void check(const ModelConfig& config, const E2eBenchOptions& options) {
  require<BadArgument>(!options.works.empty(), "work: expected at least one");
  require<BadArgument>(!options.policies.empty(), "policies: expected at least one");
  require<BadArgument>(options.repetitions >= 1, "repetitions: expected at least 1, got {}",
                       options.repetitions);
  require<BadArgument>(options.steps >= 1, "steps: expected at least 1, got {}", options.steps);
  for (const E2eWork& work : options.works) {
    require<Unsupported>(work.tokens <= config.context, "{}: {} tokens, but the model's context is {}",
                         e2e_work_name(work), work.tokens, config.context);
    require<BadArgument>(work.phase != Phase::kDecode || work.tokens > kWarmUpSteps + options.steps,
                         "{}: {} steps and {} to warm up end at its last key; it has {}", e2e_work_name(work),
                         options.steps, kWarmUpSteps, work.tokens);
  }
}

// Multiplications of one row with the stored matrices of a layer.
double layer_products(const ModelConfig& config) {
  const double hidden = config.hidden, width = 1.0 * config.query_heads * config.head_dim;
  const double kv_width = 1.0 * config.kv_heads * config.head_dim;
  return hidden * (width + 2 * kv_width) + width * hidden + 3 * hidden * config.ffn;
}

double head_products(const ModelConfig& config) {
  return static_cast<double>(config.vocabulary) * config.hidden;
}

// Of a dense step of batch sequences of length keys each.
double dense_step_bytes(const ModelConfig& config, int32_t batch, double length) {
  const double weights = config.layers * layer_products(config) + head_products(config);
  const double keys = 2.0 * config.layers * config.kv_heads * config.head_dim * length * batch;
  return (weights + keys) * kWeightBytes;
}

// All rows but those of the last chunk leave the last layer once their keys are stored.
double prefill_product_flop(const ModelConfig& config, int64_t tokens, int64_t chunk) {
  const auto rows = static_cast<double>(tokens);
  const auto last_rows = static_cast<double>((tokens - 1) % chunk + 1);
  const double qkv =
      static_cast<double>(config.hidden) * (config.query_heads + 2.0 * config.kv_heads) * config.head_dim;
  const double layer = layer_products(config);
  return 2 * (rows * (layer * (config.layers - 1) + qkv) + last_rows * (layer - qkv) + head_products(config));
}

double dense_attention_flop(const ModelConfig& config, int64_t tokens, int64_t chunk) {
  const double row_flop = 4.0 * config.query_heads * config.head_dim;
  const auto pairs = [](double rows) { return rows * (rows + 1) / 2; };
  const auto rows = static_cast<double>(tokens);
  const auto last_rows = static_cast<double>((tokens - 1) % chunk + 1);
  return row_flop * (pairs(rows) * (config.layers - 1) + pairs(rows) - pairs(rows - last_rows));
}

class Bench {
 public:
  Bench(const std::shared_ptr<const PreparedModel>& model, const E2eBenchOptions& options)
      : model_(model), config_(model->config()), o_(options) {}

  E2eReport run() {
    check(config_, o_);
    require_memory();
    E2eReport report;
    report.device = model_->device();
    const E2eDevice device = e2e_device(*model_);
    report.machine = device.name;
    report.device_memory_bytes = device.memory_bytes;
    report.weight_bytes = device.weight_bytes;
    report.config = config_;
    report.invariant = o_.invariant;
    report.steps = o_.steps;
    report.repetitions = o_.repetitions;
    say("limits of the device");
    report.limits = measure_e2e_limits(*model_);
    for (const E2eWork& work : o_.works) {
      EngineOptions engine_options;
      engine_options.threads = o_.threads;
      engine_options.invariant = o_.invariant;
      const int64_t page = engine_options.page_size;
      engine_options.cache_tokens = work.batch * ((work.tokens - 1) / page + 1) * page;
      engine_ = Engine::create(model_, engine_options);
      require_rows();
      report.threads = engine_->threads();
      report.works.push_back(work.phase == Phase::kDecode ? decode(work) : prefill(work));
      engine_.reset();
      ++works_done_;
    }
    return report;
  }

 private:
  // What does not fit is said before the first work takes its time.
  void require_memory() const {
    if (std::string_view(model_->device()) != "cuda") return;
    const GpuMemory gpu = gpu_memory();
    for (const E2eWork& work : o_.works) {
      GpuMemoryPlan plan = plan_gpu_memory(config_, work.tokens, work.batch);
      plan.weight_bytes = 0;  // there already
      require<OutOfMemory>(
          plan.total() <= gpu.free_bytes,
          "{}: needs {:.1f} GB for KV cache and scratch, but {:.1f} of the {:.1f} GB of {} are "
          "free beside the weights",
          e2e_work_name(work), static_cast<double>(plan.total()) * 1e-9,
          static_cast<double>(gpu.free_bytes) * 1e-9, static_cast<double>(gpu.total_bytes) * 1e-9, gpu.name);
    }
  }

  // All work, before any of it: what an engine takes does not depend on the work.
  void require_rows() const {
    for (const E2eWork& work : o_.works)
      require<BadArgument>(work.phase != Phase::kDecode || work.batch <= engine_->max_rows(),
                           "{}: {} rows a step, but an engine here takes {}", e2e_work_name(work), work.batch,
                           engine_->max_rows());
  }

  void say(const std::string& doing, double share_of_work = 0) const {
    if (!o_.progress) return;
    o_.progress((static_cast<double>(works_done_) + share_of_work) / static_cast<double>(o_.works.size()),
                doing);
  }

  void stop_if_cancelled() const {
    if (o_.cancel != nullptr && o_.cancel->load(std::memory_order_relaxed))
      throw_error<Cancelled>("bench: interrupted after {} of {} pieces of work", works_done_,
                             o_.works.size());
  }

  std::vector<int32_t> random_tokens(int64_t count, uint64_t seed) const {
    SplitMix random(seed);
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(config_.vocabulary));
    return tokens;
  }

  // Rounds: 0 tells the parts (where the device does), the others are timed; all go round the policies.
  template <class TimeRun>
  void rounds(const E2eWork& work, E2eWorkResult& result, TimeRun time_run) {
    const size_t count = o_.policies.size();
    result.runs.resize(count);
    std::vector<std::vector<double>> seconds(count);
    for (int round = 0; round <= o_.repetitions; ++round) {
      for (size_t i = 0; i < count; ++i) {
        const Policy& policy = *o_.policies[i];
        say(fmt::format("{} {}", e2e_work_name(work), policy.name()),
            static_cast<double>(round * static_cast<int>(count) + static_cast<int>(i)) /
                static_cast<double>(count * static_cast<size_t>(o_.repetitions + 1)));
        const double taken = time_run(policy, round == 0, result.runs[i]);
        if (round > 0) seconds[i].push_back(taken);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      E2eRun& run = result.runs[i];
      run.policy = o_.policies[i]->name();
      run.description = o_.policies[i]->describe();
      run.seconds = median(seconds[i]);
      run.min_seconds = *std::min_element(seconds[i].begin(), seconds[i].end());
    }
  }

  void require_numbers(bool numbers, const Policy& policy) const {
    if (!numbers)
      throw Error(ErrorKind::kDevice, fmt::format("policy {}: logits are no numbers", policy.name()));
  }

  E2eWorkResult prefill(const E2eWork& work) {
    const std::vector<int32_t> prompt = random_tokens(work.tokens, o_.seed);
    const auto first_token = [&](std::span<const int32_t> tokens, const Policy& policy, E2eRun& run) {
      const auto sequence = engine_->make_sequence();
      const std::span<const float> logits =
          engine_->logits(engine_->prefill(*sequence, tokens, &policy, nullptr, {}, o_.cancel));
      require_numbers(std::isfinite(*std::max_element(logits.begin(), logits.end())), policy);
      run.memory_bytes = engine_->memory_bytes();
    };
    E2eWorkResult result;
    result.work = work;
    result.product_flop = prefill_product_flop(config_, work.tokens, engine_->max_rows());
    result.dense_attention_flop = dense_attention_flop(config_, work.tokens, engine_->max_rows());
    rounds(work, result, [&](const Policy& policy, bool untimed, E2eRun& run) {
      if (untimed) {
        // Whole chunks first: their products are chosen by time.
        first_token(
            std::span(prompt).first(std::min(prompt.size(), static_cast<size_t>(engine_->max_rows()))),
            policy, run);
        run.parts = time_e2e_parts(*engine_, [&] { first_token(prompt, policy, run); });
        return 0.0;
      }
      const auto start = Clock::now();
      first_token(prompt, policy, run);
      return seconds_since(start);
    });
    return result;
  }

  E2eWorkResult decode(const E2eWork& work) {
    const int64_t base = work.tokens - kWarmUpSteps - o_.steps;
    std::vector<std::unique_ptr<Sequence>> sequences;
    for (int32_t b = 0; b < work.batch; ++b) {
      say(fmt::format("{} filling caches", e2e_work_name(work)));
      stop_if_cancelled();
      sequences.push_back(engine_->make_sequence());
      const uint64_t seed = o_.seed + static_cast<uint64_t>(b);
      if (!fill_random_keys(*engine_, *sequences.back(), base, seed))
        engine_->prefill(*sequences.back(), random_tokens(base, seed), nullptr, nullptr, {}, o_.cancel);
    }
    std::vector<int32_t> tokens, next(static_cast<size_t>(work.batch));
    std::vector<ForwardItem> items(static_cast<size_t>(work.batch));
    const auto steps = [&](const Policy& policy, int64_t count) {
      for (int64_t step = 0; step < count; ++step) {
        stop_if_cancelled();
        for (size_t b = 0; b < items.size(); ++b)
          items[b] = ForwardItem{sequences[b].get(), std::span(tokens).subspan(b, 1), 0};
        engine_->forward_greedy(items, &policy, next);
        require_numbers(std::find(next.begin(), next.end(), -1) == next.end(), policy);
        tokens = next;
      }
    };
    E2eWorkResult result;
    result.work = work;
    result.dense_bytes = dense_step_bytes(
        config_, work.batch, static_cast<double>(work.tokens) - 0.5 * static_cast<double>(o_.steps - 1));
    rounds(work, result, [&](const Policy& policy, bool untimed, E2eRun& run) {
      for (const auto& sequence : sequences) sequence->truncate(base);
      tokens = random_tokens(work.batch, o_.seed);
      steps(policy, kWarmUpSteps);
      run.memory_bytes = engine_->memory_bytes();
      if (untimed) {
        const int64_t count = std::min(kPartSteps, o_.steps);
        run.parts = time_e2e_parts(*engine_, [&] { steps(policy, count); });
        for (double& part : run.parts) part /= static_cast<double>(count);
        return 0.0;
      }
      const auto start = Clock::now();
      steps(policy, o_.steps);
      return seconds_since(start) / static_cast<double>(o_.steps);
    });
    return result;
  }

  std::shared_ptr<const PreparedModel> model_;
  const ModelConfig& config_;
  const E2eBenchOptions& o_;
  std::unique_ptr<Engine> engine_;
  size_t works_done_ = 0;
};

}  // namespace

double E2eRun::parts_seconds() const { return std::accumulate(parts.begin(), parts.end(), 0.0); }

E2eWork parse_e2e_work(std::string_view text) {
  const auto fail = [&] {
    throw_error<BadArgument>("--work: expected work like decode:4x128K or prefill:32K, got {}",
                             quote_text(text));
  };
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) fail();
  const std::string_view kind = text.substr(0, colon);
  std::string_view size = text.substr(colon + 1);
  E2eWork work;
  if (kind == "decode") {
    work.phase = Phase::kDecode;
    if (const size_t times = size.find('x'); times != std::string_view::npos) {
      const int64_t batch = parse_count(size.substr(0, times), "--work: batch");
      require<BadArgument>(batch >= 1 && batch <= kMostSequences, "--work: expected 1..{} sequences, got {}",
                           kMostSequences, batch);
      work.batch = static_cast<int32_t>(batch);
      size = size.substr(times + 1);
    }
  } else if (kind == "prefill") {
    work.phase = Phase::kPrefill;
  } else {
    fail();
  }
  work.tokens = parse_count(size, "--work: tokens");
  return work;
}

std::string e2e_work_name(const E2eWork& work) {
  const std::string tokens =
      work.tokens % 1024 == 0 ? fmt::format("{}K", work.tokens / 1024) : fmt::format("{}", work.tokens);
  return work.phase == Phase::kDecode ? fmt::format("decode:{}x{}", work.batch, tokens)
                                      : fmt::format("prefill:{}", tokens);
}

E2eReport bench_e2e(const std::shared_ptr<const PreparedModel>& model, const E2eBenchOptions& options) {
  require<BadArgument>(model != nullptr, "model: expected one, got none");
  return Bench(model, options).run();
}

double e2e_ratio_to_dense(const E2eWorkResult& result, const E2eRun& run) {
  for (const E2eRun& dense : result.runs)
    if (dense.policy == "dense") return run.seconds > 0 ? dense.seconds / run.seconds : 0;
  return 0;
}

}  // namespace kascade
