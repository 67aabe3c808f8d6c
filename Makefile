# Each target does all its set-up itself, in .venv, from a clean clone.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e
# .venv brings a Node.js of its own, for machines that have none.
NPM = PATH="$(CURDIR)/$(BIN):$$PATH" npm
FRONT = package.json package-lock.json schema/plugin.json $(wildcard js/src/*.ts js/src/*/*.ts)

.PHONY: demo test lab screenshots benchmark clean

demo: .venv/demo  ## train a network on a GPU (a virtual one where there is none), headless
	$(BIN)/gpumagic demo

test: .venv/test  ## lint, types, tests of Python, TypeScript and the real thing in a browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(NPM) run --silent check
	$(NPM) test --silent
	$(BIN)/python tests/browser/chromium.py --install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow"

lab: .venv/lab  ## JupyterLab on the quickstart
	$(BIN)/jupyter lab examples/quickstart.ipynb

screenshots: .venv/lab .venv/test  ## the pictures in the README, from a real JupyterLab
	$(BIN)/python docs/screenshots.py
	$(BIN)/python docs/monitor_screenshots.py
	$(BIN)/python docs/timing_screenshots.py

benchmark: .venv/test
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/monitor.py
	$(BIN)/python benchmarks/watch.py
	$(BIN)/python benchmarks/timing_vs_torch.py
	$(BIN)/python benchmarks/opinfo_virtual.py

clean:
	rm -rf .venv demo node_modules js/lib gpumagic/static gpumagic/labextension

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/pip pyproject.toml constraints.txt $(FRONT)
	$(INSTALL) ".[demo]"
	@touch $@

.venv/test: .venv/bin/pip pyproject.toml constraints.txt $(FRONT)
	$(INSTALL) ".[test]"
	@touch $@

.venv/lab: .venv/bin/pip pyproject.toml constraints.txt $(FRONT)
	$(INSTALL) ".[demo,lab]"
	@touch $@
