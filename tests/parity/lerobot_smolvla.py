"""Make the fixtures of SmolVLA with lerobot's own code: ``python tests/parity/lerobot_smolvla.py OUT``.

Run by hand, in an environment of its own, with lerobot 0.3.3 (``--no-deps``), transformers 4.51.3, torch 2.8 and what they import. Two
small networks with random weights, in float32, and what lerobot computes with them. Nothing is downloaded: the language model's config.json
and the processor, which lerobot takes from the Hub, are replaced by small ones.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save, save_file

ASSETS = Path(__file__).parents[2] / "assets"
STATE = {"mean": [0.1, -0.2, 0.3, 0.0, 1.0], "std": [0.5, 0.4, 0.3, 1.0, 2.0]}
ACTION = {"mean": [0.1, 0.0, -0.3, 0.2], "std": [0.6, 1.5, 0.8, 0.3]}
TASKS = ["push the red cube to the target", "pull it\n"]
SIZES: dict[str, dict[str, Any]] = {
    "smolvla_tiny": {
        "seed": 0,
        "text": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        "vision": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": 32,
        },
        "patch_size": 8,
        "scale_factor": 2,
        "policy": {
            "num_vlm_layers": 4,
            "chunk_size": 5,
            "n_action_steps": 3,
            "max_state_dim": 8,
            "max_action_dim": 6,
            "num_steps": 10,
        },
        "cameras": {
            "observation.images.front": (3, 24, 40),
            "observation.images.wrist": (3, 48, 20),
        },
    },
    "smolvla_tiny_all": {
        "seed": 1,
        "text": {
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
        "vision": {
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_attention_heads": 3,
            "num_hidden_layers": 1,
            "image_size": 64,
        },
        "patch_size": 16,
        "scale_factor": 4,
        "policy": {
            "num_vlm_layers": 3,
            "self_attn_every_n_layers": 3,
            "chunk_size": 4,
            "n_action_steps": 4,
            "max_state_dim": 7,
            "max_action_dim": 5,
            "num_steps": 4,
            "expert_width_multiplier": 0.5,
            "min_period": 1e-2,
            "max_period": 2.0,
            "pad_language_to": "max_length",
            "prefix_length": 80,
        },
        "cameras": {"observation.images.front": (3, 64, 64)},
    },
}


def small_vlm(sizes: dict[str, Any]) -> Any:
    from transformers import SmolVLMConfig

    text = sizes["text"] | {
        "model_type": "llama",
        "vocab_size": 512,
        "num_hidden_layers": 5,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 3,
    }
    vision = sizes["vision"] | {"patch_size": sizes["patch_size"]}
    settings: dict[str, Any] = {"image_token_id": 5, "pad_token_id": 3}
    return SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=sizes["scale_factor"],
        **settings,
    )


def processor() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "openvla_tiny" / "tokenizer.json"), pad_token="<pad>"
    )
    tokenizer.fake_image_token_id = 5
    tokenizer.global_image_token_id = 6
    return SimpleNamespace(tokenizer=tokenizer)


def numpy(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in tensors.items()}


def make(directory: Path, sizes: dict[str, Any]) -> None:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.smolvla import modeling_smolvla, smolvlm_with_expert
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

    vlm = small_vlm(sizes)
    smolvlm_with_expert.AutoConfig = SimpleNamespace(from_pretrained=lambda name: vlm)
    smolvlm_with_expert.AutoProcessor = modeling_smolvla.AutoProcessor = SimpleNamespace(
        from_pretrained=lambda name: processor()
    )
    size = sizes["vision"]["image_size"]
    cameras = {
        name: PolicyFeature(FeatureType.VISUAL, shape) for name, shape in sizes["cameras"].items()
    }
    config = SmolVLAConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (5,)), **cameras},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
        resize_imgs_with_padding=(size, size),
        device="cpu",
        **sizes["policy"],
    )
    statistics = {
        name: {kind: torch.tensor(numbers) for kind, numbers in given.items()}
        for name, given in {"observation.state": STATE, "action": ACTION}.items()
    }
    torch.manual_seed(sizes["seed"])
    policy = modeling_smolvla.SmolVLAPolicy(config, statistics).eval()
    generator = torch.Generator().manual_seed(sizes["seed"])
    for name, parameter in policy.named_parameters():
        if (
            parameter.ndim > 1
        ):  # larger than at the start of a training, so that every part has an effect
            scale = 1.0 if "embed" in name else 1.2 * parameter[0].numel() ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        elif not name.startswith(("normalize", "unnormalize")):
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        if not name.startswith(("normalize", "unnormalize")):
            parameter.data = parameter.data.bfloat16().float()
    images = {
        name: torch.randint(256, (2, *shape), generator=generator, dtype=torch.uint8)
        for name, shape in sizes["cameras"].items()
    }
    state = torch.randn(2, 5, generator=generator)
    shape = (2, config.chunk_size, config.max_action_dim)
    actions = torch.randn(2, config.chunk_size, 4, generator=generator)
    noise = torch.randn(shape, generator=generator)
    time = torch.tensor([0.3, 0.85])

    def batch() -> dict[str, Any]:
        return {
            "observation.state": state.clone(),
            "task": list(TASKS),
            **{name: value.float() / 255 for name, value in images.items()},
        }

    expected: dict[str, torch.Tensor] = {}
    ready = policy.normalize_inputs(batch())
    pixels, masks = policy.prepare_images(ready)
    tokens, token_mask = policy.prepare_language(ready)
    padded = policy.prepare_state(ready)
    model = policy.model
    expected |= {f"pixels_{i}": value for i, value in enumerate(pixels)}
    expected |= {"token_ids": tokens, "token_mask": token_mask, "state": padded}
    with torch.no_grad():
        embeds, mask, starts = model.embed_prefix(pixels, masks, tokens, token_mask, padded)
        joint = modeling_smolvla.make_att_2d_masks(mask, starts)
        (states, _), cache = model.vlm_with_expert.forward(
            joint, mask.cumsum(1) - 1, None, [embeds, None], use_cache=True, fill_kv_cache=True
        )
        expected |= {"prefix_embeds": embeds, "prefix_mask": mask, "prefix_states": states}
        for layer in (0, 1):
            expected |= {
                f"{kind}_{layer}": cache[layer][f"{kind}_states"] for kind in ("key", "value")
            }
        expected["suffix_embeds"] = model.embed_suffix(noise, time)[0]
        expected["velocity"] = model.denoise_step(mask, cache, noise, time)
        expected["denoised"] = model.sample_actions(
            pixels, masks, tokens, token_mask, padded, noise=noise.clone()
        )
    expected["actions"] = policy.predict_action_chunk(batch(), noise=noise.clone())
    for parameter in policy.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    loss, parts = policy.forward(batch() | {"action": actions.clone()}, noise=noise, time=time)
    expected |= {"losses": parts["losses_after_forward"], "loss": loss}
    loss.backward()
    gradients = {
        name: float(p.grad.norm())
        for name, p in policy.named_parameters()
        if p.grad is not None and float(p.grad.norm()) > 0
    }

    directory.mkdir(parents=True)
    config._save_pretrained(directory)
    document = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(document, indent=1) + "\n")
    names = (
        "model_type",
        "text_config",
        "vision_config",
        "scale_factor",
        "tie_word_embeddings",
        "image_token_id",
    )
    kept = {name: vlm.to_dict()[name] for name in names}
    for part, given in (("text_config", "text"), ("vision_config", "vision")):
        wanted = {
            *sizes[given],
            "model_type",
            "vocab_size",
            "num_hidden_layers",
            "rms_norm_eps",
            "patch_size",
        }
        kept[part] = {name: value for name, value in kept[part].items() if name in wanted}
    (directory / "vlm_config.json").write_text(json.dumps(kept, indent=1) + "\n")
    stored = {name: value for name, value in policy.state_dict().items() if "normalize" not in name}
    bits = {name: value.bfloat16().contiguous().clone() for name, value in stored.items()}
    (directory / "weights.safetensors.gz").write_bytes(gzip.compress(save(bits), mtime=0))
    save_file(
        {n: v.clone() for n, v in policy.state_dict().items() if "normalize" in n},
        directory / "statistics.safetensors",
    )
    np.savez_compressed(
        directory / "inputs.npz",
        **numpy({**images, "state": state, "actions": actions, "noise": noise, "time": time}),
    )
    np.savez_compressed(directory / "expected.npz", **numpy(expected))
    (directory / "grad_norms.json").write_text(json.dumps(gradients, indent=0) + "\n")
    print(directory, sum(value.numel() for value in stored.values()), "weights")


if __name__ == "__main__":
    for name, sizes in SIZES.items():
        make(Path(sys.argv[1]) / name, sizes)
