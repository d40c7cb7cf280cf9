// SPDX-License-Identifier: Apache-2.0
#include "engine/cuda/cuda_engine.h"

#include <algorithm>
#include <cstdlib>
#include <numbers>
#include <string_view>
#include <type_traits>

#include "base/check.h"
#include "engine/chunk_rows.h"
#include "engine/rules.h"
#include "kascade/thread_pool.h"

namespace kascade {
namespace {

using cuda::check_call;
using cuda::copy_to_device;
using cuda::copy_to_host;

constexpr int32_t kDefaultChunk = 8192;
// Index sets and workspace of a prompt's chunk: a chunk that would take more is cut into smaller ones.
constexpr uint64_t kChunkScratchBytes = uint64_t{3} << 30;
// Shapes of steps whose graphs are kept.
constexpr size_t kMostGraphs = 32;
// Products of fewer rows than a whole chunk take what the library suggests first; those of steps and of whole
// chunks are worth choosing by time.
constexpr int64_t kStepProductRows = 64;
// logits() gives the head as many rows at once.
constexpr int64_t kHeadRows = 512;
// What planned_bytes() does not count one by one: a step's small arrays, the rounding of allocations, kernels
// that are loaded when they first run, graphs.
constexpr uint64_t kMarginBytes = uint64_t{128} << 20;

cuda::Products mode_of(const EngineOptions& options) {
  return options.invariant ? cuda::Products::kInvariant : cuda::Products::kFast;
}

/// Faults inside kernels show at the next wait. With KASCADE_CUDA_CHECK set (to anything but 0 or nothing)
/// that is the end of the part they are in.
bool wants_checks() {
  const char* value = std::getenv("KASCADE_CUDA_CHECK");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

void require_cache_fits(const KvCacheShape& shape, const CudaModel& model) {
  size_t free = 0, total = 0;
  check_call(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  require<OutOfMemory>(shape.total_bytes() <= free,
                       "KV cache: {} tokens need {}, but {} of the {} of {} are free beside the weights",
                       shape.pages * shape.page_size, cuda::gigabytes(shape.total_bytes()),
                       cuda::gigabytes(free), cuda::gigabytes(total), model.device_info().name);
}

cuda::SampleRow sample_row(const TokenSampling& how) {
  // A temperature that a float's range does not reach draws the heaviest token anyway.
  const double scale =
      how.temperature == 0 ? 0 : std::clamp(std::numbers::log2e / how.temperature, 1e-30, 1e30);
  return {.scale = static_cast<float>(scale), .top_k = how.top_k, .top_p = how.top_p, .random = how.random};
}

uint64_t row_bytes(const ModelConfig& config) {
  const auto hidden = static_cast<uint64_t>(config.hidden), ffn = static_cast<uint64_t>(config.ffn);
  const uint64_t heads = 2 * static_cast<uint64_t>(config.query_heads + config.kv_heads);
  return hidden * (sizeof(float) + sizeof(__nv_bfloat16)) +
         (heads * static_cast<uint64_t>(config.head_dim) + 3 * ffn) * sizeof(__nv_bfloat16);
}

}  // namespace

CudaEngine::CudaEngine(std::shared_ptr<const CudaModel> model, const EngineOptions& options)
    : CachedEngine(model, options, kDefaultChunk),
      prepared_(std::move(model)),
      products_(mode_of(options)),
      cache_([&] {
        require<BadArgument>(options_.attention_kernel.empty() || options_.attention_kernel == "cuda-sm90",
                             "attention_kernel: {} does not run on a GPU", options_.attention_kernel);
        const KvCacheShape shape = cache_shape(config_, options_, DType::kBF16);
        require_cache_fits(shape, *prepared_);
        return std::make_shared<CudaKvCache>(shape, stream_);
      }()),
      attention_(config_, cache_,
                 (int64_t{config_.query_heads} + int64_t{2} * config_.kv_heads) * config_.head_dim),
      q_width_(int64_t{config_.query_heads} * config_.head_dim),
      qkv_width_(q_width_ + int64_t{2} * config_.kv_heads * config_.head_dim),
      host_threads_(ThreadPool(options.threads).threads()),
      checks_(wants_checks()) {
  pool_ = cache_;
  const std::vector<double> frequencies = rope_frequencies();
  rope_frequencies_.grow(std::ssize(frequencies));
  copy_to_device(rope_frequencies_.data(), frequencies.data(), std::ssize(frequencies), stream_);
  stream_.wait();
}

CudaEngine::~CudaEngine() { forget_graphs(); }

std::string CudaEngine::call_name(const ForwardOptions& options) const {
  const char* kind = options.phase == Phase::kPrefill  ? "prefill chunk"
                     : options.phase == Phase::kDecode ? "decode step"
                                                       : "call";
  return fmt::format("{} of {} rows in {} sequences{}", kind, batch_.rows(), batch_.items.size(),
                     replayed_ ? " (replayed)" : "");
}

void CudaEngine::check_part(int layer, const char* part) {
  if (!checks_) return;
  try {
    stream_.wait();
  } catch (const DeviceError& error) {
    throw_error<DeviceError>("{}{}: {}", layer >= 0 ? attention_.layer_name(layer) + ", " : "", part,
                             error.what());
  }
}

uint64_t CudaEngine::planned_bytes(const ModelConfig& config, const EngineOptions& options, int64_t batch) {
  const EngineOptions planned = checked(options, config, kDefaultChunk);
  require<BadArgument>(batch >= 1 && batch <= planned.prefill_chunk,
                       "batch: expected 1..{} sequences (each a row of a step), got {}",
                       planned.prefill_chunk, batch);
  const auto rope =
      static_cast<uint64_t>(config.context) * static_cast<uint64_t>(config.head_dim) * sizeof(float);
  const uint64_t last_row = static_cast<uint64_t>(config.hidden) * (sizeof(float) + sizeof(__nv_bfloat16)) +
                            static_cast<uint64_t>(config.vocabulary) * sizeof(float);
  const uint64_t growing = static_cast<uint64_t>(planned.prefill_chunk) * row_bytes(config) + rope +
                           static_cast<uint64_t>(std::max(batch, kHeadRows)) * last_row;
  return cache_shape(config, planned, DType::kBF16).total_bytes() + kChunkScratchBytes +
         cuda::MatrixProducts::kWorkspaceBytes + growing + growing / 8 + kMarginBytes;
}

bool CudaEngine::make_room(int64_t rows) {
  bool moved = residual_.grow(rows * config_.hidden);
  moved |= normed_.grow(rows * config_.hidden);
  moved |= qkv_.grow(rows * qkv_width_);
  moved |= attended_.grow(rows * q_width_);
  moved |= gate_up_.grow(rows * 2 * config_.ffn);
  moved |= activated_.grow(rows * config_.ffn);
  return moved;
}

bool CudaEngine::make_room_for_head(int64_t rows) {
  bool moved = last_normed_.grow(rows * config_.hidden);
  moved |= logits_.grow(rows * config_.vocabulary);
  return moved;
}

bool CudaEngine::grow_rope_table(int64_t positions) {
  if (positions <= rope_positions_) return false;
  const int64_t wanted = std::min(config_.context, std::max(positions, int64_t{4096} + rope_positions_ * 2));
  const int half = config_.head_dim / 2;
  stream_.wait();
  rope_positions_ = 0;
  rope_table_.grow(wanted * half);
  cuda::rope_table(rope_frequencies_.data(), half, 0, wanted, rope_table_.data(), stream_.get());
  rope_positions_ = wanted;
  return true;
}

void CudaEngine::prepare_products(int64_t rows, bool head) {
  const int64_t key = rows * 2 + (head ? 1 : 0);
  if (std::find(prepared_rows_.begin(), prepared_rows_.end(), key) != prepared_rows_.end()) return;
  if (!config_.layers) return;
  const CudaLayer& layer = prepared_->layers().front();
  if (head) {
    products_.prepare(prepared_->head(), rows, true, false, stream_.get());
  } else {
    products_.prepare(layer.qkv, rows, false, false, stream_.get());
    products_.prepare(layer.output, rows, true, true, stream_.get());
    products_.prepare(layer.gate_up, rows, false, false, stream_.get());
    products_.prepare(layer.down, rows, true, true, stream_.get());
  }
  prepared_rows_.push_back(key);
}

std::span<const float> CudaEngine::fetch(const float* from, int64_t count) {
  host_hidden_.grow(count);
  copy_to_host(host_hidden_.data(), from, count, stream_);
  stream_.wait();
  return {host_hidden_.data(), static_cast<size_t>(count)};
}

std::span<const float> CudaEngine::run_layers(const ForwardOptions& options, HiddenRows wanted,
                                              const NextTokens& next) {
  const cuda::DeviceScope scope(prepared_->device_info().index);
  const Draw draw = next.tokens.empty()     ? Draw::kNothing
                    : next.sampling.empty() ? Draw::kMostLikely
                                            : Draw::kSample;
  const int64_t rows = batch_.rows(), hidden = config_.hidden;
  const int32_t sequences = batch_.items.size();
  last_row_list_.clear();
  for (int32_t b = 0; b < sequences; ++b) last_row_list_.push_back(batch_.items.cu_seqlens_q[b + 1] - 1);

  upload_.clear();
  const size_t slots = upload_.add<int64_t>(batch_.slots), tokens = upload_.add<int32_t>(batch_.tokens),
               positions = upload_.add<int32_t>(batch_.positions),
               last_rows = upload_.add<int32_t>(last_row_list_);
  sample_row_list_.clear();
  for (const TokenSampling& how : next.sampling) sample_row_list_.push_back(sample_row(how));
  const size_t sample_rows = upload_.add<cuda::SampleRow>(sample_row_list_);
  // Invariant products know steps by their rows: a chunk is multiplied as a chunk however short it is, a step
  // as steps however many sequences it has.
  product_rows_ = rows;
  if (options_.invariant && options.phase != Phase::kDecode)
    product_rows_ = std::max(rows, kStepProductRows + 1);
  rows_at_once_ = options.phase == Phase::kDecode ? step_rows_at_once(rows) : product_rows_;
  replayed_ = false;
  try {
    forget_moved([&] {
      bool moved = attention_.begin(batch_, options.policy, options.phase, options.first_layer, upload_);
      moved |= upload_.place();
      moved |= make_room(product_rows_);
      moved |= grow_rope_table(batch_.items.max_kv_len);
      moved |= last_.grow(sequences * hidden);
      if (draw != Draw::kNothing) {
        moved |= make_room_for_head(sequences);
        moved |= next_.grow(sequences);
        host_next_.grow(sequences);
      }
      return moved;
    });
    attention_.place(upload_);
    slots_ = upload_.at<int64_t>(slots);
    tokens_ = upload_.at<int32_t>(tokens);
    positions_ = upload_.at<int32_t>(positions);
    last_rows_ = upload_.at<int32_t>(last_rows);
    sample_rows_ = upload_.at<cuda::SampleRow>(sample_rows);
    if (rows == options_.prefill_chunk || (options.phase == Phase::kDecode && rows <= kStepProductRows))
      prepare_products(std::min(rows, rows_at_once_), false);
    if (draw != Draw::kNothing) prepare_products(step_rows_at_once(sequences), true);
    upload_.send(stream_);
    const bool step = options.phase == Phase::kDecode && options.observer == nullptr &&
                      options.first_layer == 0 && timer_ == nullptr && !checks_;
    if (step) {
      replay(options, draw);
    } else {
      enqueue(options, wanted, draw);
    }
    if (draw != Draw::kNothing) copy_to_host(host_next_.data(), next_.data(), sequences, stream_);
    if (wanted == HiddenRows::kNone) {
      stream_.wait();
      return {};
    }
    const bool all = wanted == HiddenRows::kAll;
    const std::span<const float> result =
        fetch(all ? residual_.data() : last_.data(), (all ? rows : sequences) * hidden);
    std::copy_n(host_next_.data(), next.tokens.size(), next.tokens.data());
    return result;
  } catch (const DeviceError& error) {
    cudaStreamSynchronize(stream_.get());
    throw_error<DeviceError>(
        "{}: {}{}", call_name(options), error.what(),
        checks_ ? ""
                : " (KASCADE_CUDA_CHECK=1 in the environment tells in which layer and part a kernel fails)");
  } catch (...) {
    cudaStreamSynchronize(stream_.get());  // what was enqueued ends before its memory is used again
    throw;
  }
}

int64_t CudaEngine::step_rows_at_once(int64_t rows) const {
  return options_.invariant ? std::min(rows, kStepProductRows) : rows;
}

template <class Out>
void CudaEngine::multiply(const cuda::DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows,
                          int64_t at_once, Out* out, bool accumulate) {
  for (int64_t row = 0; row < rows; row += at_once)
    products_.multiply(matrix, x + row * matrix.inputs, std::min(at_once, rows - row),
                       out + row * matrix.outputs, std::is_same_v<Out, float>, accumulate, stream_.get());
}

void CudaEngine::enqueue(const ForwardOptions& options, HiddenRows wanted, Draw draw) {
  const int64_t rows = batch_.rows(), hidden = config_.hidden;
  if (timer_ != nullptr) timer_->begin(Part::kRest, stream_.get());
  if (options.first_layer == 0) {
    cuda::embed(prepared_->embedding().weight, tokens_, rows, hidden, residual_.data(), stream_.get());
  } else {
    copy_to_device(residual_.data(), options.hidden_in, rows * hidden, stream_);
  }
  check_part(-1, "embedding");
  for (int layer = options.first_layer; layer < config_.layers; ++layer)
    run_layer(layer, options, wanted == HiddenRows::kNone && layer == config_.layers - 1);
  if (wanted == HiddenRows::kLast) {
    const int32_t sequences = batch_.items.size();
    cuda::gather_rows(residual_.data(), last_rows_, sequences, hidden, last_.data(), stream_.get());
    if (draw != Draw::kNothing) enqueue_head(sequences, draw);
    check_part(-1, "head");
  }
  if (timer_ != nullptr) timer_->end(stream_.get());
}

void CudaEngine::run_layer(int layer, const ForwardOptions& options, bool only_keys) {
  const CudaLayer& weights = prepared_->layers()[layer];
  const int64_t rows = batch_.rows(), hidden = config_.hidden;
  const float epsilon = config_.norm_epsilon;
  const cudaStream_t stream = stream_.get();
  const char* doing = nullptr;
  const auto part = [&](Part name, const char* what) {
    if (doing != nullptr) check_part(layer, doing);
    doing = what;
    if (timer_ != nullptr) timer_->begin(name, stream);
  };
  const bool observed = options.observer != nullptr;
  if (observed) {
    const std::span<const float> entering = fetch(residual_.data(), rows * hidden);
    residual_in_.assign(entering.begin(), entering.end());
  }

  part(Part::kRest, "norm before attention");
  cuda::rms_norm(residual_.data(), weights.attention_norm, epsilon, rows, hidden, normed_.data(), stream);
  part(Part::kProducts, "product for q, k and v");
  multiply(weights.qkv, normed_.data(), product_rows_, rows_at_once_, qkv_.data(), false);
  part(Part::kRest, "rotary embedding");
  cuda::RopeAppend rope;
  rope.qkv = qkv_.data();
  rope.row_stride = qkv_width_;
  rope.bias = weights.qkv_bias;
  rope.q_norm = weights.q_norm;
  rope.k_norm = weights.k_norm;
  rope.norm_epsilon = epsilon;
  rope.rope_table = rope_table_.data();
  rope.adjacent = config_.rope_layout == RopeLayout::kAdjacent;
  rope.positions = positions_;
  rope.slots = slots_;
  rope.k_pages = reinterpret_cast<__nv_bfloat16*>(cache_->plane(layer, false));
  rope.v_pages = reinterpret_cast<__nv_bfloat16*>(cache_->plane(layer, true));
  rope.page_size = options_.page_size;
  rope.query_heads = config_.query_heads;
  rope.kv_heads = config_.kv_heads;
  rope.head_dim = config_.head_dim;
  cuda::rope_append(rope, rows, stream);
  // The last layer's keys are all that later chunks need of it.
  if (only_keys) return check_part(layer, doing);

  const AttentionParams* ran = nullptr;
  part(attention_part(attention_.shape().layers[layer].role), "attention");
  if (observed) {
    ran = &attention_.run_observed(layer, qkv_.data(), attended_.data(), stream_, *options.observer);
  } else {
    attention_.run(layer, qkv_.data(), attended_.data(), stream_);
  }
  part(Part::kProducts, "product after attention");
  multiply(weights.output, attended_.data(), product_rows_, rows_at_once_, residual_.data(), true);
  if (observed) {
    const std::span<const float> leaving = fetch(residual_.data(), rows * hidden);
    residual_out_.assign(leaving.begin(), leaving.end());
    options.observer->after_attention(LayerEvent{.layer = layer,
                                                 .phase = options.phase,
                                                 .attention = ran,
                                                 .residual_in = residual_in_.data(),
                                                 .residual_out = residual_out_.data(),
                                                 .rows = rows});
  }
  part(Part::kRest, "norm before the gated product");
  cuda::rms_norm(residual_.data(), weights.ffn_norm, epsilon, rows, hidden, normed_.data(), stream);
  part(Part::kProducts, "product for gate and up");
  multiply(weights.gate_up, normed_.data(), product_rows_, rows_at_once_, gate_up_.data(), false);
  part(Part::kRest, "gated activation");
  cuda::silu_multiply(gate_up_.data(), rows, config_.ffn, activated_.data(), stream);
  part(Part::kProducts, "down product");
  multiply(weights.down, activated_.data(), product_rows_, rows_at_once_, residual_.data(), true);
  part(Part::kRest, nullptr);
  if (observed) options.observer->after_layer(layer, fetch(residual_.data(), rows * hidden).data(), rows);
}

void CudaEngine::enqueue_head(int64_t rows, Draw draw) {
  const auto part = [&](Part name) {
    if (timer_ != nullptr) timer_->begin(name, stream_.get());
  };
  part(Part::kRest);
  cuda::rms_norm(last_.data(), prepared_->final_norm(), config_.norm_epsilon, rows, config_.hidden,
                 last_normed_.data(), stream_.get());
  part(Part::kProducts);
  multiply(prepared_->head(), last_normed_.data(), rows, step_rows_at_once(rows), logits_.data(), false);
  part(Part::kRest);
  if (draw == Draw::kMostLikely)
    cuda::arg_max(logits_.data(), rows, config_.vocabulary, next_.data(), stream_.get());
  if (draw == Draw::kSample)
    cuda::sample(logits_.data(), rows, config_.vocabulary, sample_rows_, next_.data(), stream_.get());
}

CudaEngine::Graph& CudaEngine::graph_for(Draw draw) {
  for (Graph& graph : graphs_)
    if (graph.draw == draw && graph.shape == attention_.shape()) return graph;
  if (graphs_.size() == kMostGraphs) {
    const auto oldest = std::min_element(graphs_.begin(), graphs_.end(), [](const Graph& a, const Graph& b) {
      return a.last_use < b.last_use;
    });
    if (oldest->executable != nullptr) cudaGraphExecDestroy(oldest->executable);
    graphs_.erase(oldest);
  }
  graphs_.push_back({.shape = attention_.shape(), .draw = draw});
  return graphs_.back();
}

void CudaEngine::replay(const ForwardOptions& options, Draw draw) {
  const HiddenRows wanted = draw == Draw::kNothing ? HiddenRows::kAll : HiddenRows::kLast;
  Graph& graph = graph_for(draw);
  const bool known = graph.last_use != 0;
  graph.last_use = ++step_;
  // The first step of a shape runs as it is: it may be the only one, and what is loaded when a kernel first
  // runs is not loaded while a graph is captured.
  if (!known) return enqueue(options, wanted, draw);
  if (graph.executable == nullptr) {
    check_call(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture");
    cudaGraph_t captured = nullptr;
    try {
      enqueue(options, wanted, draw);
    } catch (...) {
      cudaStreamEndCapture(stream_.get(), &captured);
      if (captured != nullptr) cudaGraphDestroy(captured);
      cudaGetLastError();
      throw;
    }
    check_call(cudaStreamEndCapture(stream_.get(), &captured), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiate(&graph.executable, captured, 0);
    cudaGraphDestroy(captured);
    check_call(made, "cudaGraphInstantiate");
  }
  replayed_ = true;
  check_call(cudaGraphLaunch(graph.executable, stream_.get()), "cudaGraphLaunch");
}

void CudaEngine::forget_graphs() {
  for (const Graph& graph : graphs_)
    if (graph.executable != nullptr) cudaGraphExecDestroy(graph.executable);
  graphs_.clear();
}

void CudaEngine::forget_moved(FunctionRef<bool()> grow) {
  try {
    if (grow()) forget_graphs();
  } catch (...) {
    forget_graphs();  // what grew before the failure has moved
    throw;
  }
}

int64_t CudaEngine::prefill_rows(const Policy* policy, int64_t length) {
  const cuda::DeviceScope scope(prepared_->device_info().index);
  return chunk_rows(options_.prefill_chunk, prefill_granule(policy, config_.layers), kChunkScratchBytes,
                    [&](int64_t rows) { return attention_.prefill_bytes(policy, rows, length); });
}

std::span<const float> CudaEngine::logits(std::span<const float> hidden) {
  const cuda::DeviceScope scope(prepared_->device_info().index);
  const int64_t width = config_.hidden, vocabulary = config_.vocabulary;
  require<BadArgument>(hidden.size() % static_cast<size_t>(width) == 0,
                       "logits: {} values, expected whole rows of {}", hidden.size(), width);
  const auto rows = static_cast<int64_t>(hidden.size()) / width;
  if (rows == 0) return {};
  const int64_t at_once = std::min(rows, kHeadRows);
  forget_moved([&] {
    const bool moved = last_.grow(at_once * width);
    return make_room_for_head(at_once) || moved;
  });
  host_logits_.grow(rows * vocabulary);
  if (step_rows_at_once(rows) <= kStepProductRows) prepare_products(step_rows_at_once(rows), true);
  for (int64_t row = 0; row < rows; row += at_once) {
    const int64_t count = std::min(at_once, rows - row);
    copy_to_device(last_.data(), hidden.data() + row * width, count * width, stream_);
    enqueue_head(count, Draw::kNothing);
    copy_to_host(host_logits_.data() + row * vocabulary, logits_.data(), count * vocabulary, stream_);
  }
  stream_.wait();
  return {host_logits_.data(), static_cast<size_t>(rows * vocabulary)};
}

void CudaEngine::fill_cache(Sequence& sequence, int64_t length, uint64_t seed) {
  const cuda::DeviceScope scope(prepared_->device_info().index);
  auto& cached = dynamic_cast<CachedSequence&>(sequence);
  require<BadArgument>(cached.pool() == pool_.get() && cached.length() == 0,
                       "fill_cache: expected an empty sequence that this engine made");
  cached.reserve(length);
  const int64_t elements = cache_->shape().page_elements();
  const std::vector<int32_t>& pages = cached.page_table();
  for (int plane = 0; plane < config_.layers * 2; ++plane) {
    auto* base = reinterpret_cast<__nv_bfloat16*>(cache_->plane(plane / 2, plane % 2 != 0));
    for (size_t begin = 0; begin < pages.size();) {  // runs of neighbouring pages
      size_t end = begin + 1;
      while (end < pages.size() && pages[end] == pages[end - 1] + 1) ++end;
      cuda::fill_normal(base + pages[begin] * elements, static_cast<int64_t>(end - begin) * elements, 1,
                        seed + static_cast<uint64_t>(plane) * 1000003u + begin, stream_.get());
      begin = end;
    }
  }
  stream_.wait();
  cached.commit(length, {});
}

uint64_t CudaEngine::memory_bytes() const {
  uint64_t bytes = prepared_->bytes() + cache_->live_bytes() + attention_.bytes() + upload_.bytes() +
                   cuda::MatrixProducts::kWorkspaceBytes;
  for (const uint64_t buffer :
       {residual_.bytes(), normed_.bytes(), qkv_.bytes(), attended_.bytes(), gate_up_.bytes(),
        activated_.bytes(), last_.bytes(), last_normed_.bytes(), logits_.bytes(), next_.bytes(),
        rope_frequencies_.bytes(), rope_table_.bytes()})
    bytes += buffer;
  return bytes;
}

}  // namespace kascade
