// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>

#include "base/check.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"

namespace kascade::cli {
namespace {

struct Tokenize {
  RunOptions options;
  TextSource source;
  std::vector<int64_t> decode;
  bool special = false;

  void run() const {
    const auto model = Model::open(options.model);
    const Tokenizer& tokenizer = model->tokenizer();
    if (!decode.empty()) {
      std::vector<int32_t> ids;
      for (const int64_t id : decode) {
        require<BadArgument>(id >= 0 && id < tokenizer.size(), "--decode: expected ids in 0..{}, got {}",
                             tokenizer.size() - 1, id);
        ids.push_back(static_cast<int32_t>(id));
      }
      const std::string text = tokenizer.decode(ids, true);
      if (options.json)
        print_json({{"ids", ids}, {"text", text}});
      else
        print(text + "\n");
      return;
    }
    // The bare ids of the text: no BOS, so that pieces can be joined.
    const std::vector<int32_t> ids = tokenizer.encode(source.read_text(), special);
    if (options.json) {
      print_json({{"ids", ids}});
      return;
    }
    std::string line;
    for (const int32_t id : ids) line += fmt::format("{}{}", line.empty() ? "" : " ", id);
    print(line + "\n");
  }
};

}  // namespace

void add_tokenize(CLI::App& app, std::function<void()>* run) {
  auto tokenize = std::make_shared<Tokenize>();
  CLI::App* verb = app.add_subcommand("tokenize", "Turn text into token ids, or ids into text");
  verb->add_option("--model,-m", tokenize->options.model, "The model whose tokenizer is used")->required();
  auto* input = verb->add_option_group("input", "exactly one of");
  input->add_option_function<std::string>(
      "--text",
      [tokenize](const std::string& value) {
        tokenize->source.text = value;
        tokenize->source.text_given = true;
      },
      "The text itself");
  input->add_option("--file", tokenize->source.file, "A file, taken byte for byte");
  input->add_option("--decode", tokenize->decode, "Ids to turn into text, e.g. 1,2,3")->delimiter(',');
  input->require_option(1);
  verb->add_flag("--special", tokenize->special, "Read spellings of control tokens as those tokens");
  tokenize->options.add_json(*verb);
  verb->footer("Example: kascade tokenize --model model.gguf --text 'Call me Ishmael.' --json");
  verb->callback([tokenize, run] { *run = [tokenize] { tokenize->run(); }; });
}

}  // namespace kascade::cli
