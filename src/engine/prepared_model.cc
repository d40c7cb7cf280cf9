// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"
#include "base/text.h"
#include "engine/cpu_model.h"
#include "kascade/engine.h"
#ifdef KASCADE_CUDA
#include "engine/cuda/cuda_model.h"
#endif

namespace kascade {

PreparedModel::~PreparedModel() = default;

std::shared_ptr<const PreparedModel> PreparedModel::create(std::shared_ptr<const Model> model,
                                                           const std::string& compute,
                                                           const std::string& device,
                                                           const LoadProgress& progress) {
  require<BadArgument>(model != nullptr, "model: expected one, got none");
  require<BadArgument>(compute == "f32" || compute == "auto", "compute: expected f32 or auto, got {}",
                       quote_text(compute));
  require<BadArgument>(device == "cpu" || device == "cuda", "device: expected cpu or cuda, got {}",
                       quote_text(device));
  if (device == "cuda") {
    require<Unsupported>(compute == "auto", "compute: a GPU works in bf16 (auto), got {}", compute);
#ifdef KASCADE_CUDA
    return std::make_shared<CudaModel>(std::move(model), progress);
#else
    (void)progress;
    throw_error<Unsupported>(
        "device: this build has no CUDA (cmake --preset cuda builds it); supported: cpu");
#endif
  }
  return std::make_shared<CpuModel>(std::move(model), compute == "f32" ? Compute::kF32 : Compute::kFast);
}

}  // namespace kascade
