"""Make the fixtures of GR00T N1.5 with lerobot's copy of NVIDIA's code: ``python tests/parity/lerobot_gr00t.py OUT``.

Run by hand, in an environment of its own, with lerobot 0.4.4 (``--no-deps``), transformers 4.57.6, diffusers 0.35.2, torch 2.8 and what
they import. Two small networks with random weights, in float32, and what that code computes with them, one row at a time, without padding.
Nothing is downloaded: Eagle's config.json and tokenizer, which lerobot takes from the Hub, are replaced by small ones, and the chat
template is that of a later Eagle (transformers' test of LocateAnything). Attention is SDPA, where Eagle asks for FlashAttention.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save

ASSETS = Path(__file__).parents[2] / "assets"
STATE = {
    "min": [-0.5, -1.0, 0.2, 0.0, -2.0],
    "max": [0.5, 1.5, 0.2, 1.0, 3.0],
}  # the third is constant
ACTION = {"min": [-0.6, -1.5, -0.8, 0.0], "max": [0.4, 1.5, 0.8, 1.0]}
TASKS = ["push the red cube to the target", "pull it"]
PROJECTOR = 2
TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}{% set count.value = count.value + 1 %}"
    "<image-{{ count.value }}>{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 488,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
}
SIZES: dict[str, dict[str, Any]] = {
    "gr00t_tiny": {
        "seed": 0,
        "cameras": 2,
        "eagle": {
            "text_config": {
                "hidden_size": 24,
                "intermediate_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
            }
            | {"rope_theta": 1e6},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
            }
            | {"image_size": 24, "patch_size": 8},
            "use_pixel_shuffle": False,
            "downsample_ratio": 0.5,
            "mlp_connector_layers": 1,
        },
        "select_layer": 3,
        "dit": {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 4,
            "interleave_self_attention": True,
        },
        "vl": {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 1},
        "head": {
            "hidden_size": 12,
            "action_dim": 6,
            "action_horizon": 5,
            "max_state_dim": 8,
            "num_target_vision_tokens": 3,
        }
        | {"num_inference_timesteps": 4},
    },
    "gr00t_tiny_shuffle": {
        "seed": 1,
        "cameras": 1,
        "eagle": {
            "text_config": {
                "hidden_size": 16,
                "intermediate_size": 40,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 12,
            }
            | {"rope_theta": 1e4},
            "vision_config": {
                "hidden_size": 12,
                "intermediate_size": 32,
                "num_attention_heads": 3,
                "num_hidden_layers": 1,
            }
            | {"image_size": 32, "patch_size": 8},
            "use_pixel_shuffle": True,
            "downsample_ratio": 0.5,
            "mlp_connector_layers": 2,
        },
        "select_layer": 2,
        "dit": {
            "num_attention_heads": 3,
            "attention_head_dim": 4,
            "num_layers": 3,
            "interleave_self_attention": False,
        },
        "vl": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2},
        "head": {
            "hidden_size": 16,
            "action_dim": 5,
            "action_horizon": 4,
            "max_state_dim": 6,
            "num_target_vision_tokens": 2,
        }
        | {"num_inference_timesteps": 10},
    },
}


def document(sizes: dict[str, Any]) -> dict[str, Any]:
    head = sizes["head"]
    width = sizes["eagle"]["text_config"]["hidden_size"]
    shared = {"dropout": 0.2, "final_dropout": True, "positional_embeddings": None}
    dit = (
        sizes["dit"]
        | shared
        | {"norm_type": "ada_norm", "output_dim": head["hidden_size"], "cross_attention_dim": width}
    )
    inner = dit["num_attention_heads"] * dit["attention_head_dim"]
    rest = {
        "add_pos_embed": True,
        "use_vlln": True,
        "max_num_embodiments": 3,
        "max_seq_len": 8,
        "num_timestep_buckets": 1000,
    }
    rest |= {
        "noise_beta_alpha": 1.5,
        "noise_beta_beta": 1.0,
        "noise_s": 0.999,
        "tune_projector": True,
        "tune_diffusion_model": True,
    }
    widths = {
        "input_embedding_dim": inner,
        "backbone_embedding_dim": width,
        "max_action_dim": head["action_dim"],
    }
    action_head = {
        **head,
        **rest,
        **widths,
        "diffusion_model_cfg": dit,
        "vl_self_attention_cfg": sizes["vl"] | shared,
    }
    backbone = {
        "eagle_path": "small",
        "project_to_dim": None,
        "reproject_vision": False,
        "select_layer": sizes["select_layer"],
    }
    return {
        "action_dim": head["action_dim"],
        "action_head_cfg": action_head,
        "action_horizon": head["action_horizon"],
        "architectures": ["GR00T_N1_5"],
        "backbone_cfg": backbone | {"tune_llm": True, "tune_visual": True},
        "compute_dtype": "float32",
        "model_type": "gr00t_n1_5",
    }


def eagle_processor(sizes: dict[str, Any]) -> Any:
    from lerobot.policies.groot.eagle2_hg_model.image_processing_eagle2_5_vl_fast import (
        Eagle25VLImageProcessorFast,
    )
    from lerobot.policies.groot.eagle2_hg_model.processing_eagle2_5_vl import Eagle25VLProcessor
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "openvla_tiny" / "tokenizer.json"), pad_token="<pad>"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<IMG_CONTEXT>", "<img>", "</img>"]}
    )
    vision = sizes["eagle"]["vision_config"]
    side = vision["image_size"]
    tokens = (
        side // vision["patch_size"] // (2 if sizes["eagle"]["use_pixel_shuffle"] else 1)
    ) ** 2
    settings = {
        "do_resize": False,
        "do_pad": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_dynamic_tiles": 12,
    }
    images = Eagle25VLImageProcessorFast(size={"height": side, "width": side}, **settings)
    return Eagle25VLProcessor(images, tokenizer, chat_template=TEMPLATE, tokens_per_tile=tokens)


def network(sizes: dict[str, Any], image_token: int) -> Any:
    from lerobot.policies.groot import groot_n1
    from lerobot.policies.groot.eagle2_hg_model.configuration_eagle2_5_vl import Eagle25VLConfig
    from lerobot.policies.groot.eagle2_hg_model.modeling_eagle2_5_vl import (
        Eagle25VLForConditionalGeneration,
    )
    from transformers import Qwen3ForCausalLM, SiglipVisionModel

    eagle = sizes["eagle"]
    vision = eagle["vision_config"] | {"model_type": "siglip_vision_model"}
    parts = {
        "text_config": eagle["text_config"] | TEXT | {"tie_word_embeddings": True},
        "vision_config": vision,
    }
    config = Eagle25VLConfig(
        **eagle | parts, select_layer=-1, image_token_index=image_token, _attn_implementation="sdpa"
    )

    def build(config: Any, **_: Any) -> Any:
        config.text_config._attn_implementation = config.vision_config._attn_implementation = "sdpa"
        models = {
            "vision_model": SiglipVisionModel(config.vision_config),
            "language_model": Qwen3ForCausalLM(config.text_config),
        }
        return Eagle25VLForConditionalGeneration(config, **models)

    groot_n1.ensure_eagle_cache_ready = lambda *_: None
    groot_n1.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    groot_n1.AutoModel = SimpleNamespace(from_config=build)
    return groot_n1.GR00TN15(groot_n1.GR00TN15Config(**document(sizes)), local_model_path="").eval()


def randomise(model: Any, generator: torch.Generator) -> None:
    """Larger than at the start of a training, so that every part has an effect."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            inputs = parameter.shape[1] if name.endswith(".W") else parameter[0].numel()
            scale = (
                0.5
                if any(part in name for part in ("embed", "future", "position"))
                else inputs**-0.5
            )
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        else:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
        parameter.requires_grad_(True)


def make(directory: Path, sizes: dict[str, Any]) -> None:
    from lerobot.policies.groot.processor_groot import (
        GrootActionUnpackUnnormalizeStep,
        GrootPackInputsStep,
    )
    from lerobot.processor.core import TransitionKey
    from PIL import Image

    torch.manual_seed(sizes["seed"])
    processor = eagle_processor(sizes)
    model = network(sizes, processor.image_token_id)
    generator = torch.Generator().manual_seed(sizes["seed"])
    randomise(model, generator)
    head = sizes["head"]
    side = sizes["eagle"]["vision_config"]["image_size"]
    images = torch.randint(
        256, (2, sizes["cameras"], side, side, 3), generator=generator, dtype=torch.uint8
    )
    state = torch.randn(2, 5, generator=generator)
    shape = (2, head["action_horizon"], head["action_dim"])
    actions = torch.randn(2, head["action_horizon"], 4, generator=generator)
    noise = torch.randn(shape, generator=generator)
    time = torch.tensor([0.3004, 0.8507])  # officially from noise to action

    statistics = {"observation.state": STATE, "action": ACTION}
    pack = GrootPackInputsStep(
        action_horizon=head["action_horizon"],
        max_state_dim=head["max_state_dim"],
        max_action_dim=head["action_dim"],
        stats=statistics,
    )
    packed = pack(
        {
            TransitionKey.OBSERVATION: {"observation.state": state.clone()},
            TransitionKey.ACTION: actions.clone(),
            TransitionKey.COMPLEMENTARY_DATA: {"task": TASKS[0]},
        }
    )
    ready = packed[TransitionKey.OBSERVATION]["state"]
    target = packed[TransitionKey.ACTION]
    action_mask = packed[TransitionKey.COMPLEMENTARY_DATA]["action_mask"]
    expected: dict[str, torch.Tensor] = {"state": ready[:, 0], "target": target}

    found: list[torch.Tensor] = []
    model.action_head.action_decoder.register_forward_hook(
        lambda module, given, result: found.append(result)
    )
    rows: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("pixels", "velocity", "denoised", "loss")
    }
    for row, task in enumerate(TASKS):
        content = [
            {"type": "image", "image": Image.fromarray(each.numpy())} for each in images[row]
        ]
        talk = [{"role": "user", "content": [*content, {"type": "text", "text": task}]}]
        text = processor.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        seen, _ = processor.process_vision_info(talk)
        vl = {
            f"eagle_{name}": value
            for name, value in processor(
                text=[text], images=seen, return_tensors="pt", padding=True
            ).items()
        }
        vl = {name: value for name, value in vl.items() if name != "eagle_token_type_ids"}
        given = {"state": ready[row : row + 1], "embodiment_id": torch.tensor([PROJECTOR])}
        learn = given | {"action": target[row : row + 1], "action_mask": action_mask[row : row + 1]}
        expected[f"token_ids_{row}"] = vl["eagle_input_ids"][0]
        rows["pixels"].append(vl["eagle_pixel_values"])
        with torch.no_grad():
            encoded = model.backbone(model.backbone.prepare_input(dict(vl)))
            expected[f"features_{row}"] = encoded["backbone_features"][0]
            expected[f"refined_{row}"] = model.action_head.process_backbone_output(encoded)[
                "backbone_features"
            ][0]
        with patch("torch.randn", lambda *_, here=row, **__: noise[here : here + 1].clone()):
            rows["denoised"].append(model.get_action({**vl, **given})["action_pred"][0])
            model.action_head.sample_time = lambda *_, here=row, **__: time[here : here + 1]
            found.clear()
            loss = model.forward({**vl, **learn})["loss"]
        rows["velocity"].append(found[0][0, -head["action_horizon"] :].detach())
        rows["loss"].append(loss.detach())
        (loss / len(TASKS)).backward()
    expected |= {name: torch.stack(each) for name, each in rows.items()}
    unpack = GrootActionUnpackUnnormalizeStep(env_action_dim=4, stats=statistics)
    steps = [
        unpack({TransitionKey.ACTION: step})[TransitionKey.ACTION]
        for step in expected["denoised"].unbind(1)
    ]
    expected["actions"] = torch.stack(steps, dim=1)
    gradients = {
        name: float(p.grad.norm())
        for name, p in model.named_parameters()
        if p.grad is not None and float(p.grad.norm()) > 0
    }
    # a bias of keys adds the same to all scores of a query: its gradient is rounding
    gradients = {
        name: norm
        for name, norm in gradients.items()
        if not name.endswith((".to_k.bias", ".k_proj.bias"))
    }

    directory.mkdir(parents=True)
    text_sizes = {name: value for name, value in TEXT.items() if name != "architectures"}
    eagle = sizes["eagle"] | {"text_config": sizes["eagle"]["text_config"] | text_sizes}
    part = {"state": {"arm": STATE}, "action": {"arm": ACTION}}
    for name, content in (
        ("config", document(sizes)),
        ("eagle_config", eagle),
        ("metadata", {"small": {"statistics": part, "embodiment_tag": "small"}}),
        ("grad_norms", gradients),
    ):
        (directory / f"{name}.json").write_text(
            json.dumps(content, indent=None if name == "grad_norms" else 1) + "\n"
        )
    bits = {
        name: value.detach().bfloat16().contiguous().clone()
        for name, value in model.state_dict().items()
    }
    bits.pop(
        "backbone.eagle_model.language_model.lm_head.weight"
    )  # tied: safetensors keep one of the two
    (directory / "weights.safetensors.gz").write_bytes(gzip.compress(save(bits), mtime=0))
    kept = {"images": images, "state": state, "actions": actions, "noise": noise, "time": time}
    for name, arrays in (("inputs", kept), ("expected", expected)):
        np.savez_compressed(
            directory / f"{name}.npz",
            **{key: value.detach().numpy() for key, value in arrays.items()},
        )
    print(
        directory,
        sum(value.numel() for value in bits.values()),
        "weights",
        dict(sorted(gradients.items())[:2]),
    )


if __name__ == "__main__":
    for name, sizes in SIZES.items():
        make(Path(sys.argv[1]) / name, sizes)
