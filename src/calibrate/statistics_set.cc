// SPDX-License-Identifier: Apache-2.0
// Means over prompts, and the file that lets an interrupted calibration go on.
#include <cmath>

#include "base/check.h"
#include "base/hash.h"
#include "base/text.h"
#include "calibrate/triangle.h"
#include "kascade/calibrate.h"

namespace kascade {
namespace {

constexpr std::string_view kMagic = "KASCSTAT";
constexpr uint32_t kVersion = 1;
constexpr int64_t kMaxPrompts = int64_t{1}
                                << 20;  // sums of 2^20 numbers below 2 in units of 2^-40 fit 63 bits
constexpr int64_t kMaxPromptTokens = INT64_MAX / kMaxPrompts;
// What fp32 sums may put outside the range of a share when they were made elsewhere.
constexpr double kSlack = 1e-4;

void require_in(const std::vector<float>& values, size_t size, double high, const char* name) {
  require<BadArgument>(values.size() == size, "statistics: {}: expected {} numbers, got {}", name, size,
                       values.size());
  for (size_t i = 0; i < values.size(); ++i)
    require<BadArgument>(values[i] >= -kSlack && values[i] <= high + kSlack,
                         "statistics: {}[{}]: expected a number in 0..{}, got {}", name, i, high, values[i]);
}

uint64_t checksum(std::string_view bytes) { return fnv1a(std::as_bytes(std::span(bytes))); }

// Little-endian, whatever the machine.
class Writer {
 public:
  void bytes(std::string_view value) { out_ += value; }
  template <class T>
  void integer(T value) {
    const uint64_t bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) out_ += static_cast<char>(bits >> (8 * i) & 0xFF);
  }
  void integers(const std::vector<int64_t>& values) {
    for (const int64_t value : values) integer(value);
  }
  std::string finish() {
    integer(checksum(out_));
    return std::move(out_);
  }

 private:
  std::string out_;
};

class BinaryReader {
 public:
  BinaryReader(std::string_view bytes, const std::string& source) : bytes_(bytes), source_(source) {}

  std::string_view bytes(uint64_t count, const char* field) {
    require<BadFile>(count <= bytes_.size(), "{}: field '{}': expected {} bytes, got {}", source_, field,
                     count, bytes_.size());
    const std::string_view value = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return value;
  }
  template <class T>
  T integer(const char* field) {
    uint64_t bits = 0;
    const std::string_view value = bytes(sizeof(T), field);
    for (size_t i = 0; i < sizeof(T); ++i)
      bits |= static_cast<uint64_t>(static_cast<unsigned char>(value[i])) << (8 * i);
    return static_cast<T>(bits);
  }
  void integers(std::vector<int64_t>& values, const char* field, int64_t low, int64_t high) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = integer<int64_t>(field);
      require<BadFile>(values[i] >= low && values[i] <= high, "{}: field '{}[{}]': expected {}..{}, got {}",
                       source_, field, i, low, high, values[i]);
    }
  }
  template <class T>
  void expect(T expected, const char* field) {
    const T value = integer<T>(field);
    require<BadFile>(value == expected, "{}: field '{}': expected {}, got {}", source_, field, expected,
                     value);
  }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  const std::string& source_;
};

}  // namespace

Aggregation aggregation_from_name(const std::string& name) {
  if (name == "min") return Aggregation::kMin;
  require<BadArgument>(name == "mean", "aggregation: expected min or mean, got {}", quote_text(name));
  return Aggregation::kMean;
}

StatisticsSet::StatisticsSet(int layers, int kv_heads, std::string identity)
    : layers_(layers), kv_heads_(kv_heads), identity_(std::move(identity)) {
  const size_t cells = static_cast<size_t>(triangle_cells(layers, kv_heads));
  min_sum_.assign(cells, 0);
  mean_sum_.assign(cells, 0);
  importance_sum_.assign(static_cast<size_t>(layers), 0);
}

void StatisticsSet::insert(int64_t prompt, const PromptStatistics& statistics) {
  require<BadArgument>(statistics.layers == layers_ && statistics.kv_heads == kv_heads_,
                       "statistics: expected {} layers of {} KV heads, got {} of {}", layers_, kv_heads_,
                       statistics.layers, statistics.kv_heads);
  const size_t full = static_cast<size_t>(layers_) * layers_ * kv_heads_ * kv_heads_;
  require_in(statistics.similarity_min, full, 1, "similarity_min");
  require_in(statistics.similarity_mean, full, 1, "similarity_mean");
  require_in(statistics.importance, static_cast<size_t>(layers_), 2, "importance");
  require<BadArgument>(statistics.tokens >= 0 && statistics.tokens <= kMaxPromptTokens,
                       "statistics: tokens: expected a count, got {}", statistics.tokens);
  require<BadArgument>(prompts() < kMaxPrompts, "statistics: expected at most {} prompts", kMaxPrompts);
  require<BadArgument>(prompt >= 0 && prompts_.insert(prompt).second,
                       "statistics: prompt {}: expected one that is not negative and not in the set", prompt);
  tokens_ += statistics.tokens;
  for_each_cell(layers_, kv_heads_, [&](size_t cell, size_t at) {
    min_sum_[cell] += to_fixed(statistics.similarity_min[at]);
    mean_sum_[cell] += to_fixed(statistics.similarity_mean[at]);
  });
  for (size_t layer = 0; layer < importance_sum_.size(); ++layer)
    importance_sum_[layer] += to_fixed(statistics.importance[layer]);
}

HeadSimilarity StatisticsSet::similarity(Aggregation aggregation) const {
  require<BadArgument>(!prompts_.empty(), "statistics: expected at least one prompt, got none");
  const std::vector<int64_t>& sum = aggregation == Aggregation::kMin ? min_sum_ : mean_sum_;
  const double prompts = static_cast<double>(prompts_.size());
  HeadSimilarity out{layers_, kv_heads_, {}};
  out.values.assign(static_cast<size_t>(layers_) * layers_ * kv_heads_ * kv_heads_, 0.0);
  for_each_cell(layers_, kv_heads_,
                [&](size_t cell, size_t at) { out.values[at] = from_fixed(sum[cell]) / prompts; });
  return out;
}

std::vector<double> StatisticsSet::importance() const {
  require<BadArgument>(!prompts_.empty(), "statistics: expected at least one prompt, got none");
  std::vector<double> out;
  for (const int64_t sum : importance_sum_)
    out.push_back(from_fixed(sum) / static_cast<double>(prompts_.size()));
  return out;
}

std::string StatisticsSet::serialize() const {
  Writer out;
  out.bytes(kMagic);
  out.integer(kVersion);
  out.integer(layers_);
  out.integer(kv_heads_);
  out.integer(static_cast<uint64_t>(identity_.size()));
  out.bytes(identity_);
  out.integer(static_cast<uint64_t>(prompts_.size()));
  for (const int64_t prompt : prompts_) out.integer(prompt);
  out.integer(tokens_);
  out.integers(min_sum_);
  out.integers(mean_sum_);
  out.integers(importance_sum_);
  return out.finish();
}

StatisticsSet StatisticsSet::parse(std::string_view bytes, const std::string& source, int layers,
                                   int kv_heads, const std::string& identity) {
  BinaryReader in(bytes, source);
  const std::string_view magic = in.bytes(std::min(bytes.size(), kMagic.size()), "magic");
  require<BadFile>(magic == kMagic, "{}: field 'magic': expected '{}', got {}", source, kMagic,
                   quote_text(magic));
  in.expect(kVersion, "version");
  in.expect(layers, "layers");
  in.expect(kv_heads, "kv_heads");
  const std::string_view stored = in.bytes(in.integer<uint64_t>("identity length"), "identity");
  require<BadFile>(stored == identity, "{}: field 'identity': expected {} (this calibration), got {}", source,
                   quote_text(identity), quote_text(stored));
  StatisticsSet set(layers, kv_heads, identity);
  const uint64_t prompts = in.integer<uint64_t>("prompts");
  require<BadFile>(prompts <= kMaxPrompts, "{}: field 'prompts': expected at most {}, got {}", source,
                   kMaxPrompts, prompts);
  // All that follows is sized by the count and by the shapes: the rest of the file must be just that.
  const uint64_t expected = 8 * (prompts + 1 + 2 * set.min_sum_.size() + set.importance_sum_.size() + 1);
  require<BadFile>(in.left() == expected, "{}: expected {} more bytes, got {}", source, expected, in.left());
  const uint64_t sum = checksum(bytes.substr(0, bytes.size() - 8));
  int64_t last = -1;
  for (uint64_t i = 0; i < prompts; ++i) {
    const int64_t prompt = in.integer<int64_t>("prompts");
    require<BadFile>(prompt > last, "{}: field 'prompts[{}]': expected above {}, got {}", source, i, last,
                     prompt);
    set.prompts_.insert(set.prompts_.end(), prompt);
    last = prompt;
  }
  set.tokens_ = in.integer<int64_t>("tokens");
  require<BadFile>(set.tokens_ >= 0 && set.tokens_ <= kMaxPromptTokens * static_cast<int64_t>(prompts),
                   "{}: field 'tokens': expected a count of {} prompts, got {}", source, prompts,
                   set.tokens_);
  // What sums of so many prompts can be: adding to them then never overflows.
  const auto count = static_cast<int64_t>(prompts);
  const auto most = [count](double high) { return count * to_fixed(high + kSlack); };
  in.integers(set.min_sum_, "similarity_min", count * to_fixed(-kSlack), most(1));
  in.integers(set.mean_sum_, "similarity_mean", count * to_fixed(-kSlack), most(1));
  in.integers(set.importance_sum_, "importance", count * to_fixed(-kSlack), most(2));
  in.expect(sum, "checksum");
  return set;
}

}  // namespace kascade
