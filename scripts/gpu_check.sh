#!/usr/bin/env bash
# Everything that only an accelerator can show: GPU tests, benchmarks, and short runs on the device.
# Usage: bash scripts/gpu_check.sh [RESULTS_FOLDER]   (default: gpu-results/; python from $PYTHON, .venv or the PATH)
# Needs asyncrl[dev,fused]: `make gpu` installs it first. What was skipped is printed at the end and is in skipped.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-results}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
"$python" - >"$out/machine.txt" <<'PY' || { echo "no CUDA device: nothing was run" | tee "$out/NOT_RUN"; exit 1; }
import sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
print(torch.cuda.get_device_name(0), torch.__version__, torch.version.cuda)
PY
rm -f "$out/NOT_RUN"
rc=0

# on_device NAME [--set ...]: the quickstart with learner and engines on the device.
on_device() {
  local name=$1
  shift
  "$python" -m asyncrl run configs/quickstart.toml --plain --set folder="$out" --set name="$name" \
    --set learner.device=cuda --set generate.engine.device=cuda "$@" >"$out/$name.txt" 2>&1 || { echo "FAILED: $name"; rc=1; }
}

"$python" -m pytest -m gpu -v -rs tests/gpu 2>&1 | tee "$out/tests.txt" || rc=1
for name in broadcast engine; do
  "$python" -m asyncrl bench "$name" --json >"$out/bench-$name.json" 2>"$out/bench-$name.log" || { echo "FAILED: bench $name"; rc=1; }
done
on_device quickstart-gpu
on_device quickstart-gpu-lowbit --set num_steps=100 --set learner.dtype=bfloat16 --set generate.engine.dtype=bfloat16 \
  --set model.fp32_head=true --set learner.logprobs=fused --set learner.optimizer=paged_adamw_8bit
on_device quickstart-gpu-lora --set num_steps=100 --set learner.lora.rank=8

echo "skipped:"
grep '^SKIPPED' "$out/tests.txt" | tee "$out/skipped.txt" || echo "nothing"
exit $rc
