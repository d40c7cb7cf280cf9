// SPDX-License-Identifier: Apache-2.0
// How close a policy comes to dense attention over a region of text: the same rows under both.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eval/interval.h"
#include "kascade/engine.h"

namespace kascade {

/// Figures over one region. Intervals: bootstrap over positions (nll, dense_nll, kl), Wilson (top1);
/// neighbouring positions are correlated, so they are somewhat narrow.
struct RegionScore {
  int64_t positions = 0;  // 0: the region is empty and its figures mean nothing
  Figure nll;             // nats per token, policy
  Figure dense_nll;
  Figure kl;    // KL(dense || policy), nats
  Figure top1;  // share of positions where the arg-max of both agree
  // Per position, in order of the text.
  std::vector<double> nlls, dense_nlls, kls;
  std::vector<uint8_t> agree;
};

/// Appends positions to the region's arrays: dense and policy are residual rows [rows, hidden] of the same
/// positions, policy empty when it is dense itself; targets [rows] the token after each row, or empty where
/// NLL is not asked for, which adds nothing to nlls and dense_nlls then. Logits are made in blocks of rows.
void score_rows(Engine& engine, std::span<const float> dense, std::span<const float> policy,
                std::span<const int32_t> targets, RegionScore& region);

/// Works the figures out from the arrays.
void summarise(RegionScore& region);

}  // namespace kascade
