PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# keeps how long a command took, for `make thresholds`
TIMES = $(BIN)/python benchmarks/figures/times.py
INSTALLED := $(VENV)/installed
OPENMMLAB := $(VENV)/openmmlab
RUNTIMES := $(VENV)/runtimes
BROWSER := $(VENV)/browser
FUZZER := $(VENV)/fuzzer
PYTEST := -m pytest -n auto --maxprocesses 8 --dist worksteal

# the ends of what pyproject.toml admits, each in an environment of its own
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13
OLDEST := build/oldest
NEWEST := build/newest
VERSIONS := $(OLDEST) $(NEWEST)
TESTING := pytest pytest-timeout pytest-xdist hypothesis pyte

.PHONY: help demo test test-all test-versions set-up-versions smoke-versions fuzz coverage openmmlab runtimes browser lint types bench gpu-check zoo thresholds clean

help: ## list what there is to make
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(INSTALLED) ## capture the built-in detector, replay its trace, print the table
	@mkdir -p demo
	$(BIN)/opcapture --force -o demo/faster_rcnn.jsonl
	$(BIN)/opreplay demo/faster_rcnn.jsonl --top 20

test: $(INSTALLED) ## run the quick tests: every feature, and nothing that takes long
	$(if $(ARGS),,$(TIMES) test --) $(BIN)/python $(PYTEST) -m 'not slow' $(ARGS)

test-all: $(INSTALLED) ## run all tests of what is installed
	$(if $(ARGS),,$(TIMES) test-all --) $(BIN)/python $(PYTEST) --durations 25 --durations-min 5 $(ARGS)

test-versions: $(VERSIONS:=/installed) ## run the demo and the quick tests on the oldest and the newest Python and torch
	@for pair in $(VERSIONS); do $$pair/bin/python tests/private_places.py || exit 1; done
	@for pair in $(VERSIONS); do \
	  echo "== $$pair"; \
	  $$pair/bin/opcapture --force -o $$pair/faster_rcnn.jsonl && \
	  $$pair/bin/opreplay $$pair/faster_rcnn.jsonl --top 20 && \
	  $$pair/bin/python $(PYTEST) -m 'not slow' $(ARGS) || exit 1; \
	done

set-up-versions: $(VERSIONS:=/installed) ## set up environments of the oldest and the newest Python and torch

smoke-versions: $(VERSIONS:=/installed) ## capture and replay once on the oldest and the newest Python and torch
	@for pair in $(VERSIONS); do \
	  $$pair/bin/python tests/private_places.py && \
	  $$pair/bin/opcapture --input-size 96 --batch-size 1 --force -o $$pair/trace.jsonl && \
	  $$pair/bin/opreplay $$pair/trace.jsonl --top 5 --mode jit --strict || exit 1; \
	done

fuzz: $(FUZZER) ## change traces and other tools' files as strangers might, for ten minutes: ARGS='--seconds 60' for one
	$(BIN)/python tests/fuzz $(ARGS)
	$(BIN)/python tests/fuzz/guided.py $(ARGS)

coverage: $(INSTALLED) ## run all tests and print how many branches they took
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run $(PYTEST) $(ARGS)
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --skip-covered

openmmlab: $(OPENMMLAB) ## add mmengine, mmcv, mmdet and mmsegmentation

runtimes: $(RUNTIMES) ## add ONNX Runtime, TVM, XLA and TensorFlow, which some modes need, Ray, Triton and a web service

browser: $(BROWSER) ## add what tests pages in a browser and notebooks in a kernel, and Chromium where Debian's packages can be had

lint: $(INSTALLED) ## check style, format and the order of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## check types
	$(BIN)/mypy -p opgrip

bench: $(INSTALLED) ## run the benchmarks
	@for benchmark in $(filter-out benchmarks/thresholds.py,$(wildcard benchmarks/*.py)); do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

gpu-check: $(INSTALLED) ## check opgrip on this machine's GPU, in ten minutes, and leave one file to be sent back
	$(PIP) -e '.[dev,gpu]'
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

zoo: $(OPENMMLAB) ## make the traces of the zoo that are not there, or have another recipe by now: hours; ARGS=--force for all
	$(BIN)/opgrip zoo make '*' $(ARGS)

thresholds: $(INSTALLED) ## measure the performance figures and compare them with their thresholds: ARGS=--quick for two minutes
	$(BIN)/python benchmarks/thresholds.py $(ARGS)

clean: ## remove the virtual environment and everything made
	rm -rf $(VENV) build demo *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(if $(wildcard $@),,$(TIMES) set-up --) $(PIP) -e '.[dev]'
	@touch $@

$(OLDEST)/installed: PAIR = $(OLDEST_PYTHON) -m venv $(OLDEST) && cp constraints-oldest.txt $(OLDEST)/constraints.txt
$(NEWEST)/installed: PAIR = $(NEWEST_PYTHON) -m venv $(NEWEST) && \
  grep -v '^torch==' constraints.txt | cat constraints-newest.txt - >$(NEWEST)/constraints.txt

$(VERSIONS:=/installed): pyproject.toml constraints.txt constraints-oldest.txt constraints-newest.txt
	@mkdir -p build
	$(PAIR)
	$(@D)/bin/python -m pip --disable-pip-version-check install -q -c $(@D)/constraints.txt \
	  -e '.[zstd,samples,results,report,plot,schema]' $(TESTING)
	@touch $@

# tensorflow-cpu is what the extra's tensorflow is without its hundreds of megabytes for GPUs
$(RUNTIMES): $(INSTALLED)
	$(PIP) -e '.[dev,onnx,tvm,xla,ray,triton,service]' tensorflow-cpu absl-py
	@touch $@

$(BROWSER): $(INSTALLED)
	$(PIP) -e '.[dev,browser,notebook]'
	@command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null \
	  || echo 'there is no chromium: tests of pages are passed over until the system has one'
	@touch $@

# there is no wheel of atheris for each Python
$(FUZZER): $(INSTALLED)
	@$(PIP) --only-binary atheris -e '.[dev,fuzz]' 2>/dev/null || echo 'there is no atheris for this Python: no fuzzer is guided'
	@touch $@

# mmdet and mmsegmentation say that they want an older mmcv, hence --no-deps: docs/openmmlab.md
$(OPENMMLAB): $(INSTALLED)
	$(PIP) -e '.[dev,openmmlab]'
	@$(PIP) --only-binary mmcv mmcv || { \
	  echo 'pip finds no wheel of mmcv for this torch: building it from source, which takes about twenty minutes and needs a C++ compiler'; \
	  $(PIP) 'setuptools<80' wheel ninja psutil && MMCV_WITH_OPS=1 $(PIP) --no-build-isolation mmcv; }
	$(PIP) --no-deps mmdet mmsegmentation
	@touch $@
