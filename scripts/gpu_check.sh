#!/usr/bin/env bash
# Everything that only an accelerator can show: GPU tests, benchmarks, and a short run on the device.
# Usage: bash scripts/gpu_check.sh [RESULTS_FOLDER]   (default: gpu-results/; python from $PYTHON, .venv or the PATH)
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
rc=0
"$python" -m pytest -m gpu -v tests/gpu 2>&1 | tee "$out/tests.txt" || rc=1
for name in broadcast engine; do
  "$python" -m asyncrl bench "$name" --json >"$out/bench-$name.json" 2>"$out/bench-$name.log" || rc=1
done
"$python" -m asyncrl run configs/quickstart.toml --plain --set folder="$out" --set name=quickstart-gpu \
  --set learner.device=cuda --set generate.engine.device=cuda >"$out/quickstart.txt" 2>&1 || rc=1
exit $rc
