#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy over our own files (or the ones given), warnings are errors.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then files=("$@"); else mapfile -t files < <(git ls-files 'src/*.cc' 'cli/*.cc' | grep -v '_isa\.cc$'); fi
printf '%s\0' "${files[@]}" | xargs -0 -n 4 -P "$(nproc)" clang-tidy -p build --quiet --warnings-as-errors='*'
