// SPDX-License-Identifier: Apache-2.0
#include "eval/statistics_run.h"

#include <filesystem>
#include <mutex>

#include "base/check.h"
#include "base/file.h"
#include "kascade/thread_pool.h"

namespace kascade {
namespace {

// Larger than any set that a real model gives; bounds what is read from a file that may not be ours.
constexpr uint64_t kMaxPartialBytes = uint64_t{1} << 30;

StatisticsSet load_partial(const std::string& path, int layers, int kv_heads, const std::string& identity) {
  std::error_code error;
  if (path.empty() || !std::filesystem::is_regular_file(path, error)) return {layers, kv_heads, identity};
  try {
    return StatisticsSet::parse(read_file(path, kMaxPartialBytes), path, layers, kv_heads, identity);
  } catch (const Error&) {
    // Another calibration's, or damaged: nothing to go on from, and no reason to fail.
    return {layers, kv_heads, identity};
  }
}

}  // namespace

StatisticsRun run_statistics(std::span<const std::unique_ptr<Engine>> engines,
                             std::span<const CalibrationPrompt> prompts,
                             const StatisticsRunOptions& options) {
  const ModelConfig& config = engines.front()->model().config();
  StatisticsRun run{load_partial(options.partial_path, config.layers, config.kv_heads, options.identity), 0};

  std::vector<int64_t> missing;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (!run.set.contains(index)) {
      missing.push_back(index);
      continue;
    }
    ++run.resumed;
    if (options.on_resumed) options.on_resumed(static_cast<int64_t>(prompts[i].ids.size()));
  }

  std::mutex mutex;
  ThreadPool pool(static_cast<int>(engines.size()));
  pool.parallel_for(static_cast<int64_t>(missing.size()), [&](int64_t m, int worker) {
    const int64_t index = missing[m];
    const CalibrationPrompt& prompt = prompts[index];
    int64_t reported = 0;
    const CollectedPrompt collected =
        collect_statistics(*engines[worker], prompt.ids, options.settings, options.cancel, [&](int64_t done) {
          const std::lock_guard lock(mutex);
          if (options.on_tokens) options.on_tokens(done - reported);
          reported = done;
        });
    const std::lock_guard lock(mutex);
    run.set.insert(index, collected.statistics);
    if (!options.partial_path.empty()) write_file_atomic(options.partial_path, run.set.serialize());
  });
  return run;
}

}  // namespace kascade
