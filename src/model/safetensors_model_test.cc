// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors_model.h"

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"
#include "model/memory_directory.h"
#include "model/model_test_faults.h"

namespace kascade {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsSubsetOf;
using testing::Not;

struct Tensor {
  std::vector<int> shape;
  float value = 0.5f;
};
using Tensors = std::map<std::string, Tensor>;

// hidden 16, ffn 32, 2 query heads and 1 KV head of 8, one layer, 8 tokens.
Tensors tiny_tensors() {
  const std::string layer = "model.layers.0.";
  return {
      {"model.embed_tokens.weight", {{8, 16}}},        {"model.norm.weight", {{16}}},
      {layer + "input_layernorm.weight", {{16}}},      {layer + "post_attention_layernorm.weight", {{16}}},
      {layer + "self_attn.q_proj.weight", {{16, 16}}}, {layer + "self_attn.k_proj.weight", {{8, 16}}},
      {layer + "self_attn.v_proj.weight", {{8, 16}}},  {layer + "self_attn.o_proj.weight", {{16, 16}}},
      {layer + "mlp.gate_proj.weight", {{32, 16}}},    {layer + "mlp.up_proj.weight", {{32, 16}}},
      {layer + "mlp.down_proj.weight", {{16, 32}}}};
}

// A file of F32 tensors; padding spaces move the data.
std::string safetensors(const Tensors& tensors, size_t padding = 0) {
  Json header = Json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    size_t count = 1;
    for (const int extent : tensor.shape) count *= static_cast<size_t>(extent);
    const size_t begin = data.size();
    for (size_t i = 0; i < count; ++i)
      data.append(reinterpret_cast<const char*>(&tensor.value), sizeof(float));
    header[name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  text.append(padding, ' ');
  const uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  return file + text + data;
}

const Json kConfig = {{"model_type", "llama"},    {"num_hidden_layers", 1},
                      {"hidden_size", 16},        {"intermediate_size", 32},
                      {"num_attention_heads", 2}, {"num_key_value_heads", 1},
                      {"vocab_size", 8},          {"max_position_embeddings", 64},
                      {"rms_norm_eps", 1e-5},     {"tie_word_embeddings", true},
                      {"eos_token_id", {6, 5}}};

const char* const kTokenizer = R"({"added_tokens": [{"id": 5, "content": "<|im_end|>", "special": true}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": ["a b", "ab c"]}})";

MemoryDirectory tiny() {
  MemoryDirectory directory("D/tiny");
  directory.put("config.json", kConfig.dump());
  directory.put("model.safetensors", safetensors(tiny_tensors()));
  directory.put("tokenizer.json", kTokenizer);
  return directory;
}

template <class E>
std::string fault(const std::function<void(MemoryDirectory&)>& change) {
  MemoryDirectory directory = tiny();
  change(directory);
  return fault_of<E>([&] { read_safetensors_model(directory); });
}

Json config_with(const char* field, const Json& value) {
  Json config = kConfig;
  config[field] = value;
  return config;
}

TEST(SafetensorsModel, ReadsOneFile) {
  MemoryDirectory directory = tiny();
  const ModelParts parts = read_safetensors_model(directory);
  EXPECT_EQ(parts.config.name, "tiny");
  EXPECT_TRUE(parts.config.tied_embeddings);
  EXPECT_EQ(parts.weights.layers.size(), 1u);
  EXPECT_EQ(parts.weights.head.data, parts.weights.embedding.data);
  EXPECT_EQ(parts.weights.bytes, 4u * (8 * 16 + 3 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32));
  EXPECT_EQ(parts.tokenizer.tokens.size(), 8u);
  EXPECT_EQ(parts.tokenizer.eos, 6);
  EXPECT_THAT(parts.tokenizer.end_ids, ElementsAre(6, 5));
  EXPECT_TRUE(parts.copies.empty());
  EXPECT_EQ(parts.chat_template, "");
}

TEST(SafetensorsModel, TokenizerConfigAndTemplates) {
  MemoryDirectory directory = tiny();
  directory.put("tokenizer_config.json",
                R"({"eos_token": "<|im_end|>", "chat_template": "in the configuration"})");
  ModelParts parts = read_safetensors_model(directory);
  EXPECT_EQ(parts.chat_template, "in the configuration");
  EXPECT_EQ(parts.tokenizer.eos, 5);
  directory.put("chat_template.jinja", "in a file");
  EXPECT_EQ(read_safetensors_model(directory).chat_template, "in a file");
}

TEST(SafetensorsModel, TyingFollowsTheTensorsWhereNothingIsStated) {
  MemoryDirectory directory = tiny();
  Json config = kConfig;
  config.erase("tie_word_embeddings");
  directory.put("config.json", config.dump());
  EXPECT_TRUE(read_safetensors_model(directory).config.tied_embeddings);
  Tensors tensors = tiny_tensors();
  tensors["lm_head.weight"] = {{8, 16}};
  directory.put("model.safetensors", safetensors(tensors));
  const ModelParts own = read_safetensors_model(directory);
  EXPECT_FALSE(own.config.tied_embeddings);
  EXPECT_NE(own.weights.head.data, own.weights.embedding.data);
  // Stated as tied, a stored head is ignored.
  directory.put("config.json", kConfig.dump());
  EXPECT_TRUE(read_safetensors_model(directory).config.tied_embeddings);
  // Stated as not tied, it must be there.
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) {
                d.put("config.json", config_with("tie_word_embeddings", false).dump());
              }),
              HasSubstr("'lm_head.weight': missing"));
}

TEST(SafetensorsModel, MisalignedTensorsAreCopied) {
  for (size_t padding = 1; padding < 4; ++padding) {
    MemoryDirectory directory = tiny();
    directory.put("model.safetensors", safetensors(tiny_tensors(), padding));
    const ModelParts parts = read_safetensors_model(directory);
    EXPECT_EQ(parts.copies.size(), tiny_tensors().size());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parts.weights.embedding.data) % 4, 0u);
    EXPECT_EQ(static_cast<const float*>(parts.weights.embedding.data)[127], 0.5f);
  }
}

TEST(SafetensorsModel, FilesThatAreMissing) {
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.remove("config.json"); }),
              HasSubstr("D/tiny/config.json: missing"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.remove("tokenizer.json"); }),
              HasSubstr("D/tiny/tokenizer.json: missing"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.remove("model.safetensors"); }),
              HasSubstr("D/tiny: neither model.safetensors nor model.safetensors.index.json is there"));
}

TEST(SafetensorsModel, FaultsNameFileAndField) {
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.put("config.json", "{"); }),
              HasSubstr("D/tiny/config.json: not valid JSON"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.put("config.json", "[]"); }),
              HasSubstr("D/tiny/config.json: expected a JSON object"));
  EXPECT_THAT(
      fault<BadFile>([](MemoryDirectory& d) { d.put("config.json", std::string((16u << 20) + 1, ' ')); }),
      HasSubstr("D/tiny/config.json: size: expected at most 16777216 bytes"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.put("tokenizer.json", "{}"); }),
              HasSubstr("D/tiny/tokenizer.json: field 'model': missing"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.put("tokenizer_config.json", "7"); }),
              HasSubstr("D/tiny/tokenizer_config.json"));
  EXPECT_THAT(fault<BadFile>([](MemoryDirectory& d) { d.put("model.safetensors", "x"); }),
              HasSubstr("D/tiny/model.safetensors: not a safetensors file"));
}

TEST(SafetensorsModel, TensorsMustAgreeWithTheConfiguration) {
  const struct {
    const char* expected;
    const char* field;
    Json value;
  } kFaults[] = {
      {"'model.layers.1.input_layernorm.weight': missing", "num_hidden_layers", 4096},
      {"'model.embed_tokens.weight': expected shape [9, 16], got [8, 16]", "vocab_size", 9},
      {"'model.embed_tokens.weight': expected shape [8, 32], got [8, 16]", "hidden_size", 32},
      {"'model.layers.0.mlp.gate_proj.weight': expected shape [33, 16], got [32, 16]", "intermediate_size",
       33},
      {"'model.layers.0.self_attn.k_proj.weight': expected shape [16, 16], got [8, 16]",
       "num_key_value_heads", 2},
      {"'model.layers.0.self_attn.q_proj.weight': expected shape [32, 16], got [16, 16]", "head_dim", 16},
  };
  for (const auto& one : kFaults)
    EXPECT_THAT(fault<BadFile>([&](MemoryDirectory& d) {
                  d.put("config.json", config_with(one.field, one.value).dump());
                }),
                HasSubstr(one.expected));
}

TEST(SafetensorsModel, ExtraAndBrokenTensors) {
  const auto with = [](const char* name, Tensor tensor) {
    return [=](MemoryDirectory& d) {
      Tensors tensors = tiny_tensors();
      tensors[name] = tensor;
      d.put("model.safetensors", safetensors(tensors));
    };
  };
  EXPECT_THAT(fault<Unsupported>(with("model.layers.0.self_attn.q_proj.bias", {{16}})),
              HasSubstr("D/tiny/model.safetensors: tensor 'model.layers.0.self_attn.q_proj.bias': no part of "
                        "architecture 'llama'"));
  EXPECT_THAT(fault<BadFile>(with("model.norm.weight", {{16}, std::numeric_limits<float>::quiet_NaN()})),
              HasSubstr("'model.norm.weight': row 0: expected finite values"));
  MemoryDirectory directory = tiny();
  with("model.layers.0.self_attn.rotary_emb.inv_freq", {{4}})(directory);
  EXPECT_NO_THROW(read_safetensors_model(directory));
}

// Two shards and their index.
MemoryDirectory sharded(const std::function<void(Tensors&, Tensors&, Json&)>& change = {}) {
  MemoryDirectory directory = tiny();
  directory.remove("model.safetensors");
  Tensors first = tiny_tensors();
  Tensors second;
  for (const char* name : {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"})
    second.insert(first.extract(name));
  Json map = Json::object();
  for (const auto& [name, tensor] : first) map[name] = "a-1.safetensors";
  for (const auto& [name, tensor] : second) map[name] = "a-2.safetensors";
  if (change) change(first, second, map);
  directory.put("a-1.safetensors", safetensors(first));
  directory.put("a-2.safetensors", safetensors(second));
  directory.put("model.safetensors.index.json",
                Json{{"metadata", {{"total_size", 1}}}, {"weight_map", map}}.dump());
  return directory;
}

TEST(SafetensorsModel, ReadsShardsAndOnlyFilesThatTheIndexNames) {
  MemoryDirectory directory = sharded();
  directory.put("stray.safetensors", "broken");
  EXPECT_EQ(read_safetensors_model(directory).weights.layers.size(), 1u);
  const std::vector<std::string> known = {
      "config.json",     "model.safetensors", "model.safetensors.index.json", "a-1.safetensors",
      "a-2.safetensors", "tokenizer.json",    "tokenizer_config.json",        "chat_template.jinja"};
  EXPECT_THAT(directory.asked(), IsSubsetOf(known));
}

TEST(SafetensorsModel, ShardFaults) {
  const auto shard_fault = [](const std::function<void(Tensors&, Tensors&, Json&)>& change) {
    MemoryDirectory directory = sharded(change);
    return fault_of<BadFile>([&] { read_safetensors_model(directory); });
  };
  EXPECT_THAT(
      shard_fault([](Tensors&, Tensors&, Json& map) { map["model.norm.weight"] = "none.safetensors"; }),
      HasSubstr("D/tiny/a-2.safetensors: expected the 1 tensors"));
  EXPECT_THAT(shard_fault([](Tensors&, Tensors&, Json& map) { map["x"] = "none.safetensors"; }),
              HasSubstr("D/tiny/none.safetensors: missing"));
  EXPECT_THAT(shard_fault([](Tensors&, Tensors& second, Json&) { second["extra"] = {{2}}; }),
              HasSubstr("D/tiny/a-2.safetensors: expected the 2 tensors that "
                        "D/tiny/model.safetensors.index.json names, got 3"));
  EXPECT_THAT(shard_fault([](Tensors& first, Tensors& second, Json&) {
                second.insert(first.extract("model.layers.0.mlp.down_proj.weight"));
                first.insert(second.extract("model.norm.weight"));
              }),
              HasSubstr("does not put it into this file"));
  EXPECT_THAT(shard_fault([](Tensors&, Tensors&, Json& map) { map = Json::object(); }),
              HasSubstr("'weight_map'"));
  EXPECT_THAT(shard_fault([](Tensors&, Tensors&, Json& map) { map["model.norm.weight"] = 5; }),
              HasSubstr("'weight_map.model.norm.weight': expected a string"));
}

TEST(SafetensorsModel, FileNamesInTheIndexAreBaseNames) {
  for (const char* name : {"../a.safetensors", "/etc/a.safetensors", "x/a.safetensors", "..", "",
                           ".a.safetensors", "x\\a.safetensors", "C:a.safetensors", "a.bin"}) {
    MemoryDirectory directory =
        sharded([&](Tensors&, Tensors&, Json& map) { map["model.norm.weight"] = name; });
    EXPECT_THAT(fault_of<BadFile>([&] { read_safetensors_model(directory); }),
                HasSubstr("'model.norm.weight': expected the name of a .safetensors file beside it"))
        << name;
    EXPECT_THAT(directory.asked(), Not(testing::Contains(name)));
  }
  EXPECT_FALSE(is_base_name(std::string_view("a\0.safetensors", 14)));
  EXPECT_TRUE(is_base_name("model-00001-of-00002.safetensors"));
}

}  // namespace
}  // namespace kascade
