// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/text.h"

namespace kascade {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxDimensions = 8;
constexpr int kMaxDepth = 4;  // header, tensor, shape; one to spare
constexpr const char* kMetadata = "__metadata__";

constexpr std::string_view kOtherTypes[] = {"F64",     "I64",     "I32",     "I16",  "I8",      "U64",
                                            "U32",     "U16",     "U8",      "BOOL", "F8_E4M3", "F8_E5M2",
                                            "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"};

struct Extent {
  uint64_t begin;
  uint64_t end;
  size_t tensor;
};

class HeaderReader {
 public:
  HeaderReader(std::span<const std::byte> file, const std::string& source) : file_(file), source_(source) {}

  std::vector<StoredTensor> run() {
    const Json header = parse_header();
    for (const auto& [name, entry] : header.items()) {
      if (name == kMetadata)
        check_metadata(entry);
      else
        read_tensor(name, entry);
    }
    place();
    return std::move(tensors_);
  }

 private:
  Json parse_header() {
    require<BadFile>(file_.size() >= kLengthBytes,
                     "{}: not a safetensors file: expected at least {} bytes, got {}", source_, kLengthBytes,
                     file_.size());
    uint64_t length = 0;
    std::memcpy(&length, file_.data(), kLengthBytes);
    const uint64_t most = std::min<uint64_t>(file_.size() - kLengthBytes, kMaxHeaderBytes);
    require<BadFile>(length >= 2 && length <= most, "{}: safetensors header length: expected 2..{}, got {}",
                     source_, most, length);
    const std::string_view text(reinterpret_cast<const char*>(file_.data()) + kLengthBytes,
                                static_cast<size_t>(length));
    require<BadFile>(text.front() == '{', "{}: safetensors header: expected a JSON object, got {}", source_,
                     quote_text(text, 20));
    data_ = file_.subspan(static_cast<size_t>(kLengthBytes + length));
    return parse_json(text, source_ + ": safetensors header", kMaxDepth);
  }

  void check_metadata(const Json& metadata) const {
    bool strings = metadata.is_object();
    if (strings)
      for (const auto& [key, value] : metadata.items()) strings = strings && value.is_string();
    require<BadFile>(strings, "{}: safetensors header: field '{}': expected an object of strings", source_,
                     kMetadata);
  }

  template <class... Args>
  [[noreturn]] void fail(const std::string& name, fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<BadFile>("{}: tensor {}: {}", source_, quote_text(name),
                         fmt::format(format, std::forward<Args>(args)...));
  }

  WeightType type(const std::string& name, const Json& entry) const {
    const auto found = entry.find("dtype");
    if (found == entry.end() || !found->is_string()) fail(name, "field 'dtype': expected a string");
    const std::string dtype = found->get<std::string>();
    if (dtype == "F32") return WeightType::kF32;
    if (dtype == "F16") return WeightType::kF16;
    if (dtype == "BF16") return WeightType::kBF16;
    if (std::find(std::begin(kOtherTypes), std::end(kOtherTypes), dtype) != std::end(kOtherTypes))
      throw_error<Unsupported>("{}: tensor {}: field 'dtype': expected F32, F16 or BF16, got {}", source_,
                               quote_text(name), dtype);
    fail(name, "field 'dtype': expected F32, F16 or BF16, got {}", quote_text(dtype));
  }

  // A JSON integer in 0..INT64_MAX.
  std::optional<int64_t> count(const Json& value) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
      return std::nullopt;
    return value.get<int64_t>();
  }

  void read_tensor(const std::string& name, const Json& entry) {
    if (!entry.is_object()) fail(name, "expected an object, got {}", entry.type_name());
    for (const auto& [field, value] : entry.items())
      if (field != "dtype" && field != "shape" && field != "data_offsets")
        fail(name, "field {}: unknown", quote_text(field));
    StoredTensor tensor;
    tensor.name = name;
    tensor.type = type(name, entry);

    const auto shape = entry.find("shape");
    if (shape == entry.end() || !shape->is_array() || shape->size() > kMaxDimensions)
      fail(name, "field 'shape': expected an array of at most {} integers", kMaxDimensions);
    uint64_t bytes = static_cast<uint64_t>(weight_type_info(tensor.type).block_bytes);
    for (const Json& extent : *shape) {
      const std::optional<int64_t> value = count(extent);
      if (!value)
        fail(name, "field 'shape': expected integers of at least 0, got {}", quote_text(dump_json(extent)));
      if (!checked_mul(bytes, static_cast<uint64_t>(*value), &bytes))
        fail(name, "field 'shape': the product of its integers does not fit in 64 bits");
      tensor.shape.push_back(*value);
    }

    const auto offsets = entry.find("data_offsets");
    if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2)
      fail(name, "field 'data_offsets': expected an array of two integers");
    const std::optional<int64_t> begin = count((*offsets)[0]);
    const std::optional<int64_t> end = count((*offsets)[1]);
    if (!begin || !end || *begin > *end || static_cast<uint64_t>(*end) > data_.size())
      fail(name, "field 'data_offsets': expected begin <= end <= {}, got {}", data_.size(),
           quote_text(dump_json(*offsets)));
    if (static_cast<uint64_t>(*end - *begin) != bytes)
      fail(name, "field 'data_offsets': expected {} bytes for shape {} of {}, got {}", bytes,
           shape_text(tensor.shape), weight_type_info(tensor.type).name, *end - *begin);
    extents_.push_back({static_cast<uint64_t>(*begin), static_cast<uint64_t>(*end), tensors_.size()});
    tensors_.push_back(std::move(tensor));
  }

  void place() {
    std::sort(extents_.begin(), extents_.end(), [](const Extent& a, const Extent& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::vector<StoredTensor> ordered;
    uint64_t position = 0;
    for (const Extent& extent : extents_) {
      StoredTensor& tensor = tensors_[extent.tensor];
      if (extent.begin != position)
        fail(tensor.name,
             "field 'data_offsets': expected to begin at {}, where the tensor before ends, got {}", position,
             extent.begin);
      tensor.data = data_.data() + extent.begin;
      position = extent.end;
      ordered.push_back(std::move(tensor));
    }
    require<BadFile>(position == data_.size(), "{}: end of the tensor data: expected {}, got {} bytes",
                     source_, position, data_.size());
    tensors_ = std::move(ordered);
  }

  std::span<const std::byte> file_;
  std::string source_;
  std::span<const std::byte> data_;
  std::vector<StoredTensor> tensors_;
  std::vector<Extent> extents_;
};

}  // namespace

std::vector<StoredTensor> parse_safetensors(std::span<const std::byte> file, const std::string& source) {
  return HeaderReader(file, source).run();
}

}  // namespace kascade
