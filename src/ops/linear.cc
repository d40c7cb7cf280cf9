// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/dequantize.h"
#include "ops/aligned_buffer.h"
#include "ops/isa.h"
#include "ops/ops.h"
#include "ops/panel_product.h"

namespace kascade {
namespace {

// Bytes of weights per index of a decode loop: long enough to stream, short enough to share 200 KB among
// threads.
constexpr int64_t kDecodeCutBytes = 16 * 1024;

// Row blocks that share one dequantised panel: more spare dequantising, fewer leave enough pieces to share.
constexpr int64_t kChunkBlocks = 4;
constexpr int64_t kLargeChunkBlocks = 8;
constexpr int64_t kLargeChunkPanels = 24;  // panels of a group from which the larger chunk is used

// Columns dequantised at a time for packing, a multiple of every block: 16 rows of them stay in the first
// cache.
constexpr int64_t kPackColumns = 256;
constexpr int64_t kPackRows = 16;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

struct Linear::Impl {
  const OpKernels* kernels = nullptr;
  Compute compute = Compute::kFast;
  WeightTensor
      weight;  // as stored; under kF32 the owned fp32 matrix, or the stored one if it is fp32 already
  AlignedBuffer<float> f32;
  AlignedBuffer<float> last_panel;  // kF32: the last outputs, padded with zero rows to a whole panel
  std::vector<float> bias;
  bool bf16 = false;  // type of the prefill product
  std::shared_ptr<const PanelProduct> product;

  int64_t panels() const { return divide_up(weight.rows, kPanelOutputs); }
  const uint8_t* row(int64_t output) const {
    return static_cast<const uint8_t*>(weight.data) + output * weight.row_bytes();
  }
  const float* bias_or_null() const { return bias.empty() ? nullptr : bias.data(); }
};

Linear::Linear(const WeightTensor& weight, const WeightTensor& bias, Compute compute) {
  const WeightTypeInfo& info = weight_type_info(weight.type);
  require<BadArgument>(
      weight.data != nullptr && weight.rows > 0 && weight.columns > 0 &&
          weight.columns % info.block_elements == 0,
      "linear: weight: expected a matrix whose columns are a multiple of {}, got {} x {} of {}{}",
      info.block_elements, weight.rows, weight.columns, info.name,
      weight.data == nullptr ? " without data" : "");
  auto impl = std::make_unique<Impl>();
  impl->kernels = &op_kernels();
  impl->compute = compute;
  impl->weight = weight;
  if (bias) {
    require<BadArgument>(bias.rows == 1 && bias.columns == weight.rows,
                         "linear: bias: expected {} elements, got {} x {}", weight.rows, bias.rows,
                         bias.columns);
    impl->bias.resize(static_cast<size_t>(bias.columns));
    dequantize_row(bias.type, bias.data, bias.columns, impl->bias.data());
  }
  impl->bf16 = compute == Compute::kFast && impl->kernels->multiplies_bf16;
  impl->product = PanelProduct::get(impl->bf16, weight.columns);

  if (compute == Compute::kF32) {
    if (weight.type != WeightType::kF32) {
      float* values = impl->f32.grow(weight.rows * weight.columns);
      const DequantizeKernel dequantize = impl->kernels->dequantize_f32(weight.type);
      for (int64_t output = 0; output < weight.rows; ++output)
        dequantize(impl->row(output), weight.columns, values + output * weight.columns);
      impl->weight.type = WeightType::kF32;
      impl->weight.data = values;
    }
    if (const int64_t rest = weight.rows % kPanelOutputs; rest != 0) {
      float* panel = impl->last_panel.grow(kPanelOutputs * weight.columns);
      std::fill_n(panel, kPanelOutputs * weight.columns, 0.0f);
      std::memcpy(panel, impl->row(weight.rows - rest), static_cast<size_t>(rest * impl->weight.row_bytes()));
    }
  }
  impl_ = std::move(impl);
}

Linear::~Linear() = default;
Linear::Linear(Linear&&) noexcept = default;
Linear& Linear::operator=(Linear&&) noexcept = default;

int64_t Linear::inputs() const { return impl_->weight.columns; }
int64_t Linear::outputs() const { return impl_->weight.rows; }
uint64_t Linear::owned_bytes() const {
  return impl_->f32.bytes() + impl_->last_panel.bytes() + impl_->bias.size() * sizeof(float);
}

struct LinearScratch::Impl {
  struct Bound {
    std::shared_ptr<const PanelProduct> product;
    PanelProduct::Binding binding;
  };
  struct Worker {
    AlignedBuffer<uint8_t> panel;       // dequantised weights as PanelProduct wants them
    AlignedBuffer<uint16_t> pack;       // [kPackRows, kPackColumns]
    AlignedBuffer<uint8_t> scratchpad;  // oneDNN's
    AlignedBuffer<float> y;             // [64, 64]
    std::vector<Bound> bound;           // a model has a handful of distinct column counts
  };
  AlignedBuffer<uint8_t> x;  // activations as the path wants them
  std::vector<Worker> workers;

  PanelProduct::Binding& binding(int worker, const PanelProduct& product) {
    std::vector<Bound>& bound = workers[static_cast<size_t>(worker)].bound;
    return std::find_if(bound.begin(), bound.end(),
                        [&](const Bound& b) { return b.product.get() == &product; })
        ->binding;
  }

  void prepare(const Linear::Impl& linear, int threads) {
    if (workers.size() < static_cast<size_t>(threads)) workers.resize(static_cast<size_t>(threads));
    for (Worker& worker : workers) {
      if (linear.compute != Compute::kF32)
        worker.panel.grow(kPanelOutputs * divide_up(linear.weight.columns, kPairBlock) * kPairBlock *
                          (linear.bf16 ? 2 : 4));
      worker.pack.grow(kPackRows * kPackColumns);
      worker.scratchpad.grow(std::max<int64_t>(1, linear.product->scratchpad_bytes()));
      worker.y.grow(kPanelRows * kPanelOutputs);
      if (std::none_of(worker.bound.begin(), worker.bound.end(),
                       [&](const Bound& b) { return b.product == linear.product; }))
        worker.bound.push_back({linear.product, linear.product->bind()});
    }
  }
};

LinearScratch::LinearScratch() : impl_(std::make_unique<Impl>()) {}
LinearScratch::~LinearScratch() = default;
LinearScratch::LinearScratch(LinearScratch&&) noexcept = default;

uint64_t LinearScratch::bytes() const {
  uint64_t bytes = impl_->x.bytes();
  for (const Impl::Worker& worker : impl_->workers)
    bytes += worker.panel.bytes() + worker.pack.bytes() + worker.scratchpad.bytes() + worker.y.bytes();
  return bytes;
}

namespace {

void check(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
           MatmulPath path) {
  require<BadArgument>(rows >= 0 && (path == MatmulPath::kPrefill || rows <= kMaxDecodeRows),
                       "linear: rows: expected 0..{}, got {}",
                       path == MatmulPath::kPrefill ? INT64_MAX : kMaxDecodeRows, rows);
  for (const LinearTask& task : tasks) {
    require<BadArgument>(task.linear != nullptr && task.out != nullptr && x != nullptr,
                         "linear: a task without matrix, input or output");
    const Linear::Impl& first = tasks[0].linear->impl();
    const Linear::Impl& impl = task.linear->impl();
    require<BadArgument>(impl.weight.columns == first.weight.columns && impl.compute == first.compute &&
                             impl.kernels == first.kernels,
                         "linear: tasks of one call must share input and mode: {} inputs against {}",
                         impl.weight.columns, first.weight.columns);
    require<BadArgument>(x_stride >= impl.weight.columns && task.out_stride >= impl.weight.rows,
                         "linear: strides: expected at least {} and {}, got {} and {}", impl.weight.columns,
                         impl.weight.rows, x_stride, task.out_stride);
  }
}

// Calls f(task, piece) for piece `index` of the tasks' pieces laid end to end.
template <class Pieces, class F>
void find_piece(std::span<const LinearTask> tasks, int64_t index, Pieces pieces_of, F f) {
  for (const LinearTask& task : tasks) {
    const int64_t pieces = pieces_of(task.linear->impl());
    if (index < pieces) return f(task, index);
    index -= pieces;
  }
}

template <class Pieces>
int64_t count_pieces(std::span<const LinearTask> tasks, Pieces pieces_of) {
  int64_t count = 0;
  for (const LinearTask& task : tasks) count += pieces_of(task.linear->impl());
  return count;
}

void decode(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
            LinearScratch::Impl& scratch, ThreadPool& pool) {
  const Linear::Impl& first = tasks[0].linear->impl();
  const OpKernels& kernels = *first.kernels;
  const int64_t columns = first.weight.columns;
  DecodeArgs inputs;
  inputs.columns = columns;
  inputs.rows = rows;
  for (int64_t r = 0; r < rows; ++r) inputs.x[r] = x + r * x_stride;

  const bool quantize = std::any_of(tasks.begin(), tasks.end(), [](const LinearTask& task) {
    return weight_type_info(task.linear->impl().weight.type).block_elements > 1;
  });
  if (quantize) {
    const int64_t steps = divide_up(columns, kStep);
    const int64_t row_bytes = steps * (kStep + 2 * 4 * static_cast<int64_t>(sizeof(float)));
    uint8_t* memory = scratch.x.grow(divide_up(row_bytes, 64) * 64 * rows);
    for (int64_t r = 0; r < rows; ++r) {
      auto* q = reinterpret_cast<int8_t*>(memory + r * divide_up(row_bytes, 64) * 64);
      auto* scale = reinterpret_cast<float*>(q + steps * kStep);
      float* scaled_sum = scale + 4 * steps;
      kernels.quantize_row(inputs.x[r], columns, q, scale, scaled_sum);
      inputs.quantized[r] = {q, scale, scaled_sum};
    }
  }

  const auto cut = [](const Linear::Impl& impl) {
    return std::max<int64_t>(4, kDecodeCutBytes / impl.weight.row_bytes() / 4 * 4);
  };
  const auto pieces_of = [&](const Linear::Impl& impl) { return divide_up(impl.weight.rows, cut(impl)); };
  pool.parallel_for(count_pieces(tasks, pieces_of), [&](int64_t index, int) {
    find_piece(tasks, index, pieces_of, [&](const LinearTask& task, int64_t piece) {
      const Linear::Impl& impl = task.linear->impl();
      DecodeArgs args = inputs;
      args.weights = static_cast<const uint8_t*>(impl.weight.data);
      args.row_bytes = impl.weight.row_bytes();
      args.out = task.out;
      args.out_stride = task.out_stride;
      args.bias = impl.bias_or_null();
      args.accumulate = task.accumulate;
      const int64_t begin = piece * cut(impl);
      kernels.decode[static_cast<int>(impl.weight.type)](args, begin,
                                                         std::min(begin + cut(impl), impl.weight.rows));
    });
  });
}

// Adds bias and prior content to a finished block and stores it.
void store_block(const float* y, const LinearTask& task, int64_t row, int64_t rows, int64_t output) {
  const Linear::Impl& impl = task.linear->impl();
  const int64_t outputs = std::min(kPanelOutputs, impl.weight.rows - output);
  const float* bias = impl.bias_or_null();
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = y + r * kPanelOutputs;
    float* to = task.out + (row + r) * task.out_stride + output;
    for (int64_t i = 0; i < outputs; ++i) {
      const float value = bias == nullptr ? from[i] : from[i] + bias[output + i];
      to[i] = task.accumulate ? to[i] + value : value;
    }
  }
}

// Outputs [output, output + outputs) as a panel, zero where there are none.
void dequantize_panel(const Linear::Impl& impl, int64_t output, int64_t outputs,
                      LinearScratch::Impl::Worker& worker) {
  const OpKernels& kernels = *impl.kernels;
  const int64_t columns = impl.weight.columns;
  if (!impl.bf16) {
    auto* panel = reinterpret_cast<float*>(worker.panel.data());
    for (int64_t i = 0; i < outputs; ++i)
      kernels.dequantize_f32(impl.weight.type)(impl.row(output + i), columns, panel + i * columns);
    std::fill(panel + outputs * columns, panel + kPanelOutputs * columns, 0.0f);
    return;
  }
  const WeightTypeInfo& info = weight_type_info(impl.weight.type);
  const DequantizeKernel dequantize = kernels.dequantize_bf16(impl.weight.type);
  auto* panel = reinterpret_cast<uint16_t*>(worker.panel.data());
  uint16_t* pack = worker.pack.data();
  for (int64_t first = 0; first < kPanelOutputs; first += kPackRows) {
    for (int64_t column = 0; column < columns; column += kPackColumns) {
      const int64_t count = std::min(kPackColumns, columns - column);
      const int64_t padded = divide_up(count, kPairBlock) * kPairBlock;
      for (int64_t r = 0; r < kPackRows; ++r) {
        uint16_t* row = pack + r * kPackColumns;
        const int64_t there = first + r < outputs ? count : 0;
        if (there > 0)
          dequantize(impl.row(output + first + r) + column / info.block_elements * info.block_bytes, count,
                     row);
        std::fill(row + there, row + padded, uint16_t{0});
      }
      kernels.pack_bf16(pack, padded, kPackColumns, panel + column * kPanelOutputs + 2 * first,
                        2 * kPanelOutputs);
    }
  }
}

void prefill(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
             LinearScratch::Impl& scratch, ThreadPool& pool) {
  const Linear::Impl& first = tasks[0].linear->impl();
  const OpKernels& kernels = *first.kernels;
  const int64_t columns = first.weight.columns;
  const int64_t element_bytes = first.bf16 ? 2 : 4;
  const int64_t blocks = divide_up(rows, kPanelRows);
  for (const LinearTask& task : tasks) scratch.prepare(task.linear->impl(), pool.threads());

  // Activations in the product's type, contiguous, with zero rows up to a whole block.
  uint8_t* packed = scratch.x.grow(blocks * kPanelRows * columns * element_bytes);
  pool.parallel_for(blocks, [&](int64_t block, int) {
    for (int64_t r = block * kPanelRows; r < (block + 1) * kPanelRows; ++r) {
      uint8_t* to = packed + r * columns * element_bytes;
      if (r >= rows) {
        std::memset(to, 0, static_cast<size_t>(columns * element_bytes));
      } else if (first.bf16) {
        kernels.to_bf16(x + r * x_stride, columns, reinterpret_cast<uint16_t*>(to));
      } else {
        std::memcpy(to, x + r * x_stride, static_cast<size_t>(columns * element_bytes));
      }
    }
  });

  const int64_t panels = count_pieces(tasks, [](const Linear::Impl& impl) { return impl.panels(); });
  const int64_t chunk_blocks = panels >= kLargeChunkPanels ? kLargeChunkBlocks : kChunkBlocks;
  const int64_t chunks = divide_up(blocks, chunk_blocks);
  const auto pieces_of = [&](const Linear::Impl& impl) { return impl.panels() * chunks; };
  pool.parallel_for(count_pieces(tasks, pieces_of), [&](int64_t index, int worker_index) {
    LinearScratch::Impl::Worker& worker = scratch.workers[static_cast<size_t>(worker_index)];
    find_piece(tasks, index, pieces_of, [&](const LinearTask& task, int64_t piece) {
      const Linear::Impl& impl = task.linear->impl();
      const int64_t output = piece / chunks * kPanelOutputs;
      const int64_t outputs = std::min(kPanelOutputs, impl.weight.rows - output);
      const void* panel = worker.panel.data();
      if (impl.compute == Compute::kF32) {
        panel = outputs < kPanelOutputs ? static_cast<const void*>(impl.last_panel.data()) : impl.row(output);
      } else {
        dequantize_panel(impl, output, outputs, worker);
      }
      PanelProduct::Binding& binding = scratch.binding(worker_index, *impl.product);
      const int64_t chunk = piece % chunks * chunk_blocks;
      for (int64_t block = chunk; block < std::min(chunk + chunk_blocks, blocks); ++block) {
        const int64_t row = block * kPanelRows;
        impl.product->run(binding, packed + row * columns * element_bytes, panel, worker.y.data(),
                          worker.scratchpad.data());
        store_block(worker.y.data(), task, row, std::min(kPanelRows, rows - row), output);
      }
    });
  });
}

}  // namespace

void linear(std::span<const LinearTask> tasks, const float* x, int64_t rows, int64_t x_stride,
            MatmulPath path, LinearScratch& scratch, ThreadPool& pool) {
  check(tasks, x, rows, x_stride, path);
  if (tasks.empty() || rows == 0) return;
  if (path == MatmulPath::kDecode)
    decode(tasks, x, rows, x_stride, scratch.impl(), pool);
  else
    prefill(tasks, x, rows, x_stride, scratch.impl(), pool);
}

}  // namespace kascade
