// SPDX-License-Identifier: Apache-2.0
// Files of interrupted calibrations from outside, as they are and with the checksum that a careful author
// would give them. Whatever the bytes, the reader gives a set that can go on and survives its own writer, or
// throws BadFile.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "base/hash.h"
#include "kascade/calibrate.h"
#include "kascade/error.h"

namespace {

using namespace kascade;

constexpr int kLayers = 2, kHeads = 2;

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const std::string& bytes) {
  try {
    StatisticsSet set = StatisticsSet::parse(bytes, "fuzz", kLayers, kHeads, "id");
    require(set.serialize() == bytes);
    PromptStatistics more;
    more.layers = kLayers;
    more.kv_heads = kHeads;
    more.similarity_min.assign(size_t{kLayers} * kLayers * kHeads * kHeads, 1);
    more.similarity_mean = more.similarity_min;
    more.importance.assign(kLayers, 1);
    int64_t prompt = 0;
    while (set.contains(prompt)) ++prompt;
    set.insert(prompt, more);
    for (const double value : set.similarity(Aggregation::kMin).values) require(std::isfinite(value));
  } catch (const BadFile&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  check(bytes);
  uint64_t sum = fnv1a(std::as_bytes(std::span(bytes)));
  for (int i = 0; i < 8; ++i, sum >>= 8) bytes += static_cast<char>(sum & 0xFF);
  check(bytes);
  return 0;
}
