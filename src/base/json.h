// SPDX-License-Identifier: Apache-2.0
// JSON from outside: bounded in size and depth before it becomes a tree, errors that name the source.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kascade {

using Json = nlohmann::json;

/// Parses text; source names it in errors. Throws BadFile for invalid JSON, invalid UTF-8, duplicate keys or
/// nesting deeper than max_depth (a deep tree overflows the stack when copied or destroyed, not only when
/// parsed).
Json parse_json(std::string_view text, const std::string& source, int max_depth = 64);

/// read_file + parse_json.
Json load_json(const std::string& path, uint64_t max_bytes = uint64_t{1} << 30);

/// Typed field access: throws BadFile "source: field 'a.b': expected T, got U". where is the dotted path of
/// object.
const Json& json_field(const Json& object, std::string_view key, const std::string& source,
                       const std::string& where);
int64_t json_int(const Json& object, std::string_view key, int64_t min, int64_t max,
                 const std::string& source, const std::string& where);
double json_number(const Json& object, std::string_view key, const std::string& source,
                   const std::string& where);
std::string json_string(const Json& object, std::string_view key, const std::string& source,
                        const std::string& where);

/// One line of JSON that stays valid whatever bytes its strings hold: invalid UTF-8 becomes U+FFFD.
std::string dump_json(const Json& value, int indent = -1);

}  // namespace kascade
