// SPDX-License-Identifier: Apache-2.0
// What the operator tests share: random stored weights of every type, a page that faults when read past,
// every instruction set.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "base/dequantize.h"
#include "kascade/dtype.h"
#include "ops/isa.h"
#include "ops/ops.h"

namespace kascade {

constexpr WeightType kAllWeightTypes[] = {WeightType::kF32,  WeightType::kF16,  WeightType::kBF16,
                                          WeightType::kQ4_0, WeightType::kQ4_1, WeightType::kQ5_0,
                                          WeightType::kQ5_1, WeightType::kQ8_0, WeightType::kQ4_K,
                                          WeightType::kQ5_K, WeightType::kQ6_K};

/// f() under every instruction set that this machine can run.
template <class F>
void for_each_isa(F f) {
  for (const OpKernels* kernels : compiled_op_kernels()) {
    if (!op_kernels_available(*kernels)) continue;
    SCOPED_TRACE(kernels->name);
    const ScopedOpKernels scoped(*kernels);
    f();
  }
}

/// Bytes that end at a page which may not be read; begins at any address, so is misaligned for most sizes.
class GuardedBytes {
 public:
  explicit GuardedBytes(int64_t size) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    mapped_ = static_cast<size_t>((size + page - 1) / page * page + page);
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_ + mapped_ - page, static_cast<size_t>(page), PROT_NONE);
    data_ = base_ + static_cast<int64_t>(mapped_) - page - size;
  }
  ~GuardedBytes() { munmap(base_, mapped_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  size_t mapped_;
  uint8_t* base_;
  uint8_t* data_;
};

/// A stored matrix of random weights of about unit size, and the same as floats.
struct RandomWeights {
  WeightTensor tensor;
  std::unique_ptr<GuardedBytes> bytes;
  std::vector<float> floats;  // [rows, columns]

  RandomWeights(WeightType type, int64_t rows, int64_t columns, uint32_t seed) {
    tensor = {.data = nullptr, .type = type, .rows = rows, .columns = columns};
    bytes = std::make_unique<GuardedBytes>(tensor.bytes());
    tensor.data = bytes->data();
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const WeightTypeInfo& info = weight_type_info(type);
    uint8_t* p = bytes->data();
    const auto half = [](uint8_t* to, float value) {
      const F16 bits = to_f16(value);
      std::memcpy(to, &bits, sizeof(bits));
    };
    for (int64_t block = 0; block < rows * columns / info.block_elements; ++block, p += info.block_bytes) {
      if (info.block_elements == 1) {
        const float value = normal(random);
        const BF16 brain = to_bf16(value);
        if (type == WeightType::kF32) std::memcpy(p, &value, sizeof(value));
        if (type == WeightType::kF16) half(p, value);
        if (type == WeightType::kBF16) std::memcpy(p, &brain, sizeof(brain));
        continue;
      }
      for (int i = 0; i < info.block_bytes; ++i) p[i] = static_cast<uint8_t>(random());
      // Scales of either sign, some of them zero or subnormal.
      const float unit = block % 17 == 3 ? 0.0f : block % 19 == 5 ? 0x1p-20f : normal(random);
      switch (type) {
        case WeightType::kQ4_0:
        case WeightType::kQ5_0:
          half(p, unit / 8);
          break;
        case WeightType::kQ8_0:
          half(p, unit / 128);
          break;
        case WeightType::kQ4_1:
        case WeightType::kQ5_1:
          half(p, unit / 8);
          half(p + 2, normal(random));
          break;
        case WeightType::kQ4_K:
        case WeightType::kQ5_K:
          half(p, unit / 512);
          half(p + 2, normal(random) / 64);
          break;
        default:
          half(p + 208, unit / 2048);
      }
    }
    floats.resize(static_cast<size_t>(rows * columns));
    for (int64_t r = 0; r < rows; ++r)
      dequantize_row(type, bytes->data() + r * tensor.row_bytes(), columns, floats.data() + r * columns);
  }
};

inline std::vector<float> random_floats(int64_t count, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace kascade
