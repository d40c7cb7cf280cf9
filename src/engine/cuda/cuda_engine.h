// SPDX-License-Identifier: Apache-2.0
// The engine on a GPU: bf16 weights, activations and KV, an fp32 residual stream. docs/engine.md says how a
// step runs.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "engine/cached_engine.h"
#include "engine/cuda/cuda_kv_cache.h"
#include "engine/cuda/cuda_layer_attention.h"
#include "engine/cuda/cuda_model.h"
#include "engine/cuda/device_memory.h"
#include "engine/cuda/packed_upload.h"
#include "engine/cuda/part_timer.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/sample.h"

namespace kascade {

class CudaEngine final : public CachedEngine {
 public:
  /// Allocates the KV cache. Throws OutOfMemory, with what is asked and what is free, when it does not fit.
  CudaEngine(std::shared_ptr<const CudaModel> model, const EngineOptions& options);
  ~CudaEngine() override;

  int threads() const override { return host_threads_; }
  std::span<const float> logits(std::span<const float> hidden) override;
  uint64_t memory_bytes() const override;

  /// For benches: fills the keys and values of a new sequence's first `length` positions with N(0, 1) instead
  /// of running a prompt.
  void fill_cache(Sequence& sequence, int64_t length, uint64_t seed);
  /// For benches: from now on, the device times of the parts of calls that are no graph replays are added up
  /// in `timer` (null: no more).
  void time_parts(cuda::PartTimer* timer) { timer_ = timer; }

  /// Bytes of KV cache and scratch that an engine of these options will allocate at most for prompts, steps
  /// of `batch` sequences and logits(). Observers take more, and so does a prompt whose smallest chunk passes
  /// the limit of index sets and workspace. Throws BadArgument for options or a batch out of range.
  static uint64_t planned_bytes(const ModelConfig& config, const EngineOptions& options, int64_t batch);

 private:
  /// What follows the layers.
  enum class Draw : uint8_t { kNothing, kMostLikely, kSample };
  struct Graph {
    StepShape shape;
    Draw draw{};
    cudaGraphExec_t executable = nullptr;  // null until the shape came a second time
    int64_t last_use = 0;
  };

  std::span<const float> run_layers(const ForwardOptions& options, HiddenRows wanted,
                                    const NextTokens& next) override;
  int64_t prefill_rows(const Policy* policy, int64_t length) override;
  // Whether memory moved.
  bool make_room(int64_t rows);
  bool make_room_for_head(int64_t rows);
  bool grow_rope_table(int64_t positions);
  void prepare_products(int64_t rows, bool head);
  void run_layer(int layer, const ForwardOptions& options, bool only_keys);
  /// Rows of a step, or of the head, that one product takes.
  int64_t step_rows_at_once(int64_t rows) const;
  /// Rows of x times the matrix, at_once of them at a time; accumulate adds to out.
  template <class Out>
  void multiply(const cuda::DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows, int64_t at_once,
                Out* out, bool accumulate);
  void enqueue(const ForwardOptions& options, HiddenRows wanted, Draw draw);
  void enqueue_head(int64_t rows, Draw draw);
  void replay(const ForwardOptions& options, Draw draw);
  Graph& graph_for(Draw draw);
  void forget_graphs();
  /// Forgets the graphs when grow() says that memory moved, or fails.
  void forget_moved(FunctionRef<bool()> grow);
  std::span<const float> fetch(const float* from, int64_t count);
  /// The call, for messages: "decode step of 4 rows in 4 sequences (replayed)".
  std::string call_name(const ForwardOptions& options) const;
  /// With checks_: waits, and throws DeviceError naming what failed. layer below 0: none.
  void check_part(int layer, const char* part);

  std::shared_ptr<const CudaModel> prepared_;
  cuda::Stream stream_;
  cuda::MatrixProducts products_;
  std::shared_ptr<CudaKvCache> cache_;
  CudaLayerAttention attention_;
  cuda::PackedUpload upload_;
  cuda::PartTimer* timer_ = nullptr;
  int64_t q_width_, qkv_width_;
  int host_threads_;       // for those who work on what comes back
  bool checks_;            // KASCADE_CUDA_CHECK: every part of a layer is waited for
  bool replayed_ = false;  // the call is a graph

  int64_t product_rows_ = 0;  // rows of the call's products; those past its own hold nothing
  int64_t rows_at_once_ = 0;  // of them that one product takes

  // Of the current call, on the device.
  const int32_t* tokens_ = nullptr;               // [rows]
  const int32_t* positions_ = nullptr;            // [rows]
  const int64_t* slots_ = nullptr;                // [rows]
  const int32_t* last_rows_ = nullptr;            // [sequences] the last row of each
  const cuda::SampleRow* sample_rows_ = nullptr;  // [sequences]

  cuda::DeviceBuffer<float> residual_{"residual stream"};              // [rows, hidden]
  cuda::DeviceBuffer<__nv_bfloat16> normed_{"normed residual"};        // [rows, hidden]
  cuda::DeviceBuffer<__nv_bfloat16> qkv_{"queries, keys and values"};  // [rows, (H + 2G) D]
  cuda::DeviceBuffer<__nv_bfloat16> attended_{"attention output"};     // [rows, H, D]
  cuda::DeviceBuffer<__nv_bfloat16> gate_up_{"gate and up"};           // [rows, 2 ffn]
  cuda::DeviceBuffer<__nv_bfloat16> activated_{"gated activation"};    // [rows, ffn]
  cuda::DeviceBuffer<float> last_{"last rows"};                        // [rows of the head, hidden]
  cuda::DeviceBuffer<__nv_bfloat16> last_normed_{"normed last rows"};  // [rows of the head, hidden]
  cuda::DeviceBuffer<float> logits_{"logits"};                         // [rows of the head, vocabulary]
  cuda::DeviceBuffer<int32_t> next_{"next tokens"};                    // [sequences]
  cuda::DeviceBuffer<double> rope_frequencies_{"rotary frequencies"};  // [D / 2]
  cuda::DeviceBuffer<float2> rope_table_{"rotary table"};              // [positions, D / 2]
  int64_t rope_positions_ = 0;
  cuda::PinnedBuffer<float> host_hidden_{"residual rows"};
  cuda::PinnedBuffer<float> host_logits_{"logits"};
  cuda::PinnedBuffer<int32_t> host_next_{"next tokens"};
  std::vector<float> residual_in_, residual_out_;  // for observers, [rows, hidden]

  std::vector<Graph> graphs_;
  int64_t step_ = 0;
  std::vector<int32_t> last_row_list_;
  std::vector<cuda::SampleRow> sample_row_list_;
  std::vector<int64_t> prepared_rows_;
};

}  // namespace kascade
