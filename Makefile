# SPDX-License-Identifier: Apache-2.0
# Two commands do everything on a fresh Debian 12 machine: `make demo` and `make test`.

JOBS ?= $(shell nproc)
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help build demo test test-asan fuzz cuda tidy format check-format bench clean deps deps-test

help:
	@echo "make demo    build the program, fetch a small model, calibrate it and compare sparse with dense"
	@echo "make test    build everything and run the whole suite, sanitizers and short fuzzing included"
	@echo "make test-asan, make fuzz, make cuda: those parts of it alone (cuda needs nvcc)"
	@echo "make build   the program alone: build/bin/kascade"
	@echo "make bench   operator timings by role, decode and prefill, into bench/results/"
	@echo "make format, make tidy, make clean"

deps:
	@scripts/install_dependencies.sh program

deps-test:
	@scripts/install_dependencies.sh test

build: deps
	cmake --preset program
	cmake --build build -j $(JOBS) --target kascade_cli

$(MODEL): | deps
	scripts/fetch_model.sh

demo: build $(MODEL)
	build/bin/kascade demo --model $(MODEL) --output build/demo

test: deps-test $(MODEL)
	scripts/run_tests.sh

test-asan: deps-test
	cmake --preset asan
	cmake --build build/asan -j $(JOBS) --target unit_tests
	ctest --test-dir build/asan --output-on-failure -LE 'golden|end_to_end'

fuzz: deps-test
	scripts/run_fuzzers.sh

cuda: deps-test
	cmake --preset cuda
	cmake --build --preset cuda --target kascade kascade_cuda kascade_cuda_test engine_test eval_test
	ctest --test-dir build/cuda --output-on-failure -R '^(cuda_host|engine|eval)$$'

bench: build
	scripts/bench_operator.sh

format:
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format -i

check-format:
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror

tidy: deps-test
	cmake --preset release
	scripts/run_tidy.sh

clean:
	rm -rf build
