# Two commands: `make demo` shows the engine generating, `make test` checks and tests it.
# Both make .venv here and install into it. TORCH chooses the build of torch, for example
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
DEMO_CHECKPOINT := $(firstword $(wildcard demo) tests/golden/data/mini)
DEMO_PROMPT ?= The open() function returns
# Files of tests that run side by side; a test of real processes starts up to six of them.
TEST_WORKERS ?= 2

.PHONY: demo test test-browser lint clean

demo: $(VENV)/installed
	@echo "--- generating from $(DEMO_CHECKPOINT), whose experts do not all fit in the cache"
	$(BIN)/headrace generate $(DEMO_CHECKPOINT) --raw --prompt "$(DEMO_PROMPT)" \
		--max-tokens 100 --temperature 0.7 --top-p 0.95 --seed 1 --cache 40% --readers 2 --threads 1

test: $(VENV)/installed-test lint
	@echo "--- tests"
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# The server's page, where chromium and chromedriver are installed (on Debian: apt-get install
# chromium chromium-driver); `make test` does without them.
test-browser: $(VENV)/installed-test
	@echo "--- the page in a browser"
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

lint: $(VENV)/installed-test
	@echo "--- ruff and mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy protocol compute expert_io engram_io launch

$(BIN)/python:
	@echo "--- making $(VENV)"
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that the environment's choice of build stands.
$(VENV)/torch: $(BIN)/python
	@echo "--- installing torch ($(TORCH)) unless it is there"
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@echo "--- installing headrace"
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/installed-test: $(VENV)/torch pyproject.toml
	@echo "--- installing headrace with its test tools"
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
