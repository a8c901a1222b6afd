from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_vla.config.errors import UserError
from rlinf_vla.models import flow
from rlinf_vla.models.gr00t.checkpoint import EAGLE as EAGLE_PATH
from rlinf_vla.models.gr00t.checkpoint import METADATA
from rlinf_vla.models.gr00t.network import GR00TNetwork
from rlinf_vla.models.gr00t.policy import GR00TOptions, GR00TPolicy
from rlinf_vla.testing.policy import PolicyConformance
from rlinf_vla.testing.policy_calls import act, gradients, noise, observations
from tests.models.frozen_part import assert_computed_once
from tests.models.test_smolvla import edit
from tests.models.tiny_openvla import ASSETS
from tools.tiny_checkpoints import write_gr00t

TINY = ASSETS / "gr00t_tiny"
EAGLE = {
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "image_size": 32,
    },
}
HEAD = {
    "action_dim": 6,
    "hidden_size": 20,
    "diffusion_model_cfg": {
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "num_layers": 3,
        "output_dim": 20,
    },
    "vl_self_attention_cfg": {"attention_head_dim": 8},
}


def directory(path: Path, **head: Any) -> Path:
    """A checkpoint without weights: 32-pixel images, two layers of text, a horizon of four actions of six numbers."""
    write_gr00t(path)
    edit(
        path / "config.json",
        {
            "backbone_cfg": {"select_layer": 2},
            "action_head_cfg": {"action_dim": 6, "hidden_size": 20},
        },
    )
    document = json.loads((path / "config.json").read_text())
    for name, value in (HEAD | head).items():
        node = document["action_head_cfg"]
        node[name] = node[name] | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(document))
    edit(path / "eagle_config.json", EAGLE)
    return path


def small(path: Path, **options: Any) -> GR00TPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"denoise_steps": 3, "frozen_vlm": False, "prompt_length": 56} | options
        return GR00TPolicy.load(directory(path), GR00TOptions(random_weights=True, **options))


class GR00T(PolicyConformance):
    continuous = True
    greedy_is_likeliest = False
    state_numbers = 8
    options: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture
    def policy(self, tmp_path: Path) -> GR00TPolicy:
        return small(tmp_path / "small", **self.options)

    def reload(self, policy: Any, directory: Path) -> GR00TPolicy:
        directory.mkdir()
        policy.save(directory)
        return GR00TPolicy.load(directory, replace(policy.options, random_weights=False))


class TestGR00T(GR00T):
    pass


class TestGR00TWholeChain(GR00T):
    options = {"sampler": "flow_sde_all", "value_on": "vlm", "chunk": 2}  # noqa: RUF012


class TestGR00TFlowNoise(GR00T):
    options = {"sampler": "flow_noise", "frozen_vlm": True}  # noqa: RUF012

    test_save_and_load = None  # type: ignore[assignment]  # a training checkpoint keeps the noise head; the model's own layout has no place for it


def test_the_packaged_asset_is_that_of_the_module(tmp_path: Path) -> None:
    write_gr00t(tmp_path)
    written = {
        path.relative_to(tmp_path): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert written == {
        path.relative_to(TINY): path.read_bytes() for path in TINY.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("value_on", ["expert", "vlm"])
def test_frozen_eagle_is_computed_once_and_the_action_head_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value_on: str
) -> None:
    policy = small(tmp_path / "small", frozen_vlm=True, value_on=value_on)
    assert_computed_once(policy, GR00TNetwork, "prefix", monkeypatch)
    learning = gradients(policy.backbone)
    assert all(name.startswith("action_head.") for name in learning)
    assert {
        "action_head.vlln.weight",
        "action_head.state_encoder.layer1.W",
        "action_head.model.proj_out_2.weight",
    } <= learning.keys()


def test_steering_starts_from_the_given_noise(tmp_path: Path) -> None:
    policy = small(tmp_path / "small", sampler="flow_noise")  # whose greedy steps are Euler steps
    with torch.no_grad():
        features = policy.encode(policy.prepare(observations(policy, 3)))
        greedy = policy.act(features, None, 0.0).actions
        moved = policy.act_from_noise(features, torch.ones(3, 6))
    torch.testing.assert_close(policy.act_from_noise(features, torch.zeros(3, 6)), greedy)
    assert not torch.allclose(moved, greedy, atol=1e-2)


@torch.no_grad()
def test_padding_of_the_prompt_changes_nothing(tmp_path: Path) -> None:
    short = small(tmp_path / "short", prompt_length=56)
    long = small(tmp_path / "long", prompt_length=90)
    seen = observations(short, 3)
    found = [act(policy, policy.prepare(seen)).actions for policy in (short, long)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_padding_of_actions_is_not_learnt(tmp_path: Path) -> None:
    """As officially; padding takes part in denoising, so its output must not be pulled to its target."""
    policy = small(tmp_path / "small")
    policy.supervised_loss(
        policy.prepare(observations(policy, 2)), torch.zeros(2, 4, 4), noise(torch.arange(2))
    ).mean().backward()
    bias = policy.backbone.action_head.action_decoder.layer2.b.grad
    assert bias is not None and bias[:4].all() and not bias[4:].any()


@pytest.mark.parametrize("steps", range(1, 21))
def test_times_of_steps_are_the_official_buckets(tmp_path: Path, steps: int) -> None:
    official = [int(step / float(steps) * 1000) for step in range(steps)]
    seen: list[float] = []
    network = small(tmp_path / "small").backbone
    network.action_head.model.timestep_encoder.register_forward_pre_hook(
        lambda module, given: seen.append(float(given[0]))
    )
    prefix = network.refined(
        network.prefix(
            torch.zeros(1, 1, 3, 32, 32),
            torch.zeros(1, 9, dtype=torch.int64),
            torch.arange(4),
            PRESENT,
        )
    )
    for time in flow.times(steps):
        network.velocity(prefix, torch.zeros(1, 8), torch.zeros(1, 4, 6), time.expand(1))
    assert seen == official


PRESENT = torch.ones(1, 9, dtype=torch.bool)


def test_an_instruction_may_be_written_as_a_list(tmp_path: Path) -> None:
    plain = small(tmp_path / "plain")
    listed = small(tmp_path / "listed", instruction_as_list=True)
    assert listed.ids("push it") == plain.ids("['push it']") != plain.ids("push it")


def metadata(path: Path, **tags: Any) -> None:
    target = path / METADATA
    target.write_text(json.dumps(json.loads(target.read_text()) | tags))


def test_parts_of_state_and_actions_are_joined_in_the_given_order(tmp_path: Path) -> None:
    path = directory(tmp_path / "small")
    parts = {
        "arm": {"min": [0.0, 0.0], "max": [2.0, 4.0]},
        "hand": {"min": [0.0], "max": [1.0]},
        "foot": {"min": [5.0], "max": [5.0]},
    }
    metadata(path, gr1={"statistics": {"state": parts, "action": parts}})
    options = GR00TOptions(
        random_weights=True, embodiment="gr1", state=["hand", "arm", "foot"], actions=["arm"]
    )
    policy = GR00TPolicy.load(path, options)
    assert (policy.spec.state_dim, policy.spec.action_dim, policy.projector) == (4, 2, 24)
    found = policy.state_normalizer(torch.tensor([1.0, 1.0, 1.0, 7.0]))
    assert found.tolist() == [1.0, 0.0, -0.5, 0.0], "a constant part is 0"
    assert policy.state_normalizer.inverse(found).tolist() == [1.0, 1.0, 1.0, 5.0]


def test_quantiles_are_clamped_and_leave_constants_alone(tmp_path: Path) -> None:
    path = directory(tmp_path / "small")
    parts = {"arm": {"q01": [0.0, 3.0], "q99": [2.0, 3.0]}}
    metadata(path, gr1={"statistics": {"state": parts, "action": parts}})
    policy = GR00TPolicy.load(
        path, GR00TOptions(random_weights=True, embodiment="gr1", normalization="q99")
    )
    assert policy.state_normalizer(torch.tensor([[5.0, 0.5], [1.0, 3.0]])).tolist() == [
        [1.0, 0.5],
        [0.0, 1.0],
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"embodiment": "gr1"},
            "model.options.embodiment gr1 has no statistics: .*metadata.json has new_embodiment, mine, choose",
        ),
        ({}, "model.options.embodiment is not given: .*metadata.json has new_embodiment, mine"),
        (
            {"embodiment": "mine"},
            "model.options.projector: the index of mine's projectors is not known",
        ),
        (
            {"embodiment": "mine", "projector": 32},
            "model.options.projector=32: the checkpoint has projectors 0 to 31",
        ),
        (
            {"embodiment": "mine", "projector": 1, "actions": ["leg"]},
            "model.options.actions: mine has no action leg, but arm",
        ),
        (
            {"embodiment": "mine", "projector": 1},
            "model.options.state: .* has 9 numbers, the model takes 8: name fewer",
        ),
    ],
)
def test_embodiments_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = directory(tmp_path / "small")
    wide = {"min": [0.0] * 9, "max": [1.0] * 9}
    few = {"min": [0.0], "max": [1.0]}
    metadata(path, mine={"statistics": {"state": {"arm": wide}, "action": {"arm": few}}})
    with pytest.raises(UserError, match=words) as caught:
        GR00TPolicy.load(path, GR00TOptions(random_weights=True, **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "config", "words"),
    [
        (
            "",
            {"model_type": "Gr00tN1d7"},
            "model_type is 'Gr00tN1d7', only 'gr00t_n1_5' is supported",
        ),
        (
            "",
            {"model_type": "gr00t_n1"},
            "model_type is 'gr00t_n1', only 'gr00t_n1_5' is supported",
        ),
        (
            "backbone_cfg",
            {"reproject_vision": True},
            "backbone_cfg.reproject_vision=true is not supported, false is",
        ),
        (
            "backbone_cfg",
            {"select_layer": 9},
            "backbone_cfg.select_layer=9, the language model has 4 layers",
        ),
        (
            "action_head_cfg",
            {"use_vlln": False},
            "action_head_cfg.use_vlln=false is not supported, true is",
        ),
        (
            "action_head_cfg",
            {"noise_s": 0.5},
            "action_head_cfg.noise_s=0.5 is not supported, 0.999 is",
        ),
        ("action_head_cfg", {"action_horizon": 0}, "action_horizon=0 is not valid"),
        (
            "action_head_cfg",
            {"vl_self_attention_cfg": {"positional_embeddings": "sinusoidal"}},
            'positional_embeddings="sinusoidal" is not supported, null is',
        ),
        (
            "action_head_cfg",
            {"diffusion_model_cfg": {"norm_type": "layer_norm"}},
            'norm_type="layer_norm" is not supported, "ada_norm" is',
        ),
    ],
)
def test_other_config_files_are_refused_in_one_line(
    tmp_path: Path, place: str, config: dict[str, Any], words: str
) -> None:
    path = directory(tmp_path / "small")
    document = json.loads((path / "config.json").read_text())
    node = document[place] if place else document
    for name, value in config.items():
        node[name] = node[name] | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match=words) as caught:
        GR00TPolicy.load(path, GR00TOptions(random_weights=True))
    assert "\n" not in str(caught.value)


def test_sizes_of_an_unknown_eagle_are_asked_for(tmp_path: Path) -> None:
    path = directory(tmp_path / "small")
    (path / "eagle_config.json").unlink()
    with pytest.raises(
        UserError,
        match=r"eagle_path 'tiny' is not known: copy that model's config.json .* as eagle_config.json",
    ):
        GR00TPolicy.load(path, GR00TOptions(random_weights=True))


def test_embeddings_stored_as_the_tied_output_layer_are_read(tmp_path: Path) -> None:
    """safetensors keep one of two tied tensors; files with both get both again."""
    policy = small(tmp_path / "small")
    saved, again = tmp_path / "saved", tmp_path / "again"
    for path in (saved, again):
        path.mkdir()
    policy.save(saved, torch.float32)
    state = load_file(saved / "model.safetensors")
    embedding, head = (
        f"backbone.eagle_model.language_model.{name}.weight"
        for name in ("model.embed_tokens", "lm_head")
    )
    for left in ({head}, {head, embedding}):
        stored = {name: value for name, value in state.items() if name != embedding}
        save_file(
            stored | {name: state[embedding].clone() for name in left}, saved / "model.safetensors"
        )
        loaded = GR00TPolicy.load(saved, replace(policy.options, random_weights=False))
        inputs = policy.prepare(observations(policy, 2))
        assert torch.equal(act(loaded, inputs).actions, act(policy, inputs).actions)
        loaded.save(again, torch.float32)
        assert load_file(again / "model.safetensors").keys() == state.keys() | {head}


def test_training_leaves_other_embodiments_alone(tmp_path: Path) -> None:
    policy = small(tmp_path / "small")
    saved, again = tmp_path / "saved", tmp_path / "again"
    for path in (saved, again):
        path.mkdir()
    policy.save(saved, torch.float32)
    trained = GR00TPolicy.load(saved, replace(policy.options, random_weights=False, projector=3))
    with torch.no_grad():
        trained.backbone.action_head.state_encoder.layer1.b += 1
    trained.save(again, torch.float32)
    name = "action_head.state_encoder.layer1.b"
    change = (
        load_file(again / "model.safetensors")[name] - load_file(saved / "model.safetensors")[name]
    )
    assert (
        change.shape[0] == 32 and (change[3] == 1).all() and not change[torch.arange(32) != 3].any()
    )


def test_the_published_sizes_have_the_published_number_of_weights(tmp_path: Path) -> None:
    """Those of nvidia/GR00T-N1.5-3B as others quote its config.json; it was not seen here. The counts
    are those that logs of its fine-tuning report."""
    path = tmp_path / "full"
    write_gr00t(path)
    (path / "eagle_config.json").unlink()
    head = {
        "action_dim": 32,
        "action_horizon": 16,
        "max_state_dim": 64,
        "max_seq_len": 1024,
        "num_target_vision_tokens": 32,
    }
    head |= {
        "hidden_size": 1024,
        "diffusion_model_cfg": {
            "attention_head_dim": 48,
            "num_attention_heads": 32,
            "num_layers": 16,
        },
    }
    head |= {
        "vl_self_attention_cfg": {
            "attention_head_dim": 64,
            "num_attention_heads": 32,
            "num_layers": 4,
        }
    }
    document = json.loads((path / "config.json").read_text())
    for name, value in head.items():
        node = document["action_head_cfg"]
        node[name] = node[name] | value if isinstance(value, dict) else value
    document["backbone_cfg"] |= {"eagle_path": EAGLE_PATH, "select_layer": 12}
    (path / "config.json").write_text(json.dumps(document))
    policy = GR00TPolicy.without_weights(path, GR00TOptions())
    counts = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in policy.backbone.action_head.named_children()
    }
    assert (counts["model"], counts["vl_self_attention"]) == (550_386_688, 201_433_088), (
        "as NVIDIA's code logs them"
    )
    projectors = sum(counts[name] for name in ("state_encoder", "action_encoder", "action_decoder"))
    backbone = sum(p.numel() for p in policy.backbone.backbone.parameters())
    assert sum(counts.values()) + 31 * projectors == 1_068_806_144, "officially trained"
    unused = 151_680 * 2048 + 15_238_352  # the output layer, and SigLIP's pooling head
    assert sum(counts.values()) + 31 * projectors + backbone + unused == 2_724_163_520
