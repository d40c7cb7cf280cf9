// SPDX-License-Identifier: Apache-2.0
// tokenizer.json and tokenizer_config.json to TokenizerData.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "kascade/tokenizer.h"

namespace kascade {

/// Reads a BPE tokenizer: byte-level with one of the known pre-tokenisers, or SentencePiece-type with byte
/// fallback. Every component that changes ids (normaliser, pre-tokeniser, post-processor, flags of added
/// tokens) is recognised exactly or refused by name. Ids run to vocabulary - 1; those that the file leaves
/// out become unused tokens. Throws BadFile or Unsupported naming source and field.
TokenizerData read_tokenizer_json(const Json& root, int64_t vocabulary, const std::string& source);

/// Special tokens and the BOS rule of tokenizer_config.json on top; data comes from read_tokenizer_json.
void apply_tokenizer_config(const Json& root, const std::string& source, TokenizerData& data);

/// The template in tokenizer_config.json: a string, or the one named "default" of a list. Empty when there is
/// none.
std::string chat_template_of(const Json& root, const std::string& source);

}  // namespace kascade
