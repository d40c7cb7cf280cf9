// SPDX-License-Identifier: Apache-2.0
// Attention as the layer loop sees it: a policy's rules become calls of the operator, index sets live from
// the layer that selects them to the last that reads them, states hear of what happens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/buffer.h"
#include "kascade/attention.h"
#include "kascade/engine.h"
#include "kascade/model.h"
#include "kascade/policy.h"
#include "kascade/thread_pool.h"

namespace kascade {

class LayerAttention {
 public:
  /// kernel_name: "" = for each rule the best implementation that supports it.
  LayerAttention(const ModelConfig& config, std::shared_ptr<const PagePool> cache,
                 const std::string& kernel_name, ThreadPool& pool);

  /// Before the layers of a forward call: takes the policy's rules for [first_layer, layers) and makes room
  /// for every index set and workspace, so that run() allocates nothing unless an observer asks for more.
  /// policy may be null (dense). Throws BadArgument when a layer reuses sets that no layer of the call
  /// selects.
  void begin(const Batch& batch, const Policy* policy, Phase phase, int first_layer);

  /// Whether the policy keeps a state for the sequences of the call.
  bool has_states() const { return has_states_; }

  /// Attention of one layer; the new keys are in the cache. q and out [rows, H, D]. The parameters as they
  /// ran; valid until the next run.
  const AttentionParams& run(int layer, const float* q, float* out, LayerObserver* observer);

  /// Bytes that a prefill call of `rows` rows of one sequence of kv_len keys takes.
  uint64_t prefill_bytes(const Policy* policy, int64_t rows, int64_t kv_len);

  uint64_t bytes() const { return positions_.bytes() + counts_.bytes() + lse_.bytes() + workspace_.bytes(); }

 private:
  /// Index sets that are alive, as their layer wrote them.
  struct Sets {
    bool alive = false;
    AttentionParams
        params;  // positions, counts, tile_offsets, capacity, set_owner, tile and tile_rule are read
  };

  const BatchView& view_for(const LayerRule& rule) const;
  AttentionParams params_for(const LayerRule& rule, const BatchView& view) const;
  const AttentionKernel& kernel_for(const AttentionParams& params) const;
  void place_sets(const LayerRule& rule, int layer, AttentionParams& params);
  void call(const AttentionParams& params);
  void run_with_states(int layer, const LayerRule& rule, const BatchView& view, AttentionParams& params);
  AttentionParams one_sequence(const AttentionParams& params, const BatchView& view, int32_t b);

  const ModelConfig& config_;
  std::shared_ptr<const PagePool> cache_;
  const AttentionKernel& best_;
  bool forced_ = false;  // best_ was asked for by name: nothing stands in for it
  ThreadPool& pool_;

  // Of the current call.
  const Batch* batch_ = nullptr;
  const Policy* policy_ = nullptr;
  Phase phase_ = Phase::kPrefill;
  bool has_states_ = false;
  std::vector<LayerRule> rules_;     // [layers]
  std::vector<int32_t> capacities_;  // [layers], of the sets that the layer writes or reads
  Sets sets_;
  AttentionParams params_;
  std::vector<int32_t> tile_offsets_;
  int32_t one_cu_seqlens_q_[2] = {0, 0};
  int32_t one_tile_offsets_[2] = {0, 0};

  Buffer<int32_t> positions_{"index sets"};
  Buffer<int32_t> counts_{"index set counts"};
  Buffer<float> lse_{"log-sum-exp"};
  Buffer<std::byte> workspace_{"attention workspace"};
};

}  // namespace kascade
