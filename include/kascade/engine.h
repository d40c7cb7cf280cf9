// SPDX-License-Identifier: Apache-2.0
// The engine: a model, a paged KV cache and a policy make tokens. One Engine belongs to one thread at a time;
// any number of engines share one PreparedModel.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kascade/attention.h"
#include "kascade/model.h"
#include "kascade/policy.h"

namespace kascade {

enum class Compute : uint8_t;  // src/ops/ops.h: kF32, kFast

class Engine;
struct EngineOptions;

using LoadProgress = std::function<void(uint64_t done, uint64_t total)>;

/// A model ready to run on one device in one numeric mode. Immutable, shared between engines.
class PreparedModel {
 public:
  /// compute "f32": weights dequantised to fp32, fp32 activations and KV (CPU only). "auto": on the CPU
  /// weights as stored and KV in bf16, on a GPU weights, activations and KV in bf16. device "cpu" or "cuda"
  /// (the current CUDA device; weights are copied to it). Throws BadArgument for other names, Unsupported
  /// where the build, the device, its driver or the mode cannot do it (each named, with what is supported),
  /// OutOfMemory where the weights do not fit.
  /// progress(done, total) hears of the bytes copied to a GPU.
  static std::shared_ptr<const PreparedModel> create(std::shared_ptr<const Model> model,
                                                     const std::string& compute,
                                                     const std::string& device = "cpu",
                                                     const LoadProgress& progress = {});
  virtual ~PreparedModel();
  virtual const char* device() const = 0;  // "cpu", "cuda"
  const Model& model() const { return *model_; }
  const ModelConfig& config() const { return model_->config(); }
  Compute compute() const { return compute_; }

 protected:
  friend class Engine;
  PreparedModel() = default;
  virtual std::unique_ptr<Engine> make_engine(std::shared_ptr<const PreparedModel> self,
                                              const EngineOptions& options) const = 0;
  std::shared_ptr<const Model> model_;
  Compute compute_{};
};

struct EngineOptions {
  int threads = 0;                 // 0 = all processors this process may use
  std::string attention_kernel{};  // "" = the best available
  int64_t cache_tokens = 0;  // KV capacity over all sequences; 0 = the model's context. The CPU's is reserved
                             // lazily, a GPU's at once
  int32_t page_size = 64;    // tokens
  int32_t prefill_chunk = 0;  // rows per forward; a multiple of 128, 0 = 512 on the CPU and 8192 on a GPU
  // GPU: products with fixed tile shapes, so that a sequence's bits do not depend on its batch mates or on
  // chunks. The CPU always works so.
  bool invariant = false;
};

/// One sequence in the cache: its pages, length and the policy's state. It outlives neither its engine's
/// model nor a policy that ran it; its pages are free for the next sequence when it ends.
class Sequence {
 public:
  virtual ~Sequence() = default;
  virtual int64_t length() const = 0;
  /// Forgets keys from length on (0 <= length <= length()); pages that become empty go to whoever needs them
  /// next.
  virtual void truncate(int64_t length) = 0;
  /// The last row's residual stream after the last layer, [hidden]; empty when that row was cut off or never
  /// was.
  virtual std::span<const float> last_hidden() const = 0;
};

/// What an observer sees of one layer of one forward call. Pointers are valid during the call only.
struct LayerEvent {
  int layer = 0;
  Phase phase = Phase::kPrefill;
  const AttentionParams* attention =
      nullptr;                         // as it ran: cache views, index sets, pooled weights if asked for
  const float* residual_in = nullptr;  // [rows, hidden] before the attention block (before its norm)
  const float* residual_out =
      nullptr;  // [rows, hidden] residual_in + o_proj(attention); set in after_attention only
  int64_t rows = 0;
};

/// Hook into the layer loop: calibration and tests. Default: sees nothing, changes nothing.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  /// May change the parameters before attention runs: e.g. ask for pooled weights into its own buffers.
  virtual void before_attention(int layer, Phase phase, AttentionParams& params) {
    (void)layer, (void)phase, (void)params;
  }
  virtual void after_attention(const LayerEvent& event) { (void)event; }
  /// The residual stream after the whole layer: [rows, hidden].
  virtual void after_layer(int layer, const float* residual, int64_t rows) {
    (void)layer, (void)residual, (void)rows;
  }
};

struct ForwardItem {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens{};  // new rows, appended at the sequence's length; may be empty
  int64_t budget_length = 0;          // final prompt length for fixed budgets; 0 = length after this call
};

struct ForwardOptions {
  Phase phase = Phase::kPrefill;
  const Policy* policy = nullptr;  // null = dense
  LayerObserver* observer = nullptr;
  // Start in the middle: layers below first_layer are taken as done, hidden_in [rows, hidden] is the residual
  // stream entering first_layer. Their keys of these very rows lie in the cache already: the rows ran through
  // all layers before and were cut off by truncate. A layer that reuses index sets needs its anchor at or
  // after first_layer. One-pass evaluation shares prefixes of layers with it.
  int first_layer = 0;
  const float* hidden_in = nullptr;
};

/// How one token is drawn from logits. The same bits, settings and logits give the same token on one kind of
/// device.
struct TokenSampling {
  double temperature = 0;  // >= 0, finite; 0 = the most likely
  int32_t top_k = 0;       // >= 0; 0 = off
  double top_p = 1;        // (0, 1]; the token that crosses the mass stays
  uint64_t random = 0;     // uniform bits, fresh for each token
};

class Engine {
 public:
  static std::unique_ptr<Engine> create(std::shared_ptr<const PreparedModel> model,
                                        const EngineOptions& options);
  virtual ~Engine() = default;

  virtual const PreparedModel& model() const = 0;
  virtual int threads() const = 0;  // of the host
  /// Rows that one forward call takes (EngineOptions::prefill_chunk).
  virtual int64_t max_rows() const = 0;
  virtual std::unique_ptr<Sequence> make_sequence() = 0;
  /// A sequence that starts with the first `length` keys of prefix (0 <= length <= prefix.length()) and
  /// shares their pages; either may go on alone, a page is copied when one of the two writes into it. Throws
  /// BadArgument for a sequence of another engine.
  virtual std::unique_ptr<Sequence> make_sequence(const Sequence& prefix, int64_t length) = 0;

  /// One pass of new rows through the layers, at most max_rows() rows in all. Appends their keys, and
  /// returns the residual stream after the last layer, [rows, hidden], valid until the next call. Throws
  /// BadArgument for a token outside the vocabulary, Unsupported past the model's context (both numbers
  /// named), OutOfMemory when pages run out; the sequences are then unchanged in length.
  virtual std::span<const float> forward(std::span<const ForwardItem> items,
                                         const ForwardOptions& options) = 0;

  /// forward() of a decode step, then the next token of each item, drawn from the logits of its last row:
  /// tokens [items], -1 where those logits hold a NaN or their largest is not finite, and for items without
  /// new rows. sampling [items], or empty for the most likely tokens (the smaller on ties). On a GPU nothing
  /// but the tokens and the last rows' residuals comes back. Throws BadArgument for sampling out of range.
  virtual void forward_next(std::span<const ForwardItem> items, const Policy* policy,
                            std::span<const TokenSampling> sampling, std::span<int32_t> tokens) = 0;
  void forward_greedy(std::span<const ForwardItem> items, const Policy* policy, std::span<int32_t> tokens) {
    forward_next(items, policy, {}, tokens);
  }

  /// Prefills tokens in chunks of at most max_rows() rows that end at multiples of one size in absolute
  /// position, budget_length = the final length. visit(first_row, hidden [rows, hidden]) sees each chunk's
  /// residual stream; may be empty. Returns the last row's residual, [hidden]; an empty prompt returns an
  /// empty span. cancel is checked between chunks (throws Cancelled). Whatever it throws, the sequence is as
  /// it was.
  virtual std::span<const float> prefill(Sequence& sequence, std::span<const int32_t> tokens,
                                         const Policy* policy, LayerObserver* observer,
                                         const std::function<void(int64_t, std::span<const float>)>& visit,
                                         const std::atomic<bool>* cancel) = 0;

  /// Final norm and head: logits [rows, vocabulary] of residual rows [rows, hidden]. Valid until the next
  /// call of it. A row's bits do not depend on the rows beside it, on a GPU in the invariant mode only.
  virtual std::span<const float> logits(std::span<const float> hidden) = 0;

  /// Bytes now held on the device: caches as reserved by live pages, scratch, owned weights.
  virtual uint64_t memory_bytes() const = 0;
};

/// --temperature, --top-k, --top-p, --seed, --stop, --max-tokens.
struct GenerateOptions {
  int64_t max_tokens = 128;
  double temperature = 0;
  int32_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
  std::vector<std::string> stops{};
  bool ignore_end = false;  // keep going past end-of-generation tokens
  const std::atomic<bool>* cancel = nullptr;
};

struct GenerateResult {
  std::string text;
  std::vector<int32_t> token_ids;
  int64_t prompt_tokens = 0;
  int64_t new_tokens = 0;
  double prefill_seconds = 0;
  double decode_seconds = 0;  // of the steps after the first new token
  std::string finish;         // "end", "stop", "length", "cancelled"
};

/// Continues sequence with prompt tokens and then samples; on_text receives text as soon as it is whole
/// characters and surely before any stop string. The last sampled token is not in the sequence, which so
/// grows by prompt + new tokens - 1; a token that ends generation is not counted. prompt may be empty where
/// the sequence knows its last_hidden. Throws Unsupported when prompt + new tokens pass the context, both
/// numbers named; BadArgument for other options out of range.
GenerateResult generate(Engine& engine, Sequence& sequence, std::span<const int32_t> prompt,
                        const Policy* policy, const GenerateOptions& options,
                        const std::function<void(std::string_view)>& on_text);

}  // namespace kascade
