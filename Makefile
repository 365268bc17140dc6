# Every target sets itself up: `make demo` on a fresh clone is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=

# One thread per process: replay is bit-exact for a thread count, and tests start many processes on few cores.
export OMP_NUM_THREADS := 1

.PHONY: help demo test bench lint format clean
help:
	@echo "make demo [S3=1]   train, kill, restore, compare bit for bit, on disk or against a real S3 server"
	@echo "make test          the whole test suite (PYTEST_ARGS=... goes to pytest)"
	@echo "make bench         step time and blocked time, against torch.save and torch.distributed.checkpoint"
	@echo "make lint          ruff and mypy --strict"

# pip, not a faster installer: pip alone knows every index that the machine is set up with.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "adacheck needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP)
	$(BIN)/adacheck-demo $(if $(S3),--s3)

# Some tests take a minute, most take milliseconds: with worksteal, a worker that is done takes over from the other.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/adacheck-bench

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict adacheck tests

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
