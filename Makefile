# `make test` and `make demo` build what they need. Everything lands in .venv and build/.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(wildcard kernels/*.[ch] kernels/*/*.[ch])
# The constraints take builds for the CPU; libtpu is there to compile with, not to look for a TPU.
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-slow types check format clean

demo: $(STAMP)
	$(BIN)/python -m griffin_eval.demo

test: $(STAMP)
	$(BIN)/pytest -n 2 $(ARGS)

test-slow: $(STAMP)
	$(BIN)/pytest -n 2 -m "(slow or tpu_compile) and not gpu" $(ARGS) \
		|| test $$? = 5  # pytest's word for: there are none

check: $(STAMP) types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/pytest -q tests/test_packaging.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The folders as `import griffin_eval` sees them, for the type checker.
types: $(STAMP)
	$(BIN)/python .ci/link_types.py

# The constraints hold every version, torch's too: pip takes no other build of it.
$(STAMP): pyproject.toml setup.py constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
