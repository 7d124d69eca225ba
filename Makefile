# make up: a fleet on this machine.  make test: everything.  make check: what needs no engine.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
FLEET := configs/laptop.yaml
PROTOS := workers/control/control.proto router/directory/directory.proto
FAST := not engine and not fleet and not slow

# $(call tests,which,how): what fails is run once more, alone and on fleets of its own, since every test shares
# the machine with engines. What failed the first time stays in the output; what fails twice fails.
define tests
$(PY) -m pytest $(1) $(2) || { [ $$? -eq 1 ] && echo "FAILED ONCE (above); once more, alone:" && \
	$(PY) -m pytest $(1) --last-failed --last-failed-no-failures none; }
endef

.PHONY: up down test check fast lint types install lock clients proto schema clean

up: install
	@$(VENV)/bin/conserve up $(FLEET)

down: install
	@$(VENV)/bin/conserve down $(FLEET)

test: install
	@deploy/setup/packages.sh
	@$(MAKE) --no-print-directory lint types fast
	@$(call tests,-m "not ($(FAST))")

check: install lint types fast

lint:
	@$(PY) -m ruff check .

types:
	@$(PY) -m mypy

# These wait more than they compute: three at a time keep two cores busy.
fast:
	@$(call tests,-m "$(FAST)",-q -n 3 --dist loadfile)

# All agent frameworks' tool loops on the fleet of the tests; `make test` has those of the extra `dev`.
# They pin much: they have an environment of their own.
clients: install
	@$(PY) -m venv .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/agents.txt
	@CONSERVE_AGENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python $(PY) -m pytest tests/clients

proto: install
	@$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

schema: install
	@$(PY) -m deploy.fleet.json_schema

install:
	@deploy/setup/install.sh $(VENV)

lock:
	@deploy/setup/lock.sh

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
