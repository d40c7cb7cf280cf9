#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the libFuzzer targets and runs each for SECONDS_PER_TARGET from its seed corpus. A crash, hang or leak fails.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${SECONDS_PER_TARGET:-10}

cmake --preset fuzz >/dev/null
cmake --build build/fuzz -j "${JOBS:-$(nproc)}" --target fuzzers
for target in build/fuzz/bin/fuzz_*; do
  name=$(basename "$target")
  corpus=build/fuzz/corpus/${name#fuzz_}
  mkdir -p "$corpus" build/fuzz/artifacts
  echo "$name for $seconds s"
  "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=0 -print_funcs=0 -verbosity=0 \
    -artifact_prefix="build/fuzz/artifacts/$name-" "$corpus" "tests/fuzz/corpus/${name#fuzz_}"
done
