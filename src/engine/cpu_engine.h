// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>

#include "engine/buffer.h"
#include "engine/cached_engine.h"
#include "engine/cpu_model.h"
#include "engine/kv_cache.h"
#include "engine/layer_attention.h"
#include "kascade/thread_pool.h"
#include "ops/ops.h"

namespace kascade {

class CpuEngine final : public CachedEngine {
 public:
  CpuEngine(std::shared_ptr<const CpuModel> model, const EngineOptions& options);

  int threads() const override { return threads_.threads(); }
  std::span<const float> logits(std::span<const float> hidden) override;
  uint64_t memory_bytes() const override;

 private:
  std::span<const float> run_layers(const ForwardOptions& options, HiddenRows wanted,
                                    const NextTokens& next) override;
  int64_t prefill_rows(const Policy* policy, int64_t length) override;
  void run_layer(int layer, const ForwardOptions& options, bool hidden_wanted);
  void multiply(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
                MatmulPath path);

  std::shared_ptr<const CpuModel> prepared_;
  ThreadPool threads_;
  std::shared_ptr<KvCache> cache_;
  LayerAttention attention_;
  Rope rope_;
  int64_t rope_positions_ = 0;
  LinearScratch linear_scratch_;
  Sampler sampler_{{}};

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
  Buffer<float> last_{"last rows"};                // [sequences, hidden]
  Buffer<float> last_normed_{"normed last rows"};  // [rows of logits(), hidden]
  Buffer<float> logits_{"logits"};                 // [rows of logits(), vocabulary]
};

}  // namespace kascade
