// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back: byte-level BPE (GPT-2 family) and SentencePiece-type vocabularies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kascade {

enum class TokenizerKind : uint8_t { kByteBpe, kSentencePiece };

/// Token classes, as in GGUF's tokenizer.ggml.token_type.
enum class TokenType : uint8_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

/// Everything a tokenizer is made from; the GGUF and tokenizer.json readers fill it, create() checks it.
struct TokenizerData {
  std::string source;  // file, for messages
  TokenizerKind kind = TokenizerKind::kByteBpe;
  std::string pre_tokenizer;  // "smollm", "llama-bpe", "qwen2", "gpt-2"; unused by SentencePiece
  std::vector<std::string>
      tokens;  // by id, as spelled in the file (byte-level alphabet or SentencePiece spelling)
  std::vector<TokenType> types;  // [tokens] or empty: all normal
  std::vector<float> scores;     // SentencePiece from GGUF: [tokens]; empty when merges are given
  // BPE: "left right" in rank order. SentencePiece from tokenizer.json has them too, instead of scores: then
  // only listed pairs merge, lowest rank first; without them any pair whose union is a token merges, highest
  // score first.
  std::vector<std::string> merges;
  std::optional<int32_t> bos, eos, unknown;
  std::vector<int32_t> end_ids;    // ids that end generation (eos, end of turn)
  bool add_bos = false;            // whether the model expects a BOS in front of raw text
  bool add_space_prefix = true;    // SentencePiece: in front of the text and after every special token
  bool space_prefix_once = false;  // SentencePiece: in front of the text only (Metaspace "first")
  bool space_prefix_unless_space =
      false;                   // SentencePiece: not where the text begins with a space (Metaspace)
  bool byte_fallback = true;   // SentencePiece: unknown characters become byte tokens
  bool ignore_merges = false;  // llama-3: a piece that is a token as a whole is that token
  bool normalize_nfc = false;  // qwen: text is composed (Unicode NFC) before it is cut into pieces
};

/// The bytes [begin, end) of a text.
struct TextRange {
  size_t begin = 0;
  size_t end = 0;
  bool operator==(const TextRange&) const = default;
};

class Tokenizer {
 public:
  /// Checks data and builds the tables. Throws BadFile (contradictions) or Unsupported (unknown
  /// pre-tokeniser).
  static std::unique_ptr<const Tokenizer> create(TokenizerData data);
  virtual ~Tokenizer() = default;

  /// Ids of a text, byte for byte, no BOS added. Spellings of control tokens inside the text are plain text
  /// unless parse_special. Invalid UTF-8 is encoded byte by byte, never an error. Near-linear time in the
  /// length of text.
  virtual std::vector<int32_t> encode(std::string_view text, bool parse_special = false) const = 0;

  /// Ids of a text of which only a part is trusted: as encode(text, true), but a control-token spelling that
  /// touches one of the ranges `plain` (ascending, disjoint, inside text; else BadArgument) stays plain text.
  virtual std::vector<int32_t> encode_marked(std::string_view text,
                                             std::span<const TextRange> plain) const = 0;

  /// Bytes of one token: may be a part of a character. Throws BadArgument for an id outside the vocabulary.
  virtual std::string_view token_bytes(int32_t id) const = 0;

  /// Bytes of a sequence (control tokens spelled out when show_special, else left out). For SentencePiece the
  /// space that encode puts in front is removed again.
  virtual std::string decode(std::span<const int32_t> ids, bool show_special = false) const = 0;

  virtual bool is_control(int32_t id) const = 0;
  virtual std::optional<int32_t> find(std::string_view spelling) const = 0;  // a token by its exact spelling

  const TokenizerData& data() const { return data_; }
  int32_t size() const { return static_cast<int32_t>(data_.tokens.size()); }
  bool ends_generation(int32_t id) const;

 protected:
  explicit Tokenizer(TokenizerData data) : data_(std::move(data)) {}
  TokenizerData data_;
};

/// Turns a stream of tokens into text without ever splitting a character: bytes of an unfinished UTF-8
/// sequence wait for the rest; flush() returns what is left.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool show_special = false)
      : tokenizer_(tokenizer), show_special_(show_special) {}
  std::string push(int32_t id);
  std::string flush();

 private:
  const Tokenizer& tokenizer_;
  bool show_special_;
  bool first_ = true;
  std::string pending_;
};

}  // namespace kascade
