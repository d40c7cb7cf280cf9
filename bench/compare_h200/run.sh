#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CUDA library and its test program with nvcc alone (no CMake packages needed), then runs what is asked for.
# run.sh OUTPUT_FOLDER [test] [sanitize] [bench | bench_prefill ARGS...]; FMT_INCLUDE names the folder that has fmt/format.h,
# where the compiler does not find it.
set -uo pipefail
cd "$(dirname "$0")/../.."
output=$1
shift
build=${BUILD:-build/cuda-direct}
mkdir -p "$build" "$output"

compile() {
  source=$1
  object=$build/$(echo "$source" | tr / _).o
  if [ ! -f "$object" ] || [ -n "$(find src include -newer "$object" \( -name '*.cu*' -o -name '*.h' \) | head -1)" ] ||
     [ "$source" -nt "$object" ]; then
    case $source in
      *.cc) ${CXX:-g++} -std=c++20 -O3 -fPIC -DFMT_HEADER_ONLY ${FMT_INCLUDE:+-I$FMT_INCLUDE} -Iinclude -Isrc -c "$source" -o "$object" ;;
      *) nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -lineinfo -Xcompiler -fPIC \
        -Iinclude -Isrc -c "$source" -o "$object" ;;
    esac
  fi
}
export -f compile
export build FMT_INCLUDE
library=$(find src/attention/cuda -name '*.cu' -not -path '*/test/*')
common="src/attention/params.cc src/attention/check.cc"
# All tests but those of the operator for all backends, whose CPU kernels need the packages.
tests="$(find src/attention/cuda/test src/base/cuda/test -name '*.c[cu]' -not -name entry_test.cc) src/attention/reference/reference.cc
  src/attention/topk.cc"
printf '%s\n' $library $common $tests | xargs -P "$(nproc)" -I{} bash -c 'compile {}' || exit 1
objects() { for source in "$@"; do echo "$build/$(echo "$source" | tr / _).o"; done; }
nvcc -shared -o "$build/libkascade_cuda.so" $(objects $library $common) || exit 1
nvcc -o "$build/kascade_cuda_test" $(objects $library $common $tests) || exit 1
echo "built in $SECONDS s"

while [ $# -gt 0 ]; do
  case $1 in
    test) "$build/kascade_cuda_test" --suite all 2>&1 | tee "$output/test.txt" ;;
    sanitize)
      for tool in memcheck racecheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 9 "$build/kascade_cuda_test" --suite sanitize \
          > "$output/$tool.txt" 2>&1
        echo "$tool: exit $?"
        tail -3 "$output/$tool.txt"
      done ;;
    bench)
      shift
      exec python3 bench/compare_h200/compare.py --library "$build/libkascade_cuda.so" --output "$output/decode.json" "$@" ;;
    bench_prefill)
      shift
      exec python3 bench/compare_h200/compare_prefill.py --library "$build/libkascade_cuda.so" \
        --output "$output/prefill.json" "$@" ;;
  esac
  shift
done
