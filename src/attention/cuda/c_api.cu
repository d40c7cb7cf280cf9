// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "attention/cuda/c_api.h"
#include "attention/cuda/cuda_attention.h"
#include "kascade/error.h"

namespace {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

/// Runs f and turns whatever it throws into a status code.
template <class F>
int guarded(F f) noexcept {
  try {
    f();
    return KASCADE_OK;
  } catch (const kascade::Error& error) {
    last_error() = error.what();
    switch (error.kind()) {
      case kascade::ErrorKind::kBadArgument:
        return KASCADE_BAD_ARGUMENT;
      case kascade::ErrorKind::kUnsupported:
        return KASCADE_UNSUPPORTED;
      case kascade::ErrorKind::kDevice:
        return KASCADE_DEVICE_ERROR;
      default:
        return KASCADE_OTHER_ERROR;
    }
  } catch (const std::exception& error) {
    last_error() = error.what();
    return KASCADE_OTHER_ERROR;
  }
}

/// An enumerator from outside; what does not fit its byte becomes 255, which the checks refuse.
template <class E>
E to_enum(int32_t value) {
  return static_cast<E>(value >= 0 && value <= 255 ? value : 255);
}

kascade::AttentionParams to_params(const kascade_attention_params& c) {
  kascade::AttentionParams p;
  p.tile_rule = kascade::TileRule::kStep;
  p.role = to_enum<kascade::Role>(c.role);
  p.set_owner = to_enum<kascade::SetOwner>(c.set_owner);
  p.q_dtype = to_enum<kascade::DType>(c.q_dtype);
  p.out_dtype = to_enum<kascade::DType>(c.out_dtype);
  p.kv_dtype = to_enum<kascade::DType>(c.kv_dtype);
#define KASCADE_COPY(field) p.field = c.field;
  KASCADE_COPY(batch)
  KASCADE_COPY(query_heads)
  KASCADE_COPY(kv_heads)
  KASCADE_COPY(head_dim)
  KASCADE_COPY(page_size)
  KASCADE_COPY(capacity)
  KASCADE_COPY(max_q_len)
  KASCADE_COPY(max_kv_len)
  KASCADE_COPY(max_total_q)
  KASCADE_COPY(max_tiles)
  KASCADE_COPY(softmax_scale)
  KASCADE_COPY(k_scale)
  KASCADE_COPY(v_scale)
  KASCADE_COPY(q)
  KASCADE_COPY(out)
  KASCADE_COPY(lse)
  KASCADE_COPY(q_row_stride)
  KASCADE_COPY(q_head_stride)
  KASCADE_COPY(out_row_stride)
  KASCADE_COPY(out_head_stride)
  KASCADE_COPY(lse_row_stride)
  KASCADE_COPY(cu_seqlens_q)
  KASCADE_COPY(seq_lens_kv)
  KASCADE_COPY(budget_lens)
  KASCADE_COPY(k)
  KASCADE_COPY(v)
  KASCADE_COPY(k_page_stride)
  KASCADE_COPY(k_token_stride)
  KASCADE_COPY(k_head_stride)
  KASCADE_COPY(v_page_stride)
  KASCADE_COPY(v_token_stride)
  KASCADE_COPY(v_head_stride)
  KASCADE_COPY(page_table)
  KASCADE_COPY(page_table_stride)
  KASCADE_COPY(cu_seqlens_kv)
  KASCADE_COPY(positions)
  KASCADE_COPY(counts)
  KASCADE_COPY(tile_offsets)
  KASCADE_COPY(head_map)
  KASCADE_COPY(needed)
  KASCADE_COPY(status)
  KASCADE_COPY(budget.percent_hundredths)
  KASCADE_COPY(budget.floor)
  KASCADE_COPY(budget.round_to)
  KASCADE_COPY(budget.sinks)
  KASCADE_COPY(budget.recent)
  KASCADE_COPY(budget.tile)
  KASCADE_COPY(budget.rolling_min_rows)
#undef KASCADE_COPY
  p.budget.round_up = c.budget.round_up != 0;
  p.budget.forced_charged = c.budget.forced_charged != 0;
  p.budget.rolling = c.budget.rolling != 0;
  p.budget.rolling_capped = c.budget.rolling_capped != 0;
  p.budget.own_tile = to_enum<kascade::OwnTile>(c.budget.own_tile);
  return p;
}

kascade::AttentionParams to_prefill_params(const kascade_attention_params& c, int32_t tile) {
  kascade::AttentionParams p = to_params(c);
  p.tile_rule = kascade::TileRule::kAligned;
  p.tile = tile;
  return p;
}

}  // namespace

int kascade_cuda_decode_workspace(const kascade_attention_params* params, size_t* bytes) {
  return guarded([&] {
    if (params == nullptr || bytes == nullptr)
      throw kascade::BadArgument("params or bytes is null, must be given");
    *bytes = kascade::cuda_attention_workspace_bytes(to_params(*params));
  });
}

int kascade_cuda_decode(const kascade_attention_params* params, void* workspace, size_t workspace_bytes,
                        void* stream) {
  return guarded([&] {
    if (params == nullptr) throw kascade::BadArgument("params is null, must be given");
    kascade::cuda_attention(to_params(*params), workspace, workspace_bytes, stream,
                            params->spare_multiprocessors);
  });
}

int kascade_cuda_prefill_workspace(const kascade_attention_params* params, int32_t tile, size_t* bytes) {
  return guarded([&] {
    if (params == nullptr || bytes == nullptr)
      throw kascade::BadArgument("params or bytes is null, must be given");
    *bytes = kascade::cuda_attention_workspace_bytes(to_prefill_params(*params, tile));
  });
}

int kascade_cuda_prefill(const kascade_attention_params* params, int32_t tile, void* workspace,
                         size_t workspace_bytes, void* stream) {
  return guarded([&] {
    if (params == nullptr) throw kascade::BadArgument("params is null, must be given");
    kascade::cuda_attention(to_prefill_params(*params, tile), workspace, workspace_bytes, stream,
                            params->spare_multiprocessors);
  });
}

const char* kascade_cuda_last_error(void) { return last_error().c_str(); }
