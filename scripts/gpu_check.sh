#!/usr/bin/env bash
# Run everything that needs an accelerator: GPU tests, benchmarks, runs on the device, and vLLM on the device.
# Usage: bash scripts/gpu_check.sh [RESULTS_FOLDER [SECTION...]]
#   RESULTS_FOLDER  default: gpu-results/
#   SECTION         tests bench runs vllm smollm2 staleness media; default: all of them, in this order. If a machine is available only
#                   for some minutes, run a few sections at a time.
# The script uses $PYTHON, the Python of .venv, or python3. If the machine can reach a registry, `make gpu` first installs what is needed.
# If it cannot, copy the folder build/gpu-bundle/ that scripts/bring_vllm.sh made to this machine, all at once or one piece at a time.
# When all pieces are here, this script joins them.
# The script continues after a failure. At the end it prints what was skipped, and why; skipped.txt has the same list. Exit code 1 means
# that something failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
shift || true
sections=${*:-tests bench runs vllm smollm2 staleness media}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
"$python" - >"$out/machine.txt" <<'PY' || { echo "no CUDA device: nothing was run" | tee "$out/NOT_RUN"; exit 1; }
import sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
print(torch.cuda.device_count(), torch.cuda.get_device_name(0), torch.__version__, torch.version.cuda)
PY
rm -f "$out/NOT_RUN"
: >"$out/skipped.txt"
rc=0
bundle=build/gpu-bundle site=build/gpu-site
model=models/SmolLM2-135M-Instruct
export OMP_WAIT_POLICY=PASSIVE VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

failed() { echo "FAILED: $1"; rc=1; }
skip() { echo "SKIPPED: $1" >>"$out/skipped.txt"; }
wanted() { case " $sections " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
has_vllm() { [ "$vllm" != none ]; }

# unpack: put the bundle's libraries where python finds them. A library that the machine already has is not replaced.
unpack() {
  [ -f "$bundle/manifest.json" ] || return 0
  "$python" scripts/gpu_bundle.py unpack "$bundle" "$site" 2>&1 | tee "$out/bundle.txt"
  local code=${PIPESTATUS[0]}
  [ "$code" = 3 ] && skip "parts of the bundle are not here yet: see bundle.txt"
  [ "$code" = 0 ] || [ "$code" = 3 ] || failed "unpacking $bundle"
}

# run NAME CONFIG [PRESET...] [--set ...]: one run, with the folder $out/NAME.
run() {
  local name=$1
  shift
  rm -rf "${out:?}/$name" # an earlier run there would be refused, and its figures shown
  "$python" -m asyncrl run "$@" --plain --set folder="$out" --set name="$name" >"$out/$name.txt" 2>&1 || { failed "$name"; return 1; }
}

# on_device NAME [--set ...]: the quickstart, with the learner and the engines on the device.
on_device() {
  local name=$1
  shift
  run "$name" configs/quickstart.toml --set learner.device=cuda --set generate.engine.device=cuda "$@"
}

# contract NAME TESTS...: the part of the contract suite for vLLM, on the device. By default, Triton multiplies float32 in TF32, but the
# suite compares to 1e-5.
contract() {
  local name=$1
  shift
  TRITON_F32_DEFAULT=ieee "$python" -m pytest -v -rs "$@" >"$out/$name.txt" 2>&1 || failed "$name"
  tail -1 "$out/$name.txt"
}

# figures NAME...: print metrics of the steps of several runs, for comparison, as JSON.
figures() {
  "$python" - "$out" "$@" <<'PY'
import json, pathlib, statistics, sys
found = {}
for name in sys.argv[2:]:
    path = pathlib.Path(sys.argv[1], name, "steps.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()][3:] if path.exists() else []
    if len(steps) < 2:
        continue
    keys = ("generated_tokens_per_s", "trained_tokens_per_s", "weight_sync_ms", "staleness_mean", "reward_mean")
    found[name] = {key: statistics.median(step.get(key, 0.0) for step in steps) for key in keys}
    found[name]["seconds_per_step"] = (steps[-1]["time_s"] - steps[0]["time_s"]) / (len(steps) - 1)
print(json.dumps(found, indent=2))
PY
}

# prepare_smollm2: make the model folder, and the preset for a run on the device with this model and the sums of experiments/gpu.
prepare_smollm2() {
  local gguf
  gguf=$(find "$site" -maxdepth 1 -name '*.gguf' 2>/dev/null | head -1)
  if [ ! -d "$model" ] && [ -n "$gguf" ]; then
    "$python" -m asyncrl model import "$gguf" "$model" >"$out/import.txt" 2>&1 || { failed "importing $gguf"; return 1; }
  fi
  [ -d "$model" ] || { skip "$*: no folder $model (scripts/bring_vllm.sh with MODEL=1, or asyncrl model import)"; return 1; }
  cat >"$out/smollm2.toml" <<TOML
[task]
kind = "jsonl"
path = "experiments/gpu/sums.jsonl"
held_out = 60

[generate.engine]
kind = "vllm"
device = "cuda"
dtype = "bfloat16"
num_slots = 128
max_sequence_tokens = 256
gpu_memory_share = 0.3
enforce_eager = true
arguments = { attention_backend = "${ATTENTION:-FLASH_ATTN}" }

[reward]
functions = [{ kind = "answer_match", extract = '(-?\d+)' }]

[packing]
tokens_per_row = 8192

[algorithm]
groups_per_step = 16

[learner]
device = "cuda"
TOML
}

unpack
[ -d "$site" ] && export PYTHONPATH="$PWD:$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
vllm=$("$python" -c 'import vllm; print(vllm.__version__)' 2>"$out/vllm-import.txt" | tail -1)
vllm=${vllm:-none}
echo "vllm $vllm" >>"$out/machine.txt"
has_vllm || skip "vllm smollm2 staleness media: vLLM cannot be imported here, see vllm-import.txt"

if wanted tests; then
  "$python" -m pytest -m gpu -v -rs tests/gpu 2>&1 | tee "$out/tests.txt" || rc=1
  grep '^SKIPPED' "$out/tests.txt" >>"$out/skipped.txt"
fi

if wanted bench; then
  for name in broadcast residency; do # `bench engine` without --engine measures a CPU
    "$python" -m asyncrl bench "$name" --json >"$out/bench-$name.json" 2>"$out/bench-$name.log" || failed "bench $name"
  done
  if has_vllm; then
    "$python" -m asyncrl bench engine --engine vllm --json >"$out/bench-engine-vllm.json" 2>"$out/bench-engine-vllm.log" || failed "bench engine vllm"
  fi
fi

if wanted runs; then
  on_device quickstart-gpu
  on_device quickstart-gpu-lowbit --set num_steps=100 --set learner.dtype=bfloat16 --set generate.engine.dtype=bfloat16 \
    --set model.fp32_head=true --set learner.logprobs=fused --set learner.optimizer=paged_adamw_8bit
  on_device quickstart-gpu-lora --set num_steps=100 --set learner.lora.rank=8
fi

if wanted vllm && has_vllm; then
  # Logits that are not finite end vLLM's process on a GPU (experiments/gpu/RESULTS.md).
  contract contract-vllm tests/contract/engines/test_engine.py tests/contract/engines/test_vllm_engine.py -k "vllm and not non_finite"
  run quickstart-gpu-vllm configs/quickstart-vllm.toml --set generate.engine.device=cuda --set learner.device=cuda \
    --set generate.engine.enforce_eager=true --set generate.engine.gpu_memory_share=0.3
fi

if wanted smollm2 && has_vllm && prepare_smollm2 smollm2; then
  run smollm2-gpu configs/smollm2.toml "$out/smollm2.toml" --set num_steps=100 && figures smollm2-gpu >"$out/smollm2.json"
fi

if wanted staleness && has_vllm && prepare_smollm2 staleness; then
  for eta in 0 2; do
    run "staleness-$eta" configs/smollm2.toml "$out/smollm2.toml" --set num_steps=40 --set buffer.max_staleness="$eta" \
      --set eval.at_start=false --set eval.at_end=false
  done
  figures staleness-0 staleness-2 | tee "$out/staleness.json"
fi

if wanted media; then
  gpus=$(cut -d' ' -f1 "$out/machine.txt" | head -1)
  media="shared_memory cuda_ipc"
  # NCCL needs a separate GPU for each member.
  if [ "$gpus" -ge 2 ]; then media="$media nccl"; else skip "nccl: it needs two GPUs, here is one"; fi
  if has_vllm && prepare_smollm2 media; then
    names=""
    for medium in $media; do
      device=cuda
      [ "$medium" = nccl ] && device=cuda:1
      run "media-$medium" configs/smollm2.toml "$out/smollm2.toml" --set num_steps=20 --set broadcast.medium.kind="$medium" \
        --set learner.device="$device" --set eval.at_start=false --set eval.at_end=false
      names="$names media-$medium"
    done
    # shellcheck disable=SC2086 - names are words
    figures $names | tee "$out/media.json"
  fi
fi

echo "skipped:"
[ -s "$out/skipped.txt" ] && cat "$out/skipped.txt" || echo "nothing"
exit $rc
