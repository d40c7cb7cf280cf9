// SPDX-License-Identifier: Apache-2.0
// The picture of a plan: the similarity matrix with its anchors, beside it the quality against the number of
// anchors.
#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string_view>

#include "base/check.h"
#include "base/svg.h"
#include "kascade/plan.h"

namespace kascade {
namespace {

// All lengths in pixels.
constexpr double kMapLeft = 70, kMapTop = 100, kMapSize = 420;
constexpr double kBarGap = 16, kBarWidth = 12;
constexpr double kChartLeft = 650, kChartWidth = 300, kChartHeight = 180, kChartGap = 60;
constexpr double kHeight = 604;

constexpr std::string_view kMuted = kSvgMuted, kGrid = kSvgGrid;
constexpr std::string_view kAnchor = "#e8384f", kKl = "#5b3f8c", kTop1 = "#1f77a4", kPasskey = "#d9822b";

struct Colour {
  double red, green, blue;
};

// Dark to light in even steps of lightness, so that it also reads in grey.
constexpr std::array<Colour, 7> kRamp = {{{48, 18, 82},
                                          {56, 66, 125},
                                          {45, 108, 142},
                                          {32, 146, 140},
                                          {71, 183, 119},
                                          {158, 214, 74},
                                          {248, 230, 70}}};

std::string ramp_colour(double share) {
  const double x = std::clamp(share, 0.0, 1.0) * (kRamp.size() - 1);
  const size_t i = std::min(static_cast<size_t>(x), kRamp.size() - 2);
  const double t = x - static_cast<double>(i);
  const auto mix = [&](double a, double b) { return static_cast<int>(std::lround(a + (b - a) * t)); };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(kRamp[i].red, kRamp[i + 1].red),
                     mix(kRamp[i].green, kRamp[i + 1].green), mix(kRamp[i].blue, kRamp[i + 1].blue));
}

// 1, 2 or 5 times a power of ten, at least value.
double round_step(double value) {
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= value * 0.999) return factor * power;
  return 10 * power;
}

std::string list_text(const std::vector<int>& values) {
  constexpr size_t kShown = 14;
  const size_t shown = std::min(values.size(), kShown);
  return fmt::format("{}{}", fmt::join(values.begin(), values.begin() + static_cast<int64_t>(shown), ", "),
                     values.size() > shown ? ", ..." : "");
}

void draw_title(const Plan& plan, Drawing& out) {
  const ModelIdentity& model = plan.model;
  std::string shape = fmt::format("{} layers, {} KV heads", model.layers, model.kv_heads);
  if (model.query_heads > 0)
    shape = fmt::format("{} layers, {} query heads, {} KV heads", model.layers, model.query_heads,
                        model.kv_heads);
  out.text(kMapLeft, 36,
           fmt::format("{}{}", model.architecture.empty() ? "" : model.architecture + ": ", shape),
           "font-size=\"17\" font-weight=\"bold\"");
  std::string made = fmt::format("Method {}, {} over tiles, {} forward", plan.settings.method,
                                 plan.settings.aggregation, plan.settings.forward);
  if (plan.settings.method == "imported") made = "Imported head map";
  if (plan.data.prompts > 0)
    made += fmt::format("; {} prompts, {} tokens", plan.data.prompts, plan.data.tokens);
  out.text(kMapLeft, 56, made, fmt::format("fill=\"{}\"", kMuted));
  out.text(kMapLeft, 84, fmt::format("Anchors {} (M = {})", list_text(plan.anchors), plan.anchors.size()),
           fmt::format("fill=\"{}\" font-weight=\"bold\"", kAnchor));
}

// Tick labels of layers, some 20 pixels apart; anchors are always named, next to the axis they select on.
void draw_layer_axes(const Plan& plan, double cell, Drawing& out) {
  const int layers = plan.model.layers;
  const int step = std::max(1, static_cast<int>(std::ceil(round_step(20 / cell))));
  const double bottom = kMapTop + kMapSize;
  for (int layer = 0; layer < layers; layer += step) {
    const double x = kMapLeft + (layer + 0.5) * cell;
    out.line(x, bottom, x, bottom + 4, kMuted);
    out.text(x, bottom + 17, fmt::format("{}", layer), "text-anchor=\"middle\"");
  }
  out.text(kMapLeft + kMapSize / 2, bottom + 38, "layer that attends", "text-anchor=\"middle\"");
  double last_label = -1e9;
  for (const int anchor : plan.anchors) {
    const double y = kMapTop + (anchor + 0.5) * cell;
    out.line(kMapLeft - 5, y, kMapLeft, y, kAnchor, 2);
    if (y - last_label < 11) continue;  // labels would touch
    last_label = y;
    out.text(kMapLeft - 9, y + 4, fmt::format("{}", anchor),
             fmt::format("text-anchor=\"end\" font-weight=\"bold\" fill=\"{}\"", kAnchor));
  }
  out.raw(fmt::format(
      "<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">layer that "
      "selects</text>\n",
      kMapLeft - 42, kMapTop + kMapSize / 2));
}

void draw_colour_bar(double low, Drawing& out) {
  constexpr int kSteps = 60;
  const double x = kMapLeft + kMapSize + kBarGap;
  out.raw("<g shape-rendering=\"crispEdges\">\n");
  for (int i = 0; i < kSteps; ++i)
    out.rect(x, kMapTop + i * kMapSize / kSteps, kBarWidth, kMapSize / kSteps + 0.5,
             fmt::format("fill=\"{}\"", ramp_colour(1 - (i + 0.5) / kSteps)));
  out.raw("</g>\n");
  constexpr int kTicks = 5;
  for (int i = 0; i <= kTicks; ++i) {
    const double share = static_cast<double>(i) / kTicks;
    out.text(x + kBarWidth + 5, kMapTop + (1 - share) * kMapSize + 4,
             fmt::format("{:.2f}", low + share * (1 - low)));
  }
  out.raw(
      fmt::format("<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" "
                  "text-anchor=\"middle\">similarity: share of the "
                  "mass that is kept</text>\n",
                  x + kBarWidth + 46, kMapTop + kMapSize / 2));
}

void draw_similarity(const Plan& plan, Drawing& out) {
  const int layers = plan.model.layers;
  const double cell = kMapSize / layers;
  // A share by definition; a hostile file's other numbers are drawn at the ends of the scale.
  const auto share = [&](int i, int j) { return std::clamp(plan.similarity[i][j], 0.0, 1.0); };
  double low = 1;
  for (int i = 0; i < layers; ++i)
    for (int j = i; j < layers; ++j) low = std::min(low, share(i, j));
  low = std::min(0.9, std::floor(low * 20) / 20);

  out.rect(kMapLeft, kMapTop, kMapSize, kMapSize, "fill=\"#f6f7f9\"");
  out.raw("<g shape-rendering=\"crispEdges\">\n");
  for (int i = 0; i < layers; ++i) {
    for (int j = i; j < layers;) {
      const std::string colour = ramp_colour((share(i, j) - low) / (1 - low));
      int end = j + 1;
      while (end < layers && ramp_colour((share(i, end) - low) / (1 - low)) == colour) ++end;
      out.rect(kMapLeft + j * cell, kMapTop + i * cell, (end - j) * cell, cell,
               fmt::format("fill=\"{}\"", colour));
      j = end;
    }
  }
  out.raw("</g>\n");

  // What the plan uses: an anchor's row, from its own layer to the last that reads its sets.
  for (size_t i = 0; i < plan.anchors.size(); ++i) {
    const int anchor = plan.anchors[i];
    const int end = i + 1 < plan.anchors.size() ? plan.anchors[i + 1] : layers;
    const double x = kMapLeft + anchor * cell, y = kMapTop + anchor * cell;
    const double width = (end - anchor) * cell;
    out.rect(x, y, width, cell, "fill=\"none\" stroke=\"#ffffff\" stroke-width=\"4\"");
    out.rect(x, y, width, cell, fmt::format("fill=\"none\" stroke=\"{}\" stroke-width=\"2\"", kAnchor));
  }
  draw_layer_axes(plan, cell, out);
  draw_colour_bar(low, out);
}

// One chart of quality against M, its own vertical scale.
class Chart {
 public:
  Chart(double top, int min_anchors, int max_anchors, Drawing& out)
      : top_(top), min_(min_anchors), span_(std::max(1, max_anchors - min_anchors)), out_(out) {}

  void use_linear(double low, double high) { low_ = low, high_ = high; }
  void use_log(double low, double high) { log_ = true, low_ = std::log(low), high_ = std::log(high); }

  double x(int anchors) const {
    return kChartLeft + 14 + (kChartWidth - 28) * static_cast<double>(anchors - min_) / span_;
  }
  double y(double value) const {
    const double v = log_ ? std::log(std::max(value, 1e-12)) : value;
    return top_ + kChartHeight * (1 - std::clamp((v - low_) / (high_ - low_), 0.0, 1.0));
  }

  void frame(std::string_view title, int chosen) {
    out_.text(kChartLeft, top_ - 10, title, "font-weight=\"bold\"");
    out_.rect(x(chosen) - 9, top_, 18, kChartHeight,
              fmt::format("fill=\"{}\" fill-opacity=\"0.12\"", kAnchor));
    out_.line(kChartLeft, top_ + kChartHeight, kChartLeft + kChartWidth, top_ + kChartHeight, kMuted);
  }
  void grid_line(double value, const std::string& label) {
    out_.line(kChartLeft, y(value), kChartLeft + kChartWidth, y(value), kGrid);
    out_.text(kChartLeft - 7, y(value) + 4, label, "text-anchor=\"end\"");
  }
  void anchor_ticks(int max_anchors) {
    const int step = std::max(1, static_cast<int>(std::ceil(round_step(span_ / 12.0))));
    for (int m = min_; m <= max_anchors; m += step)
      out_.text(x(m), top_ + kChartHeight + 17, fmt::format("{}", m), "text-anchor=\"middle\"");
  }
  void series(const std::vector<PlanCandidate>& candidates, double PlanCandidate::*field,
              std::string_view colour) {
    std::string path;
    for (const PlanCandidate& c : candidates)
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : " L", x(static_cast<int>(c.anchors.size())),
                          y(c.*field));
    out_.raw(fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, colour));
    for (const PlanCandidate& c : candidates)
      out_.raw(fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>\n",
                           x(static_cast<int>(c.anchors.size())), y(c.*field), colour));
  }
  void diamond(int anchors, double value, std::string_view colour) {
    draw_diamond(x(anchors), y(value), colour, out_);
  }
  static void draw_diamond(double x, double y, std::string_view colour, Drawing& out) {
    out.raw(
        fmt::format("<path d=\"M{0:.1f} {2:.1f} L{4:.1f} {1:.1f} L{0:.1f} {3:.1f} L{5:.1f} {1:.1f} Z\" "
                    "fill=\"#ffffff\" stroke=\"{6}\" stroke-width=\"2\"/>\n",
                    x, y, y - 6, y + 6, x + 6, x - 6, colour));
  }

 private:
  double top_;
  int min_, span_;
  bool log_ = false;
  double low_ = 0, high_ = 1;
  Drawing& out_;
};

void draw_kl(const std::vector<PlanCandidate>& candidates, const Plan& plan, Chart& chart) {
  double least = 1e3, most = 1e-6;  // what can be drawn; a hostile file's other numbers stop there
  const auto widen = [&](double kl) {
    least = std::clamp(kl, 1e-6, least);
    most = std::clamp(kl, most, 1e3);
  };
  for (const PlanCandidate& c : candidates) widen(c.kl);
  if (plan.validation) widen(plan.validation->kl);
  most = std::max(most, least);
  const int chosen = static_cast<int>(plan.anchors.size());
  if (most / least > 8) {
    chart.use_log(least * 0.8, most * 1.25);
    chart.frame("KL(dense || kascade), nats", chosen);
    int ticks = 0;
    for (double value = round_step(least * 0.8); value <= most * 1.25 && ticks < 12; ++ticks) {
      chart.grid_line(value, fmt::format("{:g}", value));
      value = most / least > 1e3 ? value * 10 : round_step(value * 1.5);
    }
  } else {
    const double step = round_step(most / 4);
    chart.use_linear(0, std::max(most * 1.08, step));
    chart.frame("KL(dense || kascade), nats", chosen);
    for (int i = 0; i * step <= most * 1.08; ++i) chart.grid_line(i * step, fmt::format("{:g}", i * step));
  }
  chart.series(candidates, &PlanCandidate::kl, kKl);
  if (plan.validation) chart.diamond(chosen, plan.validation->kl, kKl);
}

void draw_shares(const std::vector<PlanCandidate>& candidates, const Plan& plan, Chart& chart) {
  double low = 1;
  for (const PlanCandidate& c : candidates) low = std::min({low, c.top1, c.passkey});
  if (plan.validation) low = std::min({low, plan.validation->top1, plan.validation->passkey});
  low = std::max(0.0, std::floor((low - 0.02) * 10) / 10);
  const int chosen = static_cast<int>(plan.anchors.size());
  chart.use_linear(low, 1);
  chart.frame("Agreement and retrieval, %", chosen);
  const double step = 1 - low > 0.5 ? 0.2 : 1 - low > 0.25 ? 0.1 : 0.05;
  const int lines = static_cast<int>((1 - low) / step + 1e-9);
  for (int line = 0; line <= lines; ++line)
    chart.grid_line(1 - line * step, fmt::format("{:.0f}", 100 * (1 - line * step)));
  chart.series(candidates, &PlanCandidate::top1, kTop1);
  chart.series(candidates, &PlanCandidate::passkey, kPasskey);
  if (plan.validation) {
    chart.diamond(chosen, plan.validation->top1, kTop1);
    chart.diamond(chosen, plan.validation->passkey, kPasskey);
  }
}

void draw_legend(bool validated, Drawing& out) {
  const double y = kMapTop + 2 * kChartHeight + kChartGap + 62;
  double x = kChartLeft;
  for (const auto& [label, colour] :
       {std::pair{"top-1 as dense", kTop1}, std::pair{"passkey digits", kPasskey}}) {
    out.line(x, y - 4, x + 18, y - 4, colour, 2);
    out.text(x + 23, y, label);
    x += 122;
  }
  if (!validated) return;
  Chart::draw_diamond(x + 6, y - 4, kMuted, out);
  out.text(x + 18, y, "validation");
}

void draw_quality(const Plan& plan, Drawing& out) {
  std::vector<PlanCandidate> candidates = plan.candidates;
  const auto size = [](const PlanCandidate& c) { return c.anchors.size(); };
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](const auto& a, const auto& b) { return size(a) < size(b); });
  candidates.erase(std::unique(candidates.begin(), candidates.end(),
                               [&](const auto& a, const auto& b) { return size(a) == size(b); }),
                   candidates.end());
  const int chosen = static_cast<int>(plan.anchors.size());
  const int first = std::min(chosen, static_cast<int>(size(candidates.front())));
  const int last = std::max(chosen, static_cast<int>(size(candidates.back())));
  Chart kl(kMapTop, first, last, out);
  draw_kl(candidates, plan, kl);
  Chart shares(kMapTop + kChartHeight + kChartGap, first, last, out);
  draw_shares(candidates, plan, shares);
  shares.anchor_ticks(last);
  out.text(kChartLeft + kChartWidth / 2, kMapTop + 2 * kChartHeight + kChartGap + 36,
           "anchors M (layer 0 counted)", "text-anchor=\"middle\"");
  draw_legend(plan.validation.has_value(), out);
}

}  // namespace

std::string plan_svg(const Plan& plan) {
  validate_plan(plan);
  require<BadArgument>(
      !plan.similarity.empty(),
      "plan: field 'similarity': expected a matrix to draw, got none (imported head maps have none)");
  Drawing out;
  draw_title(plan, out);
  draw_similarity(plan, out);
  if (!plan.candidates.empty()) draw_quality(plan, out);
  return out.finish(plan.candidates.empty() ? kMapLeft + kMapSize + 110 : kChartLeft + kChartWidth + 40,
                    kHeight);
}

}  // namespace kascade
