// SPDX-License-Identifier: Apache-2.0
// What the program carries inside itself (data/README.md): works wherever the program is installed.
#pragma once

#include <cstdint>
#include <string_view>

namespace kascade {

/// data/calibration.jsonl: question records and book excerpts, interleaved; the last
/// kDefaultValidationPrompts are kept out of every choice.
std::string_view default_calibration();
constexpr int64_t kDefaultValidationPrompts = 6;

/// data/document.txt: the document of the demo, and the haystack of validation passkeys.
std::string_view default_document();

/// data/haystack.txt: the haystack of the passkeys that the choice of anchors sees; another book than the
/// document.
std::string_view default_haystack();

/// data/plans: the head maps that the method's authors published, as plans.
std::string_view published_llama_plan();
std::string_view published_qwen3_plan();

}  // namespace kascade
