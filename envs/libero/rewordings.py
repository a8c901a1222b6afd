"""Rewordings of the instructions of LIBERO's 130 tasks, by rules.

The tables below are all the data; docs/results/libero_rewordings.md lists what follows from them.
A wording means what the instruction means.
"""

from __future__ import annotations

import re
from collections.abc import Callable

VERBS: dict[str, tuple[str, ...]] = {
    "pick up": ("grasp", "lift", "take hold of"),
    "place": ("set", "lay", "deposit"),
    "put": ("set", "place", "lay"),
    "turn on": ("switch on", "power on", "activate"),
    "turn off": ("switch off", "power off", "deactivate"),
    "open": ("pull open", "open up"),
    "close": ("shut",),
    "push": ("slide", "shove", "move"),
    "stack": ("pile", "set", "place"),
}
"""Words of an instruction -> what they become in each wording, cyclically."""

NOUNS: dict[str, tuple[str, ...]] = {
    "alphabet soup": ("can of alphabet soup", "tin of alphabet soup", "letter soup"),
    "back compartment": ("rear compartment", "section at the back", "rear section"),
    "basket": ("woven basket", "hamper", "carrier basket"),
    "bbq sauce": ("barbecue sauce", "bottle of barbecue sauce", "bottle of bbq sauce"),
    "black bowl": ("dark bowl", "black basin", "dark serving bowl"),
    "book": ("volume", "hardcover book"),
    "bottom drawer": ("lowest drawer", "lowermost drawer", "drawer at the very bottom"),
    "bowl": ("serving bowl", "deep bowl", "basin"),
    "butter": ("package of butter", "box of butter", "butter package"),
    "cabinet": ("cupboard", "sideboard", "chest of drawers"),
    "cabinet shelf": (
        "shelf of the cabinet",
        "shelf inside the cabinet",
        "inner shelf of the cabinet",
    ),
    "caddy": ("desk organizer", "desk caddy", "stationery holder"),
    "chocolate pudding": (
        "box of chocolate pudding",
        "package of chocolate pudding",
        "chocolate dessert",
    ),
    "cookie box": ("box of cookies", "biscuit box", "cookie package"),
    "cream cheese": ("package of cream cheese", "box of cream cheese", "soft white cheese"),
    "cream cheese box": ("box of cream cheese", "cream cheese package", "package of cream cheese"),
    "front compartment": ("section at the front", "front section", "foremost compartment"),
    "frying pan": ("skillet", "pan for frying", "frypan"),
    "ketchup": ("bottle of ketchup", "ketchup bottle", "catsup"),
    "left compartment": ("left-hand compartment", "section on the left", "left section"),
    "microwave": ("microwave oven",),
    "middle drawer": ("drawer in the middle", "central drawer", "second drawer"),
    "milk": ("carton of milk", "milk carton", "box of milk"),
    "moka pot": ("stovetop coffee pot", "espresso pot", "coffee pot"),
    "moka pots": ("stovetop coffee pots", "espresso pots", "coffee pots"),
    "orange juice": ("carton of orange juice", "orange juice carton", "box of orange juice"),
    "plate": ("flat dish", "dinner plate", "serving plate"),
    "rack": ("bottle rack", "wooden rack", "rack for bottles"),
    "ramekin": ("small baking dish", "small ceramic cup", "souffle cup"),
    "red mug": ("red cup", "crimson mug", "red coffee mug"),
    "right compartment": ("right-hand compartment", "section on the right", "right section"),
    "salad dressing": ("bottle of salad dressing", "salad dressing bottle", "bottle of dressing"),
    "shelf": ("shelf unit", "rack", "shelving"),
    "stove": ("cooker", "hot plate", "cooking stove"),
    "table center": ("the middle of the table", "the center of the table", "the table's middle"),
    "tomato sauce": ("can of tomato sauce", "tin of tomato sauce", "tomato sauce can"),
    "top drawer": ("uppermost drawer", "highest drawer", "drawer at the very top"),
    "tray": ("serving tray", "flat tray", "wooden tray"),
    "white bowl": ("pale bowl", "white basin", "white serving bowl"),
    "white mug": ("white cup", "pale mug", "white coffee mug"),
    "wine bottle": ("bottle of wine", "bottle", "glass wine bottle"),
    "wine rack": ("bottle rack", "rack for wine bottles", "wooden wine rack"),
    "wooden cabinet": ("cabinet made of wood", "wooden cupboard", "wooden chest of drawers"),
    "yellow and white mug": ("white and yellow mug", "yellow and white cup", "two-colored mug"),
}

REQUESTS = ("please {}", "could you {}", "I would like you to {}", "your task is to {}")
CONTEXTS = (
    "we are about to start cooking, so please {}",
    "this place needs some tidying up: could you {}",
    "before the guests arrive, I would like you to {}",
)


def rewordings(instruction: str, severity: int) -> tuple[str, ...]:
    """Return the wordings of an instruction, none of which is the instruction itself.

    Severity 1: other verbs; 2: a request; 3: other names of things; 4: other verbs and names; 5:
    these in a request with a reason that does not matter.
    """
    rules: dict[int, tuple[Callable[[int], str], int]] = {
        1: (lambda k: _replaced(instruction, VERBS, k), 3),
        2: (lambda k: REQUESTS[k].format(instruction), len(REQUESTS)),
        3: (lambda k: _replaced(instruction, NOUNS, k), 3),
        4: (lambda k: _replaced(_replaced(instruction, NOUNS, k), VERBS, k), 3),
        5: (
            lambda k: CONTEXTS[k].format(_replaced(_replaced(instruction, NOUNS, k), VERBS, k)),
            len(CONTEXTS),
        ),
    }
    wording, count = rules[severity]
    return tuple(dict.fromkeys(wording(k) for k in range(count)))


def _replaced(text: str, table: dict[str, tuple[str, ...]], number: int) -> str:
    """Replace whole words of ``table`` by their alternative ``number``; the longest words first."""
    words = "|".join(re.escape(phrase) for phrase in sorted(table, key=len, reverse=True))
    return re.sub(
        rf"\b({words})\b", lambda match: table[match[0]][number % len(table[match[0]])], text
    )
