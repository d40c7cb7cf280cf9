// SPDX-License-Identifier: Apache-2.0
#include "kascade/model.h"

#include <sys/stat.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "model/gguf_model.h"
#include "model/safetensors_model.h"
#include "model/weight_check.h"

namespace kascade {
namespace {

// Keeps the bytes that the weights point into.
class OpenedModel : public Model {
 public:
  explicit OpenedModel(const std::string& path) {
    path_ = path;
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0)
      throw_error<IoError>("{}: cannot open: {}", path, std::system_category().message(errno));
    if (S_ISDIR(status.st_mode)) {
      adopt(read_safetensors_model(directory_.emplace(path)));
    } else {
      require<BadFile>(!path.ends_with(".safetensors"),
                       "{}: expected the directory of a safetensors model, with its config.json", path);
      adopt(read_gguf_model(file_.emplace(path).bytes(), path));
    }
  }

 private:
  void adopt(ModelParts parts) {
    config_ = std::move(parts.config);
    weights_ = std::move(parts.weights);
    copies_ = std::move(parts.copies);
    chat_template_source_ = std::move(parts.chat_template);
    tokenizer_ = Tokenizer::create(std::move(parts.tokenizer));
    fingerprint_ = weight_fingerprint(weights_);
  }

  std::optional<MappedFile> file_;
  std::optional<DiskDirectory> directory_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

}  // namespace

Model::~Model() = default;

std::shared_ptr<const Model> Model::open(const std::string& path) {
  return std::make_shared<OpenedModel>(path);
}

ModelIdentity Model::identity() const {
  ModelIdentity identity;
  identity.architecture = config_.architecture;
  identity.layers = config_.layers;
  identity.query_heads = config_.query_heads;
  identity.kv_heads = config_.kv_heads;
  identity.head_dim = config_.head_dim;
  identity.fingerprint = fingerprint_;
  return identity;
}

}  // namespace kascade
