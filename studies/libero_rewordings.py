"""List the rewordings of the instructions of LIBERO's 130 tasks as Markdown.

Usage (``make libero-rewordings``): python studies/libero_rewordings.py OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlinf_vla.envs.libero.rewordings import CONTEXTS, REQUESTS, rewordings
from rlinf_vla.envs.libero.suites import LIMITS, of_suite


def main(output: Path) -> None:
    instructions = dict.fromkeys(task.instruction for suite in LIMITS for task in of_suite(suite))
    lines = [
        "# Rewordings of LIBERO's instructions",
        "",
        f"This page lists wordings of the {len(instructions)} instructions of LIBERO's 130 tasks, which the perturbed suites",
        "`..._plus_language` draw ([libero.md](../libero.md#perturbed-suites)): those of severity 1 (other",
        "verbs) and 3 (other names of things). Severity 4 has both. 2 and 5 put the instruction, and those",
        "of severity 4, into these sentences:",
        "",
        *(f"- {sentence.format('...')}" for sentence in (*REQUESTS, *CONTEXTS)),
        "",
        "`make libero-rewordings` writes this page.",
    ]
    for instruction in instructions:
        lines += ["", f"**{instruction}**", ""]
        lines += [
            f"- {severity}: {wording}"
            for severity in (1, 3)
            for wording in rewordings(instruction, severity)
        ]
    output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
