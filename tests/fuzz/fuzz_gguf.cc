// SPDX-License-Identifier: Apache-2.0
// GGUF files from outside: whatever the bytes, the loader gives a model whose tensors lie inside them, or
// throws BadFile or Unsupported.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/dequantize.h"
#include "kascade/error.h"
#include "model/gguf_model.h"

namespace {

using namespace kascade;

void require(bool condition) {
  if (!condition) std::abort();
}

// Reads every byte of the tensor, so that the sanitizer sees one outside of the file.
void read_all(const WeightTensor& weight, std::span<const std::byte> file) {
  if (!weight) return;
  const auto* begin = static_cast<const std::byte*>(weight.data);
  require(begin >= file.data() && begin + weight.bytes() <= file.data() + file.size());
  std::vector<float> row(static_cast<size_t>(weight.columns));
  for (int64_t r = 0; r < weight.rows; ++r)
    dequantize_row(weight.type, begin + r * weight.row_bytes(), weight.columns, row.data());
}

void check_accepted(ModelParts parts, std::span<const std::byte> file) {
  require(parts.weights.layers.size() == static_cast<size_t>(parts.config.layers));
  require(parts.tokenizer.tokens.size() == static_cast<size_t>(parts.config.vocabulary));
  read_all(parts.weights.embedding, file);
  read_all(parts.weights.final_norm, file);
  read_all(parts.weights.head, file);
  for (const LayerWeights& layer : parts.weights.layers)
    for (const WeightTensor& weight :
         {layer.attention_norm, layer.q, layer.k, layer.v, layer.q_bias, layer.k_bias, layer.v_bias,
          layer.q_norm, layer.k_norm, layer.output, layer.ffn_norm, layer.gate, layer.up, layer.down})
      read_all(weight, file);
  const auto tokenizer = Tokenizer::create(std::move(parts.tokenizer));
  for (const int32_t id : tokenizer->encode("a b <|im_end|> \xFF 123"))
    require(id >= 0 && id < tokenizer->size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> file(size);  // aligned, as a mapping is
  if (size != 0) std::memcpy(file.data(), data, size);
  try {
    check_accepted(read_gguf_model(file, "fuzz"), file);
  } catch (const BadFile&) {
  } catch (const Unsupported&) {
  }
  return 0;
}
