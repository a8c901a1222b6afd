"""`rlinf-vla diagnose`: runs that were broken on purpose are found, healthy ones are not accused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_vla.cli.verbs import verbs
from rlinf_vla.core import plugins
from rlinf_vla.models.compact.policy import CompactPolicy
from rlinf_vla.runtime.run_directory import LOCK, held
from rlinf_vla.telemetry.diagnosis import OTHER, RULES
from rlinf_vla.telemetry.report import write_report
from rlinf_vla.testing.toy_policy import LinearPolicy
from tests.cli import diagnosed_runs
from tests.cli.conftest import CommandLine
from tests.cli.diagnosed_runs import BROKEN, HEALTHY, Made, conspicuous

ROOT = Path(__file__).parents[2]


def cases(runs: dict[str, Made]) -> list[Any]:
    return [
        pytest.param(made, id=name, marks=[pytest.mark.nightly] if made.slow else [])
        for name, made in runs.items()
    ]


@pytest.fixture
def diagnosed(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains one of the runs and returns its directory."""
    models = {"linear": LinearPolicy, "compact": CompactPolicy}
    monkeypatch.setattr(plugins, "models", lambda: models)
    policies = diagnosed_runs.write_policies(tmp_path)

    def run(made: Made) -> Path:
        found: Path = train(
            "run", *diagnosed_runs.keys(made, policies), recipe=f"counting_{made.recipe}"
        )
        return found

    return run


@pytest.mark.parametrize("made", cases(BROKEN))
def test_a_broken_run_is_found(diagnosed: Any, rlinf_vla: CommandLine, made: Made) -> None:
    """And the keys that it is advised to set can be set in this run."""
    run_dir = diagnosed(made)
    found = rlinf_vla("diagnose", str(run_dir))
    assert found.code == 0 and f"\n{made.verdict}: " in found.out
    verdicts = conspicuous(run_dir)
    advised = [advice for each in verdicts for advice in each.keys if advice.value != OTHER]
    keys = dict.fromkeys(f"{advice.key}={advice.value}" for advice in advised)
    assert keys or made.verdict == "normalisation outliers"
    shown = rlinf_vla("config", f"run={run_dir}", *keys, "--json")
    assert shown.code == 0, (keys, shown.err)


@pytest.mark.parametrize("made", cases(HEALTHY))
def test_a_healthy_run_is_not_accused(diagnosed: Any, rlinf_vla: CommandLine, made: Made) -> None:
    found = rlinf_vla("diagnose", str(diagnosed(made)))
    assert found.code == 0
    assert "nothing conspicuous" in found.out or "too few" in found.out, found.out


def test_there_are_twenty_of_each_and_a_broken_run_for_every_verdict() -> None:
    assert len(BROKEN) == len(HEALTHY) == 20
    assert {made.verdict for made in BROKEN.values()} == {rule.name for rule in RULES}
    quick = {made.verdict for made in BROKEN.values() if not made.slow}
    assert quick == {rule.name for rule in RULES}


def written(root: Path, rows: list[dict[str, Any]], iterations: int = 4) -> Path:
    """A run directory with these metrics."""
    run_dir = root / "runs" / "ppo" / "20261101-100000"
    run_dir.mkdir(parents=True)
    recipe = {"name": "ppo", "iterations": iterations, "algorithm": {"learning_rate": 0.1}}
    (run_dir / "recipe.yaml").write_text(json.dumps(recipe))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


LARGE = [{"step": step, "time": "", "actor/approx_kl": 0.5} for step in (1, 2, 3, 4)]


def test_its_document(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    written(tmp_path, LARGE)
    document = json.loads(rlinf_vla("diagnose", "ppo", "--json").out)
    (verdict,) = document.pop("verdicts")
    assert document == {
        "run": "runs/ppo/20261101-100000",
        "state": "finished, iteration 4 of 4",
        "iterations": 4,
    }
    assert verdict.pop("meaning").endswith(".")
    assert verdict == {
        "name": "KL out of range",
        "conspicuous": True,
        "value": 0.5,
        "number": "approximate KL 0.5",
        "first": 2,
        "last": 4,
        "keys": [{"key": "algorithm.learning_rate", "value": "0.03", "now": 0.1}],
    }


def test_what_it_prints(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    written(tmp_path, LARGE)
    lines = rlinf_vla("diagnose", "ppo").out.splitlines()
    assert lines[0] == "runs/ppo/20261101-100000: finished, iteration 4 of 4"
    assert lines[1] == "KL out of range: approximate KL 0.5 (iterations 2 to 4)"
    assert lines[2].startswith("  Updates move the policy too far")
    assert lines[3:] == ["  try algorithm.learning_rate=0.03 (now 0.1)"]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_run_that_was_stopped_early_is_told(
    rlinf_vla: CommandLine, tmp_path: Path, rows: int
) -> None:
    written(tmp_path, LARGE[:rows])
    reached = f"iteration {rows} of 4" if rows else "no iteration has been logged yet"
    assert rlinf_vla("diagnose", "ppo").out.splitlines() == [
        f"runs/ppo/20261101-100000: stopped before its end, {reached}",
        "too few iterations for a verdict: 3 are needed",
    ]


def test_a_run_that_goes_on_is_told(
    rlinf_vla: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    run_dir = written(tmp_path, LARGE[:3])
    with (run_dir / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with held(run_dir) as idle:
            assert not idle
        assert "running, iteration 3 of 4" in rlinf_vla("diagnose", "ppo").out


def test_a_mistake_is_one_line(rlinf_vla: CommandLine, tmp_path: Path) -> None:
    run_dir = written(tmp_path, LARGE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep" / "blocks").mkdir(parents=True)
    assert "no such directory" in rlinf_vla("diagnose", "nowhere").complaint
    assert "holds no run" in rlinf_vla("diagnose", "empty").complaint
    assert "holds an evaluation sweep" in rlinf_vla("diagnose", "sweep").complaint
    assert "run" in rlinf_vla("diagnose").complaint.lower()
    (run_dir / "metrics.jsonl").write_text("nonsense\n")
    assert "line 1 is damaged" in rlinf_vla("diagnose", "ppo").complaint


def test_the_report_shows_the_verdicts(tmp_path: Path) -> None:
    page = write_report(written(tmp_path, LARGE)).read_text()
    assert "KL out of range" in page and "algorithm.learning_rate=0.03 (now 0.1)" in page
    calm = [row | {"actor/approx_kl": 0.01} for row in LARGE]
    (tmp_path / "calm").mkdir()
    page = write_report(written(tmp_path / "calm", calm)).read_text()
    assert "Nothing conspicuous. Checked: KL out of range." in page
    (tmp_path / "new").mkdir()
    assert "Diagnosis" not in write_report(written(tmp_path / "new", [])).read_text()


def test_it_needs_no_pytorch(tmp_path: Path) -> None:
    program = (
        "import sys; from rlinf_vla.cli.main import run; code = run(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    run_dir = written(tmp_path, LARGE)
    command = [sys.executable, "-c", program, "diagnose", str(run_dir)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)


def test_the_page_lists_every_verdict_with_its_limit() -> None:
    page = (ROOT / "docs" / "diagnose.md").read_text()
    for rule in RULES:
        assert f"| {rule.name} | {rule.limit} | " in page, rule.name
        for metric in rule.metrics:
            assert f"`{metric}`" in page


def test_the_results_name_every_run() -> None:
    page = (ROOT / "docs" / "results" / "diagnose.md").read_text()
    for name, made in (BROKEN | HEALTHY).items():
        assert f"| {name} | {made.recipe} | " in page, name
    assert "diagnose" in verbs()
