#!/usr/bin/env bash
# Time to reward on one GPU: arms of ours one after the other, TRL made ready beside the first start and measured alone.
# Usage: bash experiments/gpu/reward.sh OUT [ARM...]
#   ARM      default: async2 trl async1 async0 async2_mps colocated1 colocated0 async2_shm async2_eager, in this order. The number is
#            buffer.max_staleness. _mps: learner and generator share the GPU by NVIDIA's MPS daemon, begun and ended here.
#   LIMIT_S  no arm begins later than so many seconds after the start (default 420): a lent machine's time is short
#   STEPS    default 60
# Needs models/SmolLM2-135M-Instruct; uses build/gpu-site (scripts/gpu_check.sh unpacks it) where it is there. Writes OUT/ARM/ (a run's
# folder, an earlier one is replaced), OUT/trl.jsonl and what each printed; a table at the end.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: reward.sh OUT [ARM...]}
shift
arms=${*:-async2 trl async1 async0 async2_mps colocated1 colocated0 async2_shm async2_eager}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
steps=${STEPS:-60}
[ -d models/SmolLM2-135M-Instruct ] || { echo "models/SmolLM2-135M-Instruct is not there; scripts/gpu_check.sh makes it"; exit 2; }
mkdir -p "$out"
out=$(realpath "$out") # the MPS daemon does not share this folder
rm -f "$out/go" "$out/go.ready" "$out/trl.jsonl"
export OMP_WAIT_POLICY=PASSIVE VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD:$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}"

# run NAME [PRESET...] [--set ...]
run() {
  local name=$1
  shift
  rm -rf "${out:?}/$name"
  "$python" -m asyncrl run experiments/gpu/reward.toml experiments/gpu/vllm.toml --set num_steps="$steps" "$@" --plain \
    --set folder="$out" --set name="$name" >"$out/$name.txt" 2>&1 || echo "FAILED: $name, see $out/$name.txt"
}

shared=configs/placements/async_hybrid.toml
turns=configs/placements/colocated.toml
trl=0
case " $arms " in *" trl "*)
  "$python" experiments/gpu/trl_grpo.py models/SmolLM2-135M-Instruct experiments/gpu/sums.jsonl "$out/trl.jsonl" --steps "$steps" \
    --go "$out/go" >"$out/trl.txt" 2>&1 &
  trl=$!
  sleep 25 # vLLM wants nobody to free memory after its first look at the GPU
  run warm "$shared" --set num_steps=2 --set eval.at_start=false --set eval.at_end=false
  while [ ! -f "$out/go.ready" ] && kill -0 $trl 2>/dev/null; do sleep 1; done
  ;;
esac
for arm in $arms; do
  [ "$SECONDS" -lt "${LIMIT_S:-420}" ] || { echo "no time for $arm"; continue; }
  case $arm in
    trl) touch "$out/go"; wait $trl || echo "FAILED: trl, see $out/trl.txt" ;;
    async[0-9]) run "$arm" "$shared" --set buffer.max_staleness="${arm#async}" ;;
    async2_mps)
      export CUDA_MPS_PIPE_DIRECTORY=$out/mps CUDA_MPS_LOG_DIRECTORY=$out/mps
      mkdir -p "$out/mps"
      if nvidia-cuda-mps-control -d; then
        run async2_mps "$shared" --set buffer.max_staleness=2
        echo quit | nvidia-cuda-mps-control
      else
        echo "FAILED: async2_mps, the MPS daemon did not start"
      fi
      unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
      ;;
    async2_shm) run async2_shm "$shared" --set buffer.max_staleness=2 --set broadcast.medium.kind=shared_memory ;;
    async2_eager) run async2_eager "$shared" --set buffer.max_staleness=2 --set learner.compile=false ;;
    colocated[0-9]) run "$arm" "$turns" --set generate.engine.sleep=true --set buffer.max_staleness="${arm#colocated}" ;;
    *) echo "no arm $arm" ;;
  esac
done
[ -f "$out/go" ] || [ "$trl" = 0 ] || kill "$trl"
"$python" - "$out" <<'PY'
import json, pathlib, statistics, sys

BARS, WINDOW = (0.5, 0.75, 0.9), 5
out = pathlib.Path(sys.argv[1])
told = {"trl": [json.loads(line) for line in (out / "trl.jsonl").open()]} if (out / "trl.jsonl").exists() else {}
for path in sorted(path for path in out.glob("*/steps.jsonl") if path.parent.name != "warm"):
    events = [json.loads(line) for line in (path.parent / "events.jsonl").open()]
    begun_s = next((event["time_s"] for event in events if event["kind"] == "phase" and event["subject"] == "running"), None)
    if begun_s is None:  # it failed at its start
        continue
    told[path.parent.name] = [step | {"time_s": step["time_s"] - begun_s} for step in map(json.loads, path.open())]
for name, steps in told.items():
    if len(steps) < 2:
        continue
    took = [after["time_s"] - before["time_s"] for before, after in zip(steps, steps[1:])]
    line = f"{name:15} {len(steps)} steps {steps[-1]['time_s']:6.1f} s, a step {statistics.median(took):.3f} s"
    for bar in BARS:
        means = [(i, statistics.mean(s["reward_mean"] for s in steps[i - WINDOW : i])) for i in range(WINDOW, len(steps) + 1)]
        reached = next((i for i, mean in means if mean >= bar), None)
        line += f"; reward {bar}: " + ("not reached" if reached is None else f"{steps[reached - 1]['time_s']:.1f} s (step {reached})")
    print(line)
    figures = ("time/train_s", "time/wait_s", "time/step_s", "weights/blocked_ms", "weights/fetch_ms", "weights/swap_ms", "staleness_mean")
    measured = [s | s.get("metrics", {}) for s in steps[5:]]
    medians = {key: statistics.median(s[key] for s in measured if key in s) for key in figures if any(key in s for s in measured)}
    print(f"{'':15} medians: " + ", ".join(f"{key} {value:.3g}" for key, value in medians.items()))
PY
