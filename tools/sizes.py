"""Measure the code: size and density of each room, and the files that a training run executes.

python tools/sizes.py                 # all but the run, in seconds
python tools/sizes.py --run           # also trains one small iteration of maniskill_ppo, a minute
python tools/sizes.py --code DIR      # of another tree's files (no run)
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = (
    "models",
    "envs",
    "robots",
    "rewards",
    "benchmarks",
    "tools",
    "studies",
    "tests",
)
NO_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
LOADED = """
import sys
from rlinf_vla.cli.main import run
assert run(["train", "recipe=maniskill_ppo", "--cfg", "job"]) == 0
import rlinf_vla.cli.train, rlinf_vla.runtime.on_policy
modules = [(name, module.__file__) for name, module in sys.modules.items() if getattr(module, "__file__", None)]
print("LOADED", *(file for name, file in modules if name.startswith("rlinf_vla")))
"""
EXECUTED = """
import inspect, sys, threading
from pathlib import Path
from rlinf_vla.cli.main import run
small = ["iterations=1", "env.num_envs=2", "rollout.batch_size=2", "rollout.pipeline_depth=1", "algorithm.horizon=30"]
small += ["algorithm.minibatch_size=8", "env.processes=1", "evaluation.before_and_after=false", "run_dir=" + sys.argv[2]]
files = set()
saved = []
def look(frame, event, value):
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED and not saved:  # no body of a module or class
        files.add(code.co_filename)
        saved.extend([1] * (event == "return" and code.co_name == "save_checkpoint"))
threading.setprofile(look)
sys.setprofile(look)
code = run(["train", "recipe=maniskill_ppo", *small])
sys.setprofile(None)
assert code == 0
print("EXECUTED", *sorted(file for file in files if file.startswith(sys.argv[1])))
"""


def is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def statements(nodes: Iterable[ast.AST]) -> int:
    """Statements among the nodes of a syntax tree; a docstring is none."""
    return sum(isinstance(node, ast.stmt) and not is_text(node) for node in nodes)


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several names: ``a, b = x, y``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    )


def tokens_and_lines(text: str) -> tuple[int, int]:
    """Tokens of the code, and the lines that hold them; comments and docstrings are neither."""
    prose = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and is_text(node):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_TOKENS and token.start[0] not in prose
    ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(tokens), len(lines)


def row(name: str, paths: Sequence[Path]) -> str:
    texts = [path.read_text() for path in paths]
    trees = [list(ast.walk(ast.parse(text))) for text in texts]
    count = sum(map(statements, trees))
    parallel = sum(is_parallel(node) for tree in trees for node in tree)
    counted = [tokens_and_lines(text) for text in texts]
    tokens = sum(pair[0] for pair in counted)
    lines = sum(pair[1] for pair in counted)
    return (
        f"| `{name}` | {count} | {len(paths)} | {sum(text.count(chr(10)) for text in texts)} "
        f"| {tokens / max(1, lines):.1f} | {1000 * parallel / max(1, count):.1f} |"
    )


def flows(paths: Iterable[Path]) -> list[str]:
    """Names of classes that carry out a macro flow or declare what one has."""
    return [
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Flow")
    ]


def printed(program: str, word: str, *arguments: str) -> list[Path]:
    command = [sys.executable, "-c", program, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in output.rpartition(word)[2].split()]


def executed() -> list[str]:
    """Files of the engine of which a training run executes functions until its first checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        files = printed(EXECUTED, "EXECUTED ", str(ROOT), str(Path(folder, "run")))
    return sorted(
        str(path.relative_to(ROOT)) for path in files if ROOT / "rlinf_vla" in path.parents
    )


def engine_of(root: Path) -> list[Path]:
    return [
        path for path in sorted((root / "rlinf_vla").rglob("*.py")) if "testing" not in path.parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="also train, and count executed files")
    parser.add_argument("--code", type=Path, default=ROOT, help="the tree whose files are counted")
    arguments = parser.parse_args()
    root = arguments.code
    rooms = [
        path
        for parent in (root / "rlinf_vla", root / "features")
        for path in sorted(parent.iterdir() if parent.exists() else ())
        if path.is_dir() and path.name != "__pycache__"
    ]
    print("| room | statements | files | lines | tokens a line | parallel assignments per 1,000 |")
    print("|---|---|---|---|---|---|")
    for folder in [*rooms, *(root / name for name in OTHERS if (root / name).exists())]:
        print(row(str(folder.relative_to(root)), sorted(folder.rglob("*.py"))))
    engine = engine_of(root)
    print(row("rlinf_vla without testing", engine))
    names = flows(engine)
    print(f"\n{len(names)} flow classes: {', '.join(names)}")
    if root != ROOT:
        return
    loaded = printed(LOADED, "LOADED ")
    print("\nloaded by `train recipe=maniskill_ppo`:")
    print(row("all packages", loaded))
    print(row("the engine", [path for path in loaded if ROOT / "rlinf_vla" in path.parents]))
    if arguments.run:
        files = executed()
        print(f"\n{len(files)} files of the engine are executed until the first checkpoint:")
        print(json.dumps(files, indent=1))


if __name__ == "__main__":
    main()
