# Each target does all its set-up itself, in .venv, from a clean clone. It needs Python, gcc, git and, for
# the browser tests, a Chromium (which `make test` takes from apt where it is root).
PYTHON ?= python3
# What to install exactly. `CONSTRAINTS=` takes the newest of everything; constraints-oldest.txt the oldest.
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
PIP_INSTALL = pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
INSTALL = $(BIN)/$(PIP_INSTALL) -e
# .venv brings a Node.js of its own, for machines that have none.
NPM = PATH="$(CURDIR)/$(BIN):$$PATH" npm
# Compiled modules are kept even where the shell forbids it (PYTHONDONTWRITEBYTECODE): the tests start many
# processes, and one that has to compile torch takes four times as long to import it.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest
# Whom the limit of each test cannot interrupt, in C, is ended with its stack shown: a failed test, not hours.
HANGS = -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true
# Three more than processors: the tests in a browser, and those with kernels and servers, often wait.
PARALLEL = -n $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 3)') --dist loadscope
# torch's CUDA build for `make test-cuda`, and the headers of the CUDA that it was built with.
TORCH_CUDA ?= 2.14.1
CUDA_HEADERS_2.14.1 = nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
CUDA_HEADERS_2.15.0 = nvidia-cuda-runtime==13.2.75 nvidia-cuda-crt==13.2.78
CUDA_ENV = .venv-cuda$(addprefix -,$(filter-out 2.14.1,$(TORCH_CUDA)))
CUDA_PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 STANDIN_CUDA_DEVICES=2 \
	$(CUDA_ENV)/bin/python -m pytest -p standin_gpus $(HANGS)
CUDA_ROOMS = $(addprefix tests/,cell copies dryrun ledger memory mismatch moving placement profiling timing)
STAND_IN_CUDA = $(wildcard tests/stand_in/nvml.c tests/stand_in/cuda/*)
FRONT = package.json package-lock.json schema/plugin.json $(wildcard js/src/*.ts js/src/*/*.ts)

.PHONY: demo test check suite slow hardware lab docs screenshots examples benchmark wheel test-wheel wheel-check release-check conda-recipe release-notes test-libraries test-frameworks test-cuda cuda-build crash-hunt clean

demo: .venv/demo  ## train a network on a GPU (a virtual one where there is none), headless
	$(BIN)/python examples/run_notebook.py

test: check suite  ## everything: lint, types, tests of Python, TypeScript and the real thing in a browser

check: .venv/test  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(NPM) run --silent check

suite: .venv/compiled  ## the tests
	$(NPM) test --silent
	$(BIN)/python tests/browser/chromium.py --install
	$(PYTEST) $(PARALLEL) $(HANGS) -m "not slow"

slow: .venv/compiled  ## the tests that take minutes, and thousands of examples for those of properties
	$(PYTEST) $(PARALLEL) -m slow
	$(PYTEST) $(PARALLEL) -m "not slow" --hypothesis-profile=thorough --timeout=3600 \
		--ignore tests/browser

# A machine with a GPU is often one without network: its own Python is taken where that has torch for CUDA.
hardware:  ## what only an NVIDIA GPU can show, into benchmarks/results/; without one all is skipped
	@if $(PYTHON) -c 'import torch; raise SystemExit(not torch.version.cuda)' 2>/dev/null; \
	then python='$(PYTHON)'; \
	else $(MAKE) --no-print-directory .venv/test && python=$(BIN)/python; fi && \
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$$python" -m pytest -v -r fE -W default \
		-m gpu tests/hardware

lab: .venv/lab  ## JupyterLab on the quickstart
	$(BIN)/jupyter lab examples/quickstart.ipynb

docs: .venv/docs  ## the pages as a site, in site/; a dead link fails
	$(BIN)/sphinx-build -W --keep-going -c docs . site

screenshots: .venv/lab .venv/test $(CUDA_ENV)/libraries  ## the pictures of the pages, from a real JupyterLab
	$(BIN)/python docs/screenshots.py
	$(BIN)/python docs/monitor_screenshots.py
	$(BIN)/python docs/timing_screenshots.py
	$(BIN)/python docs/profile_screenshots.py

examples: .venv/test  ## the outputs of the example notebooks; NOTEBOOKS="memory timing" for some
	$(BIN)/python docs/example_outputs.py $(NOTEBOOKS)

benchmark: .venv/test  ## what each feature costs
	$(BIN)/python benchmarks/load_ext.py
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/monitor.py
	$(BIN)/python benchmarks/drawing.py
	$(BIN)/python benchmarks/timing_vs_torch.py
	$(BIN)/python benchmarks/frameworks.py
	$(BIN)/python benchmarks/opinfo_virtual.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/checked.py
	$(BIN)/python benchmarks/virtual_speed.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/jax_ledger.py

wheel: .venv/bin/pip  ## dist/: the source and the wheel, with the JavaScript built
	rm -rf dist gpumagic/labextension gpumagic/static
	$(BIN)/$(PIP_INSTALL) build
	$(BIN)/python -m build --outdir dist

test-wheel: wheel  ## the wheel in an environment of its own, with neither Node.js nor this source
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/$(PIP_INSTALL) "$$(echo dist/*.whl)[lab]"
	cd dist && env -i HOME="$$HOME" PATH="$(CURDIR)/.venv-wheel/bin" python ../tests/installed_wheel.py

release-check: wheel-check  ## fail unless dist/ may be published
	! grep -n github.com/OWNER package.json

wheel-check: wheel  ## what packagers' tools say of dist/ and of pyproject.toml
	$(BIN)/$(PIP_INSTALL) check-manifest twine "validate-pyproject[all]"
	$(BIN)/twine check --strict dist/*
	$(BIN)/validate-pyproject pyproject.toml
	$(BIN)/check-manifest

conda-recipe:  ## dist/recipe.yaml: conda-forge's, for the source that is in dist/
	version=$$(sed -n 's/^  "version": "\(.*\)",/\1/p' package.json) && \
	home=$$(sed -n 's/^  "homepage": "\(.*\)",/\1/p' package.json) && \
	hash=$$(sha256sum "dist/gpumagic-$$version.tar.gz" | cut -d ' ' -f 1) && \
	sed -e "s/VERSION/$$version/" -e "s/SHA256/$$hash/" -e "s#HOMEPAGE#$$home#" conda/recipe.yaml > dist/recipe.yaml

release-notes:  ## dist/notes.md: the changelog's part of this version; none there is an error
	mkdir -p dist && version=$$(sed -n 's/^  "version": "\(.*\)",/\1/p' package.json) && \
	awk -v head="## [$$version]" 'index($$0, "## ") == 1 { on = index($$0, head) == 1; next } on' CHANGELOG.md > dist/notes.md && \
	grep -q . dist/notes.md

test-libraries: .venv-libraries/test  ## programs of other people's libraries; the table is docs/virtual-gpus.md's
	OMP_NUM_THREADS=1 .venv-libraries/bin/pytest tests/libraries $(if $(TABLE),--write-table)

test-frameworks: .venv-frameworks/test  ## JAX and TensorFlow where there is no torch, with libraries of theirs
	OMP_NUM_THREADS=1 .venv-frameworks/bin/pytest tests/frameworks/torchless
	OMP_NUM_THREADS=1 .venv-frameworks/bin/pytest tests/frameworks/with_jax tests/frameworks/libraries
	OMP_NUM_THREADS=1 .venv-frameworks/bin/pytest tests/frameworks/with_tensorflow

# The rooms' tests have GPUs of 1 GiB without workspaces, as virtual ones are; the others those of a real one.
test-cuda: $(CUDA_ENV)/libraries  ## torch's own CUDA code, on a CUDA runtime of ours whose memory is the host's
	STANDIN_CUDA_MEMORY=1024 STANDIN_CUDA_CONTEXT=0 $(CUDA_PYTEST) tests/stand_in/test_cuda_runtime.py
	$(CUDA_PYTEST) $(PARALLEL) -m "not slow" tests/cuda
	STANDIN_CUDA_MEMORY=1024 STANDIN_CUDA_CONTEXT=0 CUBLAS_WORKSPACE_CONFIG=:0:0 CUBLASLT_WORKSPACE_SIZE=0 \
		$(CUDA_PYTEST) $(PARALLEL) -m "not slow" $(CUDA_ROOMS)
	$(CUDA_PYTEST) -m gpu tests/hardware

cuda-build: .venv/test  ## fail unless torch is built for CUDA and sees no GPU
	$(BIN)/python -c "import torch; assert torch.version.cuda and not torch.cuda.is_available()"

crash-hunt: cuda-build  ## fail if an operator or public function reaches CUDA or kills its process
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/crash_hunt.py

clean:
	rm -rf .venv .venv-wheel .venv-frameworks .venv-libraries .venv-cuda* dist demo site node_modules js/lib gpumagic/static gpumagic/labextension

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/pip pyproject.toml $(CONSTRAINTS) $(FRONT)
	$(INSTALL) ".[demo]"
	@touch $@

# Not compiled: of 17,000 files the tests import few, and compiling all takes a minute.
.venv/test: .venv/bin/pip pyproject.toml $(CONSTRAINTS) $(FRONT)
	$(BIN)/$(PIP_INSTALL) --no-compile -e ".[test]"
	@touch $@

# Once: else each of the processes that start at the same time compiles all that the tests import.
.venv/compiled: .venv/test
	$(PYTEST) --collect-only --quiet > $@.log || { cat $@.log; exit 1; }
	@touch $@

.venv/docs: .venv/bin/pip pyproject.toml $(CONSTRAINTS) $(FRONT)
	$(INSTALL) ".[docs]"
	@touch $@

.venv-libraries/test: CONSTRAINTS = constraints-libraries.txt
.venv-libraries/test: pyproject.toml constraints-libraries.txt $(FRONT)
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/$(PIP_INSTALL) --no-compile -e ".[libraries]"
	@touch $@

# Of NVIDIA's wheels only the headers; `===` is never a build for the CPU. The rest is .venv's.
$(CUDA_ENV)/torch: .venv/test
	$(BIN)/python -m venv $(CUDA_ENV)
	$(CUDA_ENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		torch===$(TORCH_CUDA) $(CUDA_HEADERS_$(TORCH_CUDA))
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(*site.getsitepackages())')')" > \
		"$$($(CUDA_ENV)/bin/python -c 'import site; print(*site.getsitepackages())')/zz_venv.pth"
	@touch $@

$(CUDA_ENV)/libraries: $(CUDA_ENV)/torch $(STAND_IN_CUDA)
	$(CUDA_ENV)/bin/python tests/stand_in/cuda/build.py $(CUDA_ENV)/standin
	@touch $@

.venv-frameworks/test: CONSTRAINTS = constraints-frameworks.txt
.venv-frameworks/test: pyproject.toml constraints-frameworks.txt $(FRONT)
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/$(PIP_INSTALL) --no-compile -e ".[frameworks]"
	@touch $@

.venv/lab: .venv/bin/pip pyproject.toml $(CONSTRAINTS) $(FRONT)
	$(INSTALL) ".[demo,lab]"
	@touch $@
