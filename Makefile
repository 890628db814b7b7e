# Each target does all its own set-up, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## List what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/demo ## Index Python's standard library by jobs, and show it (ARGS=--once ends after the summary)
	@$(BIN)/python -m example_project.demo $(ARGS)

.PHONY: test
test: $(VENV)/test ## Run the tests on SQLite, PostgreSQL and, where MARIADB_URL and MYSQL_URL name them, MariaDB and MySQL
	@$(BIN)/python -m tests $(ARGS)

# Each process that the tests start writes a file of its own.
.PHONY: coverage
coverage: $(VENV)/coverage ## Run the tests under coverage, subprocesses included, and fail below 95 %
	@rm -rf build/coverage
	@mkdir -p build/coverage
	@$(BIN)/coverage run -m tests $(ARGS); status=$$?; \
		$(BIN)/coverage combine -q && $(BIN)/coverage report && exit $$status

.PHONY: chaos
chaos: $(VENV)/chaos ## Kill everything under load, and count what is lost (ARGS="--database postgresql --seconds 30")
	@$(BIN)/python -m tests.chaos $(ARGS)

.PHONY: bench
bench: $(VENV)/test ## Measure how fast it is (ARGS="--scenarios latency idle --rounds 1")
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: bench-rivals
bench-rivals: $(VENV)/test ## Measure other queues beside it, each in its own environment (ARGS="--scenarios idle --rounds 1")
	@$(BIN)/python -m benchmarks --systems all $(ARGS)

.PHONY: bench-report
bench-report: $(VENV)/bench ## Write what was measured into docs/benchmarks.md (ARGS="figures.json more.json")
	@$(BIN)/python -m benchmarks.report $(ARGS)

.PHONY: lint
lint: $(VENV)/lint ## Check style, types and migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(MAKE) --silent $(VENV)-types/types VENV=$(VENV)-types
	$(VENV)-types/bin/pyright --pythonpath $(VENV)-types/bin/python
	$(VENV)-types/bin/pyright -p tests/pyright_with_stubs.json --pythonpath $(BIN)/python
	$(BIN)/python -W error -m django makemigrations --check --dry-run --settings tests.settings
	$(BIN)/python -W error manage.py makemigrations --check --dry-run

.PHONY: translations
translations: $(VENV)/lint ## Update the translations after a change of texts, and compile them (needs GNU gettext)
	@cd django_dbqueue && DJANGO=$(abspath $(BIN))/django-admin && \
		$$DJANGO makemessages --all --no-location --no-wrap --no-obsolete -v0 && \
		sed -i '/^"POT-Creation-Date/d' locale/*/LC_MESSAGES/django.po && \
		$$DJANGO compilemessages -v0

.PHONY: docs
docs: $(VENV)/docs ## Build the documentation into build/docs
	$(BIN)/sphinx-build -q -W -b html docs build/docs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade "pip>=25.1"

# One stamp for each dependency group of pyproject.toml.
$(VENV)/%: $(BIN)/python pyproject.toml
	@echo "Setting up $(VENV) for '$*' ..."
	@$(BIN)/python -m pip install -q -e . --group $*
	@touch $@
