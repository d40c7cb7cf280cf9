// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/svg_test_util.h"
#include "kascade/plan.h"
#include "plan/plan_test_util.h"

namespace kascade {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using test::count_of;
using test::expect_well_formed;

TEST(PlanSvg, ShowsMatrixAnchorsAndQuality) {
  const std::string svg = plan_svg(sample_plan());
  expect_well_formed(svg);
  EXPECT_THAT(svg, HasSubstr("Anchors 0, 1, 4 (M = 3)"));
  EXPECT_THAT(svg, HasSubstr("KL(dense || kascade)"));
  EXPECT_THAT(svg, HasSubstr("validation"));
  EXPECT_EQ(count_of(svg, "fill=\"none\" stroke=\"#e8384f\""), 3u);  // one outline an anchor
  EXPECT_EQ(count_of(svg, "<circle"), 9u);                           // three candidates in three series
  EXPECT_EQ(plan_svg(sample_plan()), svg);
}

TEST(PlanSvg, WithoutCandidatesOnlyTheMatrix) {
  Plan plan = sample_plan();
  plan.candidates.clear();
  const std::string svg = plan_svg(plan);
  expect_well_formed(svg);
  EXPECT_THAT(svg, Not(HasSubstr("KL(")));
}

TEST(PlanSvg, NeedsASimilarity) {
  Plan plan = sample_plan();
  plan.similarity.clear();
  EXPECT_THAT(message_of<BadArgument>([&] { plan_svg(plan); }), HasSubstr("field 'similarity'"));
}

TEST(PlanSvg, TextIsEscaped) {
  Plan plan = sample_plan();
  plan.model.architecture = "<script>&\"'\x01\xff\xEF\xBF\xBF" + std::string(500, 'x');
  const std::string svg = plan_svg(plan);
  expect_well_formed(svg);
  EXPECT_THAT(svg, Not(HasSubstr("<script>")));
  EXPECT_THAT(svg, HasSubstr("&lt;script&gt;&amp;&quot;"));
  EXPECT_THAT(svg, Not(HasSubstr(std::string(101, 'x'))));
}

TEST(PlanSvg, EndsAndHostileNumbers) {
  Plan one;
  one.model = {"", 1, 0, 1, 0, ""};
  one.anchors = {0};
  one.head_map = {{0}};
  one.similarity = {{1}};
  one.candidates = {{{0}, 0, 1, 1, 0}};
  expect_well_formed(plan_svg(one));

  Plan wild = sample_plan();
  for (auto& row : wild.similarity)
    for (double& value : row) value = value > 0.75 ? 1e308 : -1e308;
  wild.candidates[0].kl = 1e308;
  wild.candidates[1].kl = -1e308;
  wild.candidates.push_back(wild.candidates[0]);  // two of one size
  wild.validation->kl = 5e-324;
  expect_well_formed(plan_svg(wild));

  Plan deep;  // every layer an anchor
  deep.model = {"llama", 300, 4, 2, 64, ""};
  deep.head_map.assign(300, {0, 1});
  deep.similarity.assign(300, std::vector<double>(300, 0.5));
  for (int layer = 0; layer < 300; ++layer) deep.anchors.push_back(layer);
  deep.candidates = {{deep.anchors, 0.1, 1, 1, 0.1}};
  const std::string svg = plan_svg(deep);
  expect_well_formed(svg);
  EXPECT_LT(svg.size(), 1u << 20);
}

}  // namespace
}  // namespace kascade
