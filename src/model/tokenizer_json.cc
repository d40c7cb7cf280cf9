// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_json.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/text.h"
#include "model/model_parts.h"

namespace kascade {
namespace {

constexpr const char* kSpace = "\u2581";  // the SentencePiece spelling of a space

// Patterns of pre-tokenisers, as the published files spell them.
struct SplitPattern {
  std::string_view pre_tokenizer;
  std::string_view regex;
};
constexpr SplitPattern kSplitPatterns[] = {
    {"llama-bpe",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {"gpt-2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
};

// A component of the file with its dotted path.
struct Part {
  const Json* json;
  std::string where;
};

class TokenizerReader {
 public:
  TokenizerReader(const Json& root, int64_t vocabulary, const std::string& source)
      : root_(root), vocabulary_(vocabulary), source_(source) {
    data_.source = source;
  }

  TokenizerData run() {
    require<BadFile>(root_.is_object(), "{}: expected a JSON object, got {}", source_, root_.type_name());
    const Json& model = json_field(root_, "model", source_, "");
    require<BadFile>(model.is_object(), "{}: field 'model': expected an object, got {}", source_,
                     model.type_name());
    if (model.contains("type") && model["type"] != "BPE")
      unsupported("model.type", "expected BPE, got {}", describe(model["type"]));
    for (const char* field : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
      if (is_set(model, field))
        unsupported(fmt::format("model.{}", field), "expected none, got {}", describe(model[field]));
    data_.byte_fallback = flag(model, "byte_fallback", false, "model");
    data_.ignore_merges = flag(model, "ignore_merges", false, "model");

    pre_tokenizer();
    normalizer();
    decoder();
    vocabulary(model);
    merges(model);
    added_tokens();
    unknown(model);
    fill_gaps();
    post_processor();
    return std::move(data_);
  }

 private:
  bool sentencepiece() const { return data_.kind == TokenizerKind::kSentencePiece; }

  template <class... Args>
  [[noreturn]] void unsupported(const std::string& field, fmt::format_string<Args...> format,
                                Args&&... args) const {
    throw_error<Unsupported>("{}: field '{}': {}", source_, field,
                             fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  [[noreturn]] void bad(const std::string& field, fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<BadFile>("{}: field '{}': {}", source_, field,
                         fmt::format(format, std::forward<Args>(args)...));
  }

  static std::string describe(const Json& value) { return quote_text(dump_json(value), 120); }

  static bool is_set(const Json& object, const char* field) {
    const auto found = object.find(field);
    return found != object.end() && !found->is_null() && *found != "";
  }

  bool flag(const Json& object, const char* field, bool absent, const std::string& where) const {
    const auto found = object.find(field);
    if (found == object.end() || found->is_null()) return absent;
    if (!found->is_boolean()) bad(where + "." + field, "expected true or false, got {}", describe(*found));
    return found->get<bool>();
  }

  // The components under `field`, sequences within sequences laid flat; list is the name of a sequence's
  // array.
  std::vector<Part> parts(const char* field, const char* list) const {
    std::vector<Part> flat;
    if (is_set(root_, field)) flatten(root_[field], field, list, &flat);
    return flat;
  }

  void flatten(const Json& json, const std::string& where, const char* list, std::vector<Part>* flat) const {
    if (json_string(json, "type", source_, where) != "Sequence") {
      flat->push_back({&json, where});
      return;
    }
    const Json& items = json_field(json, list, source_, where);
    if (!items.is_array()) bad(where + "." + list, "expected an array, got {}", items.type_name());
    for (size_t i = 0; i < items.size(); ++i)
      flatten(items[i], fmt::format("{}.{}[{}]", where, list, i), list, flat);
  }

  std::string type(const Part& part) const { return json_string(*part.json, "type", source_, part.where); }

  void pre_tokenizer() {
    const std::vector<Part> found = parts("pre_tokenizer", "pretokenizers");
    if (found.empty() || type(found.front()) == "Metaspace") return metaspace(found);
    data_.kind = TokenizerKind::kByteBpe;
    const Part& last = found.back();
    if (type(last) != "ByteLevel")
      unsupported(last.where, "expected ByteLevel, got {}", describe(*last.json));
    if (flag(*last.json, "add_prefix_space", true, last.where))
      unsupported(last.where + ".add_prefix_space", "expected false, got true");
    const bool gpt2_regex = flag(*last.json, "use_regex", true, last.where);
    if (found.size() == 1 && gpt2_regex) {
      data_.pre_tokenizer = "gpt-2";
    } else if (found.size() == 2 && gpt2_regex && type(found[0]) == "Digits" &&
               flag(*found[0].json, "individual_digits", false, found[0].where)) {
      data_.pre_tokenizer = "smollm";
    } else if (found.size() == 2 && !gpt2_regex && type(found[0]) == "Split") {
      split(found[0]);
    } else {
      unsupported("pre_tokenizer", "none of smollm, llama-bpe, qwen2 and gpt-2: {}",
                  describe(root_["pre_tokenizer"]));
    }
  }

  void split(const Part& part) {
    const Json& json = *part.json;
    const Json& pattern = json_field(json, "pattern", source_, part.where);
    const std::string regex = json_string(pattern, "Regex", source_, part.where + ".pattern");
    const auto* known = std::find_if(std::begin(kSplitPatterns), std::end(kSplitPatterns),
                                     [&](const SplitPattern& candidate) { return candidate.regex == regex; });
    if (known == std::end(kSplitPatterns))
      unsupported(part.where + ".pattern.Regex", "not the pattern of llama-bpe, qwen2 or gpt-2: {}",
                  quote_text(regex, 200));
    // These cut alike where every character matches: the pieces are the matches either way.
    const std::string behavior = json_string(json, "behavior", source_, part.where);
    const bool invert = flag(json, "invert", false, part.where);
    if (!(behavior == "Isolated" && !invert) && !(behavior == "Removed" && invert))
      unsupported(part.where + ".behavior", "expected Isolated, got {} with invert {}", quote_text(behavior),
                  invert);
    data_.pre_tokenizer = known->pre_tokenizer;
  }

  // No pre-tokeniser, or Metaspace: a SentencePiece-type vocabulary.
  void metaspace(const std::vector<Part>& found) {
    data_.kind = TokenizerKind::kSentencePiece;
    if (!data_.byte_fallback)
      unsupported("pre_tokenizer", "none or Metaspace is supported with byte_fallback only, got {}",
                  is_set(root_, "pre_tokenizer") ? describe(root_["pre_tokenizer"]) : "none");
    data_.add_space_prefix = false;
    if (found.empty()) return;
    const Part& part = found.front();
    if (found.size() != 1)
      unsupported("pre_tokenizer", "Metaspace with others: {}", describe(root_["pre_tokenizer"]));
    if (json_string(*part.json, "replacement", source_, part.where) != kSpace)
      unsupported(part.where + ".replacement", "expected U+2581");
    if (flag(*part.json, "split", true, part.where))
      unsupported(part.where + ".split", "expected false, got true");
    const std::string scheme = part.json->contains("prepend_scheme")
                                   ? json_string(*part.json, "prepend_scheme", source_, part.where)
                               : flag(*part.json, "add_prefix_space", true, part.where) ? "always"
                                                                                        : "never";
    if (scheme != "always" && scheme != "first" && scheme != "never")
      unsupported(part.where + ".prepend_scheme", "expected always, first or never, got {}",
                  quote_text(scheme));
    data_.add_space_prefix = scheme != "never";
    data_.space_prefix_once = scheme == "first";
    data_.space_prefix_unless_space = true;
  }

  void normalizer() {
    const bool has_metaspace = is_set(root_, "pre_tokenizer");
    bool replaces = false;
    for (const Part& part : parts("normalizer", "normalizers")) {
      const std::string kind = type(part);
      if (!sentencepiece() && kind == "NFC") {
        data_.normalize_nfc = true;
      } else if (sentencepiece() && !has_metaspace && kind == "Prepend" && !replaces &&
                 json_string(*part.json, "prepend", source_, part.where) == kSpace) {
        data_.add_space_prefix = true;
      } else if (sentencepiece() && !has_metaspace && kind == "Replace" && is_space_replacement(part)) {
        replaces = true;
      } else {
        unsupported(part.where, "not supported here: {}", describe(*part.json));
      }
    }
    if (sentencepiece() && !has_metaspace && !replaces)
      unsupported("normalizer",
                  "expected spaces to be replaced by U+2581 here or by a Metaspace pre-tokeniser");
  }

  bool is_space_replacement(const Part& part) const {
    const Json& pattern = json_field(*part.json, "pattern", source_, part.where);
    return json_string(pattern, "String", source_, part.where + ".pattern") == " " &&
           json_string(*part.json, "content", source_, part.where) == kSpace;
  }

  void decoder() const {
    static constexpr std::string_view kSentencePieceDecoders[] = {"Replace", "ByteFallback", "Fuse", "Strip",
                                                                  "Metaspace"};
    for (const Part& part : parts("decoder", "decoders")) {
      const std::string kind = type(part);
      const bool known = sentencepiece()
                             ? std::find(std::begin(kSentencePieceDecoders), std::end(kSentencePieceDecoders),
                                         kind) != std::end(kSentencePieceDecoders)
                             : kind == "ByteLevel";
      if (!known) unsupported(part.where, "not supported here: {}", describe(*part.json));
    }
  }

  int32_t token_id(const Json& id, const std::string& where) const {
    const bool fits = id.is_number_integer() && (id.is_number_unsigned() || id.get<int64_t>() >= 0) &&
                      id.get<uint64_t>() < static_cast<uint64_t>(vocabulary_);
    if (!fits) bad(where, "expected an id in 0..{}, got {}", vocabulary_ - 1, describe(id));
    return id.get<int32_t>();
  }

  void set_token(int32_t id, const std::string& spelling, const char* where) {
    const auto index = static_cast<size_t>(id);
    if (index >= present_.size()) {
      present_.resize(index + 1);
      data_.tokens.resize(index + 1);
      data_.types.resize(index + 1, TokenType::kUnused);
    }
    if (present_[index] && data_.tokens[index] != spelling)
      bad(where, "id {} is both {} and {}", id, quote_text(data_.tokens[index]), quote_text(spelling));
    const auto [at, added] = ids_.emplace(spelling, id);
    if (!added && at->second != id)
      bad(where, "token {} has the ids {} and {}", quote_text(spelling), at->second, id);
    present_[index] = true;
    data_.tokens[index] = spelling;
  }

  void vocabulary(const Json& model) {
    const Json& vocab = json_field(model, "vocab", source_, "model");
    if (!vocab.is_object() || vocab.empty())
      bad("model.vocab", "expected an object with tokens, got {}",
          vocab.is_object() ? "none" : vocab.type_name());
    const bool bytes = sentencepiece();
    for (const auto& [spelling, id_json] : vocab.items()) {
      const int32_t id = token_id(id_json, "model.vocab");
      if (static_cast<size_t>(id) < present_.size() && present_[static_cast<size_t>(id)])
        bad("model.vocab", "id {} is both {} and {}", id, quote_text(data_.tokens[static_cast<size_t>(id)]),
            quote_text(spelling));
      set_token(id, spelling, "model.vocab");
      data_.types[static_cast<size_t>(id)] =
          bytes && is_byte_token(spelling) ? TokenType::kByte : TokenType::kNormal;
    }
  }

  // "<0x0A>"
  static bool is_byte_token(std::string_view spelling) {
    const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); };
    return spelling.size() == 6 && spelling.starts_with("<0x") && spelling.ends_with(">") &&
           hex(spelling[3]) && hex(spelling[4]);
  }

  void merges(const Json& model) {
    const Json& merges = json_field(model, "merges", source_, "model");
    if (!merges.is_array()) bad("model.merges", "expected an array, got {}", merges.type_name());
    data_.merges.reserve(merges.size());
    for (size_t i = 0; i < merges.size(); ++i) {
      const Json& merge = merges[i];
      if (merge.is_string()) {
        data_.merges.push_back(merge.get<std::string>());
        continue;
      }
      const bool pair = merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      if (!pair) bad(fmt::format("model.merges[{}]", i), "expected two strings, got {}", describe(merge));
      const auto& left = merge[0].get_ref<const std::string&>();
      const auto& right = merge[1].get_ref<const std::string&>();
      // Both alphabets spell the space otherwise.
      if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos)
        bad(fmt::format("model.merges[{}]", i), "expected parts without spaces, got {}", describe(merge));
      data_.merges.push_back(fmt::format("{} {}", left, right));
    }
  }

  void added_tokens() {
    if (!is_set(root_, "added_tokens")) return;
    const Json& added = root_["added_tokens"];
    if (!added.is_array()) bad("added_tokens", "expected an array, got {}", added.type_name());
    for (size_t i = 0; i < added.size(); ++i) {
      const std::string where = fmt::format("added_tokens[{}]", i);
      const int32_t id = token_id(json_field(added[i], "id", source_, where), where + ".id");
      const std::string content = json_string(added[i], "content", source_, where);
      if (content.empty()) bad(where + ".content", "expected text, got none");
      for (const char* field : {"single_word", "lstrip", "rstrip"})
        if (flag(added[i], field, false, where)) unsupported(where + "." + field, "expected false, got true");
      set_token(id, content, where.c_str());
      data_.types[static_cast<size_t>(id)] =
          flag(added[i], "special", false, where) ? TokenType::kControl : TokenType::kUserDefined;
    }
  }

  void unknown(const Json& model) {
    if (!is_set(model, "unk_token")) return;
    const std::string spelling = json_string(model, "unk_token", source_, "model");
    const auto found = ids_.find(spelling);
    if (found == ids_.end()) bad("model.unk_token", "{} is no token", quote_text(spelling));
    data_.unknown = found->second;
    if (sentencepiece()) data_.types[static_cast<size_t>(found->second)] = TokenType::kUnknown;
  }

  // Models have rows for ids that the tokenizer never makes; they need a spelling all the same.
  void fill_gaps() {
    const auto size = static_cast<size_t>(vocabulary_);
    present_.resize(size);
    data_.tokens.resize(size);
    data_.types.resize(size, TokenType::kUnused);
    for (size_t id = 0; id < size; ++id) {
      if (present_[id]) continue;
      std::string spelling = fmt::format("[PAD{}]", id);
      while (ids_.contains(spelling)) spelling += '_';
      data_.tokens[id] = std::move(spelling);
    }
  }

  void post_processor() {
    for (const Part& part : parts("post_processor", "processors")) {
      const std::string kind = type(part);
      if (kind == "ByteLevel") continue;  // changes offsets alone
      if (kind != "TemplateProcessing") unsupported(part.where, "not supported: {}", describe(*part.json));
      const Json& single = json_field(*part.json, "single", source_, part.where);
      const std::string where = part.where + ".single";
      if (!single.is_array()) bad(where, "expected an array, got {}", single.type_name());
      const bool bare = single.size() == 1 && single[0].contains("Sequence");
      const bool with_bos =
          single.size() == 2 && single[0].contains("SpecialToken") && single[1].contains("Sequence");
      if (!bare && !with_bos)
        unsupported(where, "expected the text, or one token and the text, got {}", describe(single));
      if (bare) continue;
      const std::string bos =
          json_string(single[0]["SpecialToken"], "id", source_, where + "[0].SpecialToken");
      const auto found = ids_.find(bos);
      if (found == ids_.end()) bad(where, "{} is no token", quote_text(bos));
      data_.bos = found->second;
      data_.add_bos = true;
    }
  }

  const Json& root_;
  int64_t vocabulary_;
  std::string source_;
  TokenizerData data_;
  std::vector<bool> present_;                     // by id
  std::unordered_map<std::string, int32_t> ids_;  // by spelling
};

// A special token: its spelling, or an object with "content"; null and absent alike give an empty string.
std::string special_token(const Json& root, const char* field, const std::string& source) {
  const auto found = root.find(field);
  if (found == root.end() || found->is_null()) return {};
  if (found->is_object()) return json_string(*found, "content", source, field);
  return json_string(root, field, source, "");
}

}  // namespace

TokenizerData read_tokenizer_json(const Json& root, int64_t vocabulary, const std::string& source) {
  return TokenizerReader(root, vocabulary, source).run();
}

void apply_tokenizer_config(const Json& root, const std::string& source, TokenizerData& data) {
  require<BadFile>(root.is_object(), "{}: expected a JSON object, got {}", source, root.type_name());
  const auto find = [&](const char* field) -> std::optional<int32_t> {
    const std::string spelling = special_token(root, field, source);
    if (spelling.empty()) return std::nullopt;
    const auto at = std::find(data.tokens.begin(), data.tokens.end(), spelling);
    if (at == data.tokens.end())
      throw_error<BadFile>("{}: field '{}': {} is no token", source, field, quote_text(spelling));
    return static_cast<int32_t>(at - data.tokens.begin());
  };
  if (const auto bos = find("bos_token")) data.bos = bos;
  if (const auto eos = find("eos_token")) data.eos = eos;

  // The llama tokenizer classes add a BOS by this field, whatever the post-processor says.
  const auto kind = root.find("tokenizer_class");
  const bool is_llama =
      kind != root.end() && kind->is_string() && kind->get_ref<const std::string&>().starts_with("Llama");
  const auto add_bos = root.find("add_bos_token");
  if (is_llama && add_bos != root.end() && add_bos->is_boolean()) data.add_bos = add_bos->get<bool>();
  const auto add_eos = root.find("add_eos_token");
  if (add_eos != root.end() && *add_eos == true)
    throw_error<Unsupported>("{}: field 'add_eos_token': expected false, got true", source);
  if (data.add_bos && !data.bos)
    throw_error<BadFile>("{}: field 'bos_token': missing, but a BOS is to be added", source);
}

std::string chat_template_of(const Json& root, const std::string& source) {
  const auto found = root.find("chat_template");
  if (found == root.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  require<BadFile>(found->is_array(), "{}: field 'chat_template': expected a string or an array, got {}",
                   source, found->type_name());
  for (const Json& entry : *found)
    if (json_string(entry, "name", source, "chat_template") == "default")
      return json_string(entry, "template", source, "chat_template");
  return {};
}

}  // namespace kascade
