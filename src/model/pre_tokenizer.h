// SPDX-License-Identifier: Apache-2.0
// Cuts text into the pieces within which byte-level BPE merges, by the regular expression of a tokenizer
// family.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace kascade {

/// Immutable and safe to share between threads.
class PreTokenizer {
 public:
  /// name as in GGUF's tokenizer.ggml.pre: smollm, llama-bpe, qwen2, gpt-2 (and names that mean the same).
  /// Throws Unsupported for any other, naming it and source. use_jit = false is for tests of the slower
  /// matcher.
  explicit PreTokenizer(const std::string& name, const std::string& source, bool use_jit = true);
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;

  /// One walk over one text. Every byte belongs to exactly one piece; time is linear in the length of the
  /// text.
  class Walk {
   public:
    /// text must be valid UTF-8 and outlive the walk.
    Walk(const PreTokenizer& pre_tokenizer, std::string_view text);
    ~Walk();
    Walk(const Walk&) = delete;
    Walk& operator=(const Walk&) = delete;

    /// The next piece, never empty; an empty view at the end of the text. Throws OutOfMemory.
    std::string_view next();

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Compiled;
  std::unique_ptr<const Compiled> compiled_;
};

}  // namespace kascade
