// SPDX-License-Identifier: Apache-2.0
// From a policy's rules to the shapes of the operator's calls, on every device.
#pragma once

#include <cstdint>
#include <vector>

#include "base/function_ref.h"
#include "engine/batch.h"
#include "kascade/attention.h"
#include "kascade/model.h"
#include "kascade/policy.h"

namespace kascade {

/// The rule of a layer; policy null = dense.
LayerRule rule_of(const Policy* policy, int layer, Phase phase);

/// What every device's call of a layer has in common: the rule's settings, the batch's arrays and maxima, q
/// and out [rows, H, D] without gaps. Types, addresses, the cache and the sets are not in it.
AttentionParams params_of(const LayerRule& rule, const BatchView& view, const ModelConfig& config);

/// Index sets of one tile.
int64_t sets_per_tile(SetOwner owner, const ModelConfig& config);

/// Whether the layer fills index sets, by the operator or by its policy.
bool selects_sets(const LayerRule& rule);

/// The sets' shape, for the operator's own counting of tiles: a layer with dense output that fills sets for
/// others counts like a selecting one.
AttentionParams shape_of_sets(AttentionParams params);

/// offsets [B+1]: tiles before each sequence of the call; returns all of them. The arrays of params are the
/// host's.
int64_t fill_tile_offsets(const AttentionParams& params, std::vector<int32_t>& offsets);

/// Lengths are rounded up when memory is measured, so that a growing sequence asks for more once in a
/// thousand steps.
int64_t rounded_length(int64_t length);

/// Chunks of a prompt that end at multiples of this many positions keep tiles whole.
int64_t prefill_granule(const Policy* policy, int layers);

/// Bytes of index sets and workspace that a prefill call of `rows` rows of one sequence of kv_len keys takes:
/// what a device makes of a layer's rule, and the workspace that its operator asks for.
uint64_t prefill_bytes(const ModelConfig& config, int64_t rows, int64_t kv_len,
                       FunctionRef<LayerRule(int layer)> rule_of_layer,
                       FunctionRef<AttentionParams(const LayerRule&, const BatchView&)> params_for,
                       FunctionRef<uint64_t(const AttentionParams&)> workspace_of);

/// Throws BadArgument unless a layer's reuse call may read the sets that `made` wrote (null: none did).
void require_same_sets(const Policy& policy, int layer, const AttentionParams& reads,
                       const AttentionParams* made);

}  // namespace kascade
