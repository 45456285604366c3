# Two commands, each from nothing: `make run` and `make test`. Neither needs a GPU. `make mutants`
# applies hand-made bugs to the sources and checks that tests fail with each (docs/extend/testing.md).
# Set-up happens once and again whenever pyproject.toml changes.
#   PYTHON=python3.12       another interpreter, 3.11 or later
#   ORACLE_PIP_ARGS=...     arguments for installing torch, for instance, where the package index
#                           offers the CUDA build only:
#                           --extra-index-url https://download.pytorch.org/whl/cpu

PYTHON ?= python3
ORACLE_PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/pip --quiet --disable-pip-version-check
TORCH := torch==2.13.0
PACKAGES := bench builder check device models plugins runtime
TYPED := .mypy_site/spark_engine

.PHONY: lock ranks run figures test pytest kernels lint types mutants mutation abuse fuzz forms newcomer soak soak-server soak-models replicas page clients agents dist clean
.DELETE_ON_ERROR:

run: $(VENV)/.run
	$(BIN)/spark-run --prompt "Once upon a time" --max-tokens 220
	$(BIN)/spark-run --chat "What is 3 plus 4?" --max-tokens 64

# Three processes on two cores, since tests of servers wait a lot; a file at a time, since fixtures
# belong to a file. One thread each, since in small matrix products threads wait longer than they
# compute. Tests start the commands some hundred times: bytecode is written even
# where PYTHONDONTWRITEBYTECODE is set. --no-compile: most installed modules are never imported.
# Types are checked meanwhile: alone, mypy would leave a core idle for a minute.
test: $(VENV)/.test lint
	@$(MAKE) --no-print-directory -j 2 types pytest

pytest: $(VENV)/.test
	PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# Kernels of the served models' sizes for both targets, and of every case: registers, spills, shared
# memory. Five minutes; `make test` compiles every form once, whichever op launches it.
kernels: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist loadfile -m kernels tests/plugins tests/builder/plan

# Every figure of docs/performance.md and every test that needs a GPU, into OUT: hours on an H200. The
# same command continues with what did not succeed; STAGES='decode_*,ops' runs some.
OUT ?= figures
STAGES ?= *
figures: $(VENV)/.test
	$(BIN)/python -m benchmarks.run_table --out '$(OUT)' --stages '$(STAGES)'

# What a release has, in dist/: wheel, source archive, the packages that the wheel's users get (CycloneDX) and
# checksums.
dist: $(VENV)/.test
	rm -rf dist $(VENV)/release
	SPARK_COMMIT=$$(git rev-parse HEAD) $(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/pip install --quiet "$$(ls dist/*.whl)[cuda,hub,vision]"
	$(PIP) install 'cyclonedx-bom>=7,<8'
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml -o dist/sbom.cdx.json $(VENV)/release/bin/python
	cd dist && sha256sum * > SHA256SUMS

# What a newcomer meets: a wheel in an empty environment, wrong names, full disks, signals.
newcomer: $(VENV)/.test
	$(BIN)/python -m tests.soak.newcomer

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cu' '*.cuh')

# mypy cannot follow the import hook of an editable install, so it is shown the same files
# through links, laid out as they are installed.
types: $(VENV)/.test
	@rm -rf $(TYPED) && mkdir -p $(TYPED)
	@ln -s $(CURDIR)/spark_engine/*.py $(CURDIR)/spark_engine/py.typed $(TYPED)/
	@for package in $(PACKAGES); do ln -s $(CURDIR)/$$package $(TYPED)/$$package; done
	@ln -sfn $(CURDIR)/training $(dir $(TYPED))training
	MYPYPATH=$(dir $(TYPED)) $(BIN)/mypy -p spark_engine -p training
	MYPYPATH=$(dir $(TYPED)) $(BIN)/mypy examples

# Hand-made bugs, one at a time, against the tests that must fail with them.
mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants.run

# Changes every operator and number of MODULE, one at a time, in place, and prints the changes with
# which TESTS still pass. MODULE must be committed; git restores it at the end.
MODULE ?= runtime/engine/pool.py
TESTS ?= tests/runtime/engine/test_pool.py
mutation: $(VENV)/.test
	git diff --exit-code --stat HEAD -- $(MODULE)
	$(PIP) install -e '.[mutation]'
	sed 's|MODULE|$(MODULE)|; s|TESTS|$(TESTS)|' tests/mutation.toml > $(VENV)/mutation.toml
	rm -f $(VENV)/mutation.sqlite
	$(BIN)/cosmic-ray init $(VENV)/mutation.toml $(VENV)/mutation.sqlite
	$(BIN)/cr-filter-operators $(VENV)/mutation.sqlite $(VENV)/mutation.toml
	$(BIN)/cosmic-ray baseline $(VENV)/mutation.toml
	trap 'git checkout -q -- $(MODULE)' EXIT; $(BIN)/cosmic-ray exec $(VENV)/mutation.toml $(VENV)/mutation.sqlite
	$(BIN)/cr-report --surviving-only --show-diff $(VENV)/mutation.sqlite

# Attacks on real servers, a row for each: bodies, grammars, stored responses, connections, the front,
# processes that are stopped and killed, full disks, hostile engine folders. Next to each an honest client's
# time to first token, lost requests, memory and the longest callback of the event loop. Some twenty minutes.
abuse: $(VENV)/.test
	$(BIN)/python -m tests.soak.abuse

# Every path of the server under what schemathesis makes of its OpenAPI document, two hundred times as
# much as in `make test`: some minutes.
fuzz: $(VENV)/.test
	$(BIN)/pytest --timeout 3000 --hypothesis-profile fuzz tests/runtime/server/api/test_fuzz.py

# Generated traces of requests, 25 times as many as in `make test`, with drafts and without: a
# quarter of an hour.
soak: $(VENV)/.test
	$(BIN)/pytest -n 2 --timeout 3000 --hypothesis-profile soak tests/runtime/engine/test_traces.py tests/runtime/test_real_engine.py tests/runtime/engine/test_real_draft_traces.py

# Engines of several ranks in every format, dense and mixture of experts; their faults, a server of
# them with forms of answers, drafts and swap, and what spark-check says of them: some minutes.
ranks: $(VENV)/.test
	SPARK_EVERY_FORMAT=1 $(BIN)/pytest -n 2 --timeout 3000 tests/oracles/test_parity_ranks.py tests/runtime/ranks \
		tests/check/engines/test_ranks.py tests/plugins/sampling/test_emulated_sampling.py

# The embedded model's answers to 200 generated schemas by 3 prompts, each held to its schema.
forms: $(VENV)/.test
	$(BIN)/python -m tests.runtime.structured.embedded 200 3

# A server of the embedded model under everything at once, faults and attacks included: MINUTES, 30 by
# default.
MINUTES ?= 30
soak-server: $(VENV)/.test
	$(BIN)/python -m tests.soak.server $(MINUTES)

# Three models at one address, of which one fits, under load and faults: MINUTES, e.g. 20.
soak-models: $(VENV)/.test
	$(BIN)/python -m tests.soak.models $(MINUTES)

# Four replicas of the embedded model placed by Ray Serve, under load: one is killed, one is stopped,
# all are replaced; then two in a cluster, where front, controller and commands are killed. Ten minutes
# with a core for each; 80 MB of packages.
replicas: $(VENV)/.test
	$(PIP) install -e '.[ray]'
	$(BIN)/python -m tests.soak.replicas
	$(BIN)/python -m tests.soak.replicas_life

# The page at / in a real Chromium without a window (apt-get install chromium): three minutes.
page: $(VENV)/.test
	$(PIP) install -e '.[page]'
	$(BIN)/pytest tests/page/chat.py tests/page/conversation.py tests/page/files.py tests/page/parts.py tests/page/views.py

# Real clients (openai, anthropic, langchain, lm-eval, …), each in a separate environment, against
# the embedded model: 8 GB of packages, a quarter of an hour; writes the table of docs/use/clients.md.
clients: $(VENV)/.test
	$(BIN)/python -m tests.clients.run

# Six coding agents (Codex, Claude Code, opencode, Qwen Code, pi, Cline) from npm, each with a call of
# its shell and of an image, against the embedded model built for 100,000 tokens: 1.4 GB of packages,
# Linux on x86-64; nine minutes of a core's time; writes their table of docs/use/clients.md.
agents: $(VENV)/.test
	$(BIN)/python -m tests.clients.agents

clean:
	rm -rf $(VENV) .mypy_site .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "venv is missing: sudo apt-get install -y python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml requirements.lock | $(BIN)/python
	@grep -oE '^[A-Za-z0-9._-]+==[^ ;\\]+' requirements.lock > $(VENV)/versions.txt
	$(PIP) install --no-compile -c $(VENV)/versions.txt -e .
	@touch $@

# Exactly what requirements.lock names. uv takes a third of pip's time; pip serves where uv cannot
# reach the index. Without torch the tests still run; parity is then held against the stored golden
# files.
$(VENV)/.test: pyproject.toml requirements.lock | $(BIN)/python
	($(PIP) install uv && $(BIN)/uv pip install --quiet -p $(BIN)/python --require-hashes -r requirements.lock) \
	  || $(PIP) install --no-compile --require-hashes -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	$(PIP) install --no-compile $(ORACLE_PIP_ARGS) '$(TORCH)' \
	  || echo "torch cannot be installed here: parity runs on golden files"
	$(PIP) install --no-compile -e '.[trt]' \
	  || echo "TensorRT-RTX cannot be installed here: its tests skip"
	@touch $@ $(VENV)/.run

# Writes requirements.lock: versions and hashes of all that the tests install, for every platform and
# Python. Versions that it has stay unless pyproject.toml asks for others; make lock UPGRADE=--upgrade
# takes the newest. torch is left out: it is installed by its own line above.
UPGRADE ?=
lock: | $(BIN)/python
	$(PIP) install uv
	echo "torch ; sys_platform == 'never'" > $(VENV)/overrides.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes $(UPGRADE) \
	  --extra test --extra check --extra hub --extra oracle --override $(VENV)/overrides.txt \
	  --no-emit-package torch --custom-compile-command "make lock" -o requirements.lock pyproject.toml
