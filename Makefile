# Set-up, tests and the demo: `make demo`, `make test`, `make lint`. BACKEND=tensorflow (default), jax or torch.
BACKEND ?= tensorflow
BACKENDS := tensorflow jax torch
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
SEED ?= 0
COUNT ?= 300
DEMO_OUTPUT ?= runs/demo-$(BACKEND)

.PHONY: help demo test zoo fuzz lint format clean $(BACKENDS:%=test-%)
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "make demo [BACKEND=$(BACKEND)]  set up $(VENV), then train, export, verify and run a small translator"
	@echo "make test                    set up $(VENV), lint, then the tests on $(BACKENDS)"
	@echo "make test-jax                the tests on one backend (test-tensorflow, test-jax, test-torch)"
	@echo "make zoo                     export KerasHub's backbones on $(BACKENDS), and write docs/zoo.md"
	@echo "make fuzz [BACKEND=$(BACKEND) COUNT=$(COUNT) SEED=$(SEED)]  export random models and compare each with Keras"
	@echo "make lint, make format       ruff"
	@echo "make clean                   remove $(VENV) and build products"

ifeq ($(filter $(BACKEND),$(BACKENDS)),)
$(error BACKEND must be one of: $(BACKENDS). Received: BACKEND=$(BACKEND))
endif

# The first interpreter that runs, is supported and can make environments (a shim on the PATH need not run).
$(BIN)/python:
	@set -e; for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	      >/dev/null 2>&1; then \
	    echo "Creating $(VENV) with $$($$python --version) ($$python)"; \
	    $$python -m venv --clear $(VENV); exit 0; \
	  fi; \
	done; \
	echo "No suitable Python: 3.11, 3.12 or 3.13 with venv is needed (choose one with make PYTHON=/path/to/python)." >&2; \
	exit 1

# A stamp for each set of extras: nothing is installed again until what it depends on changes.
$(VENV)/.installed-%: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing for $* into $(VENV) (a few minutes the first time)"
	@$(PIP) -e ".[$*,onnx,text,plot]"
	@touch $@

$(VENV)/.installed-tests: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing all three backends and the development tools into $(VENV) (some minutes the first time)"
	@$(PIP) -e ".[tensorflow,jax,torch,onnx,tf2onnx,text,plot,pretrained,dev]"
	@touch $@ $(BACKENDS:%=$(VENV)/.installed-%)

demo: $(VENV)/.installed-$(BACKEND)
	$(BIN)/keras-transformer demo --backend $(BACKEND) --output $(DEMO_OUTPUT)

lint: $(VENV)/.installed-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One process a backend, side by side; all of them run, and a failure of any decides the exit status.
test: lint
	@$(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target $(BACKENDS:%=test-%)

$(BACKENDS:%=test-%): test-%: $(VENV)/.installed-tests
	KERAS_BACKEND=$* $(BIN)/python -m pytest -q -p no:cacheprovider

zoo: $(VENV)/.installed-tests
	@mkdir -p runs
	@for backend in $(BACKENDS); do \
	  KERAS_BACKEND=$$backend $(BIN)/python -m tests.zoo --json runs/zoo-$$backend.json || true; done
	@for more in others applications; do \
	  KERAS_BACKEND=torch $(BIN)/python -m tests.zoo --$$more --json runs/zoo-$$more.json || true; done
	@KERAS_BACKEND=tensorflow $(BIN)/python -m tests.zoo --names NASNetMobile --json runs/zoo-nasnet.json || true
	$(BIN)/python -m tests.zoo --docs $(BACKENDS:%=runs/zoo-%.json) $(patsubst %,runs/zoo-%.json,others applications nasnet)

fuzz: $(VENV)/.installed-tests
	KERAS_BACKEND=$(BACKEND) $(BIN)/python -m tests.fuzz --seed $(SEED) --count $(COUNT)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
