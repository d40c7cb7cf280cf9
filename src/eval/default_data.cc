// SPDX-License-Identifier: Apache-2.0
#include "eval/default_data.h"

#include <cstddef>

namespace kascade {

namespace embedded {  // written by cmake/KascadeEmbed.cmake
extern const unsigned char calibration[], document[], haystack[];
extern const std::size_t calibration_size, document_size, haystack_size;
}  // namespace embedded

namespace {

std::string_view text_of(const unsigned char* bytes, std::size_t size) {
  return {reinterpret_cast<const char*>(bytes), size};
}

}  // namespace

std::string_view default_calibration() { return text_of(embedded::calibration, embedded::calibration_size); }

std::string_view default_document() { return text_of(embedded::document, embedded::document_size); }

std::string_view default_haystack() { return text_of(embedded::haystack, embedded::haystack_size); }

}  // namespace kascade
