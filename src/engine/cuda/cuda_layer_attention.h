// SPDX-License-Identifier: Apache-2.0
// Attention as the layer loop of a GPU sees it: what LayerAttention is on the CPU, with every array that the
// operator reads on the device before the first layer runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/cuda/device_memory.h"
#include "engine/cuda/packed_upload.h"
#include "kascade/attention.h"
#include "kascade/engine.h"
#include "kascade/model.h"
#include "kascade/policy.h"

namespace kascade {

/// What decides which kernels a step launches and with which parameters, pointers apart: steps of equal
/// shapes may replay one graph.
struct StepShape {
  struct Layer {
    Role role{};
    TileRule tile_rule{};
    SetOwner set_owner{};
    int32_t tile = 0;
    Budget budget;
    bool mapped = false, masked = false;
    int32_t capacity = 0, max_tiles = 0;
    bool operator==(const Layer&) const = default;
  };
  std::vector<Layer> layers;
  int32_t sequences = 0, rows = 0, max_q_len = 0, max_kv_len = 0;
  int64_t page_table_stride = 0;
  bool operator==(const StepShape&) const = default;
};

class CudaLayerAttention {
 public:
  /// Rows of q lie q_row_stride elements apart.
  CudaLayerAttention(const ModelConfig& config, std::shared_ptr<const PagePool> pool, int64_t q_row_stride);

  /// Before the layers of a forward call: takes the policy's rules, adds the arrays of the call to upload and
  /// makes room for index sets and workspace; whether that, or an observer since the last call, moved memory.
  /// policy may be null (dense). Throws
  /// BadArgument when a layer reuses sets that no layer of the call selects, Unsupported (naming the layer
  /// and the parameter) for a rule that the GPU does not run.
  bool begin(const Batch& batch, const Policy* policy, Phase phase, int first_layer,
             cuda::PackedUpload& upload);
  /// Once the upload has its place: the device addresses.
  void place(const cuda::PackedUpload& upload);
  const StepShape& shape() const { return shape_; }
  /// "layer 3 (anchor)", as the call runs it.
  std::string layer_name(int layer) const;

  /// Enqueues attention of one layer; q [rows, H, D] and out [rows, H, D] in bf16. DeviceError names the
  /// layer and the role.
  void run(int layer, const void* q, void* out, const cuda::Stream& stream);

  /// run() for an observer, which sees host copies of the arrays: waits for the device. The parameters as the
  /// observer may read them after attention; queries, keys and values are none of it.
  const AttentionParams& run_observed(int layer, const void* q, void* out, const cuda::Stream& stream,
                                      LayerObserver& observer);

  /// Bytes that a prefill call of `rows` rows of one sequence of kv_len keys takes.
  uint64_t prefill_bytes(const Policy* policy, int64_t rows, int64_t kv_len);

  uint64_t bytes() const;

 private:
  struct View {  // of the batch, on the device
    const BatchView* host = nullptr;
    size_t cu_seqlens_q = 0, seq_lens_kv = 0, budget_lens = 0, page_table = 0;
    int64_t page_table_stride = 0;
  };
  struct Call {
    AttentionParams params;  // but for addresses that run() is given
    const View* view = nullptr;
    std::vector<int32_t> tile_offsets;  // of a selecting layer; a reuse layer has its source's
    int source = -1;                    // layer whose sets it writes or reads
    size_t tile_offsets_at = 0, head_map_at = 0, needed_at = 0;
  };

  LayerRule rule_of(const Policy* policy, int layer, Phase phase) const;
  View& view_for(const LayerRule& rule, Phase phase);
  AttentionParams params_for(const LayerRule& rule, const BatchView& view, int32_t max_kv_len) const;
  void add_view(View& view, const BatchView& host, int64_t page_table_stride, cuda::PackedUpload& upload);

  const ModelConfig& config_;
  std::shared_ptr<const PagePool> pool_;
  int64_t q_row_stride_;

  // Of the current call.
  Phase phase_ = Phase::kPrefill;
  int first_layer_ = 0;
  View items_, single_rows_;
  std::vector<Call> calls_;  // [layers]
  StepShape shape_;
  std::vector<int32_t> padded_table_;

  cuda::DeviceBuffer<int32_t> positions_{"index sets"};
  cuda::DeviceBuffer<int32_t> counts_{"index set counts"};
  cuda::DeviceBuffer<std::byte> workspace_{"attention workspace"};
  bool workspace_moved_ = false;  // by an observer, since begin()
  // For observers.
  AttentionParams observed_;
  cuda::DeviceBuffer<float> pooled_weights_{"pooled weights"};
  cuda::DeviceBuffer<float> own_tile_mass_{"mass of own tiles"};
  std::vector<int32_t> host_positions_, host_counts_;
};

}  // namespace kascade
