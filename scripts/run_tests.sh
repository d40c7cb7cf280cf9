#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What `make test` runs: formatting and the whole suite in release. Sanitizers: make test-asan; fuzzing: make fuzz; the CUDA
# kernels: make cuda.
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

step "done"
