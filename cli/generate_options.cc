// SPDX-License-Identifier: Apache-2.0
#include "cli/generate_options.h"

#include "cli/console.h"

namespace kascade::cli {

void GenerateFlags::add(CLI::App& verb) {
  verb.add_option("--max-tokens,-n", max_tokens, "New tokens at most; 0 only reads the prompt")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->capture_default_str();
  verb.add_option("--temperature", temperature, "0 takes the likeliest token")->capture_default_str();
  verb.add_option("--top-k", top_k, "Sample among the K likeliest tokens; 0 = all")->capture_default_str();
  verb.add_option("--top-p", top_p, "Sample among the likeliest tokens of this mass")->capture_default_str();
  verb.add_option("--seed", seed, "The same seed gives the same text")->capture_default_str();
  verb.add_option("--stop", stops, "End before this string; may be given several times")
      ->allow_extra_args(false);
}

GenerateOptions GenerateFlags::make(bool ignore_end) const {
  return {.max_tokens = max_tokens,
          .temperature = temperature,
          .top_k = top_k,
          .top_p = top_p,
          .seed = seed,
          .stops = stops,
          .ignore_end = ignore_end,
          .cancel = &interrupted()};
}

}  // namespace kascade::cli
