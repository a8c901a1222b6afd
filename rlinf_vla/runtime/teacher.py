"""The policy that teaches another one (``algorithm.teacher``)."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlinf_vla.algorithms.dagger import IMITATION
from rlinf_vla.config.errors import UserError
from rlinf_vla.config.recipe import Recipe
from rlinf_vla.core import plugins
from rlinf_vla.core.devices import device_of
from rlinf_vla.core.distributions import Categorical
from rlinf_vla.core.images import noise as random_pictures
from rlinf_vla.core.protocols import Policy, prepared
from rlinf_vla.core.types import Observation
from rlinf_vla.runtime.recipes import HUB, asset_path, teacher_of


def load_teacher(recipe: Recipe, weights: bool = True) -> Policy | None:
    """Return the recipe's teacher on the CPU, None without one.

    ``weights``: false builds the network without them, and downloads none. Raises UserError.
    """
    location = teacher_of(recipe)
    if location is None:
        return None
    name = recipe.model.name
    directory = asset_path(location, weights)
    if not directory.is_dir():
        raise UserError(
            f"algorithm.teacher={location} is not there: give the directory of a model={name}, or expert"
        )
    model: type[Policy] = plugins.choose("model", name, plugins.models())
    options = recipe.model.options
    if hasattr(options, "random_weights"):
        options = replace(options, random_weights=False)
    try:
        with torch.random.fork_rng(devices=[]):
            teacher = (model.load if weights else model.without_weights)(directory, options)
    except UserError as error:
        raise UserError(
            f"algorithm.teacher={location} cannot be read as model={name} with its model.options ({error}): "
            "give a teacher of the student's model"
        ) from None
    return teacher.requires_grad_(False)


def require_teacher(recipe: Recipe, student: Policy) -> None:
    """Raise UserError if the recipe's teacher does not fit ``student``, as far as it is known
    without the teacher's weights. ``student`` needs none either."""
    location = teacher_of(recipe)
    if location is None:
        return
    require_losses(recipe, student)
    plugin = plugins.choose("model", recipe.model.name, plugins.models())
    is_described = getattr(plugin, "is_described", lambda directory: False)
    if location.startswith(HUB) and not is_described(asset_path(location, weights=False)):
        return  # its weights are needed, which the start of the run downloads
    teacher = load_teacher(recipe, weights=False)
    assert teacher is not None
    _require_likeness(recipe, unlike_sizes(teacher, student))


def build_teacher(recipe: Recipe, student: Policy) -> Policy | None:
    """Return the recipe's teacher of ``student``, on its device. Raises UserError if its labels do
    not fit the student."""
    if teacher_of(recipe) is None:
        return None
    require_losses(recipe, student)
    teacher = load_teacher(recipe)
    assert teacher is not None
    teacher.to(device_of(student))
    _require_likeness(recipe, unlike(teacher, student, recipe.algorithm.loss))
    return teacher


def _require_likeness(recipe: Recipe, difference: str | None) -> None:
    if difference is not None:
        raise UserError(
            f"algorithm.teacher={recipe.algorithm.teacher} {difference}: choose a teacher that is made for the same task and robot"
        )


def require_losses(recipe: Recipe, student: Policy) -> None:
    """Raise UserError if ``student`` cannot learn from a policy by the recipe's loss."""
    loss = recipe.algorithm.loss
    name = f"algorithm.loss={loss}: model={recipe.model.name}"
    if loss != IMITATION and student.distributions_unsupported is not None:
        raise UserError(f"{name} {student.distributions_unsupported}: set algorithm.loss=imitation")
    chunk = student.spec.chunk
    if loss == IMITATION and student.horizon != chunk:
        raise UserError(
            f"{name} learns {student.horizon} actions of a call, and a teacher gives the {chunk} executed ones: "
            "set algorithm.teacher=expert"
        )


def unlike_sizes(teacher: Policy, student: Policy) -> str | None:
    """Return in what sizes the policies differ, as ``unlike``; neither needs weights."""
    for name in ("chunk", "action_dim", "state_dim", "images"):
        theirs, own = (getattr(policy.spec, name) for policy in (teacher, student))
        if theirs != own:
            return f"has {name}={theirs}, the policy {own}"
    return None


@torch.no_grad()
def unlike(teacher: Policy, student: Policy, loss: str) -> str | None:
    """Return in what the policies differ that must be equal, as a phrase that follows the
    teacher's name; None: nothing was found. One observation is passed through both."""
    if (difference := unlike_sizes(teacher, student)) is not None:
        return difference
    generator = torch.Generator().manual_seed(0)
    images = random_pictures(student.spec.images, 1, generator)
    state = torch.rand(1, student.spec.state_dim, generator=generator)
    seen = Observation(images, state, ["push the cube"])
    inputs, theirs = prepared(student, seen), prepared(teacher, seen)
    for name, value in inputs.items():
        if name not in theirs or not torch.equal(theirs[name], value):
            return f"is given another input {name} than the policy for the same observation"
    if loss != IMITATION:
        latent = student.act(student.encode(inputs), None, 1.0).latent
        first, second = (each.distributions(inputs, latent, 1.0) for each in (teacher, student))
        if isinstance(first, Categorical) and isinstance(second, Categorical):
            same = first.numbers.shape == second.numbers.shape
            if not same or not torch.equal(first.numbers, second.numbers):
                return "chooses from other numbers than the policy"
    return None
