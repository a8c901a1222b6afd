"""Record episodes of the scripted expert as a LeRobotDataset."""

from __future__ import annotations

from omegaconf import DictConfig

from rlinf_vla.algorithms.base import DemonstrationConfig
from rlinf_vla.config.errors import UserError
from rlinf_vla.data.lerobot_writer import LeRobotWriter
from rlinf_vla.rollout.demonstrations import RecordedEpisode, expert_features, record_expert
from rlinf_vla.runtime import builders, recipes
from rlinf_vla.telemetry.console import stages


def run(config: DictConfig) -> None:
    """Run ``algorithm.demonstrations.episodes`` episodes and write the successful ones.

    Episodes and noise are those of imitation learning. ``record.failures=true`` keeps failed ones.
    """
    recipe = recipes.read(config)
    shown = getattr(recipe.algorithm, "demonstrations", None)
    if not isinstance(shown, DemonstrationConfig) or not recipe.output:
        raise UserError("record needs algorithm.demonstrations and an output directory: rlinf-vla record recipe=maniskill_sft output=DIR")
    if shown.dataset is not None:
        raise UserError("record plays the scripted expert: leave algorithm.demonstrations.dataset out")
    output, played, successes = builders.new_directory(recipe.output), 0, 0

    with stages() as progress, builders.open_envs(recipe, None, recipe.rollout.pipeline_depth) as groups:
        spec = groups[0].spec
        with LeRobotWriter(output, spec.control_hz, expert_features(spec, recipe.record.video), recipe.env.name) as writer:

            def finished(episode: RecordedEpisode) -> None:
                nonlocal played, successes
                played, successes = played + 1, successes + episode.success
                if episode.success or recipe.record.failures:
                    writer.add_episode(episode.frames, episode.instruction)
                progress("episodes", played / shown.episodes)

            record_expert(groups, shown, recipe.seed, finished)
            if not writer.episodes:
                raise UserError(
                    f"the expert succeeded in none of {played} episodes, and nothing was written: "
                    "lower algorithm.demonstrations.noise, or keep failed episodes with record.failures=true"
                )
    print(f"{played} episodes played, {successes} with success")
    print(f"{writer.episodes} episodes, {writer.frames} frames: {builders.relative(output)} (use it as algorithm.demonstrations.dataset)")
