# Each target installs missing Debian packages, configures and builds. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
export OMP_WAIT_POLICY ?= passive

build_packages := gcc libc6-dev cmake make pkg-config libopenblas-openmp-dev libdnnl-dev librandom123-dev \
  libhdf5-dev
demo_packages  := $(build_packages) fortunes
test_packages  := $(demo_packages) g++ clang-format-14? libcriterion-dev python3 python3-numpy python3-h5py \
  libopenmpi-dev openmpi-bin
tsan_packages  := $(test_packages) clang libomp-dev
fuzz_packages  := $(tsan_packages)
slow_packages  := $(test_packages) gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
SECONDS        := 600

.PHONY: help all demo test test-slow test-gpu tsan fuzz bench bench-gpu plots install clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      gradient checks, two trainings, memory comparison (5 minutes on 2 cores)'
	@echo 'make test      all CPU tests, then again under ASan and UBSan'
	@echo 'make test-gpu  tests that need a GPU; reported as skipped without one'
	@echo 'make test-slow takes minutes: 2000 random attention calls, long sequences, NEON under qemu'
	@echo 'make tsan      the tests under the thread sanitizer (clang)'
	@echo 'make fuzz      libFuzzer on calls and files, SECONDS=600 for each of the three targets (clang)'
	@echo 'make bench     speed of the attention kernels'
	@echo 'make bench-gpu speed of this GPU, beside PyTorch where it is installed; writes out/gpu.txt'
	@echo 'make all       builds libraries and programs in build/release'
	@echo 'make plots     draws the plots of bench/ from its committed results'
	@echo 'make install   builds and installs under PREFIX (default /usr/local)'
	@echo 'make clean     removes build/'

# $(call build,preset): configure until that has succeeded, build always.
define build
test -f build/$(1)/Makefile || test -f build/$(1)/build.ninja || cmake --preset $(1)
cmake --build --preset $(1) -j $(JOBS)
endef

fattn := build/release/bin/fattn
# $(call into,name): output files of a training of the demo: curve, log, checkpoints.
into = --plot out/$(1).svg --json out/$(1).jsonl --checkpoint out/$(1) --overwrite

all:
	@cmake/packages.sh $(build_packages)
	@$(call build,release)

demo:
	@cmake/packages.sh $(demo_packages)
	@$(call build,release)
	@printf '\n== 1 of 4: every gradient against finite differences and recorded cases ==\n\n'
	@$(fattn) check --fixtures data
	@printf '\n== 2 of 4: associative recall, which no n-gram model can learn ==\n\n'
	@$(fattn) train --task recall --seconds 60 $(call into,recall)
	@printf '\n== 3 of 4: a GPT reads fortunes, byte by byte ==\n\n'
	@$(fattn) train --task text --seconds 120 $(call into,text)
	@printf '\nfattn sample --checkpoint out/text --top-p 0.9 --seed 2:\n'
	@$(fattn) sample --checkpoint out/text --top-p 0.9 --seed 2
	@printf '\n== 4 of 4: peak memory, N x N stored against flash ==\n\n'
	@$(fattn) memory --plot out/memory.svg --json out/memory.jsonl
	@printf '\nPictures: out/recall.svg out/text.svg out/memory.svg; logs and checkpoints beside them.\n'

test:
	@cmake/packages.sh $(test_packages)
	@cmake/test.sh $(JOBS) cpu cpu-asan

test-slow:
	@cmake/packages.sh $(slow_packages)
	@$(call build,cpu)
	@ctest --preset slow

test-gpu:
	@cmake/packages.sh $(test_packages)
	@if command -v nvcc /usr/local/cuda/bin/nvcc > /dev/null; then cmake/test.sh $(JOBS) cuda; \
	else echo 'test-gpu: skipped, no CUDA toolkit (nvcc) found'; fi

tsan:
	@cmake/packages.sh $(tsan_packages)
	@cmake/test.sh $(JOBS) cpu-tsan

fuzz:
	@cmake/packages.sh $(fuzz_packages)
	@$(call build,cpu-fuzz)
	@python3 tests/fuzz/fuzz.py build/cpu-fuzz $(SECONDS)

bench:
	@cmake/packages.sh $(build_packages)
	@$(call build,release)
	@$(fattn) bench

bench-gpu:
	@cmake/packages.sh $(build_packages)
	@$(call build,release)
	@mkdir -p out
	@{ git log -1 --format='commit %h' 2> /dev/null || true; $(fattn) info; \
	printf '\n== one head of 64, N 16384: a Triton kernel took 45.8 ms on a T4, 1.5 TFLOP/s ==\n\n'; \
	$(fattn) bench --device cuda --dtype f16 --batch 1 --heads 1 --d 64 --n 16384; \
	printf '\n== f16, 16384 tokens ==\n\n'; \
	$(fattn) bench --device cuda --dtype f16; \
	if python3 -c 'import torch' 2> /dev/null; then \
	printf '\n== beside PyTorch ==\n\n'; python3 bench/peers.py --quick --dtype float16; fi; } 2>&1 | tee out/gpu.txt
	@echo 'out/gpu.txt is welcome: CONTRIBUTING.md says where to'

plots:
	@cmake/packages.sh gnuplot-nox
	@bench/plots.sh

install: all
	@cmake --install build/release --prefix "$(patsubst ~/%,$(HOME)/%,$(or $(PREFIX),/usr/local))"

clean:
	@rm -rf build
