// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors_config.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "model/architecture.h"
#include "model/model_parts.h"

namespace kascade {
namespace {

// Fields that the reader below honours or checks.
constexpr std::string_view kHonoured[] = {
    "model_type",          "architectures",
    "num_hidden_layers",   "hidden_size",
    "intermediate_size",   "num_attention_heads",
    "num_key_value_heads", "head_dim",
    "vocab_size",          "max_position_embeddings",
    "rms_norm_eps",        "rope_theta",
    "rope_scaling",        "rope_parameters",
    "hidden_act",          "tie_word_embeddings",
    "bos_token_id",        "eos_token_id",
    "sliding_window",      "use_sliding_window",
    "max_window_layers",   "layer_types",
    "attention_bias",
};

// Fields that sound like mathematics and are none at inference, or not of these architectures.
constexpr std::string_view kInformative[] = {"attention_dropout",
                                             "attn_implementation",
                                             "_attn_implementation",
                                             "_attn_implementation_autoset",
                                             "_attn_implementation_internal",
                                             "use_flash_attention",
                                             "layer_norm_eps",
                                             "layer_norm_epsilon"};

// Fields that change the mathematics and are not implemented, with a value (besides null and false) that
// changes nothing.
struct Neutral {
  std::string_view field;
  double value;
};
constexpr Neutral kNeutral[] = {
    {"mlp_bias", 0},
    {"partial_rotary_factor", 1},
    {"rotary_pct", 1},
    {"rope_interleaved", 0},
    {"attn_logit_softcapping", 0},
    {"final_logit_softcapping", 0},
    {"logit_scale", 1},
    {"logits_scaling", 1},
    {"embedding_multiplier", 1},
    {"residual_multiplier", 1},
    {"num_experts", 0},
    {"num_local_experts", 0},
    {"n_routed_experts", 0},
    {"use_mrope", 0},
    {"is_encoder_decoder", 0},
    {"add_cross_attention", 0},
};

// Parts of the names of fields that change the mathematics of some architecture.
constexpr std::string_view kSuspicious[] = {
    "rope",  "rotary", "attn",       "attention",  "window", "softcap", "scal", "expert",
    "moe",   "norm",   "bias",       "multiplier", "sink",   "quant",   "clip", "qk",
    "alibi", "mup",    "activation", "sparse",     "lora",   "residual"};

template <size_t N>
bool contains(const std::string_view (&list)[N], std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

bool is_empty(const Json& value) {
  return value.is_null() || value == false || ((value.is_array() || value.is_object()) && value.empty()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty());
}

class ConfigReader {
 public:
  ConfigReader(const Json& root, const std::string& source) : root_(root), source_(source) {}

  SafetensorsConfig run() {
    require<BadFile>(root_.is_object(), "{}: expected a JSON object, got {}", source_, root_.type_name());
    find_architecture_entry();
    refuse_unknown();
    shapes();
    const double epsilon = json_number(root_, "rms_norm_eps", source_, "");
    require<BadFile>(epsilon > 0 && epsilon < 1,
                     "{}: field 'rms_norm_eps': expected a number between 0 and 1, got {}", source_, epsilon);
    model().norm_epsilon = static_cast<float>(epsilon);
    rope();
    attention();
    if (has("hidden_act")) {
      const std::string activation = json_string(root_, "hidden_act", source_, "");
      if (activation != "silu" && activation != "swish")
        unsupported("hidden_act", "expected silu, got {}", quote_text(activation));
    }
    if (has("tie_word_embeddings")) {
      result_.states_tying = true;
      model().tied_embeddings = flag("tie_word_embeddings");
    }
    token_ids();
    check_config(model(), source_);
    return std::move(result_);
  }

 private:
  ModelConfig& model() { return result_.model; }

  // Present and not null: null stands for absent.
  bool has(std::string_view field) const {
    const auto found = root_.find(field);
    return found != root_.end() && !found->is_null();
  }

  int integer(std::string_view field, int64_t max) const {
    return static_cast<int>(json_int(root_, field, 1, max, source_, ""));
  }

  bool flag(std::string_view field) const {
    if (!has(field)) return false;
    const Json& value = json_field(root_, field, source_, "");
    require<BadFile>(value.is_boolean(), "{}: field '{}': expected true or false, got {}", source_, field,
                     value.type_name());
    return value.get<bool>();
  }

  template <class... Args>
  [[noreturn]] void unsupported(std::string_view field, fmt::format_string<Args...> format,
                                Args&&... args) const {
    throw_error<Unsupported>("{}: field {}: {}", source_, quote_text(field),
                             fmt::format(format, std::forward<Args>(args)...));
  }

  void find_architecture_entry() {
    const std::string type = json_string(root_, "model_type", source_, "");
    architecture_ = find_architecture(type);
    if (architecture_ == nullptr)
      unsupported("model_type", "expected one of {}, got {}", architecture_names(), quote_text(type));
    if (has("architectures")) {
      const Json& classes = json_field(root_, "architectures", source_, "");
      require<BadFile>(classes.is_array(), "{}: field 'architectures': expected an array, got {}", source_,
                       classes.type_name());
      for (const Json& name : classes)
        if (name != architecture_->class_name)
          unsupported("architectures", "expected {}, got {}", architecture_->class_name,
                      quote_text(name.is_string() ? name.get<std::string>() : dump_json(name)));
    }
    model().architecture = architecture_->name;
    model().qkv_bias = architecture_->qkv_bias;
    model().qk_norm = architecture_->qk_norm;
    model().rope_layout = RopeLayout::kHalves;
    if (has("_name_or_path")) model().name = json_string(root_, "_name_or_path", source_, "");
  }

  void refuse_unknown() const {
    for (const auto& item : root_.items()) {
      const std::string& field = item.key();
      const Json& value = item.value();
      if (contains(kHonoured, field) || contains(kInformative, field) || is_empty(value)) continue;
      const auto* known = std::find_if(std::begin(kNeutral), std::end(kNeutral),
                                       [&](const Neutral& neutral) { return neutral.field == field; });
      if (known != std::end(kNeutral)) {
        if (!value.is_number() || value.get<double>() != known->value)
          unsupported(field, "not supported: expected {} or nothing, got {}", known->value,
                      quote_text(dump_json(value)));
        continue;
      }
      for (const std::string_view part : kSuspicious)
        if (field.find(part) != std::string::npos && value != 0)
          unsupported(field, "not supported, and it may change the model's mathematics (value: {})",
                      quote_text(dump_json(value)));
    }
  }

  void shapes() {
    ModelConfig& config = model();
    config.layers = integer("num_hidden_layers", kMaxLayers);
    config.hidden = integer("hidden_size", kMaxWidth);
    config.ffn = integer("intermediate_size", kMaxWidth);
    config.query_heads = integer("num_attention_heads", kMaxHeads);
    // The first llama models had no such field.
    const bool one_for_each = architecture_->name == std::string_view("llama") && !has("num_key_value_heads");
    config.kv_heads = one_for_each ? config.query_heads : integer("num_key_value_heads", kMaxHeads);
    if (has("head_dim")) {
      config.head_dim = integer("head_dim", kMaxHeadDim);
    } else {
      require<BadFile>(
          config.hidden % config.query_heads == 0,
          "{}: field 'hidden_size': expected a multiple of the {} heads where 'head_dim' is absent, got {}",
          source_, config.query_heads, config.hidden);
      config.head_dim = config.hidden / config.query_heads;
    }
    config.vocabulary = integer("vocab_size", kMaxTokens);
    config.context = json_int(root_, "max_position_embeddings", 1, kMaxContext, source_, "");
  }

  void rope() {
    if (has("rope_theta")) model().rope_theta = theta(root_, "");
    const bool both = has("rope_scaling") && has("rope_parameters");
    if (both) unsupported("rope_parameters", "together with 'rope_scaling' it is not supported");
    for (const char* field : {"rope_scaling", "rope_parameters"}) {
      if (!has(field)) continue;
      const Json& scaling = root_[field];
      require<BadFile>(scaling.is_object(), "{}: field '{}': expected an object, got {}", source_, field,
                       scaling.type_name());
      if (scaling.contains("rope_theta")) model().rope_theta = theta(scaling, field);
      rope_scaling(scaling, field);
    }
  }

  double theta(const Json& object, const std::string& where) const {
    const double value = json_number(object, "rope_theta", source_, where);
    require<BadFile>(value >= 1, "{}: field 'rope_theta': expected a number of at least 1, got {}", source_,
                     value);
    return value;
  }

  void rope_scaling(const Json& object, const std::string& where) {
    // Older files say "type".
    const char* key = object.contains("rope_type") ? "rope_type" : "type";
    const std::string kind = json_string(object, key, source_, where);
    RopeScaling& scaling = model().rope_scaling;
    if (kind == "linear")
      scaling.kind = RopeScaling::Kind::kLinear;
    else if (kind == "llama3")
      scaling.kind = RopeScaling::Kind::kLlama3;
    else if (kind != "default" && kind != "none")
      unsupported(where + "." + key, "expected default, linear or llama3, got {}", quote_text(kind));

    const bool llama3 = scaling.kind == RopeScaling::Kind::kLlama3;
    for (const auto& [field, value] : object.items()) {
      const bool known = field == "type" || field == "rope_type" || field == "rope_theta" ||
                         field == "factor" || field == "original_max_position_embeddings" ||
                         (llama3 && (field == "low_freq_factor" || field == "high_freq_factor"));
      if (!known && !is_empty(value))
        unsupported(where + "." + field, "not supported with {} (value: {})", kind,
                    quote_text(dump_json(value)));
    }
    if (scaling.kind == RopeScaling::Kind::kNone) return;
    scaling.factor = json_number(object, "factor", source_, where);
    require<BadFile>(scaling.factor >= 1, "{}: field '{}.factor': expected a number of at least 1, got {}",
                     source_, where, scaling.factor);
    if (!llama3) return;
    scaling.low_freq_factor = json_number(object, "low_freq_factor", source_, where);
    scaling.high_freq_factor = json_number(object, "high_freq_factor", source_, where);
    require<BadFile>(
        scaling.low_freq_factor > 0 && scaling.high_freq_factor > scaling.low_freq_factor,
        "{}: field '{}.high_freq_factor': expected more than low_freq_factor {}, a positive number, got {}",
        source_, where, scaling.low_freq_factor, scaling.high_freq_factor);
    scaling.original_context =
        json_int(object, "original_max_position_embeddings", 1, kMaxContext, source_, where);
  }

  void attention() const {
    // The bias of qwen2 is part of the architecture, whatever this field says; others have none.
    if (!architecture_->qkv_bias && flag("attention_bias"))
      unsupported("attention_bias", "expected false, got true");

    const bool windowed = narrow_window();
    bool sliding_layers = false;
    if (has("layer_types")) {
      const Json& types = root_["layer_types"];
      require<BadFile>(types.is_array(), "{}: field 'layer_types': expected an array, got {}", source_,
                       types.type_name());
      for (const Json& type : types) {
        if (type == "sliding_attention")
          sliding_layers = true;
        else if (type != "full_attention")
          unsupported("layer_types", "expected full_attention, got {}", quote_text(dump_json(type)));
      }
    }
    if (!windowed) return;
    // The qwen models use a window in the layers that the list names, or from a layer on where there is no
    // list.
    if (has_window_switch() && has("layer_types") && !sliding_layers) return;
    if (has_window_switch() && !has("layer_types") && has("max_window_layers") &&
        json_int(root_, "max_window_layers", 0, INT64_MAX, source_, "") >= result_.model.layers)
      return;
    unsupported("sliding_window", "expected none or at least the context of {}, got {}",
                result_.model.context, dump_json(root_["sliding_window"]));
  }

  // The qwen models state a window that they do not use unless told to.
  bool has_window_switch() const {
    return has("use_sliding_window") || architecture_->name == std::string_view("qwen2") ||
           architecture_->name == std::string_view("qwen3");
  }

  // Whether a window is in use that hides something.
  bool narrow_window() const {
    if (!has("sliding_window") || (has_window_switch() && !flag("use_sliding_window"))) return false;
    return json_int(root_, "sliding_window", 0, INT64_MAX, source_, "") < result_.model.context;
  }

  void token_ids() {
    const int64_t last = model().vocabulary - 1;
    if (has("bos_token_id"))
      result_.bos = static_cast<int32_t>(json_int(root_, "bos_token_id", 0, last, source_, ""));
    if (!has("eos_token_id")) return;
    if (!root_["eos_token_id"].is_array()) {
      result_.eos.push_back(static_cast<int32_t>(json_int(root_, "eos_token_id", 0, last, source_, "")));
      return;
    }
    for (const Json& id : root_["eos_token_id"]) {
      const Json wrapped = {{"[]", id}};
      result_.eos.push_back(static_cast<int32_t>(json_int(wrapped, "[]", 0, last, source_, "eos_token_id")));
    }
  }

  const Json& root_;
  std::string source_;
  const Architecture* architecture_ = nullptr;
  SafetensorsConfig result_;
};

}  // namespace

SafetensorsConfig read_safetensors_config(const Json& root, const std::string& source) {
  return ConfigReader(root, source).run();
}

}  // namespace kascade
