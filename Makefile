# make up: a fleet on this machine.  make test: everything.  make check: what needs no engine.
SHELL := /bin/bash
VENV := .venv
EXTRAS := cpu,dev
PY := $(VENV)/bin/python
FLEET := configs/laptop.yaml

.PHONY: up down test check docs fast lint types structure install lock sbom clients broken fuzz schema wheel clean

# An environment of its own, installed by uv or else by pip: $(call environment,DIRECTORY,REQUIREMENTS)
define environment
	@$(PY) -m venv $(1)
	@$(PY) -m uv pip install --quiet --python $(1)/bin/python -r $(2) 2>/dev/null || \
	  $(1)/bin/python -m pip install --quiet --disable-pip-version-check -r $(2)
endef

up: install
	@$(VENV)/bin/conserve up $(FLEET)

down:
	@$(VENV)/bin/conserve down $(FLEET)

test: install lint types docs
	@deploy/setup/packages.sh
	@$(PY) -m tests.run fast slow engines

check: install lint types docs fast

lint:
	@$(PY) -m ruff check . && $(PY) -m ruff format --quiet --check .

types:
	@$(PY) -m mypy

# The documentation as a site, in site/. A link or anchor that leads nowhere fails it.
docs:
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

fast:
	@$(PY) -m tests.run fast

# Print the figures of the structure; `--trips` starts a fleet and counts the files of a turn too.
structure: install
	@$(PY) -m benchmarks.structure

# The real programs of coding agents, and all agent frameworks' tool loops, on fleets of the tests; `make test`
# has those of the extra `dev`. They pin much: they have an environment of their own.
clients: install
	@command -v npm >/dev/null || { echo "make clients runs coding agents, which need Node.js 20 or later and npm: install them" >&2; exit 1; }
	$(call environment,.venv-clients,requirements/agents.txt)
	@cp tests/clients/package.json .venv-clients
	@npm install --prefix .venv-clients --no-package-lock --no-audit --no-fund --loglevel error
	@CONSERVE_AGENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python \
	 CONSERVE_AGENT_PROGRAMS=$(CURDIR)/.venv-clients/node_modules/.bin $(PY) -m pytest tests/clients

# What reviews found, broken again one at a time: the tests that are named beside it have to fail.
broken: install
	@$(PY) -m tests.broken

# Malformed requests against a live fleet: `make fuzz REQUESTS=100000`. Schemathesis has an environment of its own.
REQUESTS := 3000
fuzz: install
	$(call environment,.venv-fuzz,requirements/fuzz.txt)
	@$(PY) -m tests.fuzz --requests $(REQUESTS) --schemathesis .venv-fuzz/bin/schemathesis

# What is in the environments of the CPU and of CUDA, as CycloneDX JSON in dist/.
sbom:
	@deploy/setup/sbom.sh

schema: install
	@$(PY) -m deploy.generated

# What `ray up` copies to the machines of a cluster.
wheel: install
	@rm -rf build  # what was deleted since the last wheel would be in this one
	@$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

install:
	@deploy/setup/install.sh $(VENV) $(EXTRAS)

lock:
	@deploy/setup/lock.sh

clean:
	rm -rf $(VENV) .venv-clients .venv-fuzz site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
