# `make test` and `make demo` install what they need. Everything lands in .venv and build/.
#
# .venv holds the package with [all] and [test], 4.1 GB, for every target but one. build/demo holds it
# with [all] alone, 2.1 GB, for `make demo`: beside .venv it takes 36 MB more, since its packages are
# hard links to the same files.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := build/demo
KERNELS := $(wildcard kernels/*.[ch] kernels/*/*.[ch])
# The constraints take builds for the CPU; libtpu is there to compile with, not to look for a TPU.
export JAX_PLATFORMS ?= cpu
# Where Python may keep no bytecode, each process that a test starts compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Tests of one file share what they compiled: each worker takes a half, and from the other's at last.
WORKERS := -n 2 --dist worksteal

.PHONY: environment before compare coverage surface figures demo test test-ci test-all test-gpu test-oldest test-newest releases soak soak-serve kills flips fuzz faults faults-remote wheel types check format clean

# Run the quick start of README.md, command by command. Its files stay in build/quickstart.
demo: $(DEMO)/.installed
	$(DEMO)/bin/python .ci/demo.py README.md build/quickstart

test: $(STAMP)
	$(BIN)/pytest $(WORKERS) $(ARGS)

# The slow tests that .ci/run has: JAX compiles as it does for users.
test-ci: $(STAMP)
	XLA_FLAGS= $(BIN)/pytest $(WORKERS) -m "ci and not gpu" $(ARGS)

# Every test, with more random examples and with types checked at each call; then the fuzzer and an
# editable install. At most 90 minutes, for before a release.
TYPED := griffin_eval.kernels,griffin_eval.model_jax,griffin_eval.model_torch,beartype.beartype
test-all: $(STAMP)
	XLA_FLAGS= $(BIN)/pytest $(WORKERS) -m "not gpu" --hypothesis-profile=all --jaxtyping-packages=$(TYPED) $(ARGS)
	$(MAKE) fuzz SECONDS=300
	.ci/check_install editable

# The tests of test-all under coverage.py. `python tests/net/lines.py compare` then names lines that
# survived a change and are not run any more; `record` keeps the lines of a commit.
coverage: $(STAMP)
	XLA_FLAGS= $(BIN)/python -P tests/net/lines.py run $(WORKERS) -m "not gpu" --hypothesis-profile=all $(ARGS)

# Install the wheel of COMMIT (53c0389 without it) in build/before; compare runs the same commands in both
# environments and compares what they print and write.
before: $(STAMP)
	tests/net/make_before $(COMMIT)

BEFORE ?= build/before/bin/python
AFTER ?= $(BIN)/python
compare: $(STAMP)
	test -x $(BEFORE) || tests/net/make_before
	$(BIN)/python tests/net/compare.py $(BEFORE) $(AFTER) $(ARGS)

# Write tests/net/surface.txt: commands, arguments, tasks, metrics, keys, routes and names that users see.
surface: $(STAMP)
	$(BIN)/python -P tests/net/surface.py

# Needs a GPU, and builds of torch and JAX for it: PYTHON of an environment that has them.
test-gpu:
	JAX_PLATFORMS=cuda,cpu XLA_FLAGS= XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(PYTHON) -P -m pytest -m gpu $(ARGS) tests/engine/test_gpu.py tests/kernels/test_kernels_triton.py

# One framework at a time, each in one thread, so that the machine has one left.
MINUTES ?= 45
soak: $(STAMP)
	for each in torch jax; do OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 $(BIN)/python \
		tests/reliability/soak.py --framework $$each --minutes $(MINUTES) || exit 1; done

soak-serve: $(STAMP)
	for each in torch jax; do \
		$(BIN)/python tests/reliability/soak_serve.py --framework $$each --minutes $(MINUTES) || exit 1; done

COUNT ?= 50
kills: $(STAMP)
	for each in torch jax; do OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 $(BIN)/python \
		tests/reliability/kills.py --framework $$each --count $(COUNT) || exit 1; done

# Flips bits of checkpoints, and reads them with this package and with those of the formats.
flips: $(STAMP)
	$(BIN)/python tests/reliability/flips.py $(if $(COUNT),--count $(COUNT))

# The fast tests with the oldest and the newest releases of what the package needs, and an interpreter
# for each: .ci/oldest.txt and .ci/newest.txt. `make releases` writes both files anew.
test-oldest test-newest: test-%: $(STAMP)
	$(BIN)/python .ci/test_versions $* $(ARGS)

releases: $(STAMP)
	$(BIN)/python .ci/test_versions resolve

# The wheel to publish: for every Python 3 and the oldest Linux that the compiler allows. In dist/.
wheel: $(STAMP)
	rm -rf build/lib* build/bdist* build/temp* build/wheel
	$(BIN)/python -m build --no-isolation --wheel --outdir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

# Damages everything that is read of a checkpoint; tests/fuzz/run.py says how.
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RUNS),--runs $(RUNS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE)) $(TARGETS)

# Fails every call that a conversion makes to the system, or SAMPLE of each kind; hours without it.
faults: $(STAMP)
	$(BIN)/python tests/faults/run.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

# The same of every request to a store of S3's or Google's kind on this machine.
faults-remote: $(STAMP)
	$(BIN)/python tests/faults/remote.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED))

# Records the finished runs of QUEUES (griffin-eval train --queue), and draws docs/figures of all records.
figures: $(STAMP)
	$(BIN)/python -m experiments.training_records $(QUEUES)

check: $(STAMP) types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	git ls-files '*.py' | xargs $(BIN)/python .ci/check_words.py
	git ls-files '*.md' | xargs $(BIN)/python .ci/check_links.py
	cd build/types && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-logo --no-cache

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The folders as `import griffin_eval` sees them, for the type checker.
types: $(STAMP)
	$(BIN)/python .ci/link_types.py

environment: $(STAMP)

# The constraints hold every version, torch's too: no other build of it is taken. uv unpacks packages
# into its cache once, and environments are hard links to it.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
$(STAMP): EXTRAS := all,test
$(DEMO)/.installed: EXTRAS := all
$(STAMP) $(DEMO)/.installed: pyproject.toml setup.py constraints.txt $(KERNELS)
	test -x $(@D)/bin/uv || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
