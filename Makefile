# Every target sets itself up: Python 3.11+ and make are all a machine needs.
#
#   make demo        the whole cluster on this machine, on PORT (8000)
#   make test        everything CI checks
#   make test-real   the router before real vLLM engines (minutes, 3 GiB; see tests/real)
#   make bench       NAME=overhead ARGS="--reps 3"; without NAME: what there is
#   make format      rewrites the code as `make check` wants it
#   make docs        writes the generated tables of docs/ anew
#   make lock        resolves the dependencies anew
#   make clean       removes all that the targets made

PORT ?= 8000
NAME ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types imports unit test-real bench format docs lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# The build back end comes from the lock too, hence no build isolation. Python compiles what it
# imports when it does; compiling everything here would take as long as the rest.
$(STAMP): requirements-dev.txt pyproject.toml
	@sh .ci/make-venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	$(BIN)/pdrouter demo --port $(PORT)

test: check

check: lint types imports unit

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports --no-logo

unit: setup
	$(BIN)/python -m pytest --cov --cov-report=
	$(BIN)/coverage report --include='scheduler/*' --fail-under=95
	$(BIN)/coverage report --include='cachemap/*' --fail-under=95
	$(BIN)/coverage report --include='router/*' --fail-under=85

test-real: setup
	$(BIN)/python -m pytest tests/real -m real --timeout=1500 -v

bench: setup
	$(BIN)/python -m bench $(if $(NAME),$(NAME) $(ARGS),--list)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python docs/render_tables.py

# pip's own configuration (mirrors, caps, folders of wheels) must not leak into the lock, so it is
# switched off here; what is left is the public index and its hashes of every file of a release.
LOCK := PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= CUSTOM_COMPILE_COMMAND="make lock" \
	$(VENV)-lock/bin/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options

lock:
	@sh .ci/make-venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check 'pip-tools>=7.6'
	$(LOCK) $(ARGS) --output-file=requirements.txt pyproject.toml
	$(LOCK) $(ARGS) --extra=dev --extra=bench --extra=events --constraint=requirements.txt --output-file=requirements-dev.txt pyproject.toml
	$(LOCK) $(ARGS) --only-build-deps --build-deps-for=wheel --constraint=requirements-dev.txt --output-file=requirements-build.txt pyproject.toml
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-lock build dist out *.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
