#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that a build needs, unless they are there. Usage: install_dependencies.sh program|test
set -euo pipefail

packages=(g++ cmake ninja-build make git ca-certificates python3 python3-pip unzip
          libhwy-dev libdnnl-dev nlohmann-json3-dev libfmt-dev libcli11-dev libpcre2-dev)
if [ "${1:-program}" = test ]; then
  packages+=(libgtest-dev libgmock-dev libbenchmark-dev clang libclang-rt-14-dev clang-format clang-tidy ccache)
fi

if ! command -v dpkg-query >/dev/null; then
  echo "This machine has no Debian packages. Install the equivalents of: ${packages[*]}" >&2
  exit 0
fi
missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
echo "Installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
