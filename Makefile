# Everything a person or CI does here. Each target sets up what it needs by itself.
PYTHON ?= python3.11
BIN := .venv/bin
NODE := .venv-node/bin
# The node environment: with an NVIDIA GPU the CUDA build of vLLM, else its CPU build.
NODE_EXTRA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo node || echo node-cpu)
BENCHES := $(patsubst benchmarks/%.py,bench-%,$(filter-out benchmarks/__init__.py,$(wildcard benchmarks/*.py)))

LOCKS := tasks/sky/locks

# Containers often set it. Here hundreds of processes would compile the same modules, and pytest rewrite the same tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: image image-folder check-gpu lock sandbox buildah compiler demo wheel test test-all test-long test-node soak check bench record env node-env openenv-env system-packages pages docs test-packages haproxy sky-image clean $(BENCHES)

env: .venv/.ready
node-env: .venv-node/.ready
openenv-env: .venv-openenv/.ready

# The controller's environment: no torch, about 1 GB with SkyPilot and the developers' tools.
.venv/.ready: pyproject.toml $(LOCKS)/controller.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint $(LOCKS)/controller.txt --editable '.[dev]'
	touch $@

# The nodes' environment: torch, TRL and vLLM, about 4 GB, as `grpo-orch node-env` makes it for an installed wheel.
.venv-node/.ready: pyproject.toml $(LOCKS)/$(NODE_EXTRA).txt | system-packages
	$(PYTHON) -m grpo_orch.orchestrator.node_installer .venv-node $(NODE_EXTRA),deepspeed,tensorboard,test
	touch $@

# OpenEnv's harness, which a test trains: it does not install next to vLLM. 0.5 GB.
.venv-openenv/.ready:
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/pip install --quiet 'openenv==0.10.*' msgspec psutil
	touch $@

# The site's generator alone, without the project. 0.2 GB.
.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# What each environment consists of, to the last package: what is written stays as far as pyproject.toml lets it, and
# `make lock UPGRADE=--upgrade` takes the newest. The nodes' hold what `setup` of run.yaml may add, too; the controller's
# the clouds' libraries, but for Azure's, which need older versions. Of torch's CPU build the plain version is written: where it is found is the installer's affair.
UV := build/uv/bin/uv
COMPILE = $(UV) pip compile --quiet $(UPGRADE) --python-version 3.11 --no-header --no-annotate
NODE_LOCK = $(COMPILE) --python-platform x86_64-manylinux_2_28 pyproject.toml \
	$(addprefix --extra ,test bnb deepspeed liger math tensorboard wandb) --no-emit-package setuptools
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install --quiet uv
	echo 'skypilot[aws,gcp,kubernetes,slurm]' | $(COMPILE) --universal pyproject.toml --extra dev - \
		--no-emit-package pip --no-emit-package setuptools --no-emit-package wheel --output-file $(LOCKS)/controller.txt
	$(NODE_LOCK) --extra node --output-file $(LOCKS)/node.txt
	$(NODE_LOCK) --extra node-cpu --output-file $(LOCKS)/node-cpu.txt \
		$(addprefix --no-emit-package ,torchaudio torchcodec torchvision) \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu)
	sed -i 's/+cpu$$//' $(LOCKS)/node-cpu.txt

# A container with the nodes' environment (docs/spot-machines.md): for machines with GPUs, or IMAGE_FOR=node-cpu. Podman
# and buildah take the same file: DOCKER=podman.
DOCKER ?= docker
IMAGE_FOR ?= node
IMAGE ?= grpo-orch-$(IMAGE_FOR)
image: image-folder
	@$(DOCKER) version >/dev/null 2>&1 || { echo 'make image: no $(DOCKER) answers here; start its daemon, or name another program as DOCKER=podman' >&2; exit 1; }
	$(DOCKER) build --build-arg ENVIRONMENT=$(IMAGE_FOR) --tag $(IMAGE) build/image

# What the container is built from, and what SkyPilot's recipe for a virtual machine's image needs.
image-folder: env
	rm -rf build/image
	mkdir -p build/image
	cp tasks/sky/setup.sh $(wildcard tasks/sky/image/*) build/image
	$(BIN)/python -c 'from pathlib import Path; from grpo_orch.orchestrator.clouds.wheel import build_wheel; build_wheel(Path("build/image/wheels"))'

# vLLM's CPU build is linked against libnuma.
system-packages:
	@ldconfig -p | grep -q 'libnuma\.so\.1' || \
		{ echo 'libnuma1 is missing: installing it with apt-get'; apt-get update -q && apt-get install -yq libnuma1; }

# A real S3 store for the tests: Ceph's daemons, 64 packages of 269 MB, nothing of which starts by itself; what makes
# and reaches the machines that SkyPilot is tested on; Chromium, 400 MB, for the run page; and two shells. Where they
# cannot be installed, their tests are skipped, and fail where CI is set.
test-packages: | system-packages # apt works for one at a time
	@which ceph-mon ceph-osd radosgw radosgw-admin >/dev/null || \
		{ echo 'Ceph is missing: installing it with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends ceph-mon ceph-osd radosgw; } || \
		echo 'Ceph could not be installed: its tests will not run'
	@which debootstrap ip nc rsync ssh unshare >/dev/null || \
		{ echo 'Programs of the rig for SkyPilot are missing: installing them with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends \
			debootstrap iproute2 netcat-openbsd openssh-client rsync util-linux; } || \
		echo 'They could not be installed: the tests of SkyPilot will not run'
	@which chromium chromedriver >/dev/null || \
		{ echo 'Chromium is missing: installing it with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends chromium chromium-driver; } || \
		echo 'It could not be installed: the run page will not be tested in a browser'

# Builds the Dockerfile of `make image` without a daemon.
buildah:
	@which buildah >/dev/null || \
		{ echo 'buildah is missing: installing it with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends buildah; } || \
		echo 'It could not be installed: the Dockerfile is not tested'

# What the rewards' tests run programs in.
sandbox:
	@which bwrap >/dev/null || \
		{ echo 'bubblewrap is missing: installing it with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends bubblewrap; } || \
		echo 'It could not be installed: nothing is tested of code_tests'

# What the machines of the rig for SkyPilot start from: made by the first test that needs it, or here.
sky-image: env test-packages
	$(BIN)/python -m tests.rigs.sky.image build

demo: env node-env
	$(BIN)/grpo-orch demo build/demo

# The project as one file for `pip install`. What setuptools leaves in build/lib would come into the next wheel, too.
wheel:
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# What a person runs after a change, in two processes more than there are cores, for half of their time tests wait: for
# processes that start or end, for servers, for clocks. What shares one server shares a process (tests/conftest.py). The
# markers: pyproject.toml. Of the whole runs two files run in parallel: each takes more than one core, most of it for the
# imports of torch and vLLM. A test that hangs prints a traceback and fails before CI kills the job; the longest takes
# eight minutes. The process of such a test is not replaced: xdist was seen to wait forever after that.
PYTEST := python -m pytest --durations=12 -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true \
	--max-worker-restart=0
LONG := slow or ceph or root
SIDE_BY_SIDE := $(BIN)/$(PYTEST) tests --numprocesses $$(($$(nproc) + 2)) --dist loadgroup
BY_FILE := --dist loadfile --no-loadscope-reorder# in the order of tests/conftest.py
WHOLE_RUNS := $(BIN)/$(PYTEST) tests/e2e --numprocesses 2 $(BY_FILE)

test: env node-env sandbox
	$(SIDE_BY_SIDE) -m 'not (whole or soak or $(LONG))'
	$(WHOLE_RUNS) -m 'whole and not ($(LONG))'

# Everything but the soak.
test-all: test test-long

# What `make test` leaves out.
test-long: test-node env node-env openenv-env test-packages
	$(SIDE_BY_SIDE) -m '($(LONG)) and not (whole or soak)'
	$(WHOLE_RUNS) -m 'whole and ($(LONG))'

test-node: node-env compiler sandbox
	$(NODE)/$(PYTEST) tests/node --numprocesses $$(($$(nproc) + 1)) $(BY_FILE)

# DeepSpeed compiles some of its modules when they are first used.
compiler:
	@which g++ >/dev/null && test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
		{ echo 'g++ or the headers of Python are missing: installing them with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends g++ python3.11-dev; }

# Any process, at any moment; KILLS=n how many, SEED=n to repeat one, SEEDS=n to try that many.
soak: env node-env test-packages buildah
	$(BIN)/python -m pytest -s tests -m soak

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --package docs
	$(BIN)/mypy examples/tiny/pictures.py examples/twins/make.py
	PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports

# The pages of docs/ that are made from the code.
pages: env
	$(BIN)/python -m docs.generate

# The documentation site, in build/site. A broken link or anchor, and a page that the navigation lacks, are errors.
# Files outside docs/ are linked in the repository that this is a clone of.
REPO_URL ?= $(shell git remote get-url origin 2>/dev/null | \
	sed -nE 's,\.git$$,,; s,^(ssh://)?(git@|https://)([^@/]*@)?([^:/]+)[:/],https://\4/,p')
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 REPO_URL=$(REPO_URL) .venv-docs/bin/mkdocs build --strict

bench: $(BENCHES)

# What `make bench-gateway` measures beside our gateway; where it cannot be installed, the benchmark says so.
bench-gateway: | haproxy
haproxy:
	@which haproxy >/dev/null || \
		{ echo 'HAProxy is missing: installing it with apt-get'; apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends haproxy; } || \
		echo 'It could not be installed: the benchmark will not have it'

$(BENCHES): bench-%: env node-env
	$(BIN)/python -m benchmarks.$*

bench-sky bench-web: test-packages

bench-recipes bench-rewards: | sandbox

# Records anew the runs of real GRPO training that detectors are judged by, into RECORDINGS: an hour on two busy cores.
RECORDINGS ?= build/recorded
record: node-env
	$(NODE)/python -m benchmarks.recordings.record --out $(RECORDINGS)

# Whether this machine's GPUs do what a run asks of them, in minutes: docs/gpu-report.md. An environment of your own, with
# torch, transformers and this project's base requirements at least: GPU_PYTHON=python3. Without a GPU: CHECK=--cpu.
check-gpu: $(if $(GPU_PYTHON),,node-env)
	@$(or $(GPU_PYTHON),$(NODE)/python) -m benchmarks.check_gpu $(CHECK)

clean:
	rm -rf .venv .venv-node .venv-openenv .venv-docs build dist *.egg-info examples/tiny/build
