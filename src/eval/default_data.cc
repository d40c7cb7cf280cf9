// SPDX-License-Identifier: Apache-2.0
#include "eval/default_data.h"

#include <cstddef>

namespace kascade {

namespace embedded {  // written by cmake/KascadeEmbed.cmake
extern const unsigned char calibration[], document[], haystack[], plan_llama[], plan_qwen3[];
extern const std::size_t calibration_size, document_size, haystack_size, plan_llama_size, plan_qwen3_size;
}  // namespace embedded

namespace {

std::string_view text_of(const unsigned char* bytes, std::size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace

std::string_view default_calibration() { return text_of(embedded::calibration, embedded::calibration_size); }

std::string_view default_document() { return text_of(embedded::document, embedded::document_size); }

std::string_view default_haystack() { return text_of(embedded::haystack, embedded::haystack_size); }

std::string_view published_llama_plan() { return text_of(embedded::plan_llama, embedded::plan_llama_size); }

std::string_view published_qwen3_plan() { return text_of(embedded::plan_qwen3, embedded::plan_qwen3_size); }

}  // namespace kascade
