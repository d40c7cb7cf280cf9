// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_model.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model/gguf_test_builder.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Bytes = GgufBuilder::Bytes;
using Change = std::function<void(GgufBuilder&)>;

const std::vector<std::string> kTokens = {
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "c", "d"};

// hidden 16, ffn 32, 2 query heads and 1 KV head of 8, one layer, 8 tokens.
GgufBuilder tiny(const std::string& architecture = "llama") {
  GgufBuilder file;
  const std::string prefix = architecture + ".";
  file.set("general.architecture", architecture.c_str()).set("general.name", "tiny");
  file.set(prefix + "block_count", 1u)
      .set(prefix + "context_length", 64u)
      .set(prefix + "embedding_length", 16u);
  file.set(prefix + "feed_forward_length", 32u).set(prefix + "attention.head_count", 2u);
  file.set(prefix + "attention.head_count_kv", 1u).set(prefix + "attention.layer_norm_rms_epsilon", 1e-5f);
  file.set(prefix + "rope.freq_base", 50000.0f).set(prefix + "rope.dimension_count", 8u);
  file.set("tokenizer.ggml.model", "gpt2")
      .set("tokenizer.ggml.pre", "smollm")
      .set("tokenizer.ggml.tokens", kTokens);
  file.set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 3, 3, 1, 1, 1, 1, 1});
  file.set("tokenizer.ggml.merges", std::vector<std::string>{"a b"}).set("tokenizer.ggml.eos_token_id", 2u);
  file.set("tokenizer.chat_template", "{{ messages }}");
  file.add_tensor("token_embd.weight", {16, 8}).add_tensor("output_norm.weight", {16});
  file.add_tensor("blk.0.attn_norm.weight", {16}).add_tensor("blk.0.ffn_norm.weight", {16});
  file.add_tensor("blk.0.attn_q.weight", {16, 16}).add_tensor("blk.0.attn_k.weight", {16, 8});
  file.add_tensor("blk.0.attn_v.weight", {16, 8}).add_tensor("blk.0.attn_output.weight", {16, 16});
  file.add_tensor("blk.0.ffn_gate.weight", {16, 32}).add_tensor("blk.0.ffn_up.weight", {16, 32});
  file.add_tensor("blk.0.ffn_down.weight", {32, 16});
  if (architecture == "qwen2") {
    file.add_tensor("blk.0.attn_q.bias", {16})
        .add_tensor("blk.0.attn_k.bias", {8})
        .add_tensor("blk.0.attn_v.bias", {8});
  }
  if (architecture == "qwen3")
    file.add_tensor("blk.0.attn_q_norm.weight", {8}).add_tensor("blk.0.attn_k_norm.weight", {8});
  return file;
}

// Keeps the bytes that the parts point into.
struct Read {
  Bytes bytes;
  ModelParts parts;
};

Read read(GgufBuilder file) {
  Read result;
  result.bytes = file.bytes();
  result.parts = read_gguf_model(result.bytes, "F");
  return result;
}
Read read_with(const Change& change) {
  GgufBuilder file = tiny();
  change(file);
  return read(file);
}

template <class E>
std::string fault(const Change& change) {
  return fault_of<E>([&] { read_with(change); });
}

TEST(GgufModel, ReadsALlama) {
  const Read model = read(tiny());
  const ModelConfig& config = model.parts.config;
  EXPECT_EQ(config.architecture, "llama");
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.layers, 1);
  EXPECT_EQ(config.hidden, 16);
  EXPECT_EQ(config.ffn, 32);
  EXPECT_EQ(config.query_heads, 2);
  EXPECT_EQ(config.kv_heads, 1);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.vocabulary, 8);
  EXPECT_EQ(config.context, 64);
  EXPECT_EQ(config.norm_epsilon, 1e-5f);
  EXPECT_EQ(config.rope_theta, 50000);
  EXPECT_EQ(config.rope_layout, RopeLayout::kAdjacent);
  EXPECT_EQ(config.rope_scaling.kind, RopeScaling::Kind::kNone);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_FALSE(config.qk_norm);

  const ModelWeights& weights = model.parts.weights;
  ASSERT_EQ(weights.layers.size(), 1u);
  EXPECT_EQ(weights.head.data, weights.embedding.data);
  EXPECT_EQ(weights.layers[0].k.rows, 8);
  EXPECT_EQ(weights.layers[0].down.columns, 32);
  EXPECT_FALSE(weights.layers[0].q_bias);
  EXPECT_FALSE(weights.layers[0].q_norm);
  EXPECT_EQ(weights.bytes, 4u * (8 * 16 + 3 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32));

  const TokenizerData& tokenizer = model.parts.tokenizer;
  EXPECT_EQ(tokenizer.kind, TokenizerKind::kByteBpe);
  EXPECT_EQ(tokenizer.pre_tokenizer, "smollm");
  EXPECT_EQ(tokenizer.tokens, kTokens);
  EXPECT_EQ(tokenizer.types[2], TokenType::kControl);
  EXPECT_EQ(tokenizer.eos, 2);
  EXPECT_EQ(tokenizer.bos, std::nullopt);
  EXPECT_FALSE(tokenizer.add_bos);
  EXPECT_THAT(tokenizer.end_ids, ElementsAre(2, 0));
  EXPECT_EQ(model.parts.chat_template, "{{ messages }}");
}

TEST(GgufModel, ReadsQwen) {
  const Read qwen2 = read(tiny("qwen2"));
  EXPECT_EQ(qwen2.parts.config.architecture, "qwen2");
  EXPECT_EQ(qwen2.parts.config.rope_layout, RopeLayout::kHalves);
  EXPECT_TRUE(qwen2.parts.config.qkv_bias);
  EXPECT_EQ(qwen2.parts.weights.layers[0].k_bias.columns, 8);
  const Read qwen3 = read(tiny("qwen3"));
  EXPECT_TRUE(qwen3.parts.config.qk_norm);
  EXPECT_EQ(qwen3.parts.weights.layers[0].q_norm.columns, 8);
  EXPECT_FALSE(qwen3.parts.weights.layers[0].q_bias);
}

TEST(GgufModel, OwnHeadAndDefaults) {
  const Read model = read_with([](GgufBuilder& f) {
    f.add_tensor("output.weight", {16, 8});
    f.remove("llama.attention.head_count_kv")
        .remove("llama.rope.freq_base")
        .remove("llama.rope.dimension_count");
    for (const char* name : {"blk.0.attn_k.weight", "blk.0.attn_v.weight"})
      f.remove_tensor(name).add_tensor(name, {16, 16});
  });
  EXPECT_FALSE(model.parts.config.tied_embeddings);
  EXPECT_NE(model.parts.weights.head.data, model.parts.weights.embedding.data);
  EXPECT_EQ(model.parts.config.kv_heads, 2);
  EXPECT_EQ(model.parts.config.rope_theta, 10000);
}

TEST(GgufModel, HeadDimensionNeedNotFollowFromTheWidth) {
  const Read model = read_with([](GgufBuilder& f) {
    f.set("llama.attention.key_length", 16u)
        .set("llama.attention.value_length", 16u)
        .set("llama.rope.dimension_count", 16u);
    for (const char* name : {"blk.0.attn_k.weight", "blk.0.attn_v.weight"})
      f.remove_tensor(name).add_tensor(name, {16, 16});
    f.remove_tensor("blk.0.attn_q.weight").add_tensor("blk.0.attn_q.weight", {16, 32});
    f.remove_tensor("blk.0.attn_output.weight").add_tensor("blk.0.attn_output.weight", {32, 16});
  });
  EXPECT_EQ(model.parts.config.head_dim, 16);
  EXPECT_EQ(model.parts.weights.layers[0].q.rows, 32);
}

TEST(GgufModel, ValuesStatedForEachLayerMustAgree) {
  EXPECT_EQ(read_with([](GgufBuilder& f) {
              f.set("llama.attention.head_count", std::vector<int32_t>{2});
            }).parts.config.query_heads,
            2);
  EXPECT_THAT(fault<Unsupported>([](GgufBuilder& f) {
                f.set("llama.feed_forward_length", std::vector<int32_t>{32, 64});
              }),
              HasSubstr("'llama.feed_forward_length'"));
}

TEST(GgufModel, RopeScaling) {
  const auto scaling = [](const Change& change) { return read_with(change).parts.config.rope_scaling; };
  const RopeScaling linear = scaling([](GgufBuilder& f) {
    f.set("llama.rope.scaling.type", "linear").set("llama.rope.scaling.factor", 4.0f);
  });
  EXPECT_EQ(linear.kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(linear.factor, 4);
  EXPECT_EQ(scaling([](GgufBuilder& f) { f.set("llama.rope.scale_linear", 2.0f); }).factor, 2);
  EXPECT_EQ(scaling([](GgufBuilder& f) {
              f.set("llama.rope.scaling.type", "none").set("llama.rope.scaling.factor", 4.0f);
            }).kind,
            RopeScaling::Kind::kNone);
  EXPECT_THAT(fault<Unsupported>([](GgufBuilder& f) { f.set("llama.rope.scaling.type", "yarn"); }),
              HasSubstr("'llama.rope.scaling.type': expected none or linear, got 'yarn'"));
  EXPECT_THROW(read_with([](GgufBuilder& f) { f.set("llama.rope.scaling.factor", -1.0f); }), BadFile);
}

TEST(GgufModel, RopeFactors) {
  const Read model = read_with([](GgufBuilder& f) { f.add_tensor("rope_freqs.weight", {4}, 8); });
  EXPECT_THAT(model.parts.config.rope_frequency_factors, ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(fault<BadFile>([](GgufBuilder& f) { f.add_tensor("rope_freqs.weight", {8}, 8); }),
              HasSubstr("'rope_freqs.weight': expected shape [4], got [8]"));
  for (const float factor : {0.0f, -1.0f})
    EXPECT_THAT(fault<BadFile>([&](GgufBuilder& f) { f.add_tensor("rope_freqs.weight", {4}, factor); }),
                HasSubstr("positive"));
  EXPECT_THROW(read_with([](GgufBuilder& f) {
                 f.add_tensor("rope_freqs.weight", {4}, 8).set("llama.rope.scaling.factor", 2.0f);
               }),
               Unsupported);
}

struct Fault {
  const char* expected;
  Change change;
};

TEST(GgufModel, MetadataFaultsNameTheKey) {
  const Fault kFaults[] = {
      {"'general.architecture': missing", [](GgufBuilder& f) { f.remove("general.architecture"); }},
      {"'llama.block_count': missing", [](GgufBuilder& f) { f.remove("llama.block_count"); }},
      {"'llama.block_count': expected an integer in 1..4096, got the uint32 0",
       [](GgufBuilder& f) { f.set("llama.block_count", 0u); }},
      {"'llama.block_count': expected an integer",
       [](GgufBuilder& f) { f.set("llama.block_count", 4'000'000'000u); }},
      {"'llama.context_length': missing", [](GgufBuilder& f) { f.remove("llama.context_length"); }},
      {"'llama.context_length': expected an integer",
       [](GgufBuilder& f) { f.set("llama.context_length", 0u); }},
      {"'llama.embedding_length': expected an integer",
       [](GgufBuilder& f) { f.set("llama.embedding_length", "16"); }},
      {"'llama.feed_forward_length': missing", [](GgufBuilder& f) { f.remove("llama.feed_forward_length"); }},
      {"'llama.attention.head_count': expected an integer",
       [](GgufBuilder& f) { f.set("llama.attention.head_count", 0u); }},
      {"'llama.attention.head_count_kv': expected an integer",
       [](GgufBuilder& f) { f.set("llama.attention.head_count_kv", 0u); }},
      {"query heads: expected a multiple of the 3 KV heads, got 2",
       [](GgufBuilder& f) { f.set("llama.attention.head_count_kv", 3u); }},
      {"'llama.embedding_length': expected a multiple of llama.attention.head_count 3, got 16",
       [](GgufBuilder& f) { f.set("llama.attention.head_count", 3u); }},
      {"'llama.attention.layer_norm_rms_epsilon': expected a number between 0 and 1",
       [](GgufBuilder& f) { f.set("llama.attention.layer_norm_rms_epsilon", 0.0f); }},
      {"'llama.attention.layer_norm_rms_epsilon': expected a finite float, got the float32 nan",
       [](GgufBuilder& f) {
         f.set("llama.attention.layer_norm_rms_epsilon", std::numeric_limits<float>::quiet_NaN());
       }},
      {"'llama.rope.freq_base': expected a number of at least 1",
       [](GgufBuilder& f) { f.set("llama.rope.freq_base", 0.0f); }},
      {"'llama.vocab_size': expected 8, the number of tokens, got 9",
       [](GgufBuilder& f) { f.set("llama.vocab_size", 9u); }},
  };
  for (const Fault& one : kFaults) EXPECT_THAT(fault<BadFile>(one.change), HasSubstr(one.expected));
}

TEST(GgufModel, WhatChangesTheMathematicsIsRefusedByName) {
  const Fault kFaults[] = {
      {"'general.architecture': expected one of llama, mistral, qwen2, qwen3, got 'gemma2'",
       [](GgufBuilder& f) { f.set("general.architecture", "gemma2"); }},
      {"'general.type': expected 'model', got 'adapter'",
       [](GgufBuilder& f) { f.set("general.type", "adapter"); }},
      {"'split.count'", [](GgufBuilder& f) { f.set("split.count", 3u); }},
      {"'llama.attention.sliding_window': expected none or at least the context of 64, got 32",
       [](GgufBuilder& f) { f.set("llama.attention.sliding_window", 32u); }},
      {"'llama.attn_logit_softcapping': not supported: expected 0 or nothing, got the float32 50",
       [](GgufBuilder& f) { f.set("llama.attn_logit_softcapping", 50.0f); }},
      {"'llama.final_logit_softcapping'",
       [](GgufBuilder& f) { f.set("llama.final_logit_softcapping", 30.0f); }},
      {"'llama.expert_count'", [](GgufBuilder& f) { f.set("llama.expert_count", 8u); }},
      {"'llama.logit_scale'", [](GgufBuilder& f) { f.set("llama.logit_scale", 0.5f); }},
      {"'llama.attention.scale'", [](GgufBuilder& f) { f.set("llama.attention.scale", 0.5f); }},
      {"'llama.attention.causal'", [](GgufBuilder& f) { f.set("llama.attention.causal", false); }},
      {"'llama.rope.scaling.yarn_log_multiplier'",
       [](GgufBuilder& f) { f.set("llama.rope.scaling.yarn_log_multiplier", 0.1f); }},
      {"'llama.rope.dimension_count': expected the head dimension 8, got 4",
       [](GgufBuilder& f) { f.set("llama.rope.dimension_count", 4u); }},
      {"'llama.attention.value_length': expected 8, as for keys, got 16",
       [](GgufBuilder& f) { f.set("llama.attention.value_length", 16u); }},
      {"'llama.something.new'", [](GgufBuilder& f) { f.set("llama.something.new", 1u); }},
      {"head dimension: expected a multiple of 8, got 4",
       [](GgufBuilder& f) { f.set("llama.attention.head_count", 4u).remove("llama.rope.dimension_count"); }},
      {"tensor 'blk.0.attn_q.bias': no part of architecture 'llama'",
       [](GgufBuilder& f) { f.add_tensor("blk.0.attn_q.bias", {16}); }},
      {"tensor 'blk.1.attn_norm.weight': no part",
       [](GgufBuilder& f) { f.add_tensor("blk.1.attn_norm.weight", {16}); }},
      {"tensor 'blk.0.attn_sinks.weight': no part",
       [](GgufBuilder& f) { f.add_tensor("blk.0.attn_sinks.weight", {2}); }},
  };
  for (const Fault& one : kFaults) EXPECT_THAT(fault<Unsupported>(one.change), HasSubstr(one.expected));
}

TEST(GgufModel, ValuesThatChangeNothingAreAccepted) {
  EXPECT_NO_THROW(read_with([](GgufBuilder& f) {
    f.set("general.type", "model").set("split.count", 1u).set("llama.attention.sliding_window", 64u);
    f.set("llama.attn_logit_softcapping", 0.0f).set("llama.expert_count", 0u).set("llama.logit_scale", 1.0f);
    f.set("llama.attention.scale", 0.35355338f)
        .set("llama.attention.causal", true)
        .set("llama.vocab_size", 8u);
    f.set("llama.rope.scaling.original_context_length", 32u).set("general.quantization_version", 1u);
    f.set("llama.tensor_data_layout", "Meta AI original pth").set("another.prefix", 1u);
  }));
}

TEST(GgufModel, OldQuantisationIsRefusedWhereThereAreBlocks) {
  const Change blocks = [](GgufBuilder& f) {
    f.set("general.quantization_version", 1u);
    GgufBuilder::Tensor& down = f.tensor("blk.0.ffn_down.weight");
    down.type = 2;  // Q4_0: 18 bytes for 32
    down.data.assign(18 * 16, std::byte{0});
  };
  EXPECT_THAT(fault<Unsupported>(blocks), HasSubstr("'general.quantization_version': expected 2, got 1"));
}

TEST(GgufModel, TensorsMustAgreeWithMetadata) {
  const Fault kFaults[] = {
      {"tensor 'blk.0.ffn_up.weight': missing, expected shape [32, 16]",
       [](GgufBuilder& f) { f.remove_tensor("blk.0.ffn_up.weight"); }},
      {"tensor 'blk.1.attn_norm.weight': missing", [](GgufBuilder& f) { f.set("llama.block_count", 4096u); }},
      {"tensor 'output_norm.weight': missing", [](GgufBuilder& f) { f.remove_tensor("output_norm.weight"); }},
      {"tensor 'token_embd.weight': expected shape [8, 32], got [8, 16]",
       [](GgufBuilder& f) { f.set("llama.embedding_length", 32u).set("llama.attention.key_length", 8u); }},
      {"tensor 'token_embd.weight': expected shape [9, 16], got [8, 16]",
       [](GgufBuilder& f) {
         auto tokens = kTokens;
         tokens.push_back("e");
         f.set("tokenizer.ggml.tokens", tokens).remove("tokenizer.ggml.token_type");
       }},
      {"tensor 'blk.0.attn_k.weight': expected shape [16, 16], got [8, 16]",
       [](GgufBuilder& f) { f.set("llama.attention.head_count_kv", 2u); }},
      {"tensor 'blk.0.ffn_gate.weight': expected shape [64, 16], got [32, 16]",
       [](GgufBuilder& f) { f.set("llama.feed_forward_length", 64u); }},
      {"tensor 'blk.0.attn_v.weight': expected shape [8, 16], got [16, 8]",
       [](GgufBuilder& f) {
         f.tensor("blk.0.attn_v.weight").dimensions = {8, 16};
       }},
      {"tensor 'blk.0.attn_norm.weight': expected shape [16], got [2, 8]",
       [](GgufBuilder& f) {
         f.tensor("blk.0.attn_norm.weight").dimensions = {8, 2};
       }},
  };
  for (const Fault& one : kFaults) EXPECT_THAT(fault<BadFile>(one.change), HasSubstr(one.expected));
  // Outer dimensions of 1 say nothing.
  EXPECT_NO_THROW(read_with([](GgufBuilder& f) {
    f.tensor("blk.0.attn_norm.weight").dimensions = {16, 1, 1};
  }));
}

TEST(GgufModel, ValuesThatAreNotFiniteAreRefused) {
  const auto put = [](GgufBuilder& f, const char* name, size_t element, float value) {
    std::memcpy(f.tensor(name).data.data() + element * sizeof(float), &value, sizeof(float));
  };
  EXPECT_THAT(fault<BadFile>([&](GgufBuilder& f) { put(f, "blk.0.attn_norm.weight", 15, std::nanf("")); }),
              HasSubstr("tensor 'blk.0.attn_norm.weight': row 0: expected finite values"));
  EXPECT_THAT(fault<BadFile>([&](GgufBuilder& f) { put(f, "blk.0.ffn_down.weight", 33, -HUGE_VALF); }),
              HasSubstr("tensor 'blk.0.ffn_down.weight': row 1: expected finite values"));
}

TEST(GgufModel, VectorsInBlocksAreRefused) {
  EXPECT_THAT(
      fault<Unsupported>([](GgufBuilder& f) {
        f.set("llama.attention.key_length", 32u).set("llama.rope.dimension_count", 32u);
        f.add_tensor("rope_freqs.weight", {32});
        f.set("llama.embedding_length", 32u);
        GgufBuilder::Tensor& embedding = f.tensor("token_embd.weight");
        embedding.dimensions = {32, 8};
        embedding.data.resize(32 * 8 * 4);
        GgufBuilder::Tensor& norm = f.tensor("blk.0.attn_norm.weight");
        norm.dimensions = {32};
        norm.type = 8;
        norm.data.assign(34, std::byte{0});
        f.remove_tensor("rope_freqs.weight");
      }),
      HasSubstr("tensor 'blk.0.attn_norm.weight': type: expected F32, F16 or BF16 for a vector, got Q8_0"));
}

TEST(GgufModel, TokenizerFaults) {
  const Fault kBad[] = {
      {"'tokenizer.ggml.tokens': expected 1..", [](GgufBuilder& f) { f.remove("tokenizer.ggml.tokens"); }},
      {"'tokenizer.ggml.tokens': expected 1..",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.tokens", std::vector<std::string>{}); }},
      {"'tokenizer.ggml.token_type': expected 8 values, one for each token, got 1",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.token_type", std::vector<int32_t>{1}); }},
      {"'tokenizer.ggml.token_type': expected values in 1..6, got 7",
       [](GgufBuilder& f) {
         f.set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 3, 3, 1, 1, 1, 1, 7});
       }},
      {"'tokenizer.ggml.merges': missing", [](GgufBuilder& f) { f.remove("tokenizer.ggml.merges"); }},
      {"'tokenizer.ggml.eos_token_id': expected an integer in 0..7, got the uint32 8",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.eos_token_id", 8u); }},
      {"'tokenizer.ggml.bos_token_id': missing, but a BOS is to be added",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.add_bos_token", true); }},
      {"'tokenizer.ggml.model': missing", [](GgufBuilder& f) { f.remove("tokenizer.ggml.model"); }},
      {"'tokenizer.ggml.scores': missing", [](GgufBuilder& f) { f.set("tokenizer.ggml.model", "llama"); }},
      {"'tokenizer.ggml.scores': expected 8 values",
       [](GgufBuilder& f) {
         f.set("tokenizer.ggml.model", "llama").set("tokenizer.ggml.scores", std::vector<float>(7));
       }},
      {"'tokenizer.ggml.scores': holds a NaN",
       [](GgufBuilder& f) {
         f.set("tokenizer.ggml.model", "llama")
             .set("tokenizer.ggml.scores", std::vector<float>(8, std::nanf("")));
       }},
      {"'tokenizer.chat_template': expected a string",
       [](GgufBuilder& f) { f.set("tokenizer.chat_template", 1u); }},
  };
  for (const Fault& one : kBad) EXPECT_THAT(fault<BadFile>(one.change), HasSubstr(one.expected));
  const Fault kUnsupported[] = {
      {"'tokenizer.ggml.model': expected gpt2 or llama, got 'bert'",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.model", "bert"); }},
      {"'tokenizer.ggml.pre': missing", [](GgufBuilder& f) { f.remove("tokenizer.ggml.pre"); }},
      {"'tokenizer.ggml.add_eos_token'", [](GgufBuilder& f) { f.set("tokenizer.ggml.add_eos_token", true); }},
      {"'tokenizer.ggml.remove_extra_whitespaces'",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.remove_extra_whitespaces", true); }},
      {"'tokenizer.ggml.precompiled_charsmap'",
       [](GgufBuilder& f) { f.set("tokenizer.ggml.precompiled_charsmap", std::vector<int32_t>{1}); }},
  };
  for (const Fault& one : kUnsupported) EXPECT_THAT(fault<Unsupported>(one.change), HasSubstr(one.expected));
}

TEST(GgufModel, TokenizerKinds) {
  const TokenizerData sentencepiece =
      read_with([](GgufBuilder& f) {
        f.set("tokenizer.ggml.model", "llama").set("tokenizer.ggml.scores", std::vector<float>(8, -1));
        f.set("tokenizer.ggml.bos_token_id", 1u);
      }).parts.tokenizer;
  EXPECT_EQ(sentencepiece.kind, TokenizerKind::kSentencePiece);
  EXPECT_TRUE(sentencepiece.add_bos);
  EXPECT_TRUE(sentencepiece.add_space_prefix);
  EXPECT_EQ(sentencepiece.scores.size(), 8u);
  EXPECT_TRUE(sentencepiece.merges.empty());

  const TokenizerData llama3 =
      read_with([](GgufBuilder& f) {
        f.set("tokenizer.ggml.pre", "llama-v3").set("tokenizer.ggml.bos_token_id", 1u);
        f.set("tokenizer.ggml.eot_token_id", 5u);
      }).parts.tokenizer;
  EXPECT_EQ(llama3.pre_tokenizer, "llama-bpe");
  EXPECT_TRUE(llama3.ignore_merges);
  EXPECT_TRUE(llama3.add_bos);
  EXPECT_FALSE(llama3.normalize_nfc);
  EXPECT_THAT(llama3.end_ids, ElementsAre(5, 2, 0));

  const TokenizerData qwen =
      read_with([](GgufBuilder& f) {
        f.set("tokenizer.ggml.pre", "qwen2").set("tokenizer.ggml.add_bos_token", false);
      }).parts.tokenizer;
  EXPECT_TRUE(qwen.normalize_nfc);
  EXPECT_FALSE(qwen.add_bos);
}

// A token spelled like an end marker ends nothing unless it is a control token.
TEST(GgufModel, OnlyControlTokensEndGeneration) {
  const TokenizerData data =
      read_with([](GgufBuilder& f) {
        f.set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 4, 1, 1, 1, 1, 1});
        f.set("tokenizer.ggml.eos_token_id", 6u);
      }).parts.tokenizer;
  EXPECT_THAT(data.end_ids, ElementsAre(6));
}

}  // namespace
}  // namespace kascade
