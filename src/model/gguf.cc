// SPDX-License-Identifier: Apache-2.0
#include "model/gguf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/text.h"
#include "base/weight_type.h"

namespace kascade {
namespace {

static_assert(std::endian::native == std::endian::little, "values are read in the file's byte order");

// Real files have some tens of keys and up to a few thousand tensors. The bounds keep what a hostile count
// can make us allocate far below the size of a model.
constexpr uint64_t kMaxKeys = 100'000;
constexpr uint64_t kMaxTensors = 100'000;
constexpr uint64_t kMaxNameBytes = 1024;
constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 1 << 20;

constexpr uint32_t kTypes = 13;
constexpr const char* kTypeNames[kTypes] = {"uint8",  "int8",    "uint16", "int16",  "uint32",
                                            "int32",  "float32", "bool",   "string", "array",
                                            "uint64", "int64",   "float64"};

const char* type_name(GgufType type) { return kTypeNames[static_cast<uint32_t>(type)]; }

// Least bytes that a value takes: its size, or the length field of a string.
uint64_t least_bytes(GgufType type) {
  switch (type) {
    case GgufType::kUint8:
    case GgufType::kInt8:
    case GgufType::kBool:
      return 1;
    case GgufType::kUint16:
    case GgufType::kInt16:
      return 2;
    case GgufType::kUint32:
    case GgufType::kInt32:
    case GgufType::kFloat32:
      return 4;
    case GgufType::kString:
    case GgufType::kUint64:
    case GgufType::kInt64:
    case GgufType::kFloat64:
      return 8;
    case GgufType::kArray:
      return 12;
  }
  return 1;
}

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

std::string_view text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The scalar as a 64-bit integer; nullopt when its type is no integer type or it does not fit.
std::optional<int64_t> as_integer(GgufType type, const std::byte* bytes) {
  switch (type) {
    case GgufType::kUint8:
      return load<uint8_t>(bytes);
    case GgufType::kInt8:
      return load<int8_t>(bytes);
    case GgufType::kUint16:
      return load<uint16_t>(bytes);
    case GgufType::kInt16:
      return load<int16_t>(bytes);
    case GgufType::kUint32:
      return load<uint32_t>(bytes);
    case GgufType::kInt32:
      return load<int32_t>(bytes);
    case GgufType::kInt64:
      return load<int64_t>(bytes);
    case GgufType::kUint64: {
      const auto value = load<uint64_t>(bytes);
      if (value > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

struct TensorTypeId {
  uint32_t id;
  WeightType type;
};
constexpr TensorTypeId kTensorTypes[kWeightTypes] = {
    {0, WeightType::kF32},   {1, WeightType::kF16},   {30, WeightType::kBF16}, {2, WeightType::kQ4_0},
    {3, WeightType::kQ4_1},  {6, WeightType::kQ5_0},  {7, WeightType::kQ5_1},  {8, WeightType::kQ8_0},
    {12, WeightType::kQ4_K}, {13, WeightType::kQ5_K}, {14, WeightType::kQ6_K}};

constexpr struct {
  uint32_t id;
  const char* name;
} kOtherTensorTypes[] = {{9, "Q8_1"},    {10, "Q2_K"},    {11, "Q3_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"},
                         {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"},
                         {22, "IQ2_S"},  {23, "IQ4_XS"},  {24, "I8"},    {25, "I16"},    {26, "I32"},
                         {27, "I64"},    {28, "F64"},     {29, "IQ1_M"}, {34, "TQ1_0"},  {35, "TQ2_0"},
                         {39, "MXFP4"},  {40, "NVFP4"}};

}  // namespace

class GgufParser {
 public:
  GgufParser(std::span<const std::byte> file, std::string source) : file_(file) {
    result_.source_ = std::move(source);
  }

  GgufFile run() {
    header();
    for (uint64_t i = 0; i < keys_; ++i) metadata_entry(i);
    uint64_t alignment = kDefaultAlignment;
    if (const auto stated = result_.find_integer("general.alignment", 8, kMaxAlignment))
      alignment = static_cast<uint64_t>(*stated);
    if (!std::has_single_bit(alignment)) result_.wrong("general.alignment", "a power of two");
    for (uint64_t i = 0; i < tensor_count_; ++i) tensor_entry(i, alignment);
    place_tensors(alignment);
    return std::move(result_);
  }

 private:
  struct Extent {
    uint64_t begin;  // from the start of the tensor data
    uint64_t bytes;
    size_t tensor;
  };

  uint64_t left() const { return file_.size() - position_; }

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<BadFile>("{}: {}", result_.source_, fmt::format(format, std::forward<Args>(args)...));
  }

  // what is a name of a field such as "tensor 3: name".
  std::span<const std::byte> take(uint64_t bytes, const char* what, uint64_t index) {
    if (bytes > left())
      fail("{} {}: expected {} bytes at offset {}, got {} before the end of the file", what, index, bytes,
           position_, left());
    const auto result = file_.subspan(position_, static_cast<size_t>(bytes));
    position_ += static_cast<size_t>(bytes);
    return result;
  }

  template <class T>
  T read(const char* what, uint64_t index) {
    return load<T>(take(sizeof(T), what, index).data());
  }

  std::string_view read_string(const char* what, uint64_t index) {
    const auto bytes = read<uint64_t>(what, index);
    return text(take(bytes, what, index));
  }

  GgufType read_type(uint64_t index) {
    const auto id = read<uint32_t>("metadata value type of entry", index);
    if (id >= kTypes) fail("metadata entry {}: value type: expected 0..{}, got {}", index, kTypes - 1, id);
    return static_cast<GgufType>(id);
  }

  void header() {
    const std::string_view start = text(file_.first(std::min<size_t>(file_.size(), 64)));
    if (!start.starts_with("GGUF")) {
      const char* hint = "";
      if (start.starts_with("version https://git-lfs"))
        hint = " (a Git LFS pointer; the model itself is elsewhere)";
      if (start.starts_with("<") || start.starts_with("\n<")) hint = " (a web page?)";
      if (start.starts_with("PK")) hint = " (a zip archive?)";
      if (start.starts_with("FUGG")) hint = " (a big-endian file)";
      if (start.starts_with("lmgg") || start.starts_with("tjgg") || start.starts_with("fmgg"))
        hint = " (a GGML file, older than GGUF)";
      fail("not a GGUF file: expected it to start with 'GGUF', got {}{}", quote_text(start.substr(0, 4)),
           hint);
    }
    position_ = 4;
    const auto version = read<uint32_t>("header field", 1);
    if (version == 1 || (version != 0 && (version & 0xFFFFu) == 0))
      throw_error<Unsupported>("{}: GGUF version: expected 2 or 3, little-endian, got {}", result_.source_,
                               version == 1 ? std::string("1") : fmt::format("big-endian {}", version >> 24));
    if (version != 2 && version != 3)
      throw_error<Unsupported>("{}: GGUF version: expected 2 or 3, got {}", result_.source_, version);
    tensor_count_ = read<uint64_t>("header field", 2);
    keys_ = read<uint64_t>("header field", 3);
    // An entry takes at least: key length, type, one byte; name length, dimensions, one dimension, type,
    // offset.
    if (keys_ > std::min(kMaxKeys, left() / 13))
      fail("metadata count: expected at most {}, got {}", std::min(kMaxKeys, left() / 13), keys_);
    if (tensor_count_ > std::min(kMaxTensors, left() / 32))
      fail("tensor count: expected at most {}, got {}", std::min(kMaxTensors, left() / 32), tensor_count_);
    result_.tensors_.reserve(static_cast<size_t>(tensor_count_));
  }

  void metadata_entry(uint64_t index) {
    const std::string_view key = read_string("metadata key", index);
    if (key.empty() || key.size() > kMaxNameBytes)
      fail("metadata entry {}: key length: expected 1..{}, got {}", index, kMaxNameBytes, key.size());
    GgufFile::Value value;
    value.type = read_type(index);
    if (value.type == GgufType::kString) {
      value.bytes = take_string(index);
    } else if (value.type == GgufType::kArray) {
      value.element = read_type(index);
      value.count = read<uint64_t>("metadata array length of entry", index);
      value.bytes = take_array(key, value.element, value.count, index);
    } else {
      value.bytes = take(least_bytes(value.type), "metadata value of entry", index);
    }
    if (value.type == GgufType::kBool && std::to_integer<int>(value.bytes[0]) > 1)
      fail("metadata {}: bool: expected 0 or 1, got {}", quote_text(key),
           std::to_integer<int>(value.bytes[0]));
    if (!result_.metadata_.emplace(key, value).second)
      fail("metadata {}: the key occurs twice", quote_text(key));
  }

  std::span<const std::byte> take_string(uint64_t index) {
    const auto bytes = read<uint64_t>("metadata string of entry", index);
    return take(bytes, "metadata string of entry", index);
  }

  std::span<const std::byte> take_array(std::string_view key, GgufType element, uint64_t count,
                                        uint64_t index) {
    if (element == GgufType::kArray)
      throw_error<Unsupported>("{}: metadata {}: arrays of arrays are not supported", result_.source_,
                               quote_text(key));
    if (count > left() / least_bytes(element))
      fail("metadata {}: array length: expected at most {} in the bytes left, got {}", quote_text(key),
           left() / least_bytes(element), count);
    if (element != GgufType::kString)
      return take(count * least_bytes(element), "metadata array of entry", index);
    const size_t begin = position_;
    for (uint64_t i = 0; i < count; ++i) take_string(index);
    return file_.subspan(begin, position_ - begin);
  }

  WeightType tensor_type(std::string_view name, uint32_t id) const {
    for (const TensorTypeId& known : kTensorTypes)
      if (known.id == id) return known.type;
    for (const auto& other : kOtherTensorTypes)
      if (other.id == id)
        throw_error<Unsupported>(
            "{}: tensor {}: type: expected F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, "
            "Q5_K or Q6_K, got {}",
            result_.source_, quote_text(name), other.name);
    fail("tensor {}: type: {} is no known type", quote_text(name), id);
  }

  void tensor_entry(uint64_t index, uint64_t alignment) {
    StoredTensor tensor;
    tensor.name = read_string("tensor name", index);
    const std::string shown = quote_text(tensor.name);
    if (tensor.name.empty() || tensor.name.size() > kMaxNameBytes)
      fail("tensor {}: name length: expected 1..{}, got {}", index, kMaxNameBytes, tensor.name.size());
    const auto dimensions = read<uint32_t>("dimension count of tensor", index);
    if (dimensions < 1 || dimensions > kMaxDimensions)
      fail("tensor {}: dimensions: expected 1..{}, got {}", shown, kMaxDimensions, dimensions);
    int64_t rows = 1;
    for (uint32_t i = 0; i < dimensions; ++i) {
      const auto extent = read<uint64_t>("dimension of tensor", index);
      if (extent < 1 || extent > static_cast<uint64_t>(INT64_MAX))
        fail("tensor {}: dimension {}: expected 1..{}, got {}", shown, i, INT64_MAX, extent);
      const auto signed_extent = static_cast<int64_t>(extent);
      if (i > 0 && __builtin_mul_overflow(rows, signed_extent, &rows))
        fail("tensor {}: the product of its dimensions does not fit in 63 bits", shown);
      tensor.shape.insert(tensor.shape.begin(), signed_extent);  // the file has the contiguous one first
    }
    tensor.type = tensor_type(tensor.name, read<uint32_t>("type of tensor", index));
    const int64_t columns = tensor.shape.back();
    const WeightTypeInfo& info = weight_type_info(tensor.type);
    if (columns % info.block_elements != 0)
      fail("tensor {}: dimension 0: expected a multiple of {} for {}, got {}", shown, info.block_elements,
           info.name, columns);
    const std::optional<int64_t> bytes = checked_tensor_bytes(tensor.type, rows, columns);
    if (!bytes) fail("tensor {}: its size does not fit in 63 bits", shown);
    const auto begin = read<uint64_t>("offset of tensor", index);
    if (begin % alignment != 0)
      fail("tensor {}: offset: expected a multiple of {}, got {}", shown, alignment, begin);
    extents_.push_back({begin, static_cast<uint64_t>(*bytes), result_.tensors_.size()});
    result_.tensors_.push_back(std::move(tensor));
  }

  // Extents against the file and one another, whatever the order of the table.
  void place_tensors(uint64_t alignment) {
    if (extents_.empty()) return;
    check_names();
    const uint64_t padding = (alignment - position_ % alignment) % alignment;
    take(padding, "padding before tensor data, after tensor", tensor_count_ - 1);
    const std::span<const std::byte> data = file_.subspan(position_);
    std::sort(extents_.begin(), extents_.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    uint64_t end = 0;
    for (const Extent& extent : extents_) {
      StoredTensor& tensor = result_.tensors_[extent.tensor];
      if (extent.begin > data.size() || extent.bytes > data.size() - extent.begin)
        fail("tensor {}: expected {} bytes at offset {} of the tensor data, which has {} bytes",
             quote_text(tensor.name), extent.bytes, extent.begin, data.size());
      if (extent.begin < end)
        fail("tensor {}: offset {} lies inside another tensor", quote_text(tensor.name), extent.begin);
      if (extent.begin - end >= alignment)
        fail("tensor {}: offset: expected the next multiple of {} after {}, got {}", quote_text(tensor.name),
             alignment, end, extent.begin);
      tensor.data = data.data() + extent.begin;
      end = extent.begin + extent.bytes;
    }
    if (data.size() - end >= alignment)
      fail("end of the tensor data: expected at most {} bytes of padding, got {} bytes", alignment - 1,
           data.size() - end);
  }

  void check_names() const {
    std::vector<std::string_view> names;
    names.reserve(result_.tensors_.size());
    for (const StoredTensor& tensor : result_.tensors_) names.push_back(tensor.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) fail("tensor {}: the name occurs twice", quote_text(*twice));
  }

  std::span<const std::byte> file_;
  size_t position_ = 0;
  uint64_t tensor_count_ = 0;
  uint64_t keys_ = 0;
  std::vector<Extent> extents_;
  GgufFile result_;
};

GgufFile GgufFile::parse(std::span<const std::byte> file, std::string source) {
  require<BadArgument>(reinterpret_cast<uintptr_t>(file.data()) % 8 == 0,
                       "GGUF bytes: expected an address divisible by 8");
  return GgufParser(file, std::move(source)).run();
}

const GgufFile::Value* GgufFile::find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> result;
  for (const auto& [key, value] : metadata_) result.push_back(key);
  return result;
}

std::string GgufFile::describe(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return "nothing";
  const std::byte* bytes = value->bytes.data();
  switch (value->type) {
    case GgufType::kString:
      return fmt::format("the string {}", quote_text(text(value->bytes)));
    case GgufType::kArray:
      return fmt::format("an array of {} {}", value->count, type_name(value->element));
    case GgufType::kFloat32:
      return fmt::format("the float32 {}", load<float>(bytes));
    case GgufType::kFloat64:
      return fmt::format("the float64 {}", load<double>(bytes));
    case GgufType::kBool:
      return std::to_integer<int>(bytes[0]) != 0 ? "true" : "false";
    case GgufType::kUint64:
      return fmt::format("the uint64 {}", load<uint64_t>(bytes));
    default:
      return fmt::format("the {} {}", type_name(value->type), as_integer(value->type, bytes).value_or(0));
  }
}

void GgufFile::wrong(std::string_view key, std::string_view expected) const {
  throw_error<BadFile>("{}: metadata {}: expected {}, got {}", source_, quote_text(key), expected,
                       describe(key));
}

void GgufFile::missing(std::string_view key) const {
  throw_error<BadFile>("{}: metadata {}: missing", source_, quote_text(key));
}

std::optional<int64_t> GgufFile::find_integer(std::string_view key, int64_t min, int64_t max) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> integer = as_integer(value->type, value->bytes.data());
  if (!integer || *integer < min || *integer > max) wrong(key, fmt::format("an integer in {}..{}", min, max));
  return integer;
}

int64_t GgufFile::integer(std::string_view key, int64_t min, int64_t max) const {
  const std::optional<int64_t> value = find_integer(key, min, max);
  if (!value) missing(key);
  return *value;
}

std::optional<double> GgufFile::find_number(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  double number = std::nan("");
  if (value->type == GgufType::kFloat32) number = static_cast<double>(load<float>(value->bytes.data()));
  if (value->type == GgufType::kFloat64) number = load<double>(value->bytes.data());
  if (!std::isfinite(number)) wrong(key, "a finite float");
  return number;
}

double GgufFile::number(std::string_view key) const {
  const std::optional<double> value = find_number(key);
  if (!value) missing(key);
  return *value;
}

std::optional<double> GgufFile::find_scalar(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  const std::byte* bytes = value->bytes.data();
  switch (value->type) {
    case GgufType::kString:
    case GgufType::kArray:
      return std::nullopt;
    case GgufType::kFloat32:
      return static_cast<double>(load<float>(bytes));
    case GgufType::kFloat64:
      return load<double>(bytes);
    case GgufType::kBool:
      return static_cast<double>(std::to_integer<int>(bytes[0]));
    case GgufType::kUint64:
      return static_cast<double>(load<uint64_t>(bytes));
    default:
      return static_cast<double>(as_integer(value->type, bytes).value_or(0));
  }
}

std::optional<bool> GgufFile::find_flag(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kBool) wrong(key, "a bool");
  return std::to_integer<int>(value->bytes[0]) != 0;
}

std::optional<std::string_view> GgufFile::find_string(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kString) wrong(key, "a string");
  return text(value->bytes);
}

std::string_view GgufFile::string(std::string_view key) const {
  const std::optional<std::string_view> value = find_string(key);
  if (!value) missing(key);
  return *value;
}

std::optional<int64_t> GgufFile::find_uniform_integer(std::string_view key, int64_t min, int64_t max) const {
  const Value* value = find(key);
  if (value == nullptr || value->type != GgufType::kArray) return find_integer(key, min, max);
  const std::vector<int64_t> each = *find_integers(key);
  if (each.empty()) wrong(key, "an integer");
  for (const int64_t one : each) {
    if (one != each.front())
      throw_error<Unsupported>("{}: metadata {}: values that differ between layers are not supported",
                               source_, quote_text(key));
  }
  if (each.front() < min || each.front() > max) wrong(key, fmt::format("integers in {}..{}", min, max));
  return each.front();
}

std::optional<std::vector<std::string_view>> GgufFile::find_strings(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kString)
    wrong(key, "an array of strings");
  std::vector<std::string_view> result;
  result.reserve(static_cast<size_t>(value->count));
  const std::byte* at = value->bytes.data();  // the parser has walked these lengths before
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto length = static_cast<size_t>(load<uint64_t>(at));
    result.emplace_back(reinterpret_cast<const char*>(at + 8), length);
    at += 8 + length;
  }
  return result;
}

std::optional<std::vector<float>> GgufFile::find_floats(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray || value->element != GgufType::kFloat32)
    wrong(key, "an array of float32");
  std::vector<float> result(static_cast<size_t>(value->count));
  if (!result.empty()) std::memcpy(result.data(), value->bytes.data(), value->bytes.size());
  return result;
}

std::optional<std::vector<int64_t>> GgufFile::find_integers(std::string_view key) const {
  const Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != GgufType::kArray) wrong(key, "an array of integers");
  std::vector<int64_t> result;
  const uint64_t step = least_bytes(value->element);
  for (uint64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> one = as_integer(value->element, value->bytes.data() + i * step);
    if (!one) wrong(key, "an array of integers");
    result.push_back(*one);
  }
  return result;
}

}  // namespace kascade
