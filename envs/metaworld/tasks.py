"""Names and instructions of Meta-World's tasks. The package itself has no instructions."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_vla.config.errors import UserError

from ..options import one_of

INSTRUCTIONS = {
    "assembly-v3": "lift the nut by its handle and put it over the peg",
    "basketball-v3": "drop the basketball through the hoop",
    "bin-picking-v3": "move the puck from the left bin to the right bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button down from above",
    "button-press-v3": "press the button on the front of the box",
    "button-press-wall-v3": "reach around the wall and press the button on the front of the box",
    "coffee-button-v3": "start the coffee machine by its button",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug below the spout of the coffee machine",
    "dial-turn-v3": "turn the dial half way around",
    "disassemble-v3": "lift the nut off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "turn the lock of the door to lock it",
    "door-open-v3": "open the door by its handle",
    "door-unlock-v3": "turn the lock of the door to unlock it",
    "drawer-close-v3": "push the drawer shut",
    "drawer-open-v3": "pull the drawer open by its handle",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "drive the nail into the wall with the hammer",
    "hand-insert-v3": "put the gripper into the hole in the table",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "raise the lever until it points up",
    "peg-insert-side-v3": "put the peg into the hole in the side of the box",
    "peg-unplug-side-v3": "pull the peg out of the side of the box",
    "pick-out-of-hole-v3": "take the puck out of the hole and bring it to the goal",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "pick-place-wall-v3": "carry the puck over the wall and hold it at the goal",
    "plate-slide-back-side-v3": "slide the plate sideways out of the cabinet",
    "plate-slide-back-v3": "slide the plate back out of the cabinet",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-v3": "slide the plate forward into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "slide the puck over the table to the goal",
    "push-wall-v3": "slide the puck around the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper over the wall to the goal",
    "shelf-place-v3": "lift the puck onto the shelf",
    "soccer-v3": "shoot the ball into the goal",
    "stick-pull-v3": "hook the thermos with the stick and pull it to the goal",
    "stick-push-v3": "push the thermos to the goal with the stick",
    "sweep-into-v3": "sweep the puck into the hole in the table",
    "sweep-v3": "sweep the puck off the edge of the table",
    "window-close-v3": "slide the window shut by its handle",
    "window-open-v3": "slide the window open by its handle",
}

BENCHMARKS = {
    "MT10": (
        *(
            "reach-v3",
            "push-v3",
            "pick-place-v3",
            "door-open-v3",
            "drawer-open-v3",
            "drawer-close-v3",
            "button-press-topdown-v3",
        ),
        *("peg-insert-side-v3", "window-open-v3", "window-close-v3"),
    ),
    "MT50": tuple(INSTRUCTIONS),
}
"""Names that ``env.tasks`` may have for several tasks (Yu et al. 2019, table 1 and figure 6)."""


def selected(names: list[str], changed: Mapping[str, str]) -> dict[str, str]:
    """Return name -> instruction of the tasks that ``env.tasks`` selects.

    ``changed``: instructions that replace those of the table. Raises UserError for unknown or
    repeated names and for empty instructions.
    """
    for name in names:
        one_of(name, [*INSTRUCTIONS, *BENCHMARKS], "env.tasks")
    for name, text in changed.items():
        one_of(name, INSTRUCTIONS, "env.instructions")
        if not text.strip():
            raise UserError(f"env.instructions.{name} is empty: set it to what the policy is told")
    chosen = [task for name in names for task in BENCHMARKS.get(name, (name,))]
    if twice := sorted({task for task in chosen if chosen.count(task) > 1}):
        raise UserError(f"env.tasks names {twice[0]} twice")
    return {task: changed.get(task, INSTRUCTIONS[task]) for task in chosen}
