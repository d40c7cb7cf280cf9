// SPDX-License-Identifier: Apache-2.0
// Directories of safetensors models from outside: the first byte says which file of a tiny valid model the
// other bytes replace. The loader gives a model or throws BadFile or Unsupported.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/dequantize.h"
#include "base/json.h"
#include "kascade/error.h"
#include "model/memory_directory.h"
#include "model/safetensors_model.h"

namespace {

using namespace kascade;

constexpr const char* kFiles[] = {"model.safetensors", "config.json", "tokenizer.json",
                                  "tokenizer_config.json", "model.safetensors.index.json"};

constexpr const char* kConfig = R"({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16,
  "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true})";

constexpr const char* kTokenizer = R"({"added_tokens": [{"id": 5, "content": "<|im_end|>", "special": true}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, "merges": ["a b", "ab c"]}})";

constexpr struct {
  const char* name;
  int rows;  // 0: a vector
  int columns;
} kTensors[] = {{"model.embed_tokens.weight", 8, 16},
                {"model.norm.weight", 0, 16},
                {"model.layers.0.input_layernorm.weight", 0, 16},
                {"model.layers.0.post_attention_layernorm.weight", 0, 16},
                {"model.layers.0.self_attn.q_proj.weight", 16, 16},
                {"model.layers.0.self_attn.k_proj.weight", 8, 16},
                {"model.layers.0.self_attn.v_proj.weight", 8, 16},
                {"model.layers.0.self_attn.o_proj.weight", 16, 16},
                {"model.layers.0.mlp.gate_proj.weight", 32, 16},
                {"model.layers.0.mlp.up_proj.weight", 32, 16},
                {"model.layers.0.mlp.down_proj.weight", 16, 32}};

std::string valid_safetensors() {
  Json header = Json::object();
  size_t end = 0;
  for (const auto& tensor : kTensors) {
    const size_t begin = end;
    end += 2 * static_cast<size_t>(tensor.columns) * static_cast<size_t>(tensor.rows == 0 ? 1 : tensor.rows);
    Json shape = Json::array({tensor.columns});
    if (tensor.rows != 0) shape.insert(shape.begin(), tensor.rows);
    header[tensor.name] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + std::string(end, '\x3F');
}

// Reads every byte of the tensor, so that the sanitizer sees one outside of the files.
void read_all(const WeightTensor& weight) {
  if (!weight) return;
  std::vector<float> row(static_cast<size_t>(weight.columns));
  for (int64_t r = 0; r < weight.rows; ++r)
    dequantize_row(weight.type, static_cast<const char*>(weight.data) + r * weight.row_bytes(),
                   weight.columns, row.data());
}

void check_accepted(ModelParts parts) {
  read_all(parts.weights.embedding);
  read_all(parts.weights.head);
  for (const LayerWeights& layer : parts.weights.layers)
    for (const WeightTensor& weight : {layer.attention_norm, layer.q, layer.k, layer.v, layer.output,
                                       layer.ffn_norm, layer.gate, layer.up, layer.down})
      read_all(weight);
  const auto tokenizer = Tokenizer::create(std::move(parts.tokenizer));
  for (const int32_t id : tokenizer->encode("a b <|im_end|> \xFF 123"))
    if (id < 0 || id >= tokenizer->size()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string kSafetensors = valid_safetensors();
  if (size == 0) return 0;
  MemoryDirectory directory("fuzz");
  directory.put("config.json", kConfig);
  directory.put("tokenizer.json", kTokenizer);
  directory.put("model.safetensors", kSafetensors);
  const std::string name = kFiles[data[0] % std::size(kFiles)];
  if (name == "model.safetensors.index.json") {
    directory.remove("model.safetensors");
    directory.put("shard.safetensors", kSafetensors);
  }
  directory.put(name, {reinterpret_cast<const char*>(data) + 1, size - 1});
  try {
    check_accepted(read_safetensors_model(directory));
  } catch (const BadFile&) {
  } catch (const Unsupported&) {
  }
  return 0;
}
