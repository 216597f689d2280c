#!/usr/bin/env bash
# Run the seven experiments with several seeds that docs/experiments.md names, one after another, and print how long each took:
#   bash scripts/experiments.sh FOLDER [NAME...]
# The experiments run in FOLDER, in a copy of experiments/ without results. If the script was stopped, the same command continues.
# `staleness` compares with TRL: pip install -e '.[bench]' -c requirements.lock. To measure times, use a machine that does nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mkdir -p "${1:?usage: scripts/experiments.sh FOLDER [NAME...]}" && cd "$1" && pwd)
shift
names=("$@")
[ $# -gt 0 ] || names=(generators buffer_policy faulty_generators real_lag in_flight off_policy staleness)
python=$PWD/.venv/bin/python
if [ ! -e "$folder/without_models.toml" ]; then
  cp -r experiments/. "$folder"
  rm -f "$folder"/*/results.jsonl
fi

sweep() { # NAME [OPTION...]: run a sweep, then make its table and its picture
  "$python" -m asyncrl sweep resume "$folder/$1" "${@:2}"
  "$python" -m asyncrl sweep report "$folder/$1"
  "$python" -m asyncrl sweep plot "$folder/$1"
}

for name in "${names[@]}"; do
  began=$SECONDS
  case $name in
    generators) # no models: four cells in parallel leave both cores idle
      sweep generators --jobs 4
      "$python" "$folder/generators/compare.py" ;;
    buffer_policy) sweep buffer_policy --jobs 4 ;;
    faulty_generators | off_policy) "$python" "$folder/$name/run.py" ;;
    *) sweep "$name" ;;
  esac
  echo "$name: $(((SECONDS - began + 30) / 60)) minutes" | tee -a "$folder/minutes.txt"
done
