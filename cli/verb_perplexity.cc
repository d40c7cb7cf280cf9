// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>

#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/perplexity.h"

namespace kascade::cli {
namespace {

Json region_json(const RegionScore& region, bool per_token) {
  Json json = {{"positions", region.positions}};
  const auto add = [&](const std::string& name, const Figure& figure) {
    // An empty region has no figures; null says so where 0 would look like a perfect score.
    json[name] = region.positions > 0 ? Json(figure.value) : Json();
    json[name + "_low"] = region.positions > 0 ? Json(figure.low) : Json();
    json[name + "_high"] = region.positions > 0 ? Json(figure.high) : Json();
  };
  add("nll", region.nll);
  add("dense_nll", region.dense_nll);
  add("kl", region.kl);
  add("top1", region.top1);
  if (per_token) {
    json["nll_per_token"] = region.nlls;
    json["dense_nll_per_token"] = region.dense_nlls;
    json["kl_per_token"] = region.kls;
    json["top1_per_token"] = region.agree;
  }
  return json;
}

struct Perplexity {
  RunOptions options;
  PolicyFlags policy_flags;
  TextSource source;
  std::optional<int64_t> prefill, score_last;
  bool per_token = false;

  void run() const {
    const auto model = options.open();
    std::optional<Plan> plan;
    const auto policy = policy_flags.make(*model, &plan);
    const std::vector<int32_t> tokens = source.ids(model->tokenizer());
    EngineOptions engine_options = options.engine();
    engine_options.cache_tokens = 2 * (static_cast<int64_t>(tokens.size()) + engine_options.page_size);
    const auto engine = options.make_engine(model, engine_options);
    Progress progress;
    PerplexityOptions perplexity_options;
    perplexity_options.prefill = prefill;
    perplexity_options.score_last = score_last;
    perplexity_options.cancel = &interrupted();
    perplexity_options.progress = [&](int64_t done, int64_t all) {
      progress.update("perplexity",
                      static_cast<double>(done) / static_cast<double>(std::max<int64_t>(all, 1)));
    };
    const PerplexityResult result = perplexity(*engine, tokens, policy.get(), perplexity_options);
    progress.clear();
    if (options.json) {
      print_json({{"tokens", result.tokens},
                  {"prefill_tokens", result.prefill_tokens},
                  {"prefill", region_json(result.prefill, per_token)},
                  {"first", region_json(result.first, per_token)},
                  {"decode", region_json(result.decode, per_token)},
                  {"policy", policy->name()},
                  {"settings", policy->describe()},
                  {"compute", options.compute},
                  {"seconds", result.seconds}});
      return;
    }
    std::vector<std::vector<std::string>> rows = {{"", "positions", "NLL", "dense NLL", "KL", "top-1"}};
    const auto add = [&](const char* name, const RegionScore& region) {
      if (region.positions == 0) return;
      const auto cell = [](const Figure& figure) {
        return fmt::format("{:.4f} [{:.4f}, {:.4f}]", figure.value, figure.low, figure.high);
      };
      rows.push_back({name, std::to_string(region.positions), cell(region.nll), cell(region.dense_nll),
                      cell(region.kl), cell(region.top1)});
    };
    add("prefill", result.prefill);
    add("first", result.first);
    add("decode", result.decode);
    print(table(rows) + "\n" + policy->describe() + "\n");
  }
};

}  // namespace

void add_perplexity(CLI::App& app, std::function<void()>* run) {
  auto perplexity = std::make_shared<Perplexity>();
  CLI::App* verb = app.add_subcommand("perplexity", "NLL of a text under a policy, beside dense attention");
  perplexity->options.add(*verb);
  perplexity->options.add_invariant(*verb);
  perplexity->source.add(*verb, "--text", "--file", true);
  perplexity->policy_flags.add(*verb);
  verb->add_option("--prefill", perplexity->prefill,
                   "Tokens that go through prefill (default all); the rest is fed one decode step each")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  verb->add_option("--score-last", perplexity->score_last,
                   "Scored tokens inside the prefill (default all but the first)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  verb->add_flag("--per-token", perplexity->per_token, "Add arrays with every position to the JSON");
  verb->footer(
      "Example: kascade perplexity --model model.gguf --plan plan.json --file book.txt --prefill 4000 "
      "--score-last 512");
  verb->callback([perplexity, run] { *run = [perplexity] { perplexity->run(); }; });
}

}  // namespace kascade::cli
