# The manual: serve, test, lint. Each works on a machine where nothing was installed, and at once where everything is.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The one place that names an exact torch: any other spec pulls gigabytes of CUDA where a CPU build would do.
TORCH  ?= torch==2.13.0
MODELS ?= examples/model_repository
ARGS   ?=

# What the C extension is made of: installing again builds it again.
KERNELS  := $(wildcard engine/cpu/*.c engine/cpu/*.h engine/cpu/*.inc)
# The quick ones first: what is broken shows early.
PROOFS := scheduler cache_events directory apart rollout_guards object_storage pace speculation families schemas reload route_switches processes disconnects growth bodies stalls hostile_files kills explain fairness overload soak ranks python_models large_answers pipelines batches analyze pictures

PACKAGES := $(sort $(patsubst %/__init__.py,%,$(wildcard */__init__.py)))

.DEFAULT_GOAL := help
.PHONY: help install serve test lint format proof gpu clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/torch.stamp:
	@echo "making $(VENV) and installing $(TORCH)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "setuptools>=77" wheel $(TORCH)
	@touch $@

$(VENV)/run.stamp: pyproject.toml $(KERNELS) $(VENV)/torch.stamp
	@echo "installing charonia"
	@$(PIP) --no-build-isolation --editable ".[media]"
	@touch $@

# charonia is there by now: pip adds what its tests need, and builds nothing again.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing the development tools"
	@$(PIP) "charonia[dev]"
	@touch $@

install: $(VENV)/run.stamp  ## make the virtual environment and install charonia into it, editable

serve: $(VENV)/run.stamp  ## serve the demo model (ARGS="--http-port 9000" for more)
	@exec $(BIN)/charonia serve --model-repository $(MODELS) $(ARGS)

# Side by side, a file's tests in one worker, whose end ends the run; ARGS that choose some run alone (tests/conftest.py).
test: $(VENV)/dev.stamp  ## run the tests (ARGS="-k scheduler" for some)
	@$(BIN)/python -m pytest -q --side-by-side $(ARGS)

# mypy takes the checkout's folder name for the package's, hence the link that is always called charonia.
lint: $(VENV)/dev.stamp  ## ruff, and mypy --strict on the shipped code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@mkdir -p build/lint && ln -sfn ../.. build/lint/charonia
	@cd build/lint && $(abspath $(BIN))/mypy --config-file charonia/pyproject.toml \
		-m charonia -m charonia.__main__ $(foreach p,$(PACKAGES),-p charonia.$(p))

format: $(VENV)/dev.stamp  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# A proof that fails does not keep the others from running; unbuffered, for who writes what they tell into a file.
proof: $(VENV)/dev.stamp  ## the long proofs, with progress: four to five hours on two cores, the failed ones named in the end
	@echo "the tests that are marked proof, then $(words $(PROOFS)) proofs: four to five hours on two cores"
	@export PYTHONUNBUFFERED=1; failed=; \
	$(BIN)/python -m pytest -q -m proof || failed=" pytest -m proof"; \
	for proof in $(PROOFS); do echo "$$proof:"; $(BIN)/python -m tests.proofs.$$proof || failed="$$failed $$proof"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; echo "every proof held"

# Nothing is installed: such machines are often had for minutes, and without a network.
gpu:  ## on a machine with a CUDA torch: the engine on the device, its tests and then figures, into gpu.md (ARGS=--resume goes on)
	@mkdir -p build/gpu && ln -sfn ../.. build/gpu/charonia
	@PYTHONPATH="$(CURDIR)/build/gpu:$$PYTHONPATH" $(PYTHON) -m charonia.bench.gpu --tests tests/gpu --minutes 9 $(ARGS)

clean:  ## remove everything that make made
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis engine/cpu/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +
