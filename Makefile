# make train   train the debug MoE model here, on 4 processes; again: go on
# make test    lint and the quick tests
# make lint    code, types, shell scripts, and the text of README, docs and upstream's patches
# make test-all  the same with every test
# make matrix  the table of jobs: each verified, exact ones beside stock; checkpoints across layouts
# make search  random jobs over all keys, each verified; what is WRONG is made small (SECONDS=600)
# make mutants  plant faults in titan_ext, and say which test sees each (ARGS="NAMES --jobs 2")
# make faults  ranks and saves killed from outside; 50 kills during saves (KILLS=50)
# make upstream  the patches for torch and TorchTitan: their tests fail without and pass with them
# make gpu-receipts  on a GPU: every figure that the docs leave open, within 34 minutes (ARGS=--quick: 10)
# make slow-link  as root: stock and ours over a real slow link (RATES="20 100" MODELS=qwen3); 20 minutes
# ARGS="--training.seq_len 512" adds Titan flags to train; PYTEST_ARGS="-k units" picks tests.
# TORCH=2.15.0 is the release to test on, in an environment of its own.
# Each sets up what it needs (.venv, data) and can be repeated. PYTHON=... picks the interpreter.

PYTHON ?= python3
TORCH :=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
RUN_FOLDER := outputs/moe_debug
STEPS := 30
NGPU := 4
ARGS :=
KILLS := 50
RATES := 20 100
MODELS := deepseek_v3
SECONDS := 600
# Three at a time on 2 cores: ranks wait for each other. A test has up to four.
PYTEST = $(BIN)/python -m pytest -n 3 --dist worksteal --durations=10
export OMP_NUM_THREADS ?= 1
# torchao 0.18 registers two enums in a way that torch warns of in each process.
export TORCH_LOGS ?= -torch.utils._pytree

.PHONY: train test test-all matrix search mutants faults upstream gpu-receipts slow-link lint setup data clean

train: data
	@exec env PYTHON=$(BIN)/python CONFIG=train_configs/moe_debug.toml RUN_FOLDER=$(RUN_FOLDER) \
		STEPS=$(STEPS) NGPU=$(NGPU) launch/train.sh $(ARGS)

test: lint data
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: lint data
	$(PYTEST) $(PYTEST_ARGS)

matrix: data
	$(BIN)/python -m tests.matrix.runner outputs/matrix $(ARGS)
	$(BIN)/python -m tests.matrix.checkpoint_runner

search: data
	$(BIN)/python -m tests.verify.search outputs/search --seconds $(SECONDS) $(ARGS)

mutants: data
	$(BIN)/python -m tests.mutants $(ARGS)

faults: data
	$(BIN)/python -m tests.faults outputs/faults --kills $(KILLS)

upstream: setup
	$(BIN)/python upstream/check.py

gpu-receipts: data
	$(BIN)/python benchmarks/gpu_receipts.py $(ARGS)

slow-link: data
	$(BIN)/python -m benchmarks.slow_link --rates $(RATES) --models $(MODELS) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/shellcheck launch/*.sh .ci/run
	$(BIN)/python -m tests.lint_text

data: setup
	@$(BIN)/python -m titan_ext.base.stdlib_corpus

setup: $(VENV)/.installed

# A stamp, so that an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("titan_ext needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo 'installing into $(VENV); where packages have to be downloaded (3.2 GB), this takes minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' $(TORCH:%=torch==%)
	@touch $@

clean:
	rm -rf $(VENV) .data outputs
