// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/sm90/decode_attend.cuh"

namespace kascade::cuda {

template void launch_attend_pass<__nv_bfloat16, 128>(const DecodeCall&, Pass, cudaStream_t);

}  // namespace kascade::cuda
