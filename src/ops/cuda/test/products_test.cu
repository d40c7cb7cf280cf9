// SPDX-License-Identifier: Apache-2.0
// Products with stored matrices against sums in double, and what must not change their bits.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/cuda/launch.h"
#include "base/cuda/test/device_test.h"
#include "kascade/dtype.h"
#include "kascade/error.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/small_product.h"

namespace kascade::cuda_test {
namespace {

using cuda::check_cuda;
using cuda::DeviceMatrix;
using cuda::MatrixProducts;
using Bf16 = __nv_bfloat16;

/// exact[row, output], and the sum of magnitudes that bounds the error.
__global__ void exact_product(const Bf16* weight, const Bf16* x, int64_t outputs, int64_t inputs,
                              int64_t rows, double* exact, double* magnitude) {
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= rows * outputs) return;
  const Bf16* w = weight + at % outputs * inputs;
  const Bf16* row = x + at / outputs * inputs;
  double sum = 0, size = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    const double product = double{__bfloat162float(w[i])} * double{__bfloat162float(row[i])};
    sum += product;
    size += fabs(product);
  }
  exact[at] = sum;
  magnitude[at] = size;
}

enum class Out { kBf16, kF32, kAdded };

struct Operands {
  int64_t outputs, inputs, rows;
  DeviceBuffer weight, x;

  Operands(int64_t outputs_, int64_t inputs_, int64_t rows_)
      : outputs(outputs_),
        inputs(inputs_),
        rows(rows_),
        weight(static_cast<size_t>(outputs * inputs) * 2),
        x(static_cast<size_t>(rows * inputs) * 2 + 16) {
    cuda::fill_normal(weight.as<Bf16>(), outputs * inputs, 0.02f, 1, nullptr);
    cuda::fill_normal(x.as<Bf16>(), rows * inputs, 1, 2, nullptr);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize", "test");
  }
  DeviceMatrix matrix() const { return {weight.as<Bf16>(), outputs, inputs}; }
};

/// Rows [first, first + rows) of the operands' product, as floats.
std::vector<float> product(MatrixProducts& products, const Operands& o, int64_t first, int64_t rows,
                           Out kind) {
  const auto count = static_cast<size_t>(rows * o.outputs);
  const size_t size = kind == Out::kBf16 ? 2 : 4;
  DeviceBuffer out(count * size + 16);
  if (kind == Out::kAdded) {
    const std::vector<float> old(count, 0.25f);
    out.upload(0, old.data(), count * 4);
  }
  products.multiply(o.matrix(), o.x.as<Bf16>() + first * o.inputs, rows, out.as<void>(), kind != Out::kBf16,
                    kind == Out::kAdded, nullptr);
  const auto bytes = out.download<uint8_t>(count * size + 16);
  for (size_t i = 0; i < 16; ++i)
    if (bytes[count * size + i] != 0xFF) {
      fail("wrote past the end");
      break;
    }
  std::vector<float> values(count);
  if (kind != Out::kBf16) {
    std::memcpy(values.data(), bytes.data(), count * 4);
    return values;
  }
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes.data() + i * 2, 2);
    values[i] = to_float(BF16{bits});
  }
  return values;
}

void check_product(MatrixProducts& products, const Operands& o, int64_t rows, Out kind) {
  const auto count = static_cast<size_t>(rows * o.outputs);
  const DeviceBuffer exact(count * 8), magnitude(count * 8);
  exact_product<<<static_cast<unsigned>((count + 127) / 128), 128>>>(
      o.weight.as<Bf16>(), o.x.as<Bf16>(), o.outputs, o.inputs, rows, exact.as<double>(),
      magnitude.as<double>());
  const auto got = product(products, o, 0, rows, kind);
  const auto sums = exact.download<double>(count), sizes = magnitude.download<double>(count);
  for (size_t i = 0; i < count; ++i) {
    const double wanted = sums[i] + (kind == Out::kAdded ? 0.25 : 0);
    // fp32 sums of some hundred parts, tensor cores cutting off below 2^-22 of the largest; then the
    // rounding.
    const double allowed =
        sizes[i] * 0x1p-18 + std::fabs(wanted) * (kind == Out::kBf16 ? 0x1.02p-8 : 0x1p-23) + 1e-30;
    if (std::fabs(got[i] - wanted) <= allowed) continue;
    fail(text("row %d, output %d is %g, exact %g, allowed error %g", int(int64_t(i) / o.outputs),
              int(int64_t(i) % o.outputs), double{got[i]}, wanted, allowed));
    return;
  }
}

struct Size {
  int64_t outputs, inputs;
};

void check_sizes(std::initializer_list<Size> sizes, std::initializer_list<int64_t> row_counts) {
  for (const auto mode : {cuda::Products::kFast, cuda::Products::kInvariant}) {
    MatrixProducts products(mode);
    for (const auto [outputs, inputs] : sizes) {
      const Operands o(outputs, inputs, std::max(row_counts));
      for (const int64_t rows : row_counts)
        for (const Out kind : {Out::kBf16, Out::kF32, Out::kAdded}) {
          current = text("product, mode %d, [%d, %d], %d rows, out %d", int(mode), int(outputs), int(inputs),
                         int(rows), int(kind));
          try {
            check_product(products, o, rows, kind);
          } catch (const Unsupported& error) {
            // Rows of outputs that are not whole 16 bytes: a layer has none.
            EXPECT(mode == cuda::Products::kInvariant && outputs % 8 != 0, "refused: %s", error.what());
          }
        }
    }
  }
}

void test_products() {
  check_sizes({{48, 32},
               {1, 64},
               {17, 96},
               {100, 48},
               {576, 576},
               {960, 576},
               {320, 1536},
               {2048, 1536},
               {1536, 8960},
               {6144, 4096},
               {33, 192},
               {33, 160},
               {4099, 256}},
              {1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 100, 300});
}

void test_small_products() { check_sizes({{40, 192}, {320, 576}}, {1, 9, 33, 64}); }

/// o has 64 rows.
void run_shapes_of_blocks(const Operands& o, std::initializer_list<int> splits,
                          std::initializer_list<int> tile_counts, std::initializer_list<int64_t> row_counts) {
  const auto most = static_cast<size_t>(64 * o.outputs);
  const DeviceBuffer exact(most * 8), magnitude(most * 8);
  exact_product<<<static_cast<unsigned>((most + 127) / 128), 128>>>(
      o.weight.as<Bf16>(), o.x.as<Bf16>(), o.outputs, o.inputs, 64, exact.as<double>(),
      magnitude.as<double>());
  const auto sums = exact.download<double>(most), sizes = magnitude.download<double>(most);
  for (const int split : splits)
    for (const int tiles : tile_counts)
      for (const int64_t rows : row_counts) {
        if ((rows > 32 && tiles > 4)) continue;
        cuda::SmallProductShape shape;
        shape.split = split;
        shape.tiles = tiles;
        shape.clusters = tiles == 3 ? 1 : 5;
        shape.stages = tiles > 4 || rows > 8 ? 1 : tiles == 4 ? 2 : 3;
        shape.lead = tiles;
        current = text("small product, split %d, %d tiles, %d rows", split, tiles, int(rows));
        const auto count = static_cast<size_t>(rows * o.outputs);
        const DeviceBuffer out(count * 4), again(count * 4);
        for (const DeviceBuffer* to : {&out, &again})
          cuda::small_product(o.matrix(), shape, o.x.as<Bf16>(), rows, to->as<void>(), true, false, nullptr);
        const auto got = out.download<float>(count);
        for (size_t i = 0; i < count; ++i)
          if (!(std::fabs(got[i] - sums[i]) <= sizes[i] * 0x1p-18)) {
            fail(text("element %zu is %g, exact %g", i, double{got[i]}, sums[i]));
            break;
          }
        EXPECT(same_bits(got, again.download<float>(count)), "a second run differs");
      }
}

/// Every shape of blocks that the kernel takes, whichever a matrix of today gets.
void test_small_product_shapes() {
  // 21 tiles of outputs: blocks have unequal shares; inputs end within a chunk.
  run_shapes_of_blocks(Operands(333, 2400, 64), {1, 2, 4}, {1, 3, 4, 8}, {1, 8, 12, 20, 30, 64});
}
/// Every instantiation, with stages that are filled again; no more work than a race checker does in seconds.
void test_some_small_product_shapes() {
  run_shapes_of_blocks(Operands(83, 1056, 64), {1}, {3, 8}, {1, 12, 30, 64});
}
/// The same in clusters. A test of its own, as the race checker does not come back from blocks that wait for
/// each other's arrivals.
void test_some_small_product_clusters() {
  run_shapes_of_blocks(Operands(83, 1056, 64), {2}, {3, 8}, {1, 12, 30, 64});
}

/// In the invariant mode a row's bits depend on the row alone, within and above 64 rows.
void test_product_invariance() {
  MatrixProducts products(cuda::Products::kInvariant);
  for (const auto [outputs, inputs] : {Size{576, 576}, Size{1536, 8960}, Size{6144, 4096}, Size{1000, 1536}})
    for (const Out kind : {Out::kBf16, Out::kF32, Out::kAdded}) {
      current = text("invariance, [%d, %d], out %d", int(outputs), int(inputs), int(kind));
      const Operands o(outputs, inputs, 1000);
      const auto row = [&](const std::vector<float>& all, int64_t r) {
        return std::vector<float>(all.begin() + r * outputs, all.begin() + (r + 1) * outputs);
      };
      const auto of_64 = product(products, o, 0, 64, kind);
      for (const int64_t rows : {1, 3, 8, 9, 17, 40}) {
        const auto few = product(products, o, 64 - rows, rows, kind);
        EXPECT(same_bits(row(few, rows - 1), row(of_64, 63)), "the last of %d rows differs from that of 64",
               int(rows));
      }
      const auto of_1000 = product(products, o, 0, 1000, kind);
      for (const int64_t rows : {65, 100, 128, 300, 999}) {
        const auto some = product(products, o, 1000 - rows, rows, kind);
        EXPECT(same_bits(row(some, rows - 1), row(of_1000, 999)) &&
                   same_bits(row(some, 0), row(of_1000, 1000 - rows)),
               "rows of %d differ from those of 1000", int(rows));
      }
    }
}

/// A NaN stays in its row; rows of memory that no row fills do not matter.
void test_product_nan() {
  MatrixProducts products(cuda::Products::kFast);
  const Operands o(320, 576, 70);
  Operands bad(320, 576, 70);
  const uint16_t nan = 0x7FC0;
  bad.x.upload(static_cast<size_t>(2 * 576 + 7) * 2, &nan, 2);
  for (const int64_t rows : {3, 20, 70}) {
    current = text("NaN in a product of %d rows", int(rows));
    const auto clean = product(products, o, 0, rows, Out::kF32),
               got = product(products, bad, 0, rows, Out::kF32);
    for (size_t i = 0; i < got.size(); ++i) {
      const bool in_row = i / 320 == 2;
      if (in_row ? std::isnan(got[i]) : got[i] == clean[i]) continue;
      fail(text("row %zu, output %zu is %g, without the NaN %g", i / 320, i % 320, double{got[i]},
                double{clean[i]}));
      break;
    }
  }
}

/// Prepared, captured, replayed: the same bits as a plain call; chains of our kernels keep their order.
void test_product_graph() {
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate", "test");
  MatrixProducts products(cuda::Products::kFast);
  for (const int64_t rows : {1, 4, 20, 200}) {
    current = text("graph of products, %d rows", int(rows));
    // x -> h = W x -> norm -> y += V n, many times, each reading what the one before wrote.
    const int64_t width = 1536;
    const Operands o(width, width, rows);
    const std::vector<float> ones(static_cast<size_t>(width), 1.0f);
    const DeviceBuffer d_ones = DeviceBuffer::of(ones), n(static_cast<size_t>(rows * width) * 2);
    DeviceBuffer y(static_cast<size_t>(rows * width) * 4);
    const std::vector<float> start(static_cast<size_t>(rows * width), 0.5f);
    products.prepare(o.matrix(), rows, true, true, stream);
    EXPECT(!products.chosen(o.matrix(), rows, true, true).empty(), "nothing chosen");
    const auto chain = [&] {
      for (int i = 0; i < 20; ++i) {
        cuda::rms_norm(y.as<float>(), d_ones.as<float>(), 1e-5f, rows, width, n.as<Bf16>(), stream);
        products.multiply(o.matrix(), n.as<Bf16>(), rows, y.as<void>(), true, true, stream);
      }
    };
    const auto result = [&](const auto& work) {
      y.upload(0, start.data(), start.size() * 4);
      work();
      check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize", "test");
      return y.download<float>(start.size());
    };
    const auto plain = result(chain);
    // One by one, so that nothing overlaps.
    const auto apart = result([&] {
      for (int i = 0; i < 20; ++i) {
        cuda::rms_norm(y.as<float>(), d_ones.as<float>(), 1e-5f, rows, width, n.as<Bf16>(), stream);
        check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize", "test");
        products.multiply(o.matrix(), n.as<Bf16>(), rows, y.as<void>(), true, true, stream);
        check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize", "test");
      }
    });
    EXPECT(same_bits(plain, apart), "kernels that overlap give other bits than kernels apart");
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture", "test");
    chain();
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture", "test");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate", "test");
    for (int i = 0; i < 3; ++i)
      EXPECT(same_bits(plain, result([&] { cudaGraphLaunch(executable, stream); })), "replay %d differs", i);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

void test_product_refusals() {
  MatrixProducts products(cuda::Products::kFast);
  const Operands o(32, 32, 1);
  const DeviceBuffer out(64);
  try {
    products.multiply(o.matrix(), o.x.as<Bf16>(), 1, out.as<void>(), false, true, nullptr);
    fail("bf16 accumulation: no error");
  } catch (const BadArgument& error) {
    EXPECT(std::strstr(error.what(), "fp32") != nullptr, "message: %s", error.what());
  }
  products.multiply(o.matrix(), o.x.as<Bf16>(), 0, out.as<void>(), false, false, nullptr);
}

const Registered kTests[] = {{21, "products", test_products, "all"},
                             {21, "products: few and small", test_small_products, "all sanitize"},
                             {21, "products: shapes of blocks", test_small_product_shapes, "all"},
                             {21, "products: some shapes", test_some_small_product_shapes, "sanitize"},
                             {21, "products: in clusters", test_some_small_product_clusters, "sanitize"},
                             {21, "products: invariance", test_product_invariance, "all"},
                             {21, "products: NaN", test_product_nan, "all"},
                             {21, "products: graph", test_product_graph, "all"},
                             {21, "products: refusals", test_product_refusals, "all sanitize"}};

}  // namespace
}  // namespace kascade::cuda_test
