// SPDX-License-Identifier: Apache-2.0
#include <chrono>

#include "base/check.h"
#include "engine/text_stream.h"
#include "kascade/engine.h"
#include "ops/ops.h"

namespace kascade {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool cancelled(const GenerateOptions& options) {
  return options.cancel != nullptr && options.cancel->load(std::memory_order_relaxed);
}

void check(const Engine& engine, const Sequence& sequence, std::span<const int32_t> prompt,
           const GenerateOptions& options) {
  require<BadArgument>(options.max_tokens >= 0, "max_tokens: expected 0 or more, got {}", options.max_tokens);
  for (const std::string& stop : options.stops)
    require<BadArgument>(!stop.empty(), "stop: expected a text, got an empty one");
  const int64_t context = engine.model().config().context;
  const int64_t prompt_end = sequence.length() + static_cast<int64_t>(prompt.size());
  require<Unsupported>(prompt_end <= context, "context: a prompt of {} tokens, but the model's context is {}",
                       prompt_end, context);
  require<Unsupported>(options.max_tokens <= context - prompt_end,
                       "context: {} prompt and {} new tokens, but the model's context is {}", prompt_end,
                       options.max_tokens, context);
}

}  // namespace

GenerateResult generate(Engine& engine, Sequence& sequence, std::span<const int32_t> prompt,
                        const Policy* policy, const GenerateOptions& options,
                        const std::function<void(std::string_view)>& on_text) {
  check(engine, sequence, prompt, options);
  Sampler sampler(SamplingSettings{options.temperature, options.top_k, options.top_p, options.seed});
  const Tokenizer& tokenizer = engine.model().model().tokenizer();
  StreamDecoder decoder(tokenizer);
  TextStream stream(options.stops);
  GenerateResult result;
  result.prompt_tokens = static_cast<int64_t>(prompt.size());
  const auto emit = [&](std::string_view text) {
    if (on_text && !text.empty()) on_text(text);
  };

  const auto prefill_start = Clock::now();
  std::span<const float> hidden;
  try {
    hidden = prompt.empty() ? sequence.last_hidden()
                            : engine.prefill(sequence, prompt, policy, nullptr, {}, options.cancel);
  } catch (const Cancelled&) {
    result.finish = "cancelled";
    return result;
  }
  result.prefill_seconds = seconds_since(prefill_start);
  require<BadArgument>(options.max_tokens == 0 || !hidden.empty(),
                       "prompt: expected at least one token after the {} of the sequence, got none",
                       sequence.length());

  auto decode_start = Clock::now();
  result.finish = "length";
  int32_t next = -1;  // drawn by the last step
  while (result.new_tokens < options.max_tokens) {
    const int32_t token = next >= 0 ? next : sampler.sample(engine.logits(hidden));
    if (!options.ignore_end && tokenizer.ends_generation(token)) {
      result.finish = "end";
      break;
    }
    result.token_ids.push_back(token);
    if (++result.new_tokens == 1) decode_start = Clock::now();
    emit(stream.push(decoder.push(token)));
    if (stream.stopped()) {
      result.finish = "stop";
      break;
    }
    if (cancelled(options)) {
      result.finish = "cancelled";
      break;
    }
    if (result.new_tokens == options.max_tokens) break;
    const ForwardItem item{&sequence, {&token, 1}, 0};
    const TokenSampling sampling{.temperature = options.temperature,
                                 .top_k = options.top_k,
                                 .top_p = options.top_p,
                                 .random = options.temperature == 0 ? 0 : sampler.draw()};
    engine.forward_next({&item, 1}, policy, {&sampling, 1}, {&next, 1});
    hidden = sequence.last_hidden();  // what makes next -1 is the sampler's to report
  }
  if (result.new_tokens > 0) result.decode_seconds = seconds_since(decode_start);
  emit(stream.push(decoder.flush()));
  emit(stream.finish());
  if (stream.stopped()) result.finish = "stop";
  result.text = stream.text();
  return result;
}

}  // namespace kascade
