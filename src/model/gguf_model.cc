// SPDX-License-Identifier: Apache-2.0
#include "model/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/text.h"
#include "model/architecture.h"
#include "model/gguf.h"

namespace kascade {
namespace {

// Metadata under the architecture's name that config() below honours or checks.
constexpr std::string_view kHonoured[] = {
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
};

// Metadata that says how a model was made, and nothing about how it is run (without yarn, in the last two).
constexpr std::string_view kInformative[] = {"tensor_data_layout", "rope.scaling.finetuned",
                                             "rope.scaling.original_context_length"};

// Metadata that would change the mathematics, with the values that do not.
struct Neutral {
  std::string_view key;
  double values[2];
};
constexpr Neutral kNeutral[] = {
    {"expert_count", {0, 0}},
    {"expert_used_count", {0, 0}},
    {"attn_logit_softcapping", {0, 0}},
    {"final_logit_softcapping", {0, 0}},
    {"logit_scale", {0, 1}},
    {"residual_scale", {0, 1}},
    {"embedding_scale", {0, 1}},
    {"use_parallel_residual", {0, 0}},
    {"pooling_type", {0, 0}},
    {"attention.causal", {1, 1}},
    {"attention.clamp_kqv", {0, 0}},
    {"attention.max_alibi_bias", {0, 0}},
    {"rope.scaling.attn_factor", {0, 1}},
};

template <size_t N>
bool contains(const std::string_view (&list)[N], std::string_view key) {
  return std::find(std::begin(list), std::end(list), key) != std::end(list);
}

class GgufModelReader {
 public:
  GgufModelReader(std::span<const std::byte> bytes, const std::string& source)
      : file_(GgufFile::parse(bytes, source)), source_(source) {}

  ModelParts run() {
    check_kind();
    refuse_unknown();
    ModelParts parts;
    parts.tokenizer = tokenizer();
    parts.config = config(static_cast<int64_t>(parts.tokenizer.tokens.size()));
    TensorMap tensors(source_);
    for (const StoredTensor& tensor : file_.tensors()) tensors.add(tensor, source_);
    parts.config.tied_embeddings = !tensors.has("output.weight");
    rope_factors(tensors, parts.config);
    parts.weights = take_weights(tensors, TensorNames::kGguf, parts.config);
    parts.chat_template = file_.find_string("tokenizer.chat_template").value_or("");
    return parts;
  }

 private:
  std::string key(std::string_view suffix) const {
    return fmt::format("{}.{}", architecture_->gguf_name, suffix);
  }

  template <class... Args>
  [[noreturn]] void unsupported(std::string_view name, fmt::format_string<Args...> format,
                                Args&&... args) const {
    throw_error<Unsupported>("{}: metadata {}: {}", source_, quote_text(name),
                             fmt::format(format, std::forward<Args>(args)...));
  }

  void check_kind() {
    if (const auto type = file_.find_string("general.type"); type && *type != "model")
      unsupported("general.type", "expected 'model', got {}", quote_text(*type));
    if (const auto parts = file_.find_integer("split.count", 0, INT64_MAX); parts && *parts > 1)
      unsupported("split.count", "a model in one file is expected, this one is cut into {}", *parts);
    const std::string_view name = file_.string("general.architecture");
    architecture_ = find_gguf_architecture(name);
    if (architecture_ == nullptr)
      unsupported("general.architecture", "expected one of {}, got {}", architecture_names(),
                  quote_text(name));
    // Version 1 laid the blocks of the same types out otherwise.
    const auto version = file_.find_integer("general.quantization_version", 0, INT64_MAX);
    if (version && *version != 2) {
      for (const StoredTensor& tensor : file_.tensors())
        if (weight_type_info(tensor.type).block_elements != 1)
          unsupported("general.quantization_version", "expected 2, got {}", *version);
    }
  }

  void refuse_unknown() {
    const std::string prefix = key("");
    for (const std::string_view name : file_.keys()) {
      if (!name.starts_with(prefix)) continue;
      const std::string_view suffix = name.substr(prefix.size());
      if (contains(kHonoured, suffix) || contains(kInformative, suffix)) continue;
      const auto* known = std::find_if(std::begin(kNeutral), std::end(kNeutral),
                                       [&](const Neutral& neutral) { return neutral.key == suffix; });
      if (known == std::end(kNeutral))
        unsupported(name, "not supported, and it may change the model's mathematics (value: {})",
                    file_.describe(name));
      const std::optional<double> value = file_.find_scalar(name);
      if (!value || (*value != known->values[0] && *value != known->values[1]))
        unsupported(name, "not supported: expected {} or nothing, got {}", known->values[1],
                    file_.describe(name));
    }
  }

  int integer(std::string_view suffix, int64_t max) const {
    return static_cast<int>(file_.integer(key(suffix), 1, max));
  }

  int uniform_integer(std::string_view suffix, int64_t max) const {
    const auto value = file_.find_uniform_integer(key(suffix), 1, max);
    return static_cast<int>(value ? *value : file_.integer(key(suffix), 1, max));
  }

  ModelConfig config(int64_t tokens) const {
    ModelConfig config;
    config.architecture = architecture_->name;
    config.name = file_.find_string("general.name").value_or("");
    config.layers = integer("block_count", kMaxLayers);
    config.hidden = integer("embedding_length", kMaxWidth);
    config.ffn = uniform_integer("feed_forward_length", kMaxWidth);
    config.query_heads = uniform_integer("attention.head_count", kMaxHeads);
    config.kv_heads =
        static_cast<int>(file_.find_uniform_integer(key("attention.head_count_kv"), 1, kMaxHeads)
                             .value_or(config.query_heads));
    config.head_dim = head_dim(config);
    config.vocabulary = static_cast<int>(tokens);
    if (const auto stated = file_.find_integer(key("vocab_size"), 0, INT64_MAX); stated && *stated != tokens)
      throw_error<BadFile>("{}: metadata {}: expected {}, the number of tokens, got {}", source_,
                           quote_text(key("vocab_size")), tokens, *stated);
    config.context = file_.integer(key("context_length"), 1, kMaxContext);
    const double epsilon = file_.number(key("attention.layer_norm_rms_epsilon"));
    if (!(epsilon > 0 && epsilon < 1))
      throw_error<BadFile>("{}: metadata {}: expected a number between 0 and 1, got {}", source_,
                           quote_text(key("attention.layer_norm_rms_epsilon")), epsilon);
    config.norm_epsilon = static_cast<float>(epsilon);
    config.rope_theta = file_.find_number(key("rope.freq_base")).value_or(10000);
    if (!(config.rope_theta >= 1))
      throw_error<BadFile>("{}: metadata {}: expected a number of at least 1, got {}", source_,
                           quote_text(key("rope.freq_base")), config.rope_theta);
    config.rope_layout = architecture_->gguf_rope_layout;
    config.rope_scaling = rope_scaling();
    config.qkv_bias = architecture_->qkv_bias;
    config.qk_norm = architecture_->qk_norm;
    check_attention(config);
    check_config(config, source_);
    return config;
  }

  int head_dim(const ModelConfig& config) const {
    const auto stated = file_.find_integer(key("attention.key_length"), 1, kMaxHeadDim);
    if (!stated && config.hidden % config.query_heads != 0)
      throw_error<BadFile>("{}: metadata {}: expected a multiple of {} {}, got {}", source_,
                           quote_text(key("embedding_length")), key("attention.head_count"),
                           config.query_heads, config.hidden);
    const int64_t result = stated.value_or(config.hidden / config.query_heads);
    if (const auto value = file_.find_integer(key("attention.value_length"), 1, kMaxHeadDim);
        value && *value != result)
      unsupported(key("attention.value_length"), "expected {}, as for keys, got {}", result, *value);
    if (const auto rotary = file_.find_integer(key("rope.dimension_count"), 0, kMaxHeadDim);
        rotary && *rotary != result)
      unsupported(key("rope.dimension_count"), "expected the head dimension {}, got {}", result, *rotary);
    return static_cast<int>(result);
  }

  void check_attention(const ModelConfig& config) const {
    const auto window = file_.find_integer(key("attention.sliding_window"), 0, INT64_MAX);
    if (window && *window != 0 && *window < config.context)
      unsupported(key("attention.sliding_window"), "expected none or at least the context of {}, got {}",
                  config.context, *window);
    const double usual = 1 / std::sqrt(static_cast<double>(config.head_dim));
    const auto scale = file_.find_number(key("attention.scale"));
    if (scale && *scale != 0 && std::abs(*scale - usual) > 1e-6 * usual)
      unsupported(key("attention.scale"), "expected 1/sqrt(head dimension) = {}, got {}", usual, *scale);
  }

  RopeScaling rope_scaling() const {
    // Old files state the factor alone, under another name.
    std::string factor_key = key("rope.scaling.factor");
    if (!file_.has(factor_key)) factor_key = key("rope.scale_linear");
    const std::string_view type = file_.find_string(key("rope.scaling.type")).value_or("linear");
    if (type != "none" && type != "linear")
      unsupported(key("rope.scaling.type"), "expected none or linear, got {}", quote_text(type));
    const double factor = file_.find_number(factor_key).value_or(1);
    if (type == "none" || factor == 0 || factor == 1) return {};
    if (!(factor > 0))
      throw_error<BadFile>("{}: metadata {}: expected a positive number, got {}", source_,
                           quote_text(factor_key), factor);
    RopeScaling scaling;
    scaling.kind = RopeScaling::Kind::kLinear;
    scaling.factor = factor;
    return scaling;
  }

  // Llama-3 scaling, which converters write as one divisor for each pair of a head's elements.
  void rope_factors(TensorMap& tensors, ModelConfig& config) const {
    const char* name = "rope_freqs.weight";
    if (!tensors.has(name)) return;
    const WeightTensor weight = tensors.take_vector(name, config.head_dim / 2);
    if (weight.type != WeightType::kF32)
      throw_error<Unsupported>("{}: tensor '{}': type: expected F32, got {}", source_, name,
                               weight_type_info(weight.type).name);
    const auto* factors = static_cast<const float*>(weight.data);
    config.rope_frequency_factors.assign(factors, factors + weight.columns);
    for (const float factor : config.rope_frequency_factors)
      if (!(factor > 0))
        throw_error<BadFile>("{}: tensor '{}': expected positive factors, got {}", source_, name, factor);
    if (config.rope_scaling.kind != RopeScaling::Kind::kNone)
      unsupported(key("rope.scaling.factor"), "together with tensor '{}' it is not supported", name);
  }

  TokenizerData tokenizer() const {
    TokenizerData data;
    data.source = source_;
    const std::string_view model = file_.string("tokenizer.ggml.model");
    if (model != "gpt2" && model != "llama")
      unsupported("tokenizer.ggml.model", "expected gpt2 or llama, got {}", quote_text(model));
    data.kind = model == "gpt2" ? TokenizerKind::kByteBpe : TokenizerKind::kSentencePiece;
    vocabulary(data);
    if (data.kind == TokenizerKind::kByteBpe)
      byte_bpe(data);
    else
      sentencepiece(data);
    data.bos = token_id("bos_token_id", data);
    data.eos = token_id("eos_token_id", data);
    data.unknown = token_id("unknown_token_id", data);
    for (const char* name : {"eot_token_id", "eom_token_id"})
      if (const auto id = token_id(name, data)) data.end_ids.push_back(*id);
    add_end_ids(data);
    data.add_bos = file_.find_flag("tokenizer.ggml.add_bos_token").value_or(data.add_bos);
    if (data.add_bos && !data.bos)
      throw_error<BadFile>("{}: metadata 'tokenizer.ggml.bos_token_id': missing, but a BOS is to be added",
                           source_);
    refuse_text_changes();
    return data;
  }

  void vocabulary(TokenizerData& data) const {
    const auto tokens = file_.find_strings("tokenizer.ggml.tokens");
    if (!tokens || tokens->empty() || tokens->size() > static_cast<size_t>(kMaxTokens))
      throw_error<BadFile>("{}: metadata 'tokenizer.ggml.tokens': expected 1..{} strings, got {}", source_,
                           kMaxTokens, file_.describe("tokenizer.ggml.tokens"));
    data.tokens.assign(tokens->begin(), tokens->end());
    if (const auto types = file_.find_integers("tokenizer.ggml.token_type")) {
      same_count("tokenizer.ggml.token_type", types->size(), data);
      for (const int64_t type : *types) {
        if (type < 1 || type > 6)
          throw_error<BadFile>("{}: metadata 'tokenizer.ggml.token_type': expected values in 1..6, got {}",
                               source_, type);
        data.types.push_back(static_cast<TokenType>(type));
      }
    }
  }

  void same_count(const char* name, size_t count, const TokenizerData& data) const {
    require<BadFile>(count == data.tokens.size(),
                     "{}: metadata '{}': expected {} values, one for each token, got {}", source_, name,
                     data.tokens.size(), count);
  }

  void byte_bpe(TokenizerData& data) const {
    const auto merges = file_.find_strings("tokenizer.ggml.merges");
    if (!merges) throw_error<BadFile>("{}: metadata 'tokenizer.ggml.merges': missing", source_);
    data.merges.assign(merges->begin(), merges->end());
    if (!file_.has("tokenizer.ggml.pre"))
      unsupported("tokenizer.ggml.pre", "missing: which pre-tokeniser cuts the text is not known");
    data.pre_tokenizer = file_.string("tokenizer.ggml.pre");
    if (data.pre_tokenizer == "llama3" || data.pre_tokenizer == "llama-v3") data.pre_tokenizer = "llama-bpe";
    if (data.pre_tokenizer == "llama-bpe") {
      data.ignore_merges = true;
      data.add_bos = true;
    }
    data.normalize_nfc = data.pre_tokenizer == "qwen2";
  }

  void sentencepiece(TokenizerData& data) const {
    const auto scores = file_.find_floats("tokenizer.ggml.scores");
    if (!scores) throw_error<BadFile>("{}: metadata 'tokenizer.ggml.scores': missing", source_);
    same_count("tokenizer.ggml.scores", scores->size(), data);
    for (const float score : *scores)
      if (std::isnan(score))
        throw_error<BadFile>("{}: metadata 'tokenizer.ggml.scores': holds a NaN", source_);
    data.scores = *scores;
    data.add_space_prefix = file_.find_flag("tokenizer.ggml.add_space_prefix").value_or(true);
    data.add_bos = true;
  }

  std::optional<int32_t> token_id(std::string_view name, const TokenizerData& data) const {
    const auto last = static_cast<int64_t>(data.tokens.size()) - 1;
    const auto id = file_.find_integer(fmt::format("tokenizer.ggml.{}", name), 0, last);
    if (!id) return std::nullopt;
    return static_cast<int32_t>(*id);
  }

  // What would be done to the text before or after it is cut into tokens.
  void refuse_text_changes() const {
    for (const char* name : {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.remove_extra_whitespaces"})
      if (file_.find_flag(name).value_or(false)) unsupported(name, "expected false, got true");
    for (const std::string_view name : file_.keys()) {
      if (name == "tokenizer.ggml.precompiled_charsmap" || name.starts_with("tokenizer.ggml.normalizer"))
        unsupported(name, "normalisation of the text is not supported");
    }
  }

  GgufFile file_;
  std::string source_;
  const Architecture* architecture_ = nullptr;
};

}  // namespace

ModelParts read_gguf_model(std::span<const std::byte> file, const std::string& source) {
  return GgufModelReader(file, source).run();
}

}  // namespace kascade
