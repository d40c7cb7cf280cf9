// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_engine.h"

#include <algorithm>

#include "base/check.h"

namespace kascade {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<EngineBenchResult> bench_engine(std::shared_ptr<const PreparedModel> model,
                                            const EngineBenchOptions& options) {
  require<BadArgument>(!options.policies.empty(), "policies: expected at least one");
  require<BadArgument>(!options.prompt.empty(), "prompt: expected at least one token");
  require<BadArgument>(options.repetitions >= 1, "repetitions: expected at least 1, got {}",
                       options.repetitions);
  require<BadArgument>(options.decode_tokens >= 1, "decode tokens: expected at least 1, got {}",
                       options.decode_tokens);
  EngineOptions engine_options;
  engine_options.threads = options.threads;
  engine_options.cache_tokens = static_cast<int64_t>(options.prompt.size()) + options.decode_tokens + 1;
  const auto engine = Engine::create(std::move(model), engine_options);
  GenerateOptions generate_options;
  generate_options.max_tokens = options.decode_tokens + 1;  // the first comes out of the prefill
  generate_options.ignore_end = true;
  generate_options.cancel = options.cancel;

  const size_t count = options.policies.size();
  std::vector<EngineBenchResult> results(count);
  std::vector<std::vector<double>> prefill(count), decode(count);
  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    for (size_t i = 0; i < count; ++i) {
      const auto sequence = engine->make_sequence();
      const GenerateResult run =
          generate(*engine, *sequence, options.prompt, options.policies[i].get(), generate_options, {});
      require<Cancelled>(run.finish != "cancelled", "interrupted after {} of {} runs",
                         static_cast<size_t>(repetition) * count + i,
                         count * static_cast<size_t>(options.repetitions));
      prefill[i].push_back(static_cast<double>(run.prompt_tokens) / run.prefill_seconds);
      decode[i].push_back(static_cast<double>(run.new_tokens - 1) / run.decode_seconds);
      results[i].token_ids = run.token_ids;
      if (options.progress) {
        options.progress(static_cast<int64_t>(static_cast<size_t>(repetition) * count + i + 1),
                         static_cast<int64_t>(count) * options.repetitions);
      }
    }
  }
  for (size_t i = 0; i < count; ++i) {
    results[i].policy = options.policies[i]->describe();
    results[i].prefill_tokens_per_s = median(prefill[i]);
    results[i].decode_tokens_per_s = median(decode[i]);
    results[i].memory_bytes = engine->memory_bytes();
  }
  return results;
}

}  // namespace kascade
