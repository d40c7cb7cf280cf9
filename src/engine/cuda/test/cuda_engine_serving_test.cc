// SPDX-License-Identifier: Apache-2.0
// Sequences that come, go and share a GPU's engine; memory that is short; kernels that fail.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <utility>

#include "base/cuda/test/device_test.h"
#include "engine/cuda/cuda_engine.h"
#include "engine/cuda/test/cuda_engine_test_util.h"
#include "kascade/error.h"

namespace kascade {
namespace {

using test::copy;
using test::CudaEngineTest;
using test::decode;
using test::gpu_engine;
using test::kCudaVocabulary;
using test::prefill;
using test::shape;
using test::thrown;
using test::tiny;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// Residual rows of a decode step of `rows` rows for each of the sequences, which go on with tokens_.
std::vector<std::vector<float>> step(Engine& engine, std::span<const std::unique_ptr<Sequence>> sequences,
                                     std::span<const int32_t> tokens, size_t rows, const Policy* policy) {
  std::vector<ForwardItem> items;
  for (const auto& sequence : sequences)
    items.push_back({sequence.get(), tokens.subspan(static_cast<size_t>(sequence->length()), rows)});
  const std::span<const float> all = engine.forward(items, {.phase = Phase::kDecode, .policy = policy});
  std::vector<std::vector<float>> each;
  for (size_t s = 0; s < sequences.size(); ++s)
    each.push_back(copy(all.subspan(s * (all.size() / sequences.size()), all.size() / sequences.size())));
  return each;
}

TEST_F(CudaEngineTest, InvariantModeHidesTheRestOfABatch) {
  const auto engine = gpu_engine(model_, {.cache_tokens = 65536, .invariant = true});
  constexpr int kSteps = 3;  // one that runs as it is, one that is captured, one that is replayed
  // 130 sequences, and 17 of four rows, are more rows than one product of a step takes.
  struct Batch {
    size_t sequences, rows;
  };
  for (const auto& [name, policy] : policies_) {
    std::vector<std::unique_ptr<Sequence>> mates;
    std::vector<int64_t> lengths;
    for (int m = 0; m < 130; ++m) {
      mates.push_back(engine->make_sequence());
      // Of all lengths, so that sets, tiles and the units of work that kernels deal out differ.
      lengths.push_back(m == 41 ? 640 : 1 + 5 * m);
      prefill(*engine, *mates.back(), std::span(tokens_).first(lengths.back()), policy.get());
    }
    for (const auto& [sequences, rows] : {Batch{64, 1}, Batch{65, 1}, Batch{130, 1}, Batch{17, 4}}) {
      const std::span batch = std::span(mates).first(sequences);
      std::vector<std::vector<std::vector<float>>> together;
      for (int s = 0; s < kSteps; ++s) together.push_back(step(*engine, batch, tokens_, rows, policy.get()));
      for (size_t m = 0; m < sequences; ++m) mates[m]->truncate(lengths[m]);
      // The shortest, the longest, those at the ends of a product of 64 rows.
      for (const size_t m :
           {size_t{0}, size_t{15}, size_t{16}, size_t{41}, size_t{63}, size_t{64}, size_t{129}}) {
        if (m >= sequences) continue;
        for (int s = 0; s < kSteps; ++s)
          EXPECT_EQ(step(*engine, std::span(mates).subspan(m, 1), tokens_, rows, policy.get())[0],
                    together[s][m])
              << name << ", " << sequences << " of " << rows << ", sequence " << m << ", step " << s;
        mates[m]->truncate(lengths[m]);
      }
    }
  }
}

TEST_F(CudaEngineTest, InvariantLogitsDoNotDependOnTheirMates) {
  const auto engine = gpu_engine(model_, {.invariant = true});
  std::vector<float> hidden(size_t{600} * 96);  // more rows than the head takes at once
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = std::sin(static_cast<float>(i));
  const std::vector<float> all = copy(engine->logits(hidden));
  for (const size_t row : {0, 63, 64, 511, 512, 599})
    EXPECT_EQ(copy(engine->logits(std::span(hidden).subspan(row * 96, 96))),
              copy(std::span(all).subspan(row * kCudaVocabulary, kCudaVocabulary)))
        << row;
}

/// Greedy tokens of sequences that join a running batch at the steps named and leave when they are done.
std::vector<std::vector<int32_t>> serve(Engine& engine, const Policy* policy,
                                        const std::vector<std::vector<int32_t>>& prompts,
                                        const std::vector<int>& arrivals, size_t new_tokens) {
  std::vector<std::unique_ptr<Sequence>> sequences(prompts.size());
  std::vector<std::vector<int32_t>> made(prompts.size());
  size_t done = 0;
  for (int step = 0; done < prompts.size(); ++step) {
    for (size_t s = 0; s < prompts.size(); ++s) {
      if (arrivals[s] != step) continue;
      sequences[s] = engine.make_sequence();
      prefill(engine, *sequences[s], std::span(prompts[s]).first(prompts[s].size() - 1), policy);
      made[s].push_back(prompts[s].back());
    }
    std::vector<ForwardItem> items;
    std::vector<size_t> of;
    for (size_t s = 0; s < prompts.size(); ++s) {
      if (sequences[s] == nullptr) continue;
      items.push_back({sequences[s].get(), {&made[s].back(), 1}});
      of.push_back(s);
    }
    std::vector<int32_t> next(items.size());
    engine.forward_greedy(items, policy, next);
    for (size_t i = 0; i < items.size(); ++i) {
      made[of[i]].push_back(next[i]);
      if (made[of[i]].size() <= new_tokens) continue;
      sequences[of[i]].reset();
      ++done;
    }
  }
  return made;
}

TEST_F(CudaEngineTest, OrderOfArrivalChangesNoToken) {
  const auto engine = gpu_engine(model_, {.invariant = true});
  std::vector<std::vector<int32_t>> prompts;
  for (const int length : {300, 2, 77, 650, 129})
    prompts.push_back(test::random_tokens(length, kCudaVocabulary, 40 + static_cast<uint64_t>(length)));
  for (const auto& [name, policy] : policies_) {
    const auto expected = serve(*engine, policy.get(), prompts, {0, 0, 0, 0, 0}, 12);
    for (const std::vector<int>& arrivals :
         {std::vector{0, 1, 2, 3, 4}, std::vector{9, 7, 3, 1, 0}, std::vector{0, 40, 20, 5, 20}})
      EXPECT_EQ(serve(*engine, policy.get(), prompts, arrivals, 12), expected) << name;
  }
}

TEST_F(CudaEngineTest, AFullCacheSaysSoAndServesWhatFits) {
  const auto engine = gpu_engine(model_, {.cache_tokens = 512});
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  const auto expected = prefill(*engine, *a, std::span(tokens_).first(200), nullptr);
  EXPECT_THAT(thrown<OutOfMemory>([&] { prefill(*engine, *b, std::span(tokens_).first(400), nullptr); }),
              HasSubstr("KV cache"));
  EXPECT_EQ(b->length(), 0);
  EXPECT_EQ(prefill(*engine, *b, std::span(tokens_).first(200), nullptr), expected);
  EXPECT_THAT(thrown<OutOfMemory>([&] { gpu_engine(model_, {.cache_tokens = int64_t{1} << 36}); }),
              HasSubstr("GB"));
  b->truncate(0);
  EXPECT_EQ(prefill(*engine, *b, std::span(tokens_).first(200), nullptr), expected);
}

TEST_F(CudaEngineTest, APromptCancelledBetweenChunksLeavesItsSequenceAsItWas) {
  const auto engine = gpu_engine(model_, {.prefill_chunk = 128, .invariant = true});
  const Policy* policy = policies_[1].policy.get();
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(100), policy);
  prefill(*engine, *b, std::span(tokens_).first(100), policy);
  std::atomic<bool> cancel = false;
  int chunks = 0;
  const auto cancel_after_one = [&](int64_t, std::span<const float>) {
    ++chunks;
    cancel = true;
  };
  EXPECT_THAT(thrown<Cancelled>([&] {
                engine->prefill(*a, std::span(tokens_).subspan(100), policy, nullptr, cancel_after_one,
                                &cancel);
              }),
              HasSubstr("cancelled after 28 of 600 tokens"));
  EXPECT_EQ(chunks, 1);
  EXPECT_EQ(a->length(), 100);
  EXPECT_EQ(copy(a->last_hidden()), copy(b->last_hidden()));
  for (int i = 100; i < 103; ++i)
    EXPECT_EQ(decode(*engine, *a, tokens_[i], policy), decode(*engine, *b, tokens_[i], policy)) << i;
}

TEST_F(CudaEngineTest, AStepThatFindsNoPageLeavesItsBatchAsItWas) {
  const auto engine = gpu_engine(model_, {.cache_tokens = 512, .invariant = true});
  const Policy* policy = policies_[1].policy.get();
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(256), policy);  // whole pages: a step needs one more each
  prefill(*engine, *b, std::span(tokens_).first(192), policy);
  std::vector<int32_t> next(2);
  const std::vector<ForwardItem> both = {{a.get(), {&tokens_[256], 1}}, {b.get(), {&tokens_[192], 1}}};
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THAT(thrown<OutOfMemory>([&] { engine->forward_greedy(both, policy, next); }),
                HasSubstr("KV cache"));
    EXPECT_EQ(a->length(), 256);
    EXPECT_EQ(b->length(), 192);
  }
  engine->forward_greedy(std::span(both).first(1), policy, std::span(next).first(1));
  const std::vector<float> got = copy(a->last_hidden());
  b->truncate(64);
  const auto fresh = gpu_engine(model_, {.invariant = true});
  const auto expected = fresh->make_sequence();
  prefill(*fresh, *expected, std::span(tokens_).first(256), policy);
  EXPECT_EQ(got, decode(*fresh, *expected, tokens_[256], policy));
  EXPECT_EQ(decode(*engine, *a, tokens_[257], policy), decode(*fresh, *expected, tokens_[257], policy));
}

// Small enough for a race checker: a prompt, a step that runs as it is, one that is captured and one that is
// replayed, a draw and a refusal.
TEST_F(CudaEngineTest, AShortRunOfEachKindOfCall) {
  const auto engine = gpu_engine(model_, {.cache_tokens = 128, .prefill_chunk = 128, .invariant = true});
  const Policy* policy = policies_[1].policy.get();
  const auto a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*engine, *a, std::span(tokens_).first(40), policy);
  std::vector<int32_t> next(1);
  std::set<int32_t> drawn;
  for (int step = 0; step < 3; ++step) {
    a->truncate(40);
    const TokenSampling sampling{.temperature = 1, .random = uint64_t{7} << 60};
    const ForwardItem item{a.get(), {&tokens_[40], 1}};
    engine->forward_next({&item, 1}, policy, {&sampling, 1}, next);
    drawn.insert(next[0]);
  }
  EXPECT_EQ(drawn.size(), 1u);
  EXPECT_THROW(prefill(*engine, *b, std::span(tokens_).first(65), policy), OutOfMemory);
  EXPECT_EQ(a->length(), 41);
  EXPECT_EQ(b->length(), 0);
}

/// Takes the GPU's free memory but for some.
class Hog {
 public:
  explicit Hog(size_t leave) {
    void* kept = nullptr;
    EXPECT_EQ(cudaMalloc(&kept, leave), cudaSuccess);
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    for (size_t size = free; size >= size_t{1} << 20;) {
      void* block = nullptr;
      if (cudaMalloc(&block, size) == cudaSuccess) {
        blocks_.push_back(block);
      } else {
        cudaGetLastError();
        size /= 2;
      }
    }
    cudaFree(kept);
  }
  ~Hog() {
    for (void* block : blocks_) cudaFree(block);
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;

 private:
  std::vector<void*> blocks_;
};

TEST(CudaEngineMemory, ACallThatIsRefusedMemoryLeavesTheRestRunning) {
  auto wide = shape();
  wide.context = 8192;
  wide.ffn = 4096;
  const auto model = tiny(wide);
  const auto tokens = test::random_tokens(6000, kCudaVocabulary, 5);
  const EngineOptions options = {.cache_tokens = 16384, .prefill_chunk = 8192, .invariant = true};
  const auto prepared = PreparedModel::create(model, "auto", "cuda");
  const auto plain = Engine::create(prepared, options), engine = Engine::create(prepared, options);
  const auto expected = plain->make_sequence(), a = engine->make_sequence(), b = engine->make_sequence();
  prefill(*plain, *expected, std::span(tokens).first(100), nullptr);
  prefill(*engine, *a, std::span(tokens).first(100), nullptr);
  for (int i = 100; i < 104; ++i)
    EXPECT_EQ(decode(*engine, *a, tokens[i], nullptr), decode(*plain, *expected, tokens[i], nullptr));
  {
    const Hog hog(size_t{32} << 20);
    // Gate and up of 5,000 rows alone are 82 MB.
    const std::string message =
        thrown<OutOfMemory>([&] { prefill(*engine, *b, std::span(tokens).first(5000), nullptr); });
    EXPECT_THAT(message, AllOf(HasSubstr("cannot allocate"), HasSubstr("are free on the device")));
    EXPECT_EQ(b->length(), 0);
    for (int i = 104; i < 108; ++i)
      EXPECT_EQ(decode(*engine, *a, tokens[i], nullptr), decode(*plain, *expected, tokens[i], nullptr)) << i;
    EXPECT_THAT(thrown<OutOfMemory>([&] { Engine::create(prepared, {.cache_tokens = int64_t{1} << 20}); }),
                HasSubstr("free"));
  }
  const std::vector<float> long_prompt = prefill(*engine, *b, std::span(tokens).first(5000), nullptr);
  const auto c = plain->make_sequence();
  EXPECT_EQ(long_prompt, prefill(*plain, *c, std::span(tokens).first(5000), nullptr));
  EXPECT_EQ(decode(*engine, *a, tokens[108], nullptr), decode(*plain, *expected, tokens[108], nullptr));
}

TEST(CudaEngineDevice, AScopeOfNoDeviceChangesNothing) {
  int before = -1, after = -1;
  ASSERT_EQ(cudaGetDevice(&before), cudaSuccess);
  EXPECT_THAT(thrown<DeviceError>([] { cuda::DeviceScope scope(1000); }), HasSubstr("cudaSetDevice"));
  { const cuda::DeviceScope scope(before); }
  ASSERT_EQ(cudaGetDevice(&after), cudaSuccess);
  EXPECT_EQ(after, before);
}

// ---- faults inside kernels. They end the process's CUDA context, so they happen in a child: this program
// again, with a suite that nothing else runs.

constexpr const char* kFaultSuite = "fault";

void print_fault(Engine& engine, Sequence& sequence, const Policy* policy) {
  for (int call = 0; call < 2;
       ++call)  // the second finds the context broken, and says so as an exception too
    std::printf("call %d: %s\n", call,
                thrown<DeviceError>([&] { decode(engine, sequence, 3, policy); }).c_str());
}

void fault_in_attention() {
  const auto model = tiny();
  const auto policies = test::policies_of(*model);
  const auto engine = gpu_engine(model);
  const auto sequence = engine->make_sequence();
  const Policy* policy = policies[1].policy.get();
  const auto tokens = test::random_tokens(300, kCudaVocabulary, 3);
  prefill(*engine, *sequence, tokens, policy);
  for (int step = 0; step < 4; ++step) decode(*engine, *sequence, 3, policy);
  auto& table = const_cast<std::vector<int32_t>&>(dynamic_cast<CachedSequence&>(*sequence).page_table());
  const int32_t page = std::exchange(table[0], 1 << 24);  // 256 GB past the cache
  print_fault(*engine, *sequence, policy);
  table[0] = page;
  // A shape that the engine has no room and no products for yet.
  const auto mate = engine->make_sequence();
  const std::vector<ForwardItem> items = {{sequence.get(), {&tokens[0], 1}}, {mate.get(), {&tokens[1], 1}}};
  std::vector<int32_t> next(2);
  std::printf("wider: %s\n",
              thrown<DeviceError>([&] { engine->forward_greedy(items, policy, next); }).c_str());
}

void fault_in_a_norm() {
  const auto prepared = std::make_shared<CudaModel>(tiny(), 7);
  const auto engine = Engine::create(prepared, {.cache_tokens = 4096, .prefill_chunk = 512});
  const auto sequence = engine->make_sequence();
  const_cast<CudaLayer&>(prepared->layers()[2]).ffn_norm = reinterpret_cast<const float*>(uintptr_t{4096});
  print_fault(*engine, *sequence, nullptr);
}

const cuda_test::Registered kFaults[] = {{40, "attention", fault_in_attention, kFaultSuite},
                                         {40, "norm", fault_in_a_norm, kFaultSuite}};

/// What a child prints that runs the fault named.
std::string output_of_fault(const std::string& name, bool checks) {
  std::array<char, 4096> path{};
  if (readlink("/proc/self/exe", path.data(), path.size() - 1) <= 0) return "(no path of this program)";
  const std::string command = std::string(checks ? "KASCADE_CUDA_CHECK=1 '" : "KASCADE_CUDA_CHECK=0 '") +
                              path.data() + "' --suite " + kFaultSuite + " --filter " + name + " 2>&1";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "(no child)";
  std::string output;
  std::array<char, 4096> part{};
  while (const size_t count = std::fread(part.data(), 1, part.size(), pipe))
    output.append(part.data(), count);
  output += pclose(pipe) == 0 ? "ended well" : "ended badly";
  return output;
}

TEST(CudaEngineFaults, AreExceptionsThatNameTheCall) {
  EXPECT_THAT(output_of_fault("attention", false),
              AllOf(HasSubstr("call 0: decode step of 1 rows in 1 sequences (replayed): "),
                    HasSubstr("cudaError"), HasSubstr("KASCADE_CUDA_CHECK=1"), HasSubstr("call 1: "),
                    HasSubstr("wider: decode step of 2 rows in 2 sequences: "),
                    Not(HasSubstr("nothing thrown")), HasSubstr("ended well")));
}

TEST(CudaEngineFaults, ChecksNameLayerRoleAndPart) {
  EXPECT_THAT(output_of_fault("attention", true),
              AllOf(HasSubstr("call 0: decode step of 1 rows in 1 sequences: layer 0 (layer0), attention: "),
                    HasSubstr("cudaError"), Not(HasSubstr("nothing thrown")), HasSubstr("ended well")));
  EXPECT_THAT(output_of_fault("norm", true),
              AllOf(HasSubstr("layer 2 (dense), norm before the gated product: "), HasSubstr("cudaError"),
                    Not(HasSubstr("nothing thrown")), HasSubstr("ended well")));
}

}  // namespace
}  // namespace kascade
