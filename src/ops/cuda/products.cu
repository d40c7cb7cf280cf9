// SPDX-License-Identifier: Apache-2.0
// Products with stored matrices: few rows by our own kernel or cuBLASLt, whichever is faster; many by
// cuBLASLt.
#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/cuda/launch.h"
#include "base/cuda/memory.h"
#include "ops/cuda/ops.h"
#include "ops/cuda/small_product.h"

namespace kascade::cuda {
namespace {

constexpr int kCandidates = 12;
constexpr int kManyRowsCandidates = 5;
constexpr int kTimings = 3;
// Weights of this many bytes pass through the second-level cache and leave nothing of those before.
constexpr size_t kCold = size_t{160} << 20;
// Calls that are timed together, each of another matrix while they fit in kCold.
constexpr int64_t kTimedCalls = 16;
// Rows from which on the time is not that of reading weights.
constexpr int64_t kManyRowsTimed = 512;
// Up to here a shape that was never prepared goes to our own kernel.
constexpr int64_t kOwnRows = 16;
// Rows that stand for all row counts above kSmallRows where algorithms must not depend on rows.
constexpr int64_t kManyRows = 2048;

void check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError(std::string(call) + " for kernel product: " + cublasLtGetStatusString(status));
}

struct Form {
  int64_t outputs, inputs, rows;
  bool float_out, accumulate;
  bool operator<(const Form& other) const { return key() < other.key(); }
  std::tuple<int64_t, int64_t, int64_t, bool, bool> key() const {
    return {outputs, inputs, rows, float_out, accumulate};
  }
};

std::string describe(const Form& form) {
  return std::to_string(form.rows) + " rows by [" + std::to_string(form.outputs) + ", " +
         std::to_string(form.inputs) + "]" + (form.float_out ? " to f32" : " to bf16") +
         (form.accumulate ? ", added" : "");
}

/// Row counts that share what was found fastest for one of them: the largest of these.
int64_t bucket_of(int64_t rows) {
  if (rows <= kSmallRows) return rows <= 8 ? 8 : (rows + 15) / 16 * 16;
  int64_t most = kSmallRows;
  while (most < rows) most = most * 3 / 2 >= rows ? most * 3 / 2 : most * 2;
  return most;
}

struct Destroy {
  void operator()(cublasLtHandle_t handle) const { cublasLtDestroy(handle); }
  void operator()(cublasLtMatmulDesc_t description) const { cublasLtMatmulDescDestroy(description); }
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const {
    cublasLtMatmulPreferenceDestroy(preference);
  }
};
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, Destroy>;
using Handle = Owned<cublasLtHandle_t>;
using Operation = Owned<cublasLtMatmulDesc_t>;
using Layout = Owned<cublasLtMatrixLayout_t>;
using Preference = Owned<cublasLtMatmulPreference_t>;

Layout make_layout(cudaDataType type, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_blas(cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows),
                                        static_cast<uint64_t>(columns), rows),
             "cublasLtMatrixLayoutCreate");
  return Layout(layout);
}

/// A call's descriptors. cuBLASLt's matrices are column-major: W is [inputs, outputs] and transposed, x is
/// [inputs, rows], out [outputs, rows].
struct Problem {
  Operation operation;
  Layout weight, x, out;

  explicit Problem(const Form& form) {
    cublasLtMatmulDesc_t created = nullptr;
    check_blas(cublasLtMatmulDescCreate(&created, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
    operation.reset(created);
    const cublasOperation_t transpose = CUBLAS_OP_T;
    check_blas(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                              sizeof transpose),
               "cublasLtMatmulDescSetAttribute");
    weight = make_layout(CUDA_R_16BF, form.inputs, form.outputs);
    x = make_layout(CUDA_R_16BF, form.inputs, form.rows);
    out = make_layout(form.float_out ? CUDA_R_32F : CUDA_R_16BF, form.outputs, form.rows);
  }
};

/// cuBLASLt's structure has no name of its own, which containers compiled by nvcc need.
struct Algorithm {
  cublasLtMatmulAlgo_t value = {};
};

/// A call's way: our kernel, or a cuBLASLt algorithm.
struct Choice {
  bool own = false;
  SmallProductShape shape;
  Algorithm algorithm;
};

struct Entry {
  Problem problem;
  Choice choice;
};

/// Device memory for the time of a preparation; null where there is too little.
struct Scratch {
  void* data = nullptr;
  explicit Scratch(size_t bytes) {
    if (cudaMalloc(&data, bytes) == cudaSuccess) return;
    cudaGetLastError();  // a failed allocation is no launch's failure
    data = nullptr;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { cudaFree(data); }
};

struct Events {
  cudaEvent_t start = nullptr, stop = nullptr;
  Events() {
    check_cuda(cudaEventCreate(&start), "cudaEventCreate", "product");
    check_cuda(cudaEventCreate(&stop), "cudaEventCreate", "product");
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    cudaEventDestroy(start);
    if (stop != nullptr) cudaEventDestroy(stop);
  }
};

}  // namespace

struct MatrixProducts::Impl {
  Products mode;
  Handle handle;
  void* workspace = nullptr;
  int multiprocessors = 0;
  bool library_alone = false;
  std::map<Form, Entry> entries;
  // What was timed, by the largest rows of the bucket.
  std::map<Form, Choice> fastest_choices;
  // The invariant mode's algorithms, by the rows that stand for all.
  std::map<Form, Algorithm> shared_algorithms;

  explicit Impl(Products products) : mode(products), multiprocessors(cuda::multiprocessors("product")) {
    cublasLtHandle_t created = nullptr;
    check_blas(cublasLtCreate(&created), "cublasLtCreate");
    handle.reset(created);
    const cudaError_t error = cudaMalloc(&workspace, MatrixProducts::kWorkspaceBytes);
    if (error == cudaErrorMemoryAllocation)
      cuda::throw_memory_refused("workspace of products", MatrixProducts::kWorkspaceBytes,
                                 cuda::Place::kDevice);
    check_cuda(error, "cudaMalloc", "product");
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() { cudaFree(workspace); }

  std::vector<Algorithm> candidates(const Form& form, const Problem& problem, int most) const;
  Algorithm first_algorithm(const Form& form, const Problem& problem) const;
  Algorithm shared_algorithm(const Form& form);
  Choice first_choice(const DeviceMatrix& matrix, const Form& form, const Problem& problem,
                      const __nv_bfloat16* x);
  bool own_suits(const DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows) const {
    return !library_alone && small_product_suits(matrix, x, rows);
  }
  Choice own_choice(const DeviceMatrix& matrix, int64_t rows) const {
    Choice choice;
    choice.own = true;
    choice.shape = small_product_shape(matrix, rows, multiprocessors);
    return choice;
  }
  void run(const DeviceMatrix& matrix, const Form& form, const Problem& problem, const Choice& choice,
           const __nv_bfloat16* x, void* out, cudaStream_t stream) const;
  bool works(const Algorithm& algorithm, const Problem& problem) const {
    cublasLtMatmulHeuristicResult_t result;
    return cublasLtMatmulAlgoCheck(handle.get(), problem.operation.get(), problem.weight.get(),
                                   problem.x.get(), problem.out.get(), problem.out.get(), &algorithm.value,
                                   &result) == CUBLAS_STATUS_SUCCESS;
  }
  Choice fastest(const DeviceMatrix& matrix, const Form& form, const Problem& problem, const Choice& first,
                 const __nv_bfloat16* x, void* out, cudaStream_t stream) const;
  Choice try_out(const DeviceMatrix& matrix, const Form& form, const Problem& problem, cudaStream_t stream);
};

/// The heuristic's algorithms in its order; in the invariant mode those alone that sum the inputs in one
/// order whatever the rows.
std::vector<Algorithm> MatrixProducts::Impl::candidates(const Form& form, const Problem& problem,
                                                        int most) const {
  cublasLtMatmulPreference_t created = nullptr;
  check_blas(cublasLtMatmulPreferenceCreate(&created), "cublasLtMatmulPreferenceCreate");
  const Preference preference(created);
  check_blas(cublasLtMatmulPreferenceSetAttribute(preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &MatrixProducts::kWorkspaceBytes,
                                                  sizeof MatrixProducts::kWorkspaceBytes),
             "cublasLtMatmulPreferenceSetAttribute");
  // Rows of x and out may begin at any 16 bytes; the default is 256.
  const uint32_t alignment = 16;
  for (const auto operand :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    check_blas(cublasLtMatmulPreferenceSetAttribute(preference.get(), operand, &alignment, sizeof alignment),
               "cublasLtMatmulPreferenceSetAttribute");
  if (mode == Products::kInvariant) {
    const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
    check_blas(cublasLtMatmulPreferenceSetAttribute(
                   preference.get(), CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none),
               "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulHeuristicResult_t results[kCandidates];
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle.get(), problem.operation.get(), problem.weight.get(), problem.x.get(), problem.out.get(),
      problem.out.get(), preference.get(), most, results, &found);
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found && status == CUBLAS_STATUS_SUCCESS; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[i];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    int32_t splits = 1;
    size_t written = 0;
    check_blas(cublasLtMatmulAlgoConfigGetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                                    sizeof splits, &written),
               "cublasLtMatmulAlgoConfigGetAttribute");
    if (mode == Products::kInvariant && splits != 0 && splits != 1) continue;
    algorithms.push_back(Algorithm{result.algo});
  }
  return algorithms;
}

Algorithm MatrixProducts::Impl::first_algorithm(const Form& form, const Problem& problem) const {
  const std::vector<Algorithm> found =
      candidates(form, problem, mode == Products::kInvariant ? kCandidates : 1);
  if (found.empty()) throw Unsupported("cuBLASLt has no algorithm for a product of " + describe(form));
  return found.front();
}

/// One algorithm for all forms that differ in rows alone, on one side of kSmallRows.
Algorithm MatrixProducts::Impl::shared_algorithm(const Form& form) {
  Form all = form;
  all.rows = form.rows <= kSmallRows ? kSmallRows : kManyRows;
  const auto known = shared_algorithms.find(all);
  if (known != shared_algorithms.end()) return known->second;
  return shared_algorithms.emplace(all, first_algorithm(all, Problem(all))).first->second;
}

Choice MatrixProducts::Impl::first_choice(const DeviceMatrix& matrix, const Form& form,
                                          const Problem& problem, const __nv_bfloat16* x) {
  const bool few = form.rows <= kOwnRows || mode == Products::kInvariant;
  if (few && own_suits(matrix, x, form.rows)) return own_choice(matrix, form.rows);
  Choice choice;
  if (mode == Products::kInvariant) {
    choice.algorithm = shared_algorithm(form);
    if (!works(choice.algorithm, problem))
      throw Unsupported("invariant products: the algorithm for all numbers of rows does not take " +
                        describe(form));
  } else {
    choice.algorithm = first_algorithm(form, problem);
  }
  return choice;
}

void MatrixProducts::Impl::run(const DeviceMatrix& matrix, const Form& form, const Problem& problem,
                               const Choice& choice, const __nv_bfloat16* x, void* out,
                               cudaStream_t stream) const {
  if (choice.own)
    return small_product(matrix, choice.shape, x, form.rows, out, form.float_out, form.accumulate, stream);
  const float one = 1, old = form.accumulate ? 1 : 0;
  check_blas(cublasLtMatmul(handle.get(), problem.operation.get(), &one, matrix.weight, problem.weight.get(),
                            x, problem.x.get(), &old, out, problem.out.get(), out, problem.out.get(),
                            &choice.algorithm.value, workspace, MatrixProducts::kWorkspaceBytes, stream),
             "cublasLtMatmul");
}

/// The fastest of our kernel and the heuristic's algorithms, timed as decode steps run them: many in a row,
/// each with weights that are not in the cache. The first choice where there is no memory for that.
Choice MatrixProducts::Impl::fastest(const DeviceMatrix& matrix, const Form& form, const Problem& problem,
                                     const Choice& first, const __nv_bfloat16* x, void* out,
                                     cudaStream_t stream) const {
  const int64_t elements = form.outputs * form.inputs;
  const auto bytes = static_cast<size_t>(elements) * 2;
  const bool many = form.rows >= kManyRowsTimed;
  const int64_t copies =
      many || bytes > kCold / 2 ? 1 : std::min(kTimedCalls, static_cast<int64_t>(kCold / bytes) + 1);
  const int64_t calls = many ? 1 : std::max(copies, int64_t{4});
  const int timings = many ? 1 : kTimings;
  const Scratch weights(copies == 1 ? 0 : std::max(kCold, static_cast<size_t>(copies) * bytes));
  if (copies > 1 && weights.data == nullptr) return first;
  const Events events;
  const auto time = [&](const Choice& choice) {
    std::vector<float> times;
    for (int i = 0; i <= timings; ++i) {
      if (copies > 1)
        check_cuda(cudaMemsetAsync(weights.data, 0, kCold, stream), "cudaMemsetAsync", "product");
      check_cuda(cudaEventRecord(events.start, stream), "cudaEventRecord", "product");
      for (int64_t call = 0; call < calls; ++call) {
        DeviceMatrix copy = matrix;
        if (copies > 1)
          copy.weight = static_cast<const __nv_bfloat16*>(weights.data) + call % copies * elements;
        run(copy, form, problem, choice, x, out, stream);
      }
      check_cuda(cudaEventRecord(events.stop, stream), "cudaEventRecord", "product");
      check_cuda(cudaEventSynchronize(events.stop), "cudaEventSynchronize", "product");
      float taken = 0;
      check_cuda(cudaEventElapsedTime(&taken, events.start, events.stop), "cudaEventElapsedTime", "product");
      if (i > 0) times.push_back(taken);
    }
    std::nth_element(times.begin(), times.begin() + timings / 2, times.end());
    return times[static_cast<size_t>(timings / 2)];
  };
  Choice best = first;
  float least = time(best);
  const auto consider = [&](const Choice& candidate) {
    const float taken = time(candidate);
    if (taken >= least) return;
    least = taken;
    best = candidate;
  };
  if (!first.own && own_suits(matrix, x, form.rows)) consider(own_choice(matrix, form.rows));
  for (const Algorithm& algorithm : candidates(form, problem, many ? kManyRowsCandidates : kCandidates))
    consider(Choice{.own = false, .shape = {}, .algorithm = algorithm});
  return best;
}

/// Runs the product at least once unless one of its bucket has run: the first run loads the kernel, which a
/// capture should not have to.
Choice MatrixProducts::Impl::try_out(const DeviceMatrix& matrix, const Form& form, const Problem& problem,
                                     cudaStream_t stream) {
  Choice first = first_choice(matrix, form, problem, nullptr);
  Form bucket = form;
  bucket.rows = bucket_of(form.rows);
  const auto known = fastest_choices.find(bucket);
  if (known != fastest_choices.end()) {
    if (known->second.own) return own_choice(matrix, form.rows);
    if (mode == Products::kFast && works(known->second.algorithm, problem)) return known->second;
    return first;
  }
  const size_t x_bytes = static_cast<size_t>(form.rows * form.inputs) * 2;
  const size_t out_bytes = static_cast<size_t>(form.rows * form.outputs) * (form.float_out ? 4 : 2);
  const Scratch x(x_bytes), out(out_bytes);
  if (x.data == nullptr || out.data == nullptr) return first;
  const auto* x_data = static_cast<const __nv_bfloat16*>(x.data);
  check_cuda(cudaMemsetAsync(x.data, 0, x_bytes, stream), "cudaMemsetAsync", "product");
  check_cuda(cudaMemsetAsync(out.data, 0, out_bytes, stream), "cudaMemsetAsync", "product");
  if (mode == Products::kFast)
    first = fastest(matrix, form, problem, first, x_data, out.data, stream);
  else
    run(matrix, form, problem, first, x_data, out.data, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize", "product");
  return fastest_choices.emplace(bucket, first).first->second;
}

MatrixProducts::MatrixProducts(Products mode) : impl_(std::make_unique<Impl>(mode)) {}
MatrixProducts::~MatrixProducts() = default;
MatrixProducts::MatrixProducts(MatrixProducts&&) noexcept = default;
MatrixProducts& MatrixProducts::operator=(MatrixProducts&&) noexcept = default;

void MatrixProducts::use_library_alone() { impl_->library_alone = true; }

std::string MatrixProducts::chosen(const DeviceMatrix& matrix, int64_t rows, bool float_out,
                                   bool accumulate) const {
  const auto entry = impl_->entries.find(Form{matrix.outputs, matrix.inputs, rows, float_out, accumulate});
  if (entry == impl_->entries.end()) return "";
  const Choice& choice = entry->second.choice;
  if (choice.own)
    return "own kernel, inputs in " + std::to_string(choice.shape.split) + ", " +
           std::to_string(choice.shape.clusters) + " clusters, " + std::to_string(choice.shape.tiles) +
           " tiles a pass, " + std::to_string(choice.shape.stages) + " stages";
  const auto value = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
    int32_t number = 0;
    size_t written = 0;
    check_blas(cublasLtMatmulAlgoConfigGetAttribute(&choice.algorithm.value, attribute, &number,
                                                    sizeof number, &written),
               "cublasLtMatmulAlgoConfigGetAttribute");
    return std::to_string(number);
  };
  return "cuBLASLt algorithm " + value(CUBLASLT_ALGO_CONFIG_ID) + ", tile " +
         value(CUBLASLT_ALGO_CONFIG_TILE_ID) + ", stages " + value(CUBLASLT_ALGO_CONFIG_STAGES_ID) +
         ", split " + value(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) + ", custom " +
         value(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
}

void MatrixProducts::prepare(const DeviceMatrix& matrix, int64_t rows, bool float_out, bool accumulate,
                             cudaStream_t stream) {
  const Form form{matrix.outputs, matrix.inputs, rows, float_out, accumulate};
  if (rows <= 0 || impl_->entries.contains(form)) return;
  Problem problem(form);
  const Choice choice = impl_->try_out(matrix, form, problem, stream);
  impl_->entries.emplace(form, Entry{std::move(problem), choice});
}

void MatrixProducts::multiply(const DeviceMatrix& matrix, const __nv_bfloat16* x, int64_t rows, void* out,
                              bool float_out, bool accumulate, cudaStream_t stream) {
  if (rows <= 0) return;
  if (accumulate && !float_out) throw BadArgument("multiply: accumulate needs fp32 out");
  const Form form{matrix.outputs, matrix.inputs, rows, float_out, accumulate};
  auto entry = impl_->entries.find(form);
  if (entry == impl_->entries.end()) {
    Problem problem(form);
    const Choice choice = impl_->first_choice(matrix, form, problem, x);
    entry = impl_->entries.emplace(form, Entry{std::move(problem), choice}).first;
  }
  impl_->run(matrix, form, entry->second.problem, entry->second.choice, x, out, stream);
}

}  // namespace kascade::cuda
