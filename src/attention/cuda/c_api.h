/* SPDX-License-Identifier: Apache-2.0 */
/* C interface of libkascade_cuda: attention on NVIDIA Hopper GPUs. Fields mean what those of the same
 * name in kascade/attention.h mean; all pointers but the structs' own are device pointers. */
#ifndef KASCADE_CUDA_C_API_H_
#define KASCADE_CUDA_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { KASCADE_ROLE_DENSE = 0, KASCADE_ROLE_LAYER0 = 1, KASCADE_ROLE_ANCHOR = 2, KASCADE_ROLE_REUSE = 3 };
enum { KASCADE_SETS_PER_KV_HEAD = 0, KASCADE_SETS_OF_ALL_HEADS = 1, KASCADE_SETS_PER_QUERY_HEAD = 2 };
enum { KASCADE_F32 = 0, KASCADE_F16 = 1, KASCADE_BF16 = 2 };
enum { KASCADE_OWN_TILE_ON_TOP = 0, KASCADE_OWN_TILE_CHARGED = 1, KASCADE_OWN_TILE_CANDIDATE = 2 };

/* Status codes. */
enum {
  KASCADE_OK = 0,
  KASCADE_BAD_ARGUMENT = 1,
  KASCADE_UNSUPPORTED = 2,
  KASCADE_DEVICE_ERROR = 3,
  KASCADE_OTHER_ERROR = 4
};

typedef struct kascade_budget {
  int32_t percent_hundredths;
  int32_t round_up;
  int32_t floor;
  int32_t round_to;
  int32_t sinks;
  int32_t recent;
  int32_t forced_charged;
  int32_t own_tile;
  int32_t tile;
  int32_t rolling;
  int32_t rolling_min_rows;
  int32_t rolling_capped;
} kascade_budget;

typedef struct kascade_attention_params {
  int32_t role, set_owner;
  int32_t batch, query_heads, kv_heads, head_dim;
  int32_t q_dtype, out_dtype, kv_dtype;
  int32_t page_size, capacity;
  int32_t max_q_len, max_kv_len, max_total_q, max_tiles;
  float softmax_scale, k_scale, v_scale;
  kascade_budget budget;
  const void* q;
  void* out;
  float* lse;
  int64_t q_row_stride, q_head_stride;
  int64_t out_row_stride, out_head_stride;
  int64_t lse_row_stride;
  const int32_t* cu_seqlens_q;
  const int32_t* seq_lens_kv;
  const int32_t* budget_lens;
  const void* k;
  const void* v;
  int64_t k_page_stride, k_token_stride, k_head_stride;
  int64_t v_page_stride, v_token_stride, v_head_stride;
  const int32_t* page_table;
  int64_t page_table_stride;
  const int32_t* cu_seqlens_kv;
  int32_t* positions;
  int32_t* counts;
  const int32_t* tile_offsets;
  const int32_t* head_map;
  const uint8_t* needed;
  uint32_t* status;
  int32_t spare_multiprocessors; /* that the passes over keys leave to other work */
} kascade_attention_params;

/* Sets *bytes to the device memory that kascade_cuda_decode needs for any call within the stated maxima. */
int kascade_cuda_decode_workspace(const kascade_attention_params* params, size_t* bytes);

/* Enqueues a call on stream (a cudaStream_t), with a workspace that is 256-byte aligned. Neither allocates
 * nor synchronises; may be captured in a graph. */
int kascade_cuda_decode(const kascade_attention_params* params, void* workspace, size_t workspace_bytes,
                        void* stream);

/* The same for prefill: tiles of `tile` consecutive positions, any number of rows a sequence. */
int kascade_cuda_prefill_workspace(const kascade_attention_params* params, int32_t tile, size_t* bytes);
int kascade_cuda_prefill(const kascade_attention_params* params, int32_t tile, void* workspace,
                         size_t workspace_bytes, void* stream);

/* The message of the calling thread's last failed call; valid until its next call. */
const char* kascade_cuda_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* KASCADE_CUDA_C_API_H_ */
