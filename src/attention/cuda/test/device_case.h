// SPDX-License-Identifier: Apache-2.0
// One call with its data on the host, laid out on the device in one of several ways, and its results
// back on the host. Device memory that a call has no business to read holds NaN.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/cuda/test/device_test.h"
#include "kascade/attention.h"

namespace kascade::cuda_test {

enum class Values { kNormal, kEqualScores, kRamp, kOneHuge, kMassTies };

struct Case {
  std::string name;
  Role role = Role::kDense;
  TileRule tile_rule = TileRule::kStep;
  int32_t tile = 32;  // aligned calls
  DType dtype = DType::kBF16;
  DType out_dtype = DType::kF32;
  SetOwner set_owner = SetOwner::kKvHead;
  int32_t query_heads = 4, kv_heads = 2, head_dim = 64;
  std::vector<int32_t> q_lens, kv_lens;
  std::vector<int32_t> budget_lens;  // empty: null
  Budget budget = default_budget();
  std::vector<int32_t> head_map;
  std::vector<uint8_t> needed;
  Values values = Values::kNormal;
  float peak = 1.5f;
  float k_scale = 1, v_scale = 1;
  bool by_products = false;  // pooled weights and own_tile_mass
  uint64_t seed = 1;
};

struct Placement {
  bool paged = false;
  bool head_major = false;  // heads outside tokens, in pages and packed
  int32_t page_size = 16;
  int64_t spare_pages = 3;  // pages of NaN, so that physical pages reach further
  uint64_t seed = 7;
  int32_t slack = 0;        // added to every stated maximum and to capacity
  int32_t more_keys = 0;    // added to the stated maximum of keys
  int32_t row_padding = 0;  // elements after each row of q, and of the output, where nothing may be written
  int32_t multiprocessors = 0;  // that calls may use; 0: all; below 0: more are spared than there are
};

/// Host data of a case, packed: q [total_q, H, D], k and v [total_kv, G, D], 16-bit.
struct HostData {
  std::vector<int32_t> cu_q, cu_kv, tile_offsets;
  std::vector<uint16_t> q, k, v;
};
HostData make_data(const Case& c);

struct Outcome {
  std::vector<float> out, lse;
  std::vector<int32_t> counts, positions;  // capacity entries a set
  std::vector<float> pooled, own_mass;
  int32_t capacity = 0;
  int64_t pooled_stride = 0;
  uint32_t status = 0;
};

int64_t sets_of(const Case& c);

/// The reference implementation on the host data; given: sets of a reuse call.
Outcome run_reference(const Case& c, const HostData& data, const Outcome* given = nullptr);

/// The CUDA kernels on a placement of the data.
class DeviceRun {
 public:
  DeviceRun(const Case& c, const HostData& data, const Placement& placement, const Outcome* given = nullptr);
  void launch(cudaStream_t stream = nullptr);
  Outcome results() const;
  const AttentionParams& params() const { return params_; }
  const DeviceBuffer& workspace() const { return workspace_; }

 private:
  void place_keys(const Case& c, const HostData& data, const Placement& placement);
  template <class T>
  std::vector<T> unpadded() const;

  Case case_;
  AttentionParams params_;
  int spare_multiprocessors_ = 0;
  int64_t total_q_ = 0, tiles_ = 0;
  DeviceBuffer q_, k_, v_, out_, lse_, cu_q_, cu_kv_, kv_lens_, budget_lens_, pages_, tile_offsets_,
      positions_, counts_, head_map_, needed_, pooled_, own_mass_, status_, workspace_;
};

}  // namespace kascade::cuda_test
