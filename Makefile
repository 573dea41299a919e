# Everything is in scripts/; `make` alone lists the targets.
SHELL := /bin/bash
export TORCH PYTHON
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-kernels test-benchmarks test-arm test-vllm test-baseline test-package wheel test-wheel fuzz setup lint format bench bench-linear bench-attention bench-decoder bench-peers bench-models bench-accuracy real-size clean

help: ## list the targets
	@echo "usage: make TARGET [TORCH=debian | PYTHON=/path/to/python] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  TORCH=debian   Debian's python3-torch in .venv-debian instead of PyPI's torch in .venv"
	@echo "  PYTHON=...     your own interpreter with torch; nothing is installed into it"
	@echo "  ARGS='...'     passed on: to demo.py, pytest or the benchmarks"

demo: ## set up everything and let a small mixture-of-experts model write text (ARGS=--all: more tables, minutes)
	@scripts/demo.sh $(ARGS)

test: ## set up everything and run all tests: GoogleTest through ctest, then pytest
	@scripts/test.sh $(ARGS)

test-full: ## the same with 600 examples of each property and the kernels' twins: half an hour more
	@W4A8_TEST_EXAMPLES=600 W4A8_TEST_TWINS=ON scripts/test.sh $(ARGS)

test-kernels: ## the C++ tests that need no torch: core and kernels (ARGS='-R x86_avx2': those of one kernel)
	@scripts/test_kernels.sh $(ARGS)

test-benchmarks: ## the tests of the benchmarks in lab: their harness, tables and emulations
	@scripts/test_benchmarks.sh $(ARGS)

test-arm: ## the Arm kernels on emulated CPUs (installs a cross compiler and qemu when root)
	@scripts/test_arm.sh $(ARGS)

test-vllm: ## the plugin in the real vLLM, in .venv-vllm (x86-64; large downloads)
	@scripts/test_vllm.sh $(ARGS)

fuzz: ## fuzz the core with Clang's sanitizers: make fuzz SECONDS=600 (default 60)
	@scripts/fuzz.sh $(SECONDS)

test-baseline: ## the core tests on an emulated x86-64 CPU without AVX
	@scripts/test_baseline.sh

wheel: ## the wheel for every torch since 2.10 and every Python, in dist
	@scripts/build_wheel.sh $(ARGS)

test-wheel: ## the operators' tests on that wheel, in a fresh environment (ARGS='--matrix': several of them)
	@scripts/test_wheel.sh $(ARGS)

test-package: ## sdist, wheel, and the wheel's tests away from the source tree
	@scripts/test_package.sh $(ARGS)

setup: ## only set up the environment and install the package into it
	@scripts/setup.sh

lint: ## formatters and linters in check mode
	@scripts/lint.sh

format: ## let the formatters write
	@scripts/lint.sh --fix

bench: ## build and run the benchmarks (benchmarks/README.md)
	@scripts/bench.sh $(ARGS)

bench-linear: ## linear layers beside PyTorch's own operators and other libraries (lab/README.md)
	@scripts/bench_peers.sh bench_linear $(ARGS)

bench-attention: ## attention beside vLLM's and PyTorch's (ARGS='--threads 2 --questions decode')
	@scripts/bench_attention.sh $(ARGS)

bench-decoder: ## a model's layers in one call beside one by one (ARGS='--model Gemma-3-270M --rounds 5')
	@scripts/bench_decoder.sh $(ARGS)

bench-peers: ## the fused operator beside other libraries, and the goals (an hour; ARGS=--quick: minutes)
	@scripts/bench_peers.sh bench_peers $(ARGS)

bench-models: ## a model of real size in vLLM, stock and with the plugin, and in llama.cpp (ARGS='--layers 48': hours)
	@scripts/bench_models.sh $(ARGS)

bench-accuracy: ## perplexity and KL of two small language models with fewer bits (an hour; ARGS=--no-llama: no compiling)
	@scripts/bench_accuracy.sh $(ARGS)

real-size: ## write a 30-billion-parameter model with random weights (make real-size ARGS='FOLDER --layers 4')
	@scripts/real_size.sh $(ARGS)

clean: ## remove what the build made; .venv and .venv-debian stay
	@rm -rf build dist python/w4a8.egg-info python/w4a8/*.so .pytest_cache .ruff_cache
	@find python tests examples scripts benchmarks lab -name __pycache__ -type d -prune -exec rm -rf {} +
