// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "cli/calibrate_options.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/verb.h"
#include "eval/demo_report.h"

namespace kascade::cli {
namespace {

constexpr const char* kDefaultModel = ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";

struct Demo {
  RunOptions options;
  std::string plan_path, question, document, output = "build/demo";

  void run() const {
    std::error_code error;
    std::filesystem::create_directories(output, error);
    require<IoError>(!error, "{}: {}", output, error.message());
    const auto path = [this](const char* name) { return (std::filesystem::path(output) / name).string(); };
    for (const char* name : {"plan.json", "similarity.svg", "report.md"}) require_writable(path(name));

    const auto model = options.open();
    Progress progress;
    DemoOptions demo;
    CalibrateFlags flags;
    flags.quick = true;
    demo.calibrate = flags.make(&progress);
    demo.calibrate.threads = options.threads;
    demo.calibrate.output = path("plan.json");
    demo.cancel = &interrupted();
    demo.progress = demo.calibrate.progress;
    demo.question = question;
    if (!document.empty()) demo.document = read_file(document);
    if (!plan_path.empty()) {
      demo.plan = load_plan(plan_path);
      const std::string warning = check_plan_model(*demo.plan, model->identity(), false);
      if (!warning.empty()) note("warning: " + warning);
    }
    const DemoReport report =
        options.on_device(model, [&](const auto& prepared) { return run_demo(prepared, demo); });
    progress.clear();
    if (report.calibration && !report.calibration->warning.empty())
      note("warning: " + report.calibration->warning);
    const std::string markdown = demo_markdown(report);
    if (!plan_path.empty()) save_plan(report.plan, path("plan.json"));
    if (!report.plan.similarity.empty()) write_file_atomic(path("similarity.svg"), plan_svg(report.plan));
    write_file_atomic(path("report.md"), markdown);
    if (options.json) {
      print_json({{"anchors", report.plan.anchors},
                  {"validated", report.plan.validation && report.plan.validation->passed},
                  {"prompt_tokens", report.prompt_tokens},
                  {"dense_prefill_tokens_per_s", report.dense.prefill_tokens_per_s},
                  {"dense_decode_tokens_per_s", report.dense.decode_tokens_per_s},
                  {"kascade_prefill_tokens_per_s", report.kascade.prefill_tokens_per_s},
                  {"kascade_decode_tokens_per_s", report.kascade.decode_tokens_per_s},
                  {"prefill_speedup", report.prefill_speedup},
                  {"decode_speedup", report.decode_speedup},
                  {"output", output},
                  {"seconds", report.seconds}});
      return;
    }
    print(markdown);
    print(fmt::format("\nLeft in {0}: plan.json, similarity.svg, report.md\n", one_line(output)));
  }
};

}  // namespace

void add_demo(CLI::App& app, std::function<void()>* run) {
  auto demo = std::make_shared<Demo>();
  CLI::App* verb =
      app.add_subcommand("demo", "The main job on a small model: calibrate, then compare sparse with dense");
  demo->options.model = kDefaultModel;
  demo->options.add(*verb, false);
  verb->add_option("--plan", demo->plan_path, "Use this plan; nothing is calibrated");
  verb->add_option("--question", demo->question, "Ask this about the document");
  verb->add_option("--document", demo->document, "A text file in place of the shipped document");
  verb->add_option("--output,-o", demo->output, "Folder for plan.json, similarity.svg and report.md")
      ->capture_default_str();
  verb->footer("Example: make demo, or kascade demo --model model.gguf --output build/demo");
  verb->callback([demo, run] { *run = [demo] { demo->run(); }; });
}

}  // namespace kascade::cli
