PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# keeps the duration of a command for `make thresholds`
TIMES = $(BIN)/python benchmarks/figures/times.py
INSTALLED := $(VENV)/installed
OPENMMLAB := $(VENV)/openmmlab
RUNTIMES := $(VENV)/runtimes
BROWSER := $(VENV)/browser
FUZZER := $(VENV)/fuzzer
DOCS := $(VENV)/docs
PYTEST := -m pytest -n auto --maxprocesses 8 --dist worksteal

# the oldest and newest versions that pyproject.toml allows, and those that ran on a GPU, in separate environments
OLDEST_PYTHON ?= python3.10
MIDDLE_PYTHON ?= python3.12
NEWEST_PYTHON ?= python3.13
OLDEST := build/oldest
MIDDLE := build/middle
NEWEST := build/newest
VERSIONS := $(OLDEST) $(MIDDLE) $(NEWEST)
# on the torch that GPUs were measured with
ON_SIMULATOR := tests/integration/simulated/test_device.py tests/integration/capture/test_kernels.py
TESTING := pytest pytest-timeout pytest-xdist hypothesis pyte

.PHONY: help demo test test-all test-versions smoke-versions fuzz coverage openmmlab runtimes browser docs lint types bench gpu-check zoo thresholds clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(INSTALLED) ## capture the built-in detector, replay its trace, print the table
	@mkdir -p demo
	$(BIN)/opcapture --force -o demo/faster_rcnn.jsonl
	$(BIN)/opreplay demo/faster_rcnn.jsonl --top 20 --budget 5

test: $(INSTALLED) ## run the quick tests, which touch every feature
	$(if $(ARGS),,$(TIMES) test --) $(BIN)/python $(PYTEST) -m 'not slow' $(ARGS)

test-all: $(INSTALLED) ## run all tests whose packages are installed
	$(if $(ARGS),,$(TIMES) test-all --) $(BIN)/python $(PYTEST) --durations 25 --durations-min 5 $(ARGS)

test-versions: $(VERSIONS:=/installed) ## run the demo and the quick tests on the oldest, a middle and the newest Python and torch
	@for pair in $(VERSIONS); do $$pair/bin/python tests/support/runners/private_places.py || exit 1; done
	@for pair in $(VERSIONS); do \
	  echo "== $$pair"; \
	  $$pair/bin/opcapture --force -o $$pair/faster_rcnn.jsonl && \
	  $$pair/bin/opreplay $$pair/faster_rcnn.jsonl --top 20 && \
	  $$pair/bin/python $(PYTEST) -m 'not slow' $(ARGS) || exit 1; \
	done

smoke-versions: ## capture and replay once on the oldest, a middle and the newest Python and torch, each removed afterwards
	@for pair in $(VERSIONS); do \
	  make $$pair/installed && \
	  $$pair/bin/python tests/support/runners/private_places.py && \
	  $$pair/bin/opcapture --input-size 96 --batch-size 1 --force -o $$pair/trace.jsonl && \
	  $$pair/bin/opreplay $$pair/trace.jsonl --top 5 --mode jit --strict && \
	  $$pair/bin/python -m pytest -q tests/unit/replay/test_allowed_operators.py && \
	  { [ $$pair != $(MIDDLE) ] || $$pair/bin/python -m pytest -q $(ON_SIMULATOR); } && \
	  rm -rf $$pair || exit 1; \
	done

fuzz: $(FUZZER) ## fuzz the readers of traces and other tools' files for ten minutes: ARGS='--seconds 60' for one
	$(BIN)/python tests/support/fuzz $(ARGS)
	$(BIN)/python tests/support/fuzz/guided.py $(ARGS)

coverage: $(INSTALLED) ## run all tests and print the branch coverage
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run $(PYTEST) $(ARGS)
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered

openmmlab: $(OPENMMLAB) ## add mmengine, mmcv, mmdet and mmsegmentation

runtimes: $(RUNTIMES) ## add ONNX Runtime, TVM, XLA and TensorFlow for modes, Ray, Triton and a web service

browser: $(BROWSER) ## add the packages that test pages in a browser and notebooks, and Debian's Chromium and bubblewrap if available

docs: $(DOCS) ## build the documentation as a site in build/site, which needs no network
	@# not -q, which also keeps warnings from --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(INSTALLED) ## check style, format and the order of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## check types
	$(BIN)/mypy -p opgrip

bench: $(INSTALLED) ## run the benchmarks
	@for benchmark in $(filter-out benchmarks/thresholds.py,$(wildcard benchmarks/*.py)); do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

# without pip if PYTHON has torch and what opgrip needs, as on machines without a package index
gpu-check: ## check opgrip on this machine's GPU, in ten minutes, and leave one file to be sent back
	@if $(PYTHON) -c 'import torch, opgrip.capture, opgrip.replay; assert torch.cuda.is_available()' 2>/dev/null; then \
	  $(PYTHON) benchmarks/gpu_check.py $(ARGS); \
	else \
	  make $(INSTALLED) && $(PIP) -e '.[dev,gpu]' && $(BIN)/python benchmarks/gpu_check.py $(ARGS); \
	fi

zoo: $(OPENMMLAB) ## make missing traces of the zoo, and traces whose recipe changed: hours; ARGS=--force for all
	$(BIN)/opgrip zoo make '*' $(ARGS)

thresholds: $(INSTALLED) ## measure the performance figures and compare them with their thresholds: ARGS=--quick for two minutes
	$(BIN)/python benchmarks/thresholds.py $(ARGS)

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build demo *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(if $(wildcard $@),,$(TIMES) set-up --) $(PIP) -e '.[dev]'
	@touch $@

$(OLDEST)/installed: PAIR = $(OLDEST_PYTHON) -m venv $(OLDEST) && cp constraints-oldest.txt $(OLDEST)/constraints.txt
$(MIDDLE)/installed: PAIR = $(MIDDLE_PYTHON) -m venv $(MIDDLE) && \
  grep -v -e '^torch==' -e '^triton==' constraints.txt | cat constraints-middle.txt - >$(MIDDLE)/constraints.txt
$(NEWEST)/installed: PAIR = $(NEWEST_PYTHON) -m venv $(NEWEST) && \
  grep -v '^torch==' constraints.txt | cat constraints-newest.txt - >$(NEWEST)/constraints.txt

$(VERSIONS:=/installed): pyproject.toml constraints.txt $(wildcard constraints-*.txt)
	@mkdir -p build
	$(PAIR)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q -c $(@D)/constraints.txt \
	  -e '.[chakra,excel,report,plot,schema]' $(TESTING)
	@touch $@

# tensorflow-cpu is tensorflow without its hundreds of megabytes for GPUs
$(RUNTIMES): $(INSTALLED)
	$(PIP) -e '.[dev,onnx,tvm,xla,ray,triton,service]' tensorflow-cpu absl-py
	@touch $@

$(BROWSER): $(INSTALLED)
	$(PIP) -e '.[dev,browser,notebook]'
	@{ command -v chromium && command -v bwrap; } >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium bubblewrap; } >/dev/null \
	  || echo 'chromium or bubblewrap is not installed: tests of pages, or of the sandbox, are skipped'
	@touch $@

$(DOCS): $(INSTALLED)
	$(PIP) -e '.[dev,docs]'
	@touch $@

# not every Python has a wheel of atheris
$(FUZZER): $(INSTALLED)
	@$(PIP) --only-binary atheris -e '.[dev,fuzz]' 2>/dev/null || echo 'no wheel of atheris for this Python: the guided fuzzer is skipped'
	@touch $@

# --no-deps because mmdet and mmsegmentation require an older mmcv: docs/openmmlab.md
$(OPENMMLAB): $(INSTALLED)
	$(PIP) -e '.[dev,openmmlab]'
	@$(PIP) --only-binary mmcv mmcv || { \
	  echo 'no wheel of mmcv for this torch: building it from source, which takes about twenty minutes and needs a C++ compiler'; \
	  $(PIP) 'setuptools<80' wheel ninja psutil && MMCV_WITH_OPS=1 $(PIP) --no-build-isolation mmcv; }
	$(PIP) --no-deps mmdet mmsegmentation
	@# its first import writes a file that other processes would read half written
	@$(BIN)/python -c 'import yapf'
	@touch $@
