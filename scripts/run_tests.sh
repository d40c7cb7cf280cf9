#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `make test` runs: formatting, the whole suite in release, the unit tests under ASan and UBSan, short fuzzing.
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

if command -v nvcc >/dev/null && [ -d src/attention/cuda ]; then
  step "CUDA: build"
  BUILD=build/cuda-direct bench/compare_h200/run.sh build/cuda-direct/results
  step "CUDA: tests that need no GPU"
  build/cuda-direct/kascade_cuda_test --suite host
fi

step "ASan and UBSan: build"
cmake --preset asan >/dev/null
cmake --build build/asan -j "$jobs"
step "ASan and UBSan: unit tests"
ctest --test-dir build/asan --output-on-failure -LE 'golden|end_to_end'

step "fuzzing"
scripts/run_fuzzers.sh
step "done"
