# Each target does its own set-up: missing Debian packages, configure, build. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
export OMP_WAIT_POLICY ?= passive

build_packages := gcc libc6-dev cmake make pkg-config libopenblas-openmp-dev librandom123-dev libhdf5-dev
demo_packages  := $(build_packages) fortunes gnuplot-nox
test_packages  := $(demo_packages) g++ libcriterion-dev python3 python3-numpy python3-h5py
tsan_packages  := $(test_packages) clang libomp-dev

.PHONY: help all demo test test-gpu tsan bench install clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      gradient checks, two trainings, memory comparison (5 minutes on 2 cores)'
	@echo 'make test      everything, then once more under ASan and UBSan'
	@echo 'make test-gpu  the tests that need a GPU; reported as skipped without one'
	@echo 'make tsan      the tests under the thread sanitizer (clang)'
	@echo 'make bench     speed of the attention kernels'
	@echo 'make all       libraries and programs, into build/release'
	@echo 'make install   the same, installed under PREFIX (default /usr/local)'
	@echo 'make clean     removes build/'

# $(call build,preset): configure once, build always.
define build
test -f build/$(1)/CMakeCache.txt || cmake --preset $(1)
cmake --build --preset $(1) -j $(JOBS)
endef

all:
	@cmake/packages.sh $(build_packages)
	@$(call build,release)

demo:
	@cmake/packages.sh $(demo_packages)
	@$(call build,release)
	@cli/demo.sh build/release/bin/fattn

test:
	@cmake/packages.sh $(test_packages)
	@cmake/test.sh $(JOBS) cpu cpu-asan

test-gpu:
	@cmake/packages.sh $(test_packages)
	@if command -v nvcc /usr/local/cuda/bin/nvcc > /dev/null; then cmake/test.sh $(JOBS) cuda; \
	else echo 'test-gpu: skipped, no CUDA toolkit (nvcc) found'; fi

tsan:
	@cmake/packages.sh $(tsan_packages)
	@cmake/test.sh $(JOBS) cpu-tsan

bench:
	@cmake/packages.sh $(build_packages)
	@$(call build,release)
	@build/release/bin/fattn bench

install: all
	@cmake --install build/release --prefix $(or $(PREFIX),/usr/local)

clean:
	@rm -rf build
