# make demo      train a small model over a pipeline, compare, check, and save pictures; a minute
# make test      everything that must hold: format, lint, types, import contracts, tests
# make fuzz      thousands of random models and forwards against the unsplit ones, random command lines,
#                and random requests of the studio; SEED=7 and CASES=100 choose them, PROCESSES=1 runs
#                the models over processes
# make busy      the tests of processes while some are held up, as on a busy machine; five minutes
# make soak      the tests of processes with every combination of faults, schedules and ranks, and
#                with training runs of thousands of steps; then 200 kills at random moments, killed ranks
#                with DataLoader workers, and lost hosts; three quarters of an hour
# make surroundings  small programs in each odd surrounding: C locale, read-only folders, python -O, no
#                compiler, 2 GB and others; five minutes
# make docs      build the documentation into site/
# make studio    build the studio, the page that `penstock studio` opens; needs npm
# make browser   install Chromium (apt, as root) and playwright-core (npm) for the tests of the studio
# make features  rewrite docs/features.md from a run of its tests; a minute
# make frameworks  train with Trainers of Hugging Face and Lightning, unsplit and as pipes, and compare the curves; ten minutes
# make zoo       rewrite docs/models.md: every model of the zoo in every trial; then compare the first step of
#                each with the audit and without it; first more tests of traces; a quarter of an hour
# make versions  rewrite docs/versions.md: a sample of the tests with every supported PyTorch release; an hour.
#                VERSIONS="2.11.0 2.15.0" chooses, FULL=1 runs all tests, KEEP=folder keeps environments,
#                PYTHONS="python3.11 python3.13" chooses interpreters
# make caps      random models under random memory caps: peaks, and their forecasts; three minutes
# make papers    compare `fit` with the bubbles that the zero-bubble paper publishes; five minutes on 14 cores
# make plans     compare plans with brute force, on 200 random small problems; minutes
# make bench     measure; prints tables
# make bench-gpu measure on one GPU; prints all GPU tables of docs/measurements.md; about an hour. PYTHON= chooses the
#                interpreter, with a build of PyTorch for that GPU

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three workers for two cores: tests of processes and faults wait half of their time.
WORKERS ?= $(shell python3 -c 'import os; print(max(2, len(os.sched_getaffinity(0)) * 3 // 2))')
unexport PYTHONDONTWRITEBYTECODE  # tests start some sixty interpreters, each of which would compile

.PHONY: demo test suite lint fuzz busy soak surroundings docs studio browser features frameworks zoo versions caps papers plans bench bench-gpu format clean

demo: $(READY)
	$(BIN)/penstock demo --out out/demo

# Two jobs: while mypy needs one core, the tests use the others.
test: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(READY)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fuzz: $(READY)
	$(BIN)/python -m tests.properties.fuzz $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES)) \
		$(if $(PROCESSES),--processes)
	$(if $(PROCESSES),,$(BIN)/python -m tests.properties.fuzz_forwards \
		$(if $(SEED),--first $(SEED)) $(if $(CASES),--cases $(CASES)))
	$(if $(PROCESSES),,$(BIN)/python -m tests.fuzz_cli \
		$(if $(SEED),--first $(SEED)) $(if $(CASES),--cases $(CASES)))
	$(if $(PROCESSES),,test ! -d src/penstock/studio/built || $(BIN)/python -m tests.studio.random_requests \
		$(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES)))

busy: $(READY)
	$(BIN)/python -m tests.distributed.random_pauses $(if $(SEED),--seed $(SEED)) -n auto --dist worksteal \
		tests/distributed tests/faults tests/data_parallel tests/launch tests/doctor tests/checkpoint

soak: export PENSTOCK_SOAK := 1
soak: $(READY)
	$(BIN)/python -m tests.checkpoint.corrupt --cases 500
	$(BIN)/python -m tests.checkpoint.two_writers --seconds 60
	$(BIN)/pytest -n auto --dist worksteal tests/distributed tests/faults
	$(BIN)/python -m tests.faults.random_kills
	$(BIN)/python -m tests.faults.loader_kills
	$(BIN)/python -m tests.faults.cut_hosts

surroundings: export PENSTOCK_SURROUNDINGS := 1
surroundings: $(READY)
	$(BIN)/pytest -v tests/test_surroundings.py

docs: export NO_MKDOCS_2_WARNING := 1  # an advertisement of mkdocs-material
docs: $(READY)
	$(BIN)/mkdocs build --strict

studio: $(READY)
	$(BIN)/python -m penstock.studio.build

browser:
	apt-get update && apt-get install --yes chromium
	npm install --prefix build/browser --no-save playwright-core@1.65.1

features: $(READY)
	$(BIN)/python -m tests.features

frameworks: export OMP_NUM_THREADS := 1
frameworks: $(READY)
	$(BIN)/python -m tests.integrations.frameworks $(ROWS)

zoo: $(READY)
	PENSTOCK_SOAK=1 $(BIN)/pytest -n $(WORKERS) tests/model/traced
	$(BIN)/python -m tests.models.table
	$(BIN)/python -m tests.models.audited

versions: $(READY)
	$(BIN)/python -m tests.versions $(VERSIONS) $(if $(FULL),--full) $(if $(KEEP),--keep $(KEEP)) \
		$(foreach python,$(PYTHONS),--python $(python))

caps: $(READY)
	$(BIN)/python -m tests.properties.memory_caps $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES))

papers: $(READY)
	$(BIN)/python benchmarks/zero_bubble.py

plans: $(READY)
	$(BIN)/python -m tests.planning.brute_force --workers 2

bench: $(READY)
	$(BIN)/python benchmarks/play.py
	$(BIN)/python benchmarks/fit.py
	$(BIN)/python benchmarks/cut.py
	$(BIN)/python benchmarks/trust.py

# The interpreter of the machine: the environment of `make` has PyTorch for the CPU. A figure that misses a bound exits
# with 1, and the other tables are printed all the same.
PYTHON ?= python3
bench-gpu: export PYTHONPATH := src
bench-gpu:
	$(PYTHON) benchmarks/virtual_gpu.py
	-for figure in 2 3 4 5; do $(PYTHON) benchmarks/graph.py --figure $$figure; done
	$(PYTHON) benchmarks/graph.py
	$(PYTHON) benchmarks/graph.py --host
	$(PYTHON) benchmarks/graph.py --transformers
	$(PYTHON) benchmarks/recording.py --ranks 4 --sms 32
	$(PYTHON) benchmarks/forecast.py --ranks 4 --sms 16 --rows 4096 --rounds 9
	$(PYTHON) benchmarks/real_models.py
	$(PYTHON) benchmarks/dropout.py --devices 4 --dtype bfloat16
	$(PYTHON) benchmarks/plans.py --cases gpt-4 unequal gpt-8
	$(PYTHON) benchmarks/papers.py --steps 1 --runtime graph --schedule 1f1b --checkpoint never
	$(PYTHON) benchmarks/papers.py --steps 1 --runtime graph
	$(PYTHON) benchmarks/papers.py --steps 2

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) out site

$(READY): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
