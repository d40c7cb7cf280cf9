#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Times the attention operator on this machine and writes bench/results/MACHINE/{decode,prefill}.json.
# MACHINE is made of the processor and its cores, or taken from the environment. Nothing else should run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."

# The product name of a processor says nothing about its generation; its flags do.
machine_name() {
  local model flags generation=
  model=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
  flags=" $(sed -n 's/^flags[^:]*: *//p' /proc/cpuinfo | head -n 1) "
  case "$model" in
    AMD*)
      case "$flags" in
        *" avx512_vp2intersect "*) generation=-zen5 ;;
        *" avx512_bf16 "*) generation=-zen4 ;;
      esac
      ;;
  esac
  echo "$(echo "$model" | sed 's/([^)]*)//g; s/ [0-9]*-Core.*//; s/ *@.*//' | tr 'A-Z ' 'a-z-')$generation-$(nproc)cores"
}

results=bench/results/${MACHINE:-$(machine_name)}
commit=$(git describe --always --dirty --abbrev=10 2>/dev/null || true)
mkdir -p "$results"
for phase in decode prefill; do
  build/bin/kascade bench "$phase" --json --commit "$commit" > "$results/$phase.json.new"
  mv "$results/$phase.json.new" "$results/$phase.json"
  echo "$results/$phase.json"
  sed -n '/"roles": {/,/^  }/p; /"speedup"/p; /_gb_per_s"/p' "$results/$phase.json" | head -n 60
done
