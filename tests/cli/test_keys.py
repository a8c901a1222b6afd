"""Every key of a recipe is read by some code: recorded while commands run, by class, without its declaration and checks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rlinf_vla.algorithms.hg_dagger import HGDAggerConfig
from rlinf_vla.algorithms.recap import LabelledDemonstrationConfig
from rlinf_vla.config.cluster import ClusterConfig, RobotRoleConfig, RoleConfig, RolesConfig
from rlinf_vla.config.policy_server import BackboneConfig
from rlinf_vla.config.recipe import DeadlineConfig, PresetConfig, Recipe
from rlinf_vla.config.robot import ControlConfig, SessionConfig
from rlinf_vla.config.serve import ServeConfig
from rlinf_vla.core import plugins
from rlinf_vla.core.types import Observation
from rlinf_vla.runtime import recipes
from rlinf_vla.runtime.recipes import Configs
from rlinf_vla.testing.toy_policy import LinearOptions, LinearPolicy
from tests.cli.conftest import CommandLine, Counting
from tests.features.planner.made_up import profile

pytestmark = pytest.mark.machine  # a run on Ray looks for its server

ROOT = Path(__file__).parents[2]
Key = tuple[type, str]
"""A dataclass, and the name of one of its fields."""


def declared(node: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Every key from ``node`` on, nested nodes and their keys included."""
    for each in fields(node):
        yield prefix + each.name, (node, each.name)
        if isinstance(each.default_factory, type) and is_dataclass(each.default_factory):
            yield from declared(each.default_factory, f"{prefix}{each.name}.")


def unread(keys: dict[str, Key], seen: set[Key]) -> list[str]:
    return sorted(path for path, key in keys.items() if key not in seen)


def watch(
    nodes: set[type],
    seen: set[Key],
    counts: Callable[[type, FrameType], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From now on, ``seen`` records each attribute of an instance that a frame reads for which ``counts`` is true."""
    for node in nodes:
        names = {each.name for each in fields(node)}

        def recording(self: Any, name: str, node: type = node, names: set[str] = names) -> Any:
            if name in names and counts(node, sys._getframe(1)):
                seen.add((node, name))
            return object.__getattribute__(self, name)

        monkeypatch.setattr(node, "__getattribute__", recording)


def by_the_package(node: type, frame: FrameType) -> bool:
    """Not by the schema's own checks (a preset has no other reader), and not where a dataclass only compares or shows itself."""
    module = frame.f_globals.get("__name__", "")
    if module.startswith(("rlinf_vla.config", recipes.__name__)):
        return node is PresetConfig
    return module.startswith("rlinf_vla.") and frame.f_code.co_name not in ("__eq__", "__repr__")


def said(paths: Iterator[Path], receivers: set[str]) -> set[str]:
    """Attributes and items of what is called one of ``receivers`` that some source reads: ``config.task``, ``self._options["task"]``."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.Attribute, ast.Subscript)) or not isinstance(
                node.ctx, ast.Load
            ):
                continue
            receiver = (
                node.value.id
                if isinstance(node.value, ast.Name)
                else getattr(node.value, "attr", None)
            )
            key = (
                node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
            )
            if receiver in receivers and isinstance(key, str):
                found.add(key)
    return found


# tests of the checks


@dataclass
class Inner:
    used: int = 1
    unused: int = 2


@dataclass
class Odd:
    used: int = 1
    unused: int = 2
    compared: int = 3
    inner: Inner = field(default_factory=Inner)


def test_an_unread_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = dict(declared(Odd))
    seen = set[Key]()
    assert list(keys) == ["used", "unused", "compared", "inner", "inner.used", "inner.unused"]
    watch({Odd, Inner}, seen, lambda node, frame: frame.f_code.co_name == "reader", monkeypatch)
    odd = Odd(compared=4)

    def reader() -> int:
        return odd.used + odd.inner.used

    assert reader() == 2 and odd.compared == 4 and odd == Odd(compared=4), (
        "the last two do not count"
    )
    assert unread(keys, seen) == ["compared", "inner.unused", "unused"]


def test_a_key_that_no_source_reads_is_found(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "config.told = 1\nprint(config.read, self.config.deep, other.foreign, 'config.quoted')\n"
    )
    assert said(iter([source]), {"config"}) == {"read", "deep"}


def test_every_key_is_checked() -> None:
    paths = [path for path, _ in declared(Recipe)] + [
        f"algorithm.{path}" for node in Configs("algorithm").values() for path, _ in declared(node)
    ]
    paths += [f"env.{path}" for env in plugins.envs().values() for path, _ in declared(env.Config)]
    paths += [
        f"robot.{path}" for robot in plugins.robots().values() for path, _ in declared(robot.Config)
    ]
    paths += [
        f"reward.options.{path}"
        for reward in plugins.rewards().values()
        for path, _ in declared(reward.Config)
    ]
    paths += [
        f"model.options.{path}"
        for model in plugins.models().values()
        for path, _ in declared(model.Config)
    ]
    assert sorted(set(paths)) == recipes.keys()


# the keys


@pytest.mark.slow
def test_the_engine_reads_its_keys(
    rlinf_vla: CommandLine, counting: Counting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = dict(declared(Recipe))
    for name, node in Configs("algorithm").items():
        keys |= {f"algorithm={name} {path}": key for path, key in declared(node)}
    seen: set[Key] = set()
    watch({node for node, _ in keys.values()}, seen, by_the_package, monkeypatch)

    def run(verb: str, name: str, *overrides: str) -> None:
        found = rlinf_vla(*counting.arguments(verb, name, *overrides))
        assert found.code == 0, found.out + found.err

    single = LinearPolicy(LinearOptions(chunk=1))
    single.save(tmp_path / "single")
    limited = ["env.tool_m=0.1", "rollout.limits.translation=2.0", "algorithm.cost_limit=1"]
    everything = [
        *limited,
        "algorithm.decoupled=true",
        "algorithm.kl_coef=0.1",
        "algorithm.sft_coef=0.1",
        "algorithm.demonstrations.episodes=2",
    ]
    run("train", "counting_ppo", "run_dir=ppo", "episodes=2", "evaluation.every=1", *everything)
    run(
        "train",
        "counting_grpo",
        "run_dir=grpo",
        "episodes=2",
        "iterations=1",
        "reward=success",
        *everything,
    )
    run(
        "train",
        "counting_sac",
        "run_dir=sac",
        "iterations=1",
        "algorithm.demonstrations=2",
        "algorithm.sft_coef=0.1",
        *limited,
        f"model.checkpoint={tmp_path}/single",
    )
    run("train", "counting_sft", "run_dir=sft", "iterations=1", "evaluation.before_and_after=false")
    run("train", "counting_dagger", "run_dir=dagger", "iterations=1", "episodes=2")
    run("train", "counting_classifier", "run_dir=classifier", "iterations=1")
    run(
        "record",
        "counting_sft",
        "output=dataset",
        "record.failures=true",
        "record.video=false",
        "algorithm.demonstrations.noise=[3.0]",
    )
    run(
        "train",
        "counting_sac",
        "run_dir=rlpd",
        "iterations=1",
        "algorithm.dataset=dataset",
        f"model.checkpoint={tmp_path}/single",
    )
    run(
        "train",
        "counting_cal_ql",
        "run_dir=cal_ql",
        "iterations=3",
        "algorithm.dataset=dataset",
        *limited,
        f"model.checkpoint={tmp_path}/single",
    )
    of_dataset = "algorithm.demonstrations.dataset=dataset"
    run(
        "train",
        "counting_sft",
        "run_dir=shown",
        "iterations=1",
        "evaluation.before_and_after=false",
        of_dataset,
    )
    LinearPolicy(LinearOptions(chunk=2, reads=True)).save(tmp_path / "reader")
    reader = f"model.checkpoint={tmp_path}/reader"
    short = ("iterations=1", "model.lora.rank=0", reader)
    text = (counting.folder / "recipe" / "counting_sft.yaml").read_text()
    for name in ("value", "recap"):
        recipe = text.partition("algorithm:\n")[0].replace("/algorithm: sft", f"/algorithm: {name}")
        (counting.folder / "recipe" / f"counting_{name}.yaml").write_text(recipe)
    run("train", "counting_value", "run_dir=value", of_dataset, *short)
    assert rlinf_vla("label", "dataset", "value=value/value", "output=labelled").code == 0
    labelled = "algorithm.demonstrations.dataset=labelled"
    unplayed = "evaluation.before_and_after=false"
    run("train", "counting_recap", "run_dir=recap", labelled, unplayed, *short)
    run("eval", "counting_ppo", "checkpoint=ppo/checkpoints/step_000002", "episodes=2")
    run("eval", "counting_eval", "episodes=2")
    assert rlinf_vla(*counting.arguments("train", "counting_eval")).code == 2, "it trains nothing"
    run("plan", "counting_ppo")
    run(
        "export",
        "counting_ppo",
        "checkpoint=ppo/checkpoints/step_000002",
        "output=exported",
        "output_dtype=float32",
    )
    profile(chunk=2, episode_limit=6).write(tmp_path / "known.json")
    run(
        "train",
        "counting_ppo",
        "run_dir=foreseen",
        "iterations=2",
        "evaluation.before_and_after=false",
        "profile=known.json",
    )
    there = [
        "cluster.runtime=ray",
        "cluster.address=127.0.0.1:1",
        "rollout.split=head",
        "algorithm.kl_coef=0.1",
        "reward=success",
    ]
    assert (
        rlinf_vla(*counting.arguments("train", "counting_ppo", "run_dir=ray", *there)).code == 2
    ), "no server is at this address"
    # two keys are needed before the recipe is composed: the directory, and whether to resume
    seen |= {
        (Recipe, name)
        for name in said(iter([ROOT / "rlinf_vla" / "runtime" / "run_directory.py"]), {"config"})
    }
    # robots are driven in real time
    realworld = ROOT / "features" / "realworld"
    loop = iter([ROOT / "rlinf_vla" / "config" / "robot.py", realworld / "control_loop.py"])
    seen |= {(ControlConfig, name) for name in said(loop, {"config", "_config"})}
    seen |= {
        (Recipe, name) for name in said(iter([ROOT / "benchmarks" / "control.py"]), {"recipe"})
    }
    beside = [realworld / f"{name}.py" for name in ("cell", "player", "runtime")]
    seen |= {
        (SessionConfig, name) for name in said(iter(beside), {"settings", "session", "_settings"})
    }
    seen |= {(Recipe, name) for name in said(iter(beside), {"recipe"})}
    # an operator corrects the policy there, and delays need chunks that move a tool
    dagger = (
        ROOT / "rlinf_vla" / "algorithms" / name for name in ("hg_dagger.py", "sft.py", "base.py")
    )
    seen |= {
        (HGDAggerConfig, name)
        for name in said(dagger, {"config"}) | {"name", "weight_decay", "adam_beta2"}
    }  # which are read as any algorithm's
    seen |= {
        (DeadlineConfig, name)
        for name in said(iter([ROOT / "rlinf_vla" / "rollout" / "deadline.py"]), {"config"})
    }
    serving = [
        ROOT / "rlinf_vla" / "config" / "serve.py",
        *(ROOT / "features" / "serving").glob("*.py"),
    ]
    seen |= {(ServeConfig, name) for name in said(iter(serving), {"config", "serve"})}
    # the run on Ray ended before it started a worker
    workers = ROOT / "rlinf_vla" / "runtime" / "ray"
    flow = ROOT / "rlinf_vla" / "runtime" / "on_policy.py"
    seen |= {
        (ClusterConfig, name) for name in said(iter([flow, *workers.glob("*.py")]), {"cluster"})
    }
    of_role = said(iter([workers / "places.py"]), {"self", "role"})
    seen |= {(node, name) for node in (RoleConfig, RobotRoleConfig) for name in of_role}
    on_ray = realworld / "ray_link.py"
    seen |= {(RolesConfig, name) for name in said(iter([on_ray]), {"roles"})}
    seen |= {(RobotRoleConfig, name) for name in said(iter([on_ray]), {"own"})}
    # recap has datasets, for which the keys of the scripted expert are said to be ignored
    expert = ("noise", "random_actions", "detour")
    seen |= {(LabelledDemonstrationConfig, name) for name in expert}
    # a server runs until a signal comes
    seen.add((Recipe, "serve"))
    # a head needs such a server
    seen |= {(BackboneConfig, name) for name in of_an_address()}
    seen.add((Recipe, "preset"))  # read only by the schema's check, as all of its keys
    left = unread(keys, seen)
    assert not left, left


def of_an_address() -> set[str]:
    """The keys of a policy server's address that the client reads."""
    files = (
        ROOT / "features" / "serving" / "policy_server.py",
        ROOT / "rlinf_vla" / "config" / "policy_server.py",
    )
    return said(iter(files), {"server", "self"})


ASSETS = {
    "compact": "compact",
    "openvla": "openvla_tiny",
    "openvla_oft": "openvla_oft_plus_tiny",
    "pi0": "pi0_tiny",
} | {
    "smolvla": "smolvla_tiny",
    "gr00t": "gr00t_tiny",
}


def test_a_policy_on_a_server_reads_its_options() -> None:
    """From its sources: there is no server here."""
    config = plugins.models()["remote"].Config
    found = (
        said((ROOT / "models" / "remote").glob("*.py"), {"options", "config", "self"})
        | of_an_address()
    )
    assert unread(dict(declared(config)), {(config, each) for each in found}) == []


def siblings(path: Path) -> Iterator[Path]:
    """Modules of other plug-ins that ``path`` imports: ``from ..genesis.batch import``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
            module = path.parents[1].joinpath(*node.module.split(".")).with_suffix(".py")
            if module.is_file():
                yield module


@pytest.mark.parametrize("name", ASSETS)
def test_a_model_reads_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plugins.models()[name]
    seen: set[Key] = set()
    watch({model.Config}, seen, by_the_package, monkeypatch)
    policy = model.load(
        recipes.asset_path(f"asset://{ASSETS[name]}"), model.Config(random_weights=True)
    )
    images = {
        image: torch.zeros(1, *size, 3, dtype=torch.uint8)
        for image, size in policy.spec.images.items()
    }
    inputs = policy.prepare(Observation(images, torch.zeros(1, 8), ["push the cube"]))
    policy.act(policy.encode(inputs), None, 0.0)
    assert unread(dict(declared(model.Config)), seen) == []


@pytest.mark.parametrize("name", list(plugins.envs()))
def test_a_simulator_reads_its_options(name: str) -> None:
    """Without starting one, from its sources. The engine selects it by ``name``."""
    config = plugins.envs()[name].Config
    _, folder, package, *_ = config.__module__.split(".")
    own = set((ROOT / folder).glob(f"{package}*/*.py"))
    paths = (
        own | set((ROOT / folder).glob("*.py")) | {path for each in own for path in siblings(each)}
    )
    receivers = {
        "config",
        "options",
        "_options",
    }  # the arguments of its processes are made from the config
    found = said(iter(paths), receivers)
    assert unread(dict(declared(config)), {(config, each) for each in found | {"name"}}) == []


@pytest.mark.parametrize("name", list(plugins.rewards()))
def test_a_reward_reads_its_options(name: str) -> None:
    plugin = plugins.rewards()[name]
    config = plugin.Config
    source = Path(str(sys.modules[type(plugin).__module__].__file__))
    found = said(source.parent.glob(f"*{source.name}"), {"config", "options"})
    assert unread(dict(declared(config)), {(config, each) for each in found}) == []


@pytest.mark.parametrize("name", list(plugins.robots()))
def test_a_robot_reads_its_options(name: str) -> None:
    """Without a robot, from its sources."""
    config = plugins.robots()[name].Config
    found = said((ROOT / "robots").glob("**/*.py"), {"config", "options"})
    assert unread(dict(declared(config)), {(config, each) for each in found | {"name"}}) == []
