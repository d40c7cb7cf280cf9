// SPDX-License-Identifier: Apache-2.0
// A verb of the command line: one file each, one line in main.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace kascade::cli {

/// Adds a subcommand to app and sets *run to its body when it is the one chosen. Bodies throw kascade::Error.
using AddVerb = void (*)(CLI::App& app, std::function<void()>* run);

void add_inspect(CLI::App& app, std::function<void()>* run);
void add_tokenize(CLI::App& app, std::function<void()>* run);
void add_calibrate(CLI::App& app, std::function<void()>* run);
void add_plan(CLI::App& app, std::function<void()>* run);
void add_generate(CLI::App& app, std::function<void()>* run);
void add_chat(CLI::App& app, std::function<void()>* run);
void add_perplexity(CLI::App& app, std::function<void()>* run);
void add_bench(CLI::App& app, std::function<void()>* run);
void add_bench_e2e(CLI::App& bench, std::function<void()>* run);  // below bench
void add_demo(CLI::App& app, std::function<void()>* run);

}  // namespace kascade::cli
