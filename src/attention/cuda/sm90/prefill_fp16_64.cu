// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/prefill_pool.cuh"
#include "attention/cuda/sm90/prefill_score.cuh"

namespace kascade::cuda {

template void launch_prefill_attend<__half, 64>(const PrefillCall&, bool, cudaStream_t);
template void launch_prefill_lse<__half, 64>(const PrefillCall&, cudaStream_t);
template void launch_prefill_pool<__half, 64>(const PrefillCall&, int32_t, cudaStream_t);

}  // namespace kascade::cuda
