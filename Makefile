# make train   set everything up, train the tiny preset on this machine, end with a report
# make test    build and run every C++ and Python test
# make wheel   dist/dropless-*.whl
# make lint    formatters and linters
# make build   the libraries alone, in build/
# make cuda    the CUDA library too, installing a compiler from PyPI where there is none
#
# Everything lands in this folder: .venv, build, dist, runs.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.PHONY: build cuda train test wheel lint clean environment tools nvcc

PYTHON ?= python3
JOBS ?= $(shell nproc)
# Flags of `make train`, for example TRAIN_FLAGS="--text ~/books --ffn dense".
TRAIN_FLAGS ?=
# OFF makes a wheel without the CUDA library.
CUDA ?= ON
# What `make cuda` compiles for: all, native (the GPU at hand), 90a or 80.
CUDA_ARCHITECTURES ?= all

# Warnings are errors for those who develop and in CI, not for those whose compiler is newer than ours.
CONFIGURE := cmake --preset default -DDROPLESS_WERROR=$(if $(CI),ON,OFF)

# The environment's cmake and ninja stand in where the machine has none.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# The CUDA library is compiled where there is a GPU to run it, and by `make cuda` anywhere.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

environment:
	@$(PYTHON) tools/environment.py .venv requirements/oldest.txt

tools: environment
	@.venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/tools.txt

nvcc: environment
	@command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
	  .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements/cuda.txt

build: environment $(if $(GPU),nvcc)
	@$(CONFIGURE) -DDROPLESS_TESTS=OFF -DDROPLESS_CUDA=$(if $(GPU),ON,OFF) \
	  -DDROPLESS_CUDA_ARCHITECTURES=native
	@cmake --build build -j $(JOBS)

cuda: nvcc
	@$(CONFIGURE) -DDROPLESS_TESTS=OFF -DDROPLESS_CUDA=ON \
	  -DDROPLESS_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)
	@cmake --build build -j $(JOBS) --target dropless_cpu dropless_cuda

train: build
	@PYTHONPATH=python .venv/bin/python -m dropless.train --preset tiny $(TRAIN_FLAGS)

test: environment $(if $(GPU),nvcc)
	@PYTHON=$(PYTHON) JOBS=$(JOBS) CUDA=$(if $(GPU),ON,OFF) CONFIGURE="$(CONFIGURE)" tools/test.sh

wheel: tools $(if $(filter OFF,$(CUDA)),,nvcc)
	@CUDA=$(CUDA) JOBS=$(JOBS) tools/wheel.sh

lint: tools
	@tools/lint.sh

clean:
	rm -rf build build-asan build-tsan dist
