// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "engine/batch.h"
#include "engine/buffer.h"
#include "engine/kv_cache.h"
#include "engine/layer_attention.h"
#include "engine/prepared_model.h"
#include "kascade/engine.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::shared_ptr<const PreparedModelImpl> model, const EngineOptions& options);

  const PreparedModel& model() const override { return *model_; }
  int threads() const override { return pool_.threads(); }
  std::unique_ptr<Sequence> make_sequence() override;
  std::span<const float> forward(std::span<const ForwardItem> items, const ForwardOptions& options) override;
  std::span<const float> prefill(Sequence& sequence, std::span<const int32_t> tokens, const Policy* policy,
                                 LayerObserver* observer,
                                 const std::function<void(int64_t, std::span<const float>)>& visit,
                                 const std::atomic<bool>* cancel) override;
  std::span<const float> logits(std::span<const float> hidden) override;
  uint64_t memory_bytes() const override;

 private:
  void check(std::span<const ForwardItem> items, const ForwardOptions& options) const;
  CachedSequence& own(Sequence* sequence) const;
  std::span<const float> run(std::span<const ForwardItem> items, const ForwardOptions& options,
                             bool hidden_wanted);
  void run_layer(int layer, const ForwardOptions& options, bool hidden_wanted);
  void multiply(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
                MatmulPath path);
  int64_t prefill_rows(const Policy* policy, int64_t length);

  std::shared_ptr<const PreparedModelImpl> model_;
  const ModelConfig& config_;
  EngineOptions options_;
  ThreadPool pool_;
  std::shared_ptr<KvCache> cache_;
  LayerAttention attention_;
  Rope rope_;
  int64_t rope_positions_ = 0;
  LinearScratch linear_scratch_;
  Batch batch_;

  // Activations of one forward call, row by row.
  Buffer<float> residual_{"residual stream"};      // [rows, hidden]
  Buffer<float> normed_{"normed residual"};        // [rows, hidden]
  Buffer<float> queries_{"queries"};               // [rows, H, D]
  Buffer<float> keys_{"keys"};                     // [rows, G, D]
  Buffer<float> values_{"values"};                 // [rows, G, D]
  Buffer<float> attended_{"attention output"};     // [rows, H, D]
  Buffer<float> gate_{"gate"};                     // [rows, ffn]
  Buffer<float> up_{"up"};                         // [rows, ffn]
  Buffer<float> observed_{"observed residual"};    // [rows, hidden], with an observer only
  Buffer<float> last_normed_{"normed last rows"};  // [rows of logits(), hidden]
  Buffer<float> logits_{"logits"};                 // [rows of logits(), vocabulary]
};

}  // namespace kascade
