# Two commands matter: `make quickstart` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch is pinned: this version has a CPU build wherever pip finds one; set TORCH= to keep one that is already there.
TORCH ?= torch==2.13.0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: install quickstart test check format sandbox bench lock clean gpu

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH) -c requirements.lock
	$(BIN)/pip install -q -e '.[dev]' -c requirements.lock
	touch $(STAMP)

quickstart: install
	$(BIN)/asyncrl run configs/quickstart.toml --set name=quickstart-$$(date +%Y%m%d-%H%M%S)

# The code-execution reward needs bubblewrap; without root the sandbox tests say that they did not run.
sandbox:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bubblewrap; } \
	  || echo "bubblewrap is not installed: code_exec tests will be reported as not run"

test: install sandbox
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check asyncrl tests experiments
	$(BIN)/ruff check asyncrl tests experiments
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format asyncrl tests experiments
	$(BIN)/ruff check --fix asyncrl tests experiments

bench: install
	for name in transport broadcast engine pipeline; do $(BIN)/asyncrl bench $$name || exit 1; done

gpu: install
	bash scripts/gpu_check.sh

# Write the versions that are installed now as the locked set.
lock:
	$(BIN)/pip freeze --exclude-editable --exclude asyncrl | sed 's/+cpu//' > requirements.lock

clean:
	rm -rf $(VENV) build dist *.egg-info
