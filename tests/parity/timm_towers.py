"""Compare with timm, in a process that has it: ``python timm_towers.py FOLDER`` prints JSON.

FOLDER has timm and its torchvision (``make timm``). On a PyTorch without CUDA, torchvision's compiled
operators cannot be loaded, and its module then asks for two that do not exist; they are declared
before, and nothing here calls them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import torch

SIZES = {"embed_dim": 48, "depth": 4, "num_heads": 4, "img_size": 56}


def import_timm(folder: str):  # type: ignore[no-untyped-def]
    sys.path.append(folder)
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
    except RuntimeError:  # they exist: torchvision fits
        del operators
        import timm
    return timm, operators


def towers(timm) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Largest relative difference of the patches' features, in float64, by the tower's name."""
    from rlinf_vla.models.openvla.vit import TIMM, VisionTransformer

    differences = {}
    for name, published in TIMM.items():
        config = replace(published, **SIZES)
        sizes = asdict(config)
        torch.manual_seed(0)
        official = timm.create_model(
            name,
            pretrained=False,
            num_classes=0,
            **{key: sizes[key] for key in ("img_size", "embed_dim", "depth", "num_heads")},
        )
        for parameter in official.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        official = official.double().eval()
        ours = VisionTransformer(config).double()
        weights = {
            key.replace(".gamma", ".scale_factor"): value
            for key, value in official.state_dict().items()
        }
        ours.load_state_dict(weights)
        pixels = torch.randn(2, 3, config.img_size, config.img_size, dtype=torch.float64)
        with torch.no_grad():
            # as openvla: prismatic/extern/hf/modeling_prismatic.py
            (expected,) = official.get_intermediate_layers(pixels, n={config.depth - 2})
            actual = ours(pixels)
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        differences[name] = float((actual - expected).abs().max() / expected.abs().max())
    return differences


def encoder() -> dict[str, object]:
    """The compact policy with a backbone of timm."""
    from rlinf_vla.config.errors import UserError
    from rlinf_vla.models.compact.encoder import ImageEncoder

    sizes = {"image_sizes": [64, 64], "width": 16}
    network = ImageEncoder(sizes, "timm:resnet10t")
    images = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    try:
        ImageEncoder(sizes, "timm:resnet11")
    except UserError as error:
        refusal = str(error)
    return {
        "weights": sum(parameter.numel() for parameter in network.parameters()),
        "shape": list(network(images).shape),
        "refusal": refusal,
    }


if __name__ == "__main__":
    library, declared = import_timm(sys.argv[1])
    print("RESULT", json.dumps({"towers": towers(library), "encoder": encoder()}))
