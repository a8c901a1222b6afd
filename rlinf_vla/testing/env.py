"""Conformance suite of a simulator plug-in: what every ``core.protocols.VectorEnv`` must do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.observation_features import camera, picture
from rlinf_vla.core.protocols import VectorEnv
from rlinf_vla.core.types import Episodes, Observation, StepResult

NUM_ENVS = 3
EPISODE_LIMIT = 20


def episodes(*seeds: int, task_id: int = 0) -> Episodes:
    """Return the episode of each environment by its seed."""
    return Episodes.first_attempts(
        torch.full((len(seeds),), task_id, dtype=torch.int64),
        torch.tensor(seeds, dtype=torch.int64),
    )


def random_actions(env: VectorEnv, chunk: int, seed: int) -> Tensor:
    """Return float32 ``[B, C, D]``, small enough to do no harm in any control mode."""
    generator = torch.Generator().manual_seed(seed)
    return (
        0.3 * torch.randn(env.spec.num_envs, chunk, env.spec.action_dim, generator=generator)
    ).to(env.spec.device)


def assert_same_row(a: Observation, i: int, b: Observation, j: int) -> None:
    """Environment ``i`` of ``a`` and ``j`` of ``b`` see the same, bit for bit."""
    assert a.instruction[i] == b.instruction[j]
    assert torch.equal(a.state[i], b.state[j])
    for name in a.images:
        assert torch.equal(a.images[name][i], b.images[name][j]), f"image {name} differs"


def assert_same(a: StepResult, b: StepResult) -> None:
    for name in ("reward", "terminated", "truncated", "success", "valid"):
        assert torch.equal(getattr(a, name), getattr(b, name)), f"{name} differs"
    for row in range(len(a.reward)):
        assert_same_row(a.observation, row, b.observation, row)


def turned(before: Tensor, after: Tensor) -> Tensor:
    """Return rotation vectors ``[B, 3]`` (rad, base axes) between quaternions ``[B, 4]`` (wxyz)."""
    w0 = before[:, :1]
    v0 = before[:, 1:]
    w1 = after[:, :1]
    v1 = after[:, 1:]
    w = w1 * w0 + (v1 * v0).sum(1, keepdim=True)  # after times the conjugate of before
    v = w0 * v1 - w1 * v0 - torch.cross(v1, v0, dim=1)
    v = torch.where(w < 0, -v, v)
    w = w.abs()
    size = v.norm(dim=1, keepdim=True)
    return torch.where(
        size > 1e-6, v / size.clamp(min=1e-6) * 2 * torch.atan2(size, w), torch.zeros_like(v)
    )


def expert_episodes(env: VectorEnv, *seeds: int) -> tuple[Tensor, StepResult]:
    """Play the expert until the first episode ends; return its actions ``[B, C, D]`` and the last
    result. Skips the test where there is no expert."""
    env.reset(episodes(*seeds))
    actions: list[Tensor] = []
    try:
        for _ in range(EPISODE_LIMIT):
            actions.append(env.expert_actions())
            result = env.step(actions[-1][:, None])
            if result.done.any():
                break
    except UserError:
        pytest.skip("no scripted expert")
    return torch.stack(actions, dim=1), result


class VectorEnvConformance:
    """Subclasses override ``make``. Tests share its environments: simulators start slowly."""

    reach = 0.5
    """Of a step that moves the tool, in units of ``spec.tool``."""
    open_m = (0.03, 0.05)
    """How far a finger of an open gripper may be from closed."""

    @classmethod
    def make(cls) -> list[VectorEnv]:
        """Return two vector environments that advance independently, of ``NUM_ENVS`` environments
        and ``EPISODE_LIMIT`` control steps each. A scripted expert succeeds within the limit."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def groups(cls) -> Iterator[list[VectorEnv]]:
        groups = cls.make()
        yield groups
        for env in groups:
            env.close()
            env.close()
        with pytest.raises(RuntimeError):
            groups[0].reset(episodes(*range(NUM_ENVS)))

    @pytest.fixture
    def env(self, groups: list[VectorEnv]) -> VectorEnv:
        return groups[0]

    def test_what_it_returns_matches_its_spec(self, env: VectorEnv) -> None:
        spec = env.spec
        chunk = 2
        assert (
            (spec.num_envs, spec.episode_limit) == (NUM_ENVS, EPISODE_LIMIT)
            and spec.control_hz > 0
            and spec.tasks
        )
        observation = env.reset(episodes(1, 2, 3))
        result = env.step(random_actions(env, chunk, seed=0))
        for seen in (observation, result.observation):
            assert seen.images.keys() == spec.images.keys()
            for name, image in seen.images.items():
                assert (image.dtype, image.shape) == (
                    getattr(torch, camera(name).dtype),
                    (NUM_ENVS, *picture(name, spec.images[name])),
                )
            assert (seen.state.dtype, seen.state.shape) == (
                torch.float32,
                (NUM_ENVS, spec.state_dim),
            )
            assert len(seen.instruction) == NUM_ENVS and all(
                isinstance(text, str) and text for text in seen.instruction
            )
        assert result.reward.device.type == spec.device.type
        assert (result.reward.dtype, result.reward.shape) == (torch.float32, (NUM_ENVS, chunk))
        flags = (result.terminated, result.truncated, result.success, result.valid)
        assert all((flag.dtype, flag.shape) == (torch.bool, (NUM_ENVS, chunk)) for flag in flags)

    def test_an_observation_stays_as_it_was(self, env: VectorEnv) -> None:
        first = env.reset(episodes(1, 2, 3))
        copies = first.state.clone(), {name: image.clone() for name, image in first.images.items()}
        env.step(random_actions(env, 5, seed=1))
        assert torch.equal(first.state, copies[0])
        assert all(torch.equal(image, copies[1][name]) for name, image in first.images.items())

    def test_an_episode_does_not_depend_on_what_was_played_before(self, env: VectorEnv) -> None:
        actions = random_actions(env, 6, seed=2)
        start = env.reset(episodes(11, 12, 13))
        first = env.step(actions)
        env.reset(episodes(21, 22, 23))
        env.step(random_actions(env, 3, seed=3))
        again = env.reset(episodes(11, 12, 13))
        for row in range(NUM_ENVS):
            assert_same_row(start, row, again, row)
        assert_same(first, env.step(actions))

    def test_an_episode_does_not_depend_on_its_place_in_the_batch(self, env: VectorEnv) -> None:
        actions = random_actions(env, 6, seed=4)
        order = [2, 0, 1]
        env.reset(episodes(11, 12, 13))
        first = env.step(actions)
        env.reset(episodes(*[(11, 12, 13)[position] for position in order]))
        moved = env.step(actions[order])
        for row, position in enumerate(order):
            assert_same_row(moved.observation, row, first.observation, position)
            assert torch.equal(moved.reward[row], first.reward[position])

    def test_an_experts_episode_repeats_in_any_place(self, env: VectorEnv) -> None:
        """An expert touches objects, and simulators keep state in contacts."""
        chunk, _ = expert_episodes(env, 31, 32, 33)
        env.reset(episodes(31, 32, 33))
        first = env.step(chunk)
        for turn in range(4):
            order = [(turn + row) % NUM_ENVS for row in range(NUM_ENVS)]
            env.reset(episodes(*[(31, 32, 33)[position] for position in order]))
            again = env.step(chunk[order])
            for row, position in enumerate(order):
                assert_same_row(again.observation, row, first.observation, position)

    def test_a_seed_matters(self, env: VectorEnv) -> None:
        seen = env.reset(episodes(31, 32, 31))
        differ = [not torch.equal(image[0], image[1]) for image in seen.images.values()]
        assert any(
            differ
            or [
                not torch.equal(seen.state[0], seen.state[1]),
                seen.instruction[0] != seen.instruction[1],
            ]
        )
        assert_same_row(seen, 0, seen, 2)

    def test_a_chunk_is_its_control_steps_one_by_one(self, env: VectorEnv) -> None:
        actions = random_actions(env, 5, seed=5)
        env.reset(episodes(41, 42, 43))
        chunk = env.step(actions)
        env.reset(episodes(41, 42, 43))
        steps = [env.step(actions[:, i : i + 1]) for i in range(actions.shape[1])]
        assert torch.equal(chunk.reward, torch.cat([step.reward for step in steps], dim=1))
        for row in range(NUM_ENVS):
            assert_same_row(chunk.observation, row, steps[-1].observation, row)

    def test_a_chunk_ends_at_termination(self, env: VectorEnv) -> None:
        actions, last = expert_episodes(env, 51, 51, 51)
        assert (last.terminated & last.success).all(), "the expert did not succeed within the limit"
        length = actions.shape[1]
        env.reset(episodes(51, 51, 51))
        chunk = env.step(torch.cat([actions, random_actions(env, 4, seed=6)], dim=1))
        expected = torch.arange(length + 4) < length
        assert torch.equal(chunk.valid.cpu(), expected.expand(NUM_ENVS, -1))
        assert torch.equal(
            chunk.terminated.nonzero()[:, 1].cpu(), torch.full((NUM_ENVS,), length - 1)
        )
        assert not chunk.truncated.any()
        assert not (chunk.success & ~chunk.valid).any()
        assert (chunk.reward[~chunk.valid] == 0).all()
        for row in range(NUM_ENVS):
            assert_same_row(chunk.observation, row, last.observation, row)

    def test_an_episode_is_truncated_at_its_limit(self, env: VectorEnv) -> None:
        env.reset(episodes(61, 62, 63))
        still = torch.zeros(
            NUM_ENVS, EPISODE_LIMIT - 2, env.spec.action_dim, device=env.spec.device
        )
        result = env.step(still)
        assert result.valid.all() and not result.done.any()
        result = env.step(still[:, :5])
        assert torch.equal(result.valid.cpu(), (torch.arange(5) < 2).expand(NUM_ENVS, -1))
        assert torch.equal(
            result.truncated.nonzero()[:, 1].cpu(), torch.ones(NUM_ENVS, dtype=torch.int64)
        )
        assert not result.terminated.any()
        env.step_async(still, skip_ended=True)
        assert not env.step_wait().valid.any()

    def test_a_partial_reset_leaves_the_others_alone(self, env: VectorEnv) -> None:
        actions = random_actions(env, 8, seed=7)
        env.reset(episodes(71, 72, 73))
        whole = env.step(actions)
        env.reset(episodes(71, 72, 73))
        half = env.step(actions[:, :4])
        seen = env.reset(episodes(0, 74, 0), torch.tensor([False, True, False]))
        for row in (0, 2):
            assert_same_row(seen, row, half.observation, row)
        rest = env.step(actions[:, 4:])
        for row in (0, 2):
            assert_same_row(rest.observation, row, whole.observation, row)
        fresh = env.reset(episodes(74, 74, 74))
        assert_same_row(fresh, 0, seen, 1)

    def test_groups_advance_independently(self, groups: list[VectorEnv]) -> None:
        actions = random_actions(groups[0], 4, seed=8)
        expected = []
        for env, seeds in zip(groups, [(81, 82, 83), (91, 92, 93)], strict=True):
            env.reset(episodes(*seeds))
            expected.append(env.step(actions))
        groups[0].reset_async(episodes(81, 82, 83))
        groups[1].reset_async(episodes(91, 92, 93))
        groups[1].reset_wait()
        groups[1].step_async(actions)
        groups[0].reset_wait()
        groups[0].step_async(actions)
        assert_same(groups[0].step_wait(), expected[0])
        assert_same(groups[1].step_wait(), expected[1])

    def test_the_expert_and_the_picture_change_nothing(self, env: VectorEnv) -> None:
        actions = random_actions(env, 4, seed=9)
        env.reset(episodes(101, 102, 103))
        expected = env.step(actions)
        env.reset(episodes(101, 102, 103))
        picture = env.render(1)
        assert (picture.dtype, picture.ndim, picture.shape[-1]) == (torch.uint8, 3, 3)
        try:
            advice = env.expert_actions()
        except UserError:
            pass
        else:
            assert (advice.dtype, advice.shape) == (torch.float32, (NUM_ENVS, env.spec.action_dim))
            assert torch.equal(advice, env.expert_actions())
        assert_same(env.step(actions), expected)

    def test_the_tool_moves_the_way_it_is_told(self, env: VectorEnv) -> None:
        """docs/conventions.md, by physics: +x is seen as +x, in metres, and so on."""
        tool, dim = env.spec.tool, env.spec.action_dim
        if tool is None:
            pytest.skip("actions do not move a tool")
        assert dim in (4, 7)
        steps = EPISODE_LIMIT - 1
        for axis in range(dim - 1):
            for sign in (1.0, -1.0):
                command = torch.zeros(NUM_ENVS, steps, dim, device=env.spec.device)
                command[:, : steps // 2, axis] = (
                    sign * self.reach
                )  # the rest of the time the arm comes to a stand
                before = env.reset(episodes(111, 112, 113)).state
                after = env.step(command).observation.state
                commanded = (
                    sign
                    * self.reach
                    * (steps // 2)
                    * (tool.translation_m if axis < 3 else tool.rotation_rad)
                )
                moved = (
                    after[:, :3] - before[:, :3]
                    if axis < 3
                    else turned(before[:, 3:7], after[:, 3:7])
                )
                along = moved[:, axis % 3] / commanded
                assert ((along > 0.2) & (along < 1.2)).all(), (
                    f"axis {axis}, told {commanded}: {moved}"
                )
                moved[:, axis % 3] = 0
                assert (moved.abs() < 0.25 * abs(commanded)).all(), (
                    f"axis {axis} moves the others: {moved}"
                )

    def test_the_gripper_opens_and_closes(self, env: VectorEnv) -> None:
        if env.spec.tool is None:
            pytest.skip("actions do not move a tool")
        half = EPISODE_LIMIT // 2
        command = torch.zeros(NUM_ENVS, half, env.spec.action_dim, device=env.spec.device)
        command[:, :, 2] = self.reach  # away from things that would keep the fingers apart
        command[:, :, -1] = -1
        env.reset(episodes(111, 112, 113))
        closed = env.step(command).observation.state[:, 7]
        command[:, :, -1] = 1
        opened = env.step(command[:, : half - 1]).observation.state[:, 7]
        assert (closed.abs() < 0.01).all(), "gripper -1 does not close"
        assert ((opened > self.open_m[0]) & (opened < self.open_m[1])).all(), (
            "gripper +1 does not open, or a finger's way is not in metres"
        )

    def test_bad_input_is_refused(self, env: VectorEnv) -> None:
        spec = env.spec
        env.reset(episodes(1, 2, 3))
        action = torch.zeros(NUM_ENVS, 1, spec.action_dim, device=spec.device)
        for wrong in (
            action[:, 0],
            action[:-1],
            action[:, :, :-1],
            action[:, :0],
            action * torch.nan,
        ):
            with pytest.raises(ValueError, match="actions"):
                env.step(wrong)
        for seeds in ((1, 2), (-1, 2, 3), (2**32, 2, 3)):
            with pytest.raises(ValueError, match="seed"):
                env.reset(episodes(*seeds))
        with pytest.raises(ValueError, match="task_id"):
            env.reset(episodes(1, 2, 3, task_id=len(spec.tasks)))
        with pytest.raises(ValueError, match="mask"):
            env.reset(episodes(1, 2, 3), torch.tensor([True]))
        env.step(action)  # and none of that did any harm

    def test_an_ended_episode_is_not_stepped(self, env: VectorEnv) -> None:
        env.reset(episodes(1, 2, 3))
        env.step(torch.zeros(NUM_ENVS, EPISODE_LIMIT, env.spec.action_dim, device=env.spec.device))
        with pytest.raises(RuntimeError, match="reset"):
            env.step(torch.zeros(NUM_ENVS, 1, env.spec.action_dim, device=env.spec.device))
