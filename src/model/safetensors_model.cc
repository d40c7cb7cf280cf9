// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors_model.h"

#include <cstring>
#include <map>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/text.h"
#include "model/architecture.h"
#include "model/safetensors.h"
#include "model/safetensors_config.h"
#include "model/tokenizer_json.h"

namespace kascade {
namespace {

// Real ones are below a tenth of these.
constexpr size_t kMaxConfigBytes = size_t{16} << 20;
constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;
constexpr size_t kMaxTemplateBytes = size_t{4} << 20;

class SafetensorsModelReader {
 public:
  explicit SafetensorsModelReader(ModelDirectory& directory) : directory_(directory) {}

  ModelParts run() {
    const std::string config_path = directory_.path_of("config.json");
    SafetensorsConfig config = read_safetensors_config(json("config.json", kMaxConfigBytes), config_path);
    parts_.config = std::move(config.model);
    if (parts_.config.name.empty()) parts_.config.name = base_name(directory_.path());
    TensorMap tensors(directory_.path());
    read_tensors(tensors);
    if (!config.states_tying) parts_.config.tied_embeddings = !tensors.has("lm_head.weight");
    parts_.weights = take_weights(tensors, TensorNames::kSafetensors, parts_.config);
    read_tokenizer(config);
    return std::move(parts_);
  }

 private:
  static std::string base_name(std::string path) {
    while (path.size() > 1 && path.back() == '/') path.pop_back();
    return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
  }

  static std::string_view text(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::string_view bounded(std::span<const std::byte> bytes, const std::string& name,
                           size_t max_bytes) const {
    require<BadFile>(bytes.size() <= max_bytes, "{}: size: expected at most {} bytes, got {}",
                     directory_.path_of(name), max_bytes, bytes.size());
    return text(bytes);
  }

  Json json(const std::string& name, size_t max_bytes) {
    return parse_json(bounded(directory_.require(name), name, max_bytes), directory_.path_of(name));
  }

  void read_tensors(TensorMap& tensors) {
    const std::string whole = "model.safetensors";
    const std::string index = "model.safetensors.index.json";
    if (const auto file = directory_.find(whole)) {
      for (StoredTensor& tensor : parse_safetensors(*file, directory_.path_of(whole)))
        add(std::move(tensor), whole, tensors);
      return;
    }
    require<BadFile>(directory_.find(index).has_value(), "{}: neither {} nor {} is there", directory_.path(),
                     whole, index);
    read_shards(json(index, kMaxConfigBytes), directory_.path_of(index), tensors);
  }

  void read_shards(const Json& index, const std::string& source, TensorMap& tensors) {
    const Json& weight_map = json_field(index, "weight_map", source, "");
    require<BadFile>(weight_map.is_object() && !weight_map.empty(),
                     "{}: field 'weight_map': expected an object with tensors", source);
    std::map<std::string, size_t> shards;  // file name, number of tensors that the index puts into it
    for (const auto& [tensor, file] : weight_map.items()) {
      const std::string name = json_string(weight_map, tensor, source, "weight_map");
      if (!is_base_name(name) || !name.ends_with(".safetensors"))
        throw_error<BadFile>(
            "{}: field 'weight_map': {}: expected the name of a .safetensors file beside it, got {}", source,
            quote_text(tensor), quote_text(name));
      ++shards[name];
    }
    for (const auto& [shard, count] : shards) {
      std::vector<StoredTensor> found =
          parse_safetensors(directory_.require(shard), directory_.path_of(shard));
      require<BadFile>(found.size() == count, "{}: expected the {} tensors that {} names, got {}",
                       directory_.path_of(shard), count, source, found.size());
      for (StoredTensor& tensor : found) {
        const auto named = weight_map.find(tensor.name);
        if (named == weight_map.end() || *named != shard)
          throw_error<BadFile>("{}: tensor {}: {} does not put it into this file", directory_.path_of(shard),
                               quote_text(tensor.name), source);
        add(std::move(tensor), shard, tensors);
      }
    }
  }

  // The format aligns no tensor, though writers do. Kernels read whole elements, so that one which starts
  // between two is copied: slower to open, and the copy stays in memory.
  void add(StoredTensor tensor, const std::string& file, TensorMap& tensors) {
    const auto element_bytes = static_cast<uintptr_t>(weight_type_info(tensor.type).block_bytes);
    if (reinterpret_cast<uintptr_t>(tensor.data) % element_bytes != 0) {
      size_t bytes = element_bytes;  // the parser has checked the product against the file
      for (const int64_t extent : tensor.shape) bytes *= static_cast<size_t>(extent);
      auto copy = std::make_unique<std::byte[]>(bytes);
      if (bytes != 0) std::memcpy(copy.get(), tensor.data, bytes);
      tensor.data = copy.get();
      parts_.copies.push_back(std::move(copy));
    }
    tensors.add(std::move(tensor), directory_.path_of(file));
  }

  void read_tokenizer(const SafetensorsConfig& config) {
    const std::string name = "tokenizer.json";
    TokenizerData& data = parts_.tokenizer;
    data = read_tokenizer_json(json(name, kMaxTokenizerBytes), parts_.config.vocabulary,
                               directory_.path_of(name));
    const std::string settings = "tokenizer_config.json";
    if (directory_.find(settings)) {
      const Json root = json(settings, kMaxConfigBytes);
      apply_tokenizer_config(root, directory_.path_of(settings), data);
      parts_.chat_template = chat_template_of(root, directory_.path_of(settings));
    }
    // Newer writers keep the template in a file of its own, which wins.
    const std::string template_name = "chat_template.jinja";
    if (const auto file = directory_.find(template_name))
      parts_.chat_template = bounded(*file, template_name, kMaxTemplateBytes);
    if (!data.bos) data.bos = config.bos;
    if (!data.eos && !config.eos.empty()) data.eos = config.eos.front();
    data.end_ids = config.eos;
    add_end_ids(data);
  }

  ModelDirectory& directory_;
  ModelParts parts_;
};

}  // namespace

ModelParts read_safetensors_model(ModelDirectory& directory) {
  return SafetensorsModelReader(directory).run();
}

}  // namespace kascade
