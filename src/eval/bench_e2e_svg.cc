// SPDX-License-Identifier: Apache-2.0
// Where the time goes: one group of bars for each piece of work, one bar for each policy, the slowest of a
// group as high as the chart.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/svg.h"
#include "eval/bench_e2e.h"

namespace kascade {
namespace {

// All lengths in pixels.
constexpr double kLeft = 40, kTop = 110, kChartHeight = 300, kLabelSpace = 44;
constexpr double kBarWidth = 62, kBarGap = 14, kGroupGap = 46;
constexpr double kHeight = kTop + kChartHeight + 96;
constexpr double kLeastWidth = 720;
constexpr double kLeastNamed = 15;  // parts lower than this hold no text

constexpr std::string_view kWholeColour = "#9aa7b5";

// All times of a group in one unit.
std::string time_text(double seconds, double slowest) {
  return slowest >= 1 ? fmt::format("{:.2f} s", seconds) : fmt::format("{:.1f} ms", seconds * 1e3);
}

double group_width(const E2eWorkResult& result) {
  const auto bars = static_cast<double>(result.runs.size());
  return bars * kBarWidth + (bars - 1) * kBarGap;
}

void draw_bar(const E2eWorkResult& result, const E2eRun& run, double x, double slowest, Drawing& out) {
  const double bottom = kTop + kChartHeight;
  const double scale = slowest > 0 ? (kChartHeight - kLabelSpace) / slowest : 0;
  const double all = run.parts_seconds();
  double y = bottom;
  for (const E2ePart& shown : kE2eParts) {
    const double share = all > 0 ? run.parts[shown.part] / all : 0, height = share * run.seconds * scale;
    if (height <= 0) continue;
    y -= height;
    out.rect(x, y, kBarWidth, height, fmt::format("fill=\"{}\"", shown.colour));
    if (height >= kLeastNamed)
      out.text(x + kBarWidth / 2, y + height / 2 + 4, fmt::format("{:.0f} %", share * 100),
               fmt::format("text-anchor=\"middle\" font-size=\"11\" fill=\"{}\"",
                           shown.pale ? kSvgInk : "#ffffff"));
  }
  if (all <= 0) {
    y -= run.seconds * scale;
    out.rect(x, y, kBarWidth, bottom - y, fmt::format("fill=\"{}\"", kWholeColour));
  }
  const double ratio = e2e_ratio_to_dense(result, run);
  const bool compared = ratio > 0 && run.policy != "dense";
  if (compared)
    out.text(x + kBarWidth / 2, y - 21, fmt::format("{:.2f}x", ratio),
             "text-anchor=\"middle\" font-weight=\"bold\"");
  out.text(x + kBarWidth / 2, y - 6, time_text(run.seconds, slowest), "text-anchor=\"middle\"");
  out.text(x + kBarWidth / 2, bottom + 17, run.policy, "text-anchor=\"middle\"");
}

std::string group_title(const E2eWork& work) {
  const std::string tokens =
      work.tokens % 1024 == 0 ? fmt::format("{}K", work.tokens / 1024) : fmt::format("{}", work.tokens);
  return work.phase == Phase::kDecode ? fmt::format("decode, {} x {}", work.batch, tokens)
                                      : fmt::format("first token, {}", tokens);
}

void draw_legend(const E2eReport& report, Drawing& out) {
  const bool parts = std::any_of(report.works.begin(), report.works.end(), [](const E2eWorkResult& result) {
    return std::any_of(result.runs.begin(), result.runs.end(),
                       [](const E2eRun& run) { return run.parts_seconds() > 0; });
  });
  if (!parts) return;
  double x = kLeft;
  for (const E2ePart& shown : kE2eParts) {
    const std::string_view label = shown.label;
    out.rect(x, 78, 11, 11, fmt::format("fill=\"{}\"", shown.colour));
    out.text(x + 16, 88, label);
    x += 34 + 6.2 * static_cast<double>(label.size());
  }
}

}  // namespace

std::string bench_e2e_svg(const E2eReport& report) {
  Drawing out;
  out.text(kLeft, 36, "Where the time goes, by policy", "font-size=\"17\" font-weight=\"bold\"");
  out.text(kLeft, 56,
           fmt::format("{}{} on {}; time of a step, or to the first token", report.config.name,
                       report.random_weights ? " (random weights)" : "",
                       report.machine.empty() ? report.device : report.machine),
           fmt::format("fill=\"{}\"", kSvgMuted));
  draw_legend(report, out);
  const double bottom = kTop + kChartHeight;
  double x = kLeft + 10;
  for (const E2eWorkResult& result : report.works) {
    double slowest = 0;
    for (const E2eRun& run : result.runs) slowest = std::max(slowest, run.seconds);
    const double width = group_width(result);
    double bar = x;
    for (const E2eRun& run : result.runs) {
      draw_bar(result, run, bar, slowest, out);
      bar += kBarWidth + kBarGap;
    }
    out.line(x - 8, bottom, x + width + 8, bottom, kSvgMuted);
    out.text(x + width / 2, bottom + 40, group_title(result.work),
             "text-anchor=\"middle\" font-weight=\"bold\"");
    x += width + kGroupGap;
  }
  out.text(kLeft, kHeight - 16,
           "Each piece of work has a scale of its own. Shares are of device time, taken without graphs.",
           fmt::format("fill=\"{}\" font-size=\"11\"", kSvgMuted));
  return out.finish(std::max(x - kGroupGap + kLeft, kLeastWidth), kHeight);
}

}  // namespace kascade
