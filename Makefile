PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
# keeps how long a command took, for `make held`
TIMES = $(BIN)/python benchmarks/figures/times.py
INSTALLED := $(VENV)/installed
OPENMMLAB := $(VENV)/openmmlab
RUNTIMES := $(VENV)/runtimes

.PHONY: help demo test openmmlab runtimes lint types bench held clean

help: ## list what there is to make
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## capture the built-in detector, replay its trace, print the table
	@mkdir -p demo
	$(BIN)/opcapture --force -o demo/faster_rcnn.jsonl
	$(BIN)/opreplay demo/faster_rcnn.jsonl --top 20

test: $(INSTALLED) ## run the tests
	$(if $(ARGS),,$(TIMES) test --) $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

openmmlab: $(OPENMMLAB) ## add mmengine, mmcv, mmdet and mmsegmentation

runtimes: $(RUNTIMES) ## add ONNX Runtime, TVM, XLA and TensorFlow, which some modes need

lint: $(INSTALLED) ## check style, format and which room knows which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED) ## check types
	@mkdir -p build/types/opgrip
	@for room in capture replay samples tools traces; do ln -sfn ../../../$$room build/types/opgrip/$$room; done
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p opgrip

bench: $(INSTALLED) ## run the benchmarks
	@for benchmark in $(filter-out benchmarks/held.py,$(wildcard benchmarks/*.py)); do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

held: $(INSTALLED) ## measure what earlier work reached, and fail where it is no longer: ARGS=--quick for two minutes
	$(BIN)/python benchmarks/held.py $(ARGS)

clean: ## remove the virtual environment and everything made
	rm -rf $(VENV) build demo *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(TIMES) set-up -- $(PIP) -e '.[dev]'
	@touch $@

# tensorflow-cpu is what the extra's tensorflow is without its hundreds of megabytes for GPUs
$(RUNTIMES): $(INSTALLED)
	$(PIP) -e '.[dev,onnx,tvm,xla]' tensorflow-cpu absl-py
	@touch $@

# mmdet and mmsegmentation say that they want an older mmcv, hence --no-deps: docs/openmmlab.md
$(OPENMMLAB): $(INSTALLED)
	$(PIP) -e '.[dev,openmmlab]'
	@$(PIP) --only-binary mmcv mmcv || { \
	  echo 'pip finds no wheel of mmcv for this torch: building it from source, which takes about twenty minutes and needs a C++ compiler'; \
	  $(PIP) 'setuptools<80' wheel ninja psutil && MMCV_WITH_OPS=1 $(PIP) --no-build-isolation mmcv; }
	$(PIP) --no-deps mmdet mmsegmentation
	@touch $@
