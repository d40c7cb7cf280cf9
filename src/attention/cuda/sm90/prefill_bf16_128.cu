// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/prefill_chain.cuh"
#include "attention/cuda/sm90/prefill_pool.cuh"
#include "attention/cuda/sm90/prefill_score.cuh"

namespace kascade::cuda {

template void launch_prefill_chain<__nv_bfloat16, 128>(const PrefillCall&, cudaStream_t);
template void launch_prefill_attend<__nv_bfloat16, 128>(const PrefillCall&, bool, cudaStream_t);
template void launch_prefill_lse<__nv_bfloat16, 128>(const PrefillCall&, cudaStream_t);
template void launch_prefill_pool<__nv_bfloat16, 128>(const PrefillCall&, int32_t, cudaStream_t);

}  // namespace kascade::cuda
