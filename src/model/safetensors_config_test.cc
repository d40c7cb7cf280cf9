// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors_config.h"

#include <fmt/format.h>

#include <string>

#include "base/text.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Json base_config(const std::string& type = "llama") {
  const char* class_name = type == "llama"     ? "LlamaForCausalLM"
                           : type == "mistral" ? "MistralForCausalLM"
                           : type == "qwen2"   ? "Qwen2ForCausalLM"
                                               : "Qwen3ForCausalLM";
  return {{"architectures", {class_name}},
          {"model_type", type},
          {"num_hidden_layers", 2},
          {"hidden_size", 64},
          {"intermediate_size", 96},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"vocab_size", 100},
          {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 500000.0},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", true},
          {"bos_token_id", 1},
          {"eos_token_id", 2}};
}

// base with the fields of patch on top; "absent" as a value removes the field.
SafetensorsConfig read(const Json& patch, const std::string& type = "llama") {
  Json config = base_config(type);
  for (const auto& [field, value] : patch.items()) {
    if (value == "absent")
      config.erase(field);
    else
      config[field] = value;
  }
  return read_safetensors_config(config, "F");
}

TEST(SafetensorsConfig, ReadsALlama) {
  const SafetensorsConfig config = read(Json::object());
  EXPECT_EQ(config.model.architecture, "llama");
  EXPECT_EQ(config.model.layers, 2);
  EXPECT_EQ(config.model.hidden, 64);
  EXPECT_EQ(config.model.ffn, 96);
  EXPECT_EQ(config.model.query_heads, 4);
  EXPECT_EQ(config.model.kv_heads, 2);
  EXPECT_EQ(config.model.head_dim, 16);
  EXPECT_EQ(config.model.vocabulary, 100);
  EXPECT_EQ(config.model.context, 512);
  EXPECT_EQ(config.model.norm_epsilon, 1e-6f);
  EXPECT_EQ(config.model.rope_theta, 500000);
  EXPECT_EQ(config.model.rope_layout, RopeLayout::kHalves);
  EXPECT_EQ(config.model.rope_scaling.kind, RopeScaling::Kind::kNone);
  EXPECT_TRUE(config.model.tied_embeddings);
  EXPECT_TRUE(config.states_tying);
  EXPECT_EQ(config.bos, 1);
  EXPECT_THAT(config.eos, ElementsAre(2));
}

TEST(SafetensorsConfig, ArchitecturesDifferAsTheTableSays) {
  EXPECT_EQ(read({}, "mistral").model.architecture, "mistral");
  EXPECT_TRUE(read({}, "qwen2").model.qkv_bias);
  EXPECT_FALSE(read({}, "qwen2").model.qk_norm);
  EXPECT_TRUE(read({}, "qwen3").model.qk_norm);
  EXPECT_FALSE(read({}, "qwen3").model.qkv_bias);
}

TEST(SafetensorsConfig, HeadDimExplicitNullOrAbsent) {
  EXPECT_EQ(read({{"head_dim", 32}}).model.head_dim, 32);
  EXPECT_EQ(read({{"head_dim", nullptr}}).model.head_dim, 16);
  EXPECT_EQ(read({{"head_dim", "absent"}}).model.head_dim, 16);
  EXPECT_THAT(fault_of<BadFile>([] {
                read({{"head_dim", 0}});
              }),
              HasSubstr("'head_dim': expected an integer in 1..4096"));
  EXPECT_THAT(fault_of<BadFile>([] {
                read({{"hidden_size", 65}});
              }),
              HasSubstr("'hidden_size': expected a multiple of the 4"));
  EXPECT_THAT(fault_of<Unsupported>([] { read({{"head_dim", 12}}); }), HasSubstr("multiple of 8, got 12"));
}

TEST(SafetensorsConfig, AbsentFields) {
  EXPECT_EQ(read({{"num_key_value_heads", "absent"}}).model.kv_heads, 4);
  EXPECT_EQ(read({{"rope_theta", "absent"}}).model.rope_theta, 10000);
  EXPECT_FALSE(read({{"tie_word_embeddings", "absent"}}).states_tying);
  EXPECT_THAT(read({{"eos_token_id", nullptr}}).eos, IsEmpty());
  EXPECT_EQ(read({{"bos_token_id", "absent"}}).bos, std::nullopt);
  EXPECT_NO_THROW(read({{"architectures", "absent"}, {"hidden_act", "absent"}}));
  for (const char* field : {"model_type", "num_hidden_layers", "hidden_size", "intermediate_size",
                            "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"})
    EXPECT_EQ(fault_of<BadFile>([&] {
                read({{field, "absent"}});
              }),
              fmt::format("F: field '{}': missing", field));
  EXPECT_THROW(read({{"num_key_value_heads", "absent"}}, "mistral"), BadFile);
}

TEST(SafetensorsConfig, SeveralEndTokens) {
  EXPECT_THAT(read({{"eos_token_id", {5, 6, 7}}}).eos, ElementsAre(5, 6, 7));
  EXPECT_THAT(fault_of<BadFile>([] {
                read({{"eos_token_id", 100}});
              }),
              HasSubstr("'eos_token_id': expected an integer in 0..99"));
  EXPECT_THAT(fault_of<BadFile>([] { read({{"eos_token_id", {5, -1}}}); }), HasSubstr("'eos_token_id"));
  EXPECT_THAT(fault_of<BadFile>([] { read({{"eos_token_id", {{"a", 1}}}}); }), HasSubstr("'eos_token_id"));
  EXPECT_THAT(fault_of<BadFile>([] { read({{"bos_token_id", 1.5}}); }), HasSubstr("'bos_token_id'"));
}

TEST(SafetensorsConfig, FaultsNameTheField) {
  for (const char* field : {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
                            "num_key_value_heads", "vocab_size", "max_position_embeddings"}) {
    for (const Json& value :
         {Json(0), Json(-1), Json(1e30), Json("4"), Json(1.5), Json::array(), Json(INT64_MAX)})
      EXPECT_THAT(fault_of<BadFile>([&] { read({{field, value}}); }), HasSubstr(quote_text(field)));
  }
  for (const Json& value : {Json(0), Json(1), Json(-1e-6), Json("x")})
    EXPECT_THAT(fault_of<BadFile>([&] { read({{"rms_norm_eps", value}}); }), HasSubstr("'rms_norm_eps'"));
  EXPECT_THAT(fault_of<BadFile>([] { read({{"rope_theta", 0}}); }), HasSubstr("'rope_theta'"));
  EXPECT_THAT(fault_of<BadFile>([] {
                read({{"num_key_value_heads", 3}});
              }),
              HasSubstr("multiple of the 3 KV heads, got 4"));
  EXPECT_THAT(fault_of<BadFile>([] {
                read({{"tie_word_embeddings", 1}});
              }),
              HasSubstr("'tie_word_embeddings'"));
  EXPECT_THAT(fault_of<BadFile>([] { read_safetensors_config(Json::array(), "F"); }),
              HasSubstr("expected a JSON object"));
  EXPECT_THAT(fault_of<Unsupported>([] {
                read({{"num_attention_heads", 32}, {"num_key_value_heads", 1}, {"head_dim", 16}});
              }),
              HasSubstr("query heads for each KV head: expected 1..16, got 32"));
}

TEST(SafetensorsConfig, RopeScaling) {
  const auto scaling = [](const Json& value) { return read({{"rope_scaling", value}}).model.rope_scaling; };
  EXPECT_EQ(scaling(nullptr).kind, RopeScaling::Kind::kNone);
  EXPECT_EQ(scaling({{"rope_type", "default"}}).kind, RopeScaling::Kind::kNone);
  EXPECT_EQ(scaling({{"type", "linear"}, {"factor", 2.5}}).kind, RopeScaling::Kind::kLinear);
  EXPECT_EQ(scaling({{"type", "linear"}, {"factor", 2.5}}).factor, 2.5);
  const Json kLlama3 = {{"rope_type", "llama3"},
                        {"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192}};
  const RopeScaling llama3 = scaling(kLlama3);
  EXPECT_EQ(llama3.kind, RopeScaling::Kind::kLlama3);
  EXPECT_EQ(llama3.factor, 8);
  EXPECT_EQ(llama3.low_freq_factor, 1);
  EXPECT_EQ(llama3.high_freq_factor, 4);
  EXPECT_EQ(llama3.original_context, 8192);

  for (const char* kind : {"yarn", "dynamic", "longrope", "su", "mrope"})
    EXPECT_THAT(fault_of<Unsupported>([&] {
                  scaling({{"rope_type", kind}, {"factor", 2.0}});
                }),
                HasSubstr(fmt::format(
                    "'rope_scaling.rope_type': expected default, linear or llama3, got '{}'", kind)));
  EXPECT_THAT(fault_of<Unsupported>([&] {
                scaling({{"type", "linear"}, {"factor", 2.0}, {"attention_factor", 0.5}});
              }),
              HasSubstr("'rope_scaling.attention_factor'"));
  EXPECT_THAT(fault_of<BadFile>([&] {
                scaling({{"type", "linear"}});
              }),
              HasSubstr("'rope_scaling.factor': missing"));
  EXPECT_THAT(fault_of<BadFile>([&] {
                scaling({{"factor", 2.0}});
              }),
              HasSubstr("'rope_scaling.type': missing"));
  EXPECT_THAT(fault_of<BadFile>([&] { scaling("linear"); }), HasSubstr("'rope_scaling': expected an object"));
  for (const char* field :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    for (const Json& value : {Json(0), Json(-1), Json("x"), Json(nullptr)}) {
      Json broken = kLlama3;
      broken[field] = value;
      EXPECT_THROW(scaling(broken), BadFile) << field << value;
    }
  }
}

TEST(SafetensorsConfig, RopeParametersOfNewerFiles) {
  const SafetensorsConfig config =
      read({{"rope_theta", "absent"},
            {"rope_parameters", {{"rope_theta", 1e6}, {"rope_type", "linear"}, {"factor", 2.0}}}});
  EXPECT_EQ(config.model.rope_theta, 1e6);
  EXPECT_EQ(config.model.rope_scaling.factor, 2);
  EXPECT_THROW(read({{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}), BadFile);
}

TEST(SafetensorsConfig, SlidingWindow) {
  // A window at least as long as the context hides nothing.
  EXPECT_NO_THROW(read({{"sliding_window", nullptr}}, "mistral"));
  EXPECT_NO_THROW(read({{"sliding_window", 512}}, "mistral"));
  EXPECT_THAT(fault_of<Unsupported>([] {
                read({{"sliding_window", 511}}, "mistral");
              }),
              HasSubstr("'sliding_window': expected none or at least the context of 512, got 511"));
  EXPECT_THROW(read({{"sliding_window", 0}}, "mistral"), Unsupported);
  EXPECT_THROW(read({{"sliding_window", 128}}, "llama"), Unsupported);
  for (const char* type : {"qwen2", "qwen3"}) {
    EXPECT_NO_THROW(read({{"sliding_window", 128}}, type));
    EXPECT_NO_THROW(read({{"sliding_window", 128}, {"use_sliding_window", false}}, type));
    EXPECT_THROW(read({{"sliding_window", 128}, {"use_sliding_window", true}}, type), Unsupported);
    EXPECT_THROW(
        read({{"sliding_window", 128}, {"use_sliding_window", true}, {"max_window_layers", 1}}, type),
        Unsupported);
    EXPECT_NO_THROW(
        read({{"sliding_window", 128}, {"use_sliding_window", true}, {"max_window_layers", 2}}, type));
    const Json full = {"full_attention", "full_attention"};
    const Json sliding = {"full_attention", "sliding_attention"};
    EXPECT_NO_THROW(
        read({{"sliding_window", 128}, {"use_sliding_window", true}, {"layer_types", full}}, type));
    EXPECT_NO_THROW(read({{"sliding_window", nullptr}, {"layer_types", sliding}}, type));
    EXPECT_THROW(read({{"sliding_window", 128},
                       {"use_sliding_window", true},
                       {"max_window_layers", 2},
                       {"layer_types", sliding}},
                      type),
                 Unsupported);
    EXPECT_THROW(read({{"layer_types", {"chunked_attention"}}}, type), Unsupported);
  }
}

TEST(SafetensorsConfig, WhatChangesTheMathematicsIsRefusedByName) {
  const struct {
    const char* field;
    Json value;
  } kFields[] = {{"attention_bias", true},
                 {"mlp_bias", true},
                 {"hidden_act", "gelu"},
                 {"partial_rotary_factor", 0.5},
                 {"rope_interleaved", true},
                 {"attn_logit_softcapping", 50.0},
                 {"final_logit_softcapping", 30.0},
                 {"logit_scale", 0.0625},
                 {"embedding_multiplier", 12.0},
                 {"num_local_experts", 8},
                 {"num_experts_per_tok", 2},
                 {"quantization_config", {{"quant_method", "gptq"}}},
                 {"use_qk_norm", true},
                 {"attention_sink_size", 4},
                 {"query_pre_attn_scalar", 256},
                 {"no_rope_layers", {1, 0}},
                 {"clip_qkv", 8.0},
                 {"architectures", {"LlamaForSequenceClassification"}},
                 {"model_type", "gemma2"},
                 {"is_encoder_decoder", true}};
  for (const auto& one : kFields)
    EXPECT_THAT(fault_of<Unsupported>([&] {
                  read({{one.field, one.value}});
                }),
                HasSubstr(quote_text(one.field)));
}

TEST(SafetensorsConfig, ValuesThatChangeNothingAreAccepted) {
  EXPECT_NO_THROW(read({{"attention_bias", false},
                        {"mlp_bias", false},
                        {"partial_rotary_factor", 1.0},
                        {"rope_interleaved", false},
                        {"attn_logit_softcapping", nullptr},
                        {"logit_scale", 1},
                        {"num_local_experts", 0},
                        {"quantization_config", nullptr},
                        {"attention_dropout", 0.1},
                        {"_attn_implementation_autoset", true},
                        {"initializer_range", 0.02},
                        {"pretraining_tp", 1},
                        {"torch_dtype", "bfloat16"},
                        {"transformers_version", "4.53.0"},
                        {"use_cache", true},
                        {"pruned_heads", Json::object()},
                        {"a_field_of_somebody", {1, 2}}}));
  EXPECT_NO_THROW(read({{"attention_bias", true}}, "qwen2"));
}

TEST(SafetensorsConfig, LongValuesMakeShortMessages) {
  EXPECT_LT(fault_of<Unsupported>([] { read({{"clip_qkv", std::string(100'000, 'x')}}); }).size(), 400u);
  EXPECT_LT(fault_of<Unsupported>([] { read({{"x_rope_" + std::string(100'000, 'x'), 5}}); }).size(), 400u);
}

}  // namespace
}  // namespace kascade
