// SPDX-License-Identifier: Apache-2.0
// kascade <verb>: parsing and printing only. Exit code 0: success, 1: failure, 2: bad usage.
#include <cstdio>
#include <exception>
#include <functional>
#include <new>

#include "cli/console.h"
#include "cli/verb.h"
#include "kascade/error.h"

namespace {

constexpr kascade::cli::AddVerb kVerbs[] = {
    kascade::cli::add_inspect,    kascade::cli::add_tokenize, kascade::cli::add_calibrate,
    kascade::cli::add_plan,       kascade::cli::add_generate, kascade::cli::add_chat,
    kascade::cli::add_perplexity, kascade::cli::add_bench,    kascade::cli::add_demo,
};

int fail(const char* message) {
  std::fprintf(stderr, "kascade: %s\n", message);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  kascade::cli::install_signal_handlers();
  std::function<void()> run;
  CLI::App app{
      "Sparse attention for long contexts: calibrate a model once, then run it several times cheaper."};
  app.name("kascade");
  app.set_version_flag("--version", KASCADE_VERSION);
  app.require_subcommand(1);
  app.footer("Example: kascade generate --model model.gguf --plan plan.json --prompt-file question.txt");
  try {
    for (const auto add : kVerbs) add(app, &run);
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  }
  try {
    run();
    kascade::cli::print_now("");
    return 0;
  } catch (const kascade::Error& error) {
    return fail(error.what());
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
