// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention/cuda/bench/attention_bench.h"
#include "attention/cuda/bench/product_peak.h"
#include "attention/cuda/bench/read_bandwidth.h"
#include "attention/cuda/cuda_attention.h"
#include "attention/params.h"
#include "base/cuda/device_bytes.h"
#include "base/cuda/launch.h"
#include "base/cuda/mix.cuh"

namespace kascade {
namespace {

using cuda::check_cuda;

constexpr const char* kName = "attention_bench";
constexpr int kRoles = 5;
constexpr Role kRole[kRoles] = {Role::kDense, Role::kLayer0, Role::kAnchor, Role::kReuse, Role::kReuse};
constexpr int kRandomReuse = 4;
// Several times the second-level cache of any GPU.
constexpr size_t kFlushBytes = size_t{512} << 20;

__host__ __device__ uint64_t mixed(uint64_t x) { return cuda::mix(x + cuda::kMixStep); }

/// Uniform of the given deviation.
template <class T>
__global__ void fill_kernel(T* out, int64_t count, uint64_t seed, float deviation) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto bits = static_cast<int32_t>(mixed(seed + static_cast<uint64_t>(i)) >> 32);
    out[i] = static_cast<T>(static_cast<float>(bits) * (1.7320508f * 0x1p-31f) * deviation);
  }
}

/// As many random candidates of every set as it has members, ascending. A sequence has `tiles` tiles; the
/// candidates of its last are `most`, of each tile before it `step` fewer.
__global__ void draw_kernel(const int32_t* counts, int32_t* positions, int64_t sets, int32_t heads,
                            int32_t capacity, int32_t tiles, int32_t step, int32_t most) {
  const int64_t set = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (set >= sets) return;
  const int32_t candidates = most - (tiles - 1 - static_cast<int32_t>(set / heads % tiles)) * step;
  int32_t wanted = counts[set];
  int32_t* out = positions + set * capacity;
  uint64_t seed = static_cast<uint64_t>(set) << 24;
  // Selection sampling: each key is taken with the probability that is left.
  for (int32_t j = 0; j < candidates && wanted > 0; ++j) {
    const uint64_t random = mixed(++seed) >> 32;
    if (static_cast<int32_t>(random * static_cast<uint32_t>(candidates - j) >> 32) >= wanted) continue;
    *out++ = j;
    --wanted;
  }
}

class Buffer : public cuda::DeviceBytes {
 public:
  explicit Buffer(size_t bytes) : DeviceBytes(bytes, kName) {}

  template <class T>
  static Buffer of(const std::vector<T>& values) {
    Buffer buffer(values.size() * sizeof(T));
    buffer.upload(0, values.data(), values.size() * sizeof(T));
    return buffer;
  }
};

std::vector<int32_t> multiples(int32_t count, int32_t step) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i) * step;
  return values;
}

std::vector<int32_t> shuffled(int32_t count) {
  std::vector<int32_t> values = multiples(count, 1);
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[mixed(i) % i]);
  return values;
}

class Bench {
 public:
  Bench(const CudaAttentionBenchOptions& options, const std::function<void(double, const std::string&)>& said)
      : o_(options),
        said_(said),
        pages_(options.page_size > 0 ? (options.context + options.page_size - 1) / options.page_size : 1),
        page_tokens_(options.page_size > 0 ? options.page_size : options.context),
        elements_(int64_t{options.batch} * pages_ * page_tokens_ * options.kv_heads * options.head_dim),
        rows_(options.prefill ? options.context : 1),
        tiles_(options.prefill ? (options.context + options.tile - 1) / options.tile : 1),
        capacity_(capacity()),
        sets_(int64_t{options.batch} * tiles_ * options.kv_heads),
        k_(static_cast<size_t>(elements_) * 2),
        v_(static_cast<size_t>(elements_) * 2),
        q_(query_elements() * 2),
        out_(query_elements() * 4),
        cu_q_(Buffer::of(multiples(options.batch + 1, rows_))),
        tile_offsets_(Buffer::of(multiples(options.batch + 1, tiles_))),
        cu_kv_(Buffer::of(multiples(options.batch + 1, options.page_size > 0 ? 0 : options.context))),
        lengths_(Buffer::of(std::vector<int32_t>(static_cast<size_t>(options.batch), options.context))),
        table_(Buffer::of(shuffled(static_cast<int32_t>(options.batch * pages_)))),
        needed_(Buffer::of(options.needed)),
        positions_(static_cast<size_t>(sets_ * capacity_) * 4),
        random_(static_cast<size_t>(sets_ * capacity_) * 4),
        counts_(static_cast<size_t>(sets_) * 4),
        flush_(kFlushBytes) {
    check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate", kName);
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate", kName);
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate", kName);
    blocks_ = cuda::multiprocessors(kName) * 8;
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  CudaAttentionBenchResult run() {
    CudaAttentionBenchResult result;
    int device = 0;
    cudaDeviceProp properties;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice", kName);
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", kName);
    result.device = properties.name;
    said_(0, "filling the cache");
    fill(k_, elements_, 1, 1);
    fill(v_, elements_, uint64_t{1} << 40, 1);
    fill(q_, static_cast<int64_t>(query_elements()), uint64_t{1} << 41, o_.query_deviation);
    check_cuda(cudaMemset(flush_.as(), 1, flush_.bytes()), "cudaMemset", kName);
    said_(0.1, "measuring the machine");
    result.read_gb_per_s = bandwidth();
    if (o_.prefill) result.bf16_tflop_per_s = measure_cuda_bf16_tflop_per_s();
    launch(Role::kAnchor, positions_, workspace_of(Role::kAnchor));
    draw_sets(result);
    for (int role = 0; role < kRoles; ++role) {
      said_(0.2 + 0.15 * role, std::string("timing ") + role_name(kRole[role]) +
                                   (role == kRandomReuse ? " of random sets" : ""));
      const auto [median, least] = time_role(role);
      result.ms[static_cast<size_t>(role)] = median;
      result.min_ms[static_cast<size_t>(role)] = least;
    }
    said_(0.95, "checking the answers");
    check_dense(result);
    return result;
  }

 private:
  size_t query_elements() const {
    return static_cast<size_t>(o_.batch) * static_cast<size_t>(rows_) *
           static_cast<size_t>(o_.query_heads * o_.head_dim);
  }

  AttentionParams shape(Role role) const {
    AttentionParams p;
    p.role = role;
    p.tile_rule = o_.prefill ? TileRule::kAligned : TileRule::kStep;
    p.tile = o_.tile;
    p.batch = o_.batch;
    p.query_heads = o_.query_heads;
    p.kv_heads = o_.kv_heads;
    p.head_dim = o_.head_dim;
    p.q_dtype = p.kv_dtype = o_.dtype;
    p.out_dtype = o_.prefill ? o_.dtype : DType::kF32;
    p.budget = o_.budget;
    p.q_head_stride = p.out_head_stride = o_.head_dim;
    p.q_row_stride = p.out_row_stride = int64_t{o_.query_heads} * o_.head_dim;
    p.max_q_len = rows_;
    p.max_kv_len = o_.context;
    p.max_total_q = o_.batch * rows_;
    p.max_tiles = o_.batch * tiles_;
    return p;
  }

  int32_t capacity() const { return static_cast<int32_t>(required_capacity(shape(Role::kAnchor))); }

  AttentionParams params(Role role, const Buffer& positions) const {
    AttentionParams p = shape(role);
    p.q = q_.as();
    p.out = out_.as();
    p.cu_seqlens_q = cu_q_.as<int32_t>();
    p.seq_lens_kv = lengths_.as<int32_t>();
    p.k = k_.as();
    p.v = v_.as();
    if (o_.page_size > 0) {
      p.page_size = o_.page_size;
      p.page_table = table_.as<int32_t>();
      p.page_table_stride = pages_;
    } else {
      p.cu_seqlens_kv = cu_kv_.as<int32_t>();
    }
    p.k_head_stride = p.v_head_stride = o_.head_dim;
    p.k_token_stride = p.v_token_stride = int64_t{o_.kv_heads} * o_.head_dim;
    p.k_page_stride = p.v_page_stride = p.k_token_stride * o_.page_size;
    if (role == Role::kDense) return p;
    p.positions = positions.as<int32_t>();
    p.counts = counts_.as<int32_t>();
    p.tile_offsets = tile_offsets_.as<int32_t>();
    p.capacity = capacity_;
    if (role == Role::kLayer0 && !o_.needed.empty()) p.needed = needed_.as<uint8_t>();
    return p;
  }

  Buffer workspace_of(Role role) const {
    return Buffer(cuda_attention_workspace_bytes(params(role, positions_)));
  }

  void launch(Role role, const Buffer& positions, const Buffer& workspace) {
    cuda_attention(params(role, positions), workspace.as(), workspace.bytes(), stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", kName);
  }

  void fill(const Buffer& buffer, int64_t count, uint64_t seed, float deviation) {
    if (o_.dtype == DType::kBF16) {
      fill_kernel<<<blocks_, 256, 0, stream_>>>(buffer.as<__nv_bfloat16>(), count, seed, deviation);
    } else {
      fill_kernel<<<blocks_, 256, 0, stream_>>>(buffer.as<__half>(), count, seed, deviation);
    }
    check_cuda(cudaGetLastError(), "launch", kName);
  }

  void read(const Buffer& buffer) {
    enqueue_read(buffer.as(), buffer.bytes(), flush_.as<uint32_t>(), stream_);
  }

  template <class F>
  double timed(F f) {
    check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord", kName);
    f();
    check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord", kName);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", kName);
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime", kName);
    return ms;
  }

  double bandwidth() {
    const Buffer& largest = k_.bytes() > flush_.bytes() ? k_ : flush_;
    const Buffer& other = k_.bytes() > flush_.bytes() ? flush_ : k_;
    double least = INFINITY;
    for (int i = 0; i < 10; ++i) {
      read(other);
      least = std::min(least, timed([&] { read(largest); }));
    }
    return static_cast<double>(largest.bytes()) / least * 1e-6;
  }

  std::pair<double, double> time_role(int role) {
    const Buffer workspace = workspace_of(kRole[role]);
    const Buffer& positions = role == kRandomReuse ? random_ : positions_;
    launch(kRole[role], positions, workspace);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture",
               kName);
    cuda_attention(params(kRole[role], positions), workspace.as(), workspace.bytes(), stream_);
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture", kName);
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate", kName);
    std::vector<double> times;
    for (int i = -2; i < std::max(o_.repetitions, 1); ++i) {
      read(flush_);
      const double ms =
          timed([&] { check_cuda(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch", kName); });
      if (i >= 0) times.push_back(ms);
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times.front()};
  }

  /// Random ascending sets of the sizes that the anchor chose.
  void draw_sets(CudaAttentionBenchResult& result) {
    const std::vector<int32_t> counts = counts_.download<int32_t>(static_cast<size_t>(sets_));
    for (size_t set = 0; set < counts.size(); ++set) {
      const int32_t tile = static_cast<int32_t>(set / static_cast<size_t>(o_.kv_heads)) % tiles_;
      const int32_t rows = o_.prefill ? std::min(o_.tile, o_.context - tile * o_.tile) : 1;
      result.members += counts[set];
      result.member_rows += static_cast<double>(counts[set]) * rows;
    }
    const int32_t most = o_.prefill ? (tiles_ - 1) * o_.tile : o_.context - 1;
    check_cuda(cudaMemset(random_.as(), 0xFF, random_.bytes()), "cudaMemset", kName);
    constexpr int kThreads = 64;
    draw_kernel<<<static_cast<unsigned>((sets_ + kThreads - 1) / kThreads), kThreads, 0, stream_>>>(
        counts_.as<int32_t>(), random_.as<int32_t>(), sets_, o_.kv_heads, capacity_, tiles_, o_.tile, most);
    check_cuda(cudaGetLastError(), "launch", kName);
  }

  float value(uint16_t bits) const {
    return o_.dtype == DType::kBF16 ? to_float(BF16{bits}) : to_float(F16{bits});
  }

  /// Dense output of the last row's first KV head against fp64.
  void check_dense(CudaAttentionBenchResult& result) {
    AttentionParams p = params(Role::kDense, positions_);
    p.out_dtype = DType::kF32;
    const Buffer workspace = workspace_of(Role::kDense);
    cuda_attention(p, workspace.as(), workspace.bytes(), stream_);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", kName);
    const auto dim = static_cast<size_t>(o_.head_dim);
    const auto group = static_cast<size_t>(o_.query_heads / o_.kv_heads);
    const std::vector<int32_t> table = table_.download<int32_t>(static_cast<size_t>(o_.batch * pages_));
    const size_t page_elements = static_cast<size_t>(page_tokens_ * o_.kv_heads) * dim;
    const size_t width = static_cast<size_t>(o_.query_heads) * dim, first = query_elements() - width;
    std::vector<uint16_t> q(width);
    std::vector<float> out(width);
    check_cuda(cudaMemcpy(q.data(), q_.as<uint16_t>() + first, width * 2, cudaMemcpyDeviceToHost),
               "cudaMemcpy", kName);
    check_cuda(cudaMemcpy(out.data(), out_.as<float>() + first, width * 4, cudaMemcpyDeviceToHost),
               "cudaMemcpy", kName);
    std::vector<uint16_t> k(page_elements), v(page_elements);
    std::vector<double> sum(group * dim), magnitude(group * dim), total(group);
    for (int64_t page = 0; page < pages_; ++page) {
      const int64_t slot = int64_t{o_.batch - 1} * pages_ + page;
      const size_t physical = static_cast<size_t>(o_.page_size > 0 ? table[static_cast<size_t>(slot)] : slot);
      for (const auto& [to, from] : {std::pair{&k, &k_}, std::pair{&v, &v_}})
        check_cuda(cudaMemcpy(to->data(), from->as<uint16_t>() + physical * page_elements, page_elements * 2,
                              cudaMemcpyDeviceToHost),
                   "cudaMemcpy", kName);
      const int64_t tokens = std::min(page_tokens_, o_.context - page * page_tokens_);
      for (int64_t t = 0; t < tokens; ++t) {
        const size_t at = static_cast<size_t>(t * o_.kv_heads) * dim;
        for (size_t h = 0; h < group; ++h) {
          double score = 0;
          for (size_t d = 0; d < dim; ++d) score += double{value(q[h * dim + d])} * value(k[at + d]);
          // Scores are a few dozen at most: no reference is needed in fp64.
          const double weight = std::exp(score / std::sqrt(static_cast<double>(dim)));
          total[h] += weight;
          for (size_t d = 0; d < dim; ++d) {
            sum[h * dim + d] += weight * value(v[at + d]);
            magnitude[h * dim + d] += weight * std::fabs(value(v[at + d]));
          }
        }
      }
    }
    const double unit = o_.dtype == DType::kBF16 ? 0x1p-9 : 0x1p-12;
    for (size_t i = 0; i < sum.size(); ++i) {
      result.largest_error =
          std::max(result.largest_error, std::fabs(sum[i] / total[i / dim] - double{out[i]}));
      result.allowed_error = std::max(result.allowed_error, 2 * unit * magnitude[i] / total[i / dim] + 1e-6);
    }
  }

  const CudaAttentionBenchOptions o_;
  const std::function<void(double, const std::string&)>& said_;
  const int64_t pages_, page_tokens_, elements_;
  const int32_t rows_, tiles_;  // of a sequence
  const int32_t capacity_;
  const int64_t sets_;
  Buffer k_, v_, q_, out_, cu_q_, tile_offsets_, cu_kv_, lengths_, table_, needed_, positions_, random_,
      counts_, flush_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  int blocks_ = 0;
};

}  // namespace

CudaAttentionBenchResult bench_attention_by_role(
    const CudaAttentionBenchOptions& options, const std::function<void(double, const std::string&)>& said) {
  if (!cuda_sm90_kernel.available())
    throw Unsupported("--device cuda: no CUDA device of compute capability 9.0");
  return Bench(options, said).run();
}

}  // namespace kascade
