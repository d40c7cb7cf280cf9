#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `make test` runs: formatting, the whole suite in release, the unit tests under AddressSanitizer and
# UndefinedBehaviorSanitizer, short fuzzing, and where nvcc is installed the CUDA build with those of its tests that
# need no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}

step() { printf '\n== %s (%s)\n' "$1" "$(date +%T)"; }

step "formatting"
make --no-print-directory check-format

step "release: build"
cmake --preset release >/dev/null
cmake --build build -j "$jobs"
step "release: tests"
ctest --test-dir build --output-on-failure

step "sanitizers: build"
cmake --preset asan >/dev/null
cmake --build build/asan -j "$jobs" --target unit_tests
step "sanitizers: unit tests"
ctest --test-dir build/asan --output-on-failure -LE 'golden|end_to_end|cuda'

step "fuzzing"
scripts/run_fuzzers.sh

if command -v nvcc >/dev/null; then
  step "CUDA: build and host tests"
  make --no-print-directory cuda
  ctest --test-dir build/cuda --output-on-failure -R end_to_end_bench
fi

step "done"
