// SPDX-License-Identifier: Apache-2.0
#include "engine/chunk_rows.h"

#include <gtest/gtest.h>

#include "engine/kv_cache.h"
#include "engine/layer_attention.h"
#include "engine/rules.h"

namespace kascade {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(ChunkRows, AreTheMostThatFit) {
  const auto per_row = [](int64_t rows) { return static_cast<uint64_t>(rows) * 10; };
  EXPECT_EQ(chunk_rows(512, 32, 5120, per_row), 512);
  EXPECT_EQ(chunk_rows(512, 32, 5119, per_row), 256);
  EXPECT_EQ(chunk_rows(512, 48, 1 << 20, per_row), 480);
  EXPECT_EQ(chunk_rows(512, 48, 2000, per_row), 96);  // 480, 240, 96: multiples of the granule
  EXPECT_EQ(chunk_rows(512, 1, 100, per_row), 8);
  EXPECT_EQ(chunk_rows(512, 32, 1, per_row), 32);  // a tile is never cut
  EXPECT_EQ(chunk_rows(128, 1000, 1 << 20, per_row), 128);
}

TEST(ChunkRows, StopWhereHalvingDoesNotHelp) {
  const auto mostly_fixed = [](int64_t rows) { return 1000 * kMiB + static_cast<uint64_t>(rows); };
  EXPECT_EQ(chunk_rows(512, 32, kMiB, mostly_fixed), 512);
}

// 32 layers, 32 query heads, 8 KV heads of 128 at 131,072 tokens: index sets and workspace of a chunk.
TEST(ChunkRows, ALongContextStaysWithinItsScratch) {
  ModelConfig config;
  config.layers = 32;
  config.query_heads = 32;
  config.kv_heads = 8;
  config.head_dim = 128;
  ThreadPool pool(2);
  const auto cache = std::make_shared<KvCache>(KvCacheShape{
      .layers = 32, .kv_heads = 8, .head_dim = 128, .pages = 2048, .page_size = 64, .dtype = DType::kBF16});
  LayerAttention attention(config, cache, "", pool);
  const ModelIdentity identity{"llama", 32, 32, 8, 128, ""};
  for (const PolicyInfo& info : policies()) {
    std::vector<int> every_layer(32);
    for (int layer = 0; layer < 32; ++layer) every_layer[layer] = layer;
    PolicyOptions options;
    if (info.needs_plan)
      options.anchors = std::string(info.name).starts_with("kascade-p") ? std::vector{0, 2, 8} : every_layer;
    const auto policy = make_policy(info.name, options, identity, nullptr);
    const auto bytes_of = [&](int64_t rows) { return attention.prefill_bytes(policy.get(), rows, 131072); };
    const int64_t rows = chunk_rows(512, prefill_granule(policy.get(), config.layers), 256 * kMiB, bytes_of);
    EXPECT_LE(bytes_of(rows), 256 * kMiB) << info.name;
    EXPECT_GE(rows, 64) << info.name;
  }
}

}  // namespace
}  // namespace kascade
