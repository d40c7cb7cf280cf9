// SPDX-License-Identifier: Apache-2.0
// The operator bench by itself, for work on the kernels: bench_attention decode|prefill [key=value ...].
#include "eval/bench_attention.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "kascade/error.h"

namespace {

void set(kascade::AttentionBenchOptions& options, const std::string& key, const std::string& value) {
  const auto number = [&] { return std::atoi(value.c_str()); };
  if (key == "kernel")
    options.kernel = value;
  else if (key == "batch")
    options.batch = number();
  else if (key == "context")
    options.context = number();
  else if (key == "percent")
    options.percent = std::atof(value.c_str());
  else if (key == "query_heads")
    options.query_heads = number();
  else if (key == "kv_heads")
    options.kv_heads = number();
  else if (key == "head_dim")
    options.head_dim = number();
  else if (key == "page_size")
    options.page_size = number();
  else if (key == "tile")
    options.tile = number();
  else if (key == "threads")
    options.threads = number();
  else if (key == "repetitions")
    options.repetitions = number();
  else if (key == "needed")
    options.needed.assign(static_cast<size_t>(options.kv_heads), 0), options.needed[0] = 1;
  else if (key == "dtype")
    options.dtype = value == "f32"   ? kascade::DType::kF32
                    : value == "f16" ? kascade::DType::kF16
                                     : kascade::DType::kBF16;
  else
    throw kascade::BadArgument("bench_attention: unknown option " + key);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    kascade::AttentionBenchOptions options;
    bool json = false;
    if (argc < 2)
      throw kascade::BadArgument("usage: bench_attention decode|prefill [key=value ...] [--json]");
    if (std::string(argv[1]) == "prefill") {
      options.phase = kascade::Phase::kPrefill;
      options.context = 16384;
    }
    for (int i = 2; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--json") {
        json = true;
        continue;
      }
      const size_t equals = argument.find('=');
      set(options, argument.substr(0, equals),
          equals == std::string::npos ? "" : argument.substr(equals + 1));
    }
    const kascade::AttentionBenchResult result = kascade::bench_attention(options, {}, nullptr);
    std::fputs((json ? bench_attention_json(result) + "\n" : bench_attention_table(result)).c_str(), stdout);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
