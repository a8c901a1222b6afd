"""Write the card (README.md) of a shared model or dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from rlinf_vla.cli.shared_files import DATASET, Shared, without_private
from rlinf_vla.config.recipe import MODES

LIBRARY = "rlinf-vla"
SOFTWARE = ("rlinf-vla", "torch", "transformers", "peft")


def card(shared: Shared, repository: str, license: str, datasets: Sequence[str] = ()) -> str:
    """Return the card's text, with its metadata. ``datasets``: repositories it was trained on."""
    name = repository.partition("/")[2]
    lines = _dataset(shared, repository) if shared.kind == DATASET else _model(shared, repository)
    return (
        f"---\n{_metadata(shared, license, datasets)}---\n\n# {name}\n\n" + "\n".join(lines) + "\n"
    )


def _metadata(shared: Shared, license: str, datasets: Sequence[str]) -> str:
    from huggingface_hub import DatasetCardData, ModelCardData  # takes time to import

    if shared.kind == DATASET:
        configs = [{"config_name": "default", "data_files": "data/*/*.parquet"}]
        data = DatasetCardData(
            license=license,
            task_categories=["robotics"],
            tags=["LeRobot", LIBRARY],
            configs=configs,
        )
        return f"{data.to_yaml()}\n"
    names = (
        [shared.recipe[node].get("name") for node in ("model", "algorithm", "env")]
        if shared.recipe
        else []
    )
    tags = [
        LIBRARY,
        "vision-language-action",
        "reinforcement-learning",
        *(str(name) for name in names if name not in (None, "none")),
    ]
    return (
        ModelCardData(
            license=license,
            base_model=shared.base,
            datasets=list(datasets) or None,
            tags=tags,
            library_name=LIBRARY,
            pipeline_tag="robotics",
        ).to_yaml()
        + "\n"
    )


def _model(shared: Shared, repository: str) -> Iterator[str]:
    recipe = shared.recipe
    if shared.checkpoint is not None:
        yield f"Checkpoint `{shared.checkpoint}` of a run of `{recipe['name']}`, trained with {LIBRARY}."
        use = [
            f"rlinf-vla pull {repository} {repository.partition('/')[2]}",
            f"rlinf-vla eval run={repository.partition('/')[2]}",
        ]
    else:
        yield f"A model in its official layout, written by {LIBRARY}."
        use = [
            f"rlinf-vla eval recipe=NAME model={recipe['model']['name'] if recipe else 'NAME'} model.checkpoint=hf://{repository}"
        ]
    yield from ("", "## Use", "", "```", *use, "```", "", "## Results", "")
    yield from _results(shared)
    yield from ("", "## Provenance", "")
    yield from _provenance(shared)
    if recipe:
        yield from ("", "## Recipe", "")
        if shared.left_out:
            yield from (
                f"Keys that named something of the machine are left out: {', '.join(f'`{key}`' for key in shared.left_out)}.",
                "",
            )
        yield from ("```yaml", OmegaConf.to_yaml(OmegaConf.create(recipe)).rstrip("\n"), "```")


def _results(shared: Shared) -> Iterator[str]:
    rows = [
        (name, mode, evaluation[mode])
        for name, evaluation in shared.evaluations.items()
        for mode in MODES
        if mode in evaluation
    ]
    if not rows:
        yield "No evaluation of this checkpoint was recorded."
        return
    yield "| evaluation | mode | episodes | success | 95 % interval |"
    yield "|---|---|---|---|---|"
    for name, mode, block in rows:
        low, high = block["pc_success_ci95"]
        label = "before training" if name == "before" else "this checkpoint"
        yield f"| {label} | {mode} | {block['n_episodes']} | {block['pc_success']:.1f} % | {low:.1f} to {high:.1f} % |"


def _provenance(shared: Shared) -> Iterator[str]:
    environment = shared.environment
    if not environment:
        yield "Not recorded."
        return
    git = environment.get("git") or {}
    if git:
        yield f"* commit: `{git.get('commit')}`" + (
            " with uncommitted changes" if git.get("uncommitted_changes") else ""
        )
    packages = environment.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in SOFTWARE if packages.get(name)]
    yield f"* software: Python {environment.get('python')}, {', '.join(versions)}"
    yield f"* hardware: {', '.join(environment.get('gpus') or []) or environment.get('cpu')}"
    if environment.get("argv"):
        yield f"* command: `rlinf-vla {' '.join(map(str, environment['argv'][1:]))}`"


def _dataset(shared: Shared, repository: str) -> Iterator[str]:
    info: dict[str, Any] = shared.info
    features = [f"`{key}`" for key in info["features"]]
    counted = (
        f"{info['total_episodes']} episodes, {info['total_frames']} frames at {info['fps']} Hz"
    )
    yield f"A LeRobotDataset {info['codebase_version']}: {counted}."
    yield from (
        "",
        f"Robot: {without_private(info.get('robot_type')) or 'not named'}. Features: {', '.join(features)}.",
    )
    yield from ("", "## Use", "", "```", f"rlinf-vla pull {repository} DIR")
    yield from (
        "rlinf-vla train recipe=maniskill_sft algorithm.demonstrations.dataset=DIR",
        "```",
        "",
        "## meta/info.json",
        "",
    )
    yield from ("```json", json.dumps(info, indent=1), "```")
