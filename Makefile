# make demo    train a vision transformer on handwritten digits and draw what came of it
# make test    the whole test suite
# make test-other-processor  the tests as on a processor of the other kind (with or without AVX-512 and bf16)
# make check   what a contributor runs before a commit: format, lint, types, layers, tests
# make docs    regenerate docs/files.md, and docs/lab.md from the results of the lab (minutes)
# make soak    the long tests; kill -9 at random moments, 50 times for each of two recipes; every resume must be bit-exact
# make campaign  every fault of docs/reliability.md, in shards that continue where they stopped: hours; SMALL=1: minutes
# make bench   speed beside timm, vit-pytorch, Hugging Face and torch.nn
# Each makes the virtual environment .venv by itself; PYTHON=python3.12 make test chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-other-processor check lint format bench docs soak campaign clean

demo: $(VENV)/package
	$(BIN)/clearhead demo

test: $(VENV)/dev
	$(BIN)/pytest -n 2

# No result may depend on the processor.
test-other-processor: $(VENV)/dev
	other=$$($(BIN)/python -c "import torch; print('avx2' if torch.cpu._is_avx512_bf16_supported() else 'bf16')") && \
	CLEARHEAD_TEST_PROCESSOR=$$other $(BIN)/pytest -n 2 --ignore=tests/benchmarks

check: lint test

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

soak: $(VENV)/dev
	$(BIN)/pytest -m soak
	$(BIN)/pytest -n 2 --hypothesis-profile=other tests/data tests/nn tests/training/test_records.py tests/test_files.py
	$(BIN)/python benchmarks/soak.py reverse
	$(BIN)/python benchmarks/soak.py mnist --steps 120 -- --data.limit 4000 --training.batch-size 32

campaign: $(VENV)/dev
	$(BIN)/python -m benchmarks.campaign $(if $(SMALL),--small) $(SHARDS); code=$$?; \
	$(BIN)/python -m benchmarks.campaign report; exit $$code

bench: $(VENV)/bench
	$(BIN)/python benchmarks/step.py

docs: $(VENV)/package
	$(BIN)/python docs/make_files.py
	$(BIN)/clearhead lab --all --page docs/lab.md

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Each file below stands for an installed set of packages and is made anew when the lists of packages change.
$(VENV)/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/dev: $(VENV)/package
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/bench: $(VENV)/package
	$(PIP) --editable '.[bench]'
	touch $@
