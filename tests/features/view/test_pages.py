"""The pages of ``rlinf-vla view``, as a browser asks for them."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import episodes
from tests.data.old_versions import V20, rewrite
from tests.features.view.conftest import HOSTILE, Viewed, block, log
from tests.skips import needs

pytestmark = needs("serve")


def test_a_run(run_dir: Path, viewed: Viewed) -> None:
    with viewed(run_dir) as page:
        found = page.get()
        assert (
            found.status == 200
            and "iteration 20 of 40" in found.text
            and "algorithm.gamma" in found.text
        )
        assert "+77.5 percentage points" in found.text and "Iteration 20" in found.text, (
            "the paired difference, and the timeline"
        )
        assert "+40.0 (+" in found.text, "the difference of step 10 to before training"
        curves = {curve["title"]: curve for curve in found.data["curves"]}
        assert (
            list(curves) == ["Success", "Approximate KL divergence", f"own/{HOSTILE}"]
            and found.data["main"] == 2
        )
        assert curves["Success"]["lines"]["rollouts"] == [step / 40 for step in range(1, 21)]
        assert [dot[:2] for dot in curves["Success"]["dots"]] == [[0, 0.1], [10, 0.5], [20, 0.875]]
        assert curves["Approximate KL divergence"]["lines"]["actor/approx_kl"][:2] == [None, 0.01]
        films = found.data["films"]
        assert films["columns"] == ["before", "step_000010", "after"] and list(films["rows"]) == [
            "PushCube_3"
        ]
        film = films["rows"]["PushCube_3"]["step_000010"]
        assert film["title"] == f"step_000010: {HOSTILE}"
        whole = page.get(f"/{film['source']}")
        part = page.get(f"/{film['source']}", Range="bytes=2-5")
        assert (
            whole.body == (run_dir / film["source"]).read_bytes()
            and whole.headers["content-type"] == "video/mp4"
        )
        assert (part.status, part.body) == (206, whole.body[2:6])


def test_a_run_is_followed(run_dir: Path, viewed: Viewed) -> None:
    with viewed(run_dir) as page:
        first = page.get()
        assert page.get("/", If_None_Match=first.headers["etag"]).status == 304
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 21, "rollout/succ')  # being written
        torn = page.get("/", If_None_Match=first.headers["etag"])
        assert torn.status == 200 and torn.data == first.data
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('ess_once": 1.0, "time": "2026-11-20T12:00:00+00:00"}\n')
        assert (
            page.get("/", If_None_Match=torn.headers["etag"]).data["curves"][0]["lines"][
                "rollouts"
            ][-1]
            == 1.0
        )


@pytest.mark.parametrize(
    "broken",
    [b"", b"\xff\xfe\x00", b"[]", b'{"greedy": 1, "traceEvents": 5}', b'{"greedy": {"n_episodes'],
)
def test_what_can_be_read_of_a_run_is_shown(run_dir: Path, viewed: Viewed, broken: bytes) -> None:
    for name in (
        "evaluation/after.json",
        "evaluation/comparison.json",
        "timeline.json",
        "recipe.yaml",
        "videos/after_PushCube_3.mp4",
    ):
        (run_dir / name).write_bytes(broken)
    with viewed(run_dir) as page:
        found = page.get()
        assert found.status == 200 and len(found.data["curves"]) == 3, found.text
        assert "timeline.json could not be read" in found.text and "10.0 %" in found.text
        assert "cannot be read" in found.data["films"]["rows"]["PushCube_3"]["after"]["title"]


def changed(path: Path, *place: str | int, to: object) -> None:
    """Replaces one value of a JSON file."""
    document = part = json.loads(path.read_text())
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = to
    path.write_text(json.dumps(document))


WRONG = {
    "evaluation/after.json": lambda path, value: changed(path, "greedy", "pc_success", to=value),
    "comparison": lambda path, value: changed(path, "greedy", "pc_difference_ci95", to=value),
    "timeline": lambda path, value: changed(path, "traceEvents", -1, "dur", to=value),
    "environment": lambda path, value: path.write_text(json.dumps({"gpus": 5, "memory_gb": value})),
    "recipe": lambda path, value: path.write_text(
        json.dumps({"name": [value], "iterations": value})
    ),
}
FILES = {
    "comparison": "evaluation/comparison.json",
    "timeline": "timeline.json",
    "environment": "environment.json",
    "recipe": "recipe.yaml",
}


@pytest.mark.parametrize("part", WRONG)
def test_a_value_of_another_kind_hides_its_part_alone(
    run_dir: Path, viewed: Viewed, part: str
) -> None:
    for value in ("many", {"a": [1]}):
        WRONG[part](run_dir / FILES.get(part, part), value)
        with viewed(run_dir) as page:
            found = page.get()
            problems = [
                line
                for line in found.text.splitlines()
                if "annot be shown" in line or "could not be read" in line
            ]
            named = any(part.partition(".")[0] in line for line in problems)
            assert found.status == 200 and len(found.data["curves"]) == 3 and named, (part, value)
            assert ("10.0 %" in found.text) and ("Iteration 20" in found.text) == (
                part != "timeline"
            )


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": 1e400}', '{"step": "x"}', '{"step": 21, "a": "b"}']
)
def test_a_damaged_line_of_metrics_hides_the_curves_alone(
    run_dir: Path, viewed: Viewed, line: str
) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with viewed(run_dir) as page:
        found = page.get()
        assert (
            "metrics.jsonl could not be read" in found.text and "line 21 is damaged" in found.text
        )
        assert [curve["title"] for curve in found.data["curves"]] == [
            "Success"
        ] and "algorithm.gamma" in found.text


def test_a_time_of_another_kind_hides_no_curves(run_dir: Path, viewed: Viewed) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time": 5, "rollout/success_once": NaN, "own": Infinity}\n')
    with viewed(run_dir) as page:
        found = page.get()
        assert (
            "21 iterations" in found.text
            and found.data["curves"][0]["lines"]["rollouts"][-1] is None
        )


@pytest.mark.parametrize(
    "place",
    [
        ("policies", "start", "pc_success"),
        ("differences", 0, "p_value"),
        ("suites",),
        ("environment",),
    ],
)
def test_a_value_of_another_kind_in_a_result_leaves_the_blocks(
    sweep_dir: Path, viewed: Viewed, place: tuple[str | int, ...]
) -> None:
    changed(sweep_dir / "result.json", *place, to="many")
    changed(sweep_dir / "blocks" / "00_000_000_0000000.json", "episodes", to=5)
    with viewed(sweep_dir) as page:
        found = page.get()
        assert "result.json cannot be read" in found.text and "42 episodes so far" in found.text


def test_a_run_from_its_first_moment(tmp_path: Path, viewed: Viewed) -> None:
    with viewed(tmp_path) as page:
        assert "No iteration has been logged yet" in page.get().text
        log(tmp_path, range(1, 2))
        assert page.get().data["curves"][0]["x"] == [1]


def test_an_evaluation_without_training(run_dir: Path, viewed: Viewed) -> None:
    shutil.move(run_dir / "evaluation" / "before.json", run_dir / "start.json")
    shutil.rmtree(run_dir / "evaluation")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "evaluation").mkdir()
    shutil.move(run_dir / "start.json", run_dir / "evaluation" / "start.json")
    with viewed(run_dir) as page:
        text = page.get().text
        assert "10.0 %" in text and "There is no evaluation" not in text


def test_a_sweep(sweep_dir: Path, viewed: Viewed) -> None:
    with viewed(sweep_dir) as page:
        found = page.get()
        assert found.status == 200 and found.text.count("color-mix") == 4 * 2, (
            "a square per task and policy"
        )
        assert "+66.7 (+" in found.text and "not finished" not in found.text
        films = found.data["films"]
        assert films["columns"] == ["start", f"best {HOSTILE}"] and len(films["rows"]) == 4
        row = films["rows"][f"suite1: task0 {HOSTILE}, seed 0"]
        assert (
            row["start"]["source"] == "videos/00_001_000_0000000.mp4"
            and page.get(f"/{row['start']['source']}").status == 200
        )


@pytest.mark.parametrize("result", [None, "{", "[]", '{"policies": {}}'])
def test_an_unfinished_sweep(sweep_dir: Path, viewed: Viewed, result: str | None) -> None:
    (sweep_dir / "result.json").unlink()
    if result is not None:
        (sweep_dir / "result.json").write_text(result)
    for number, path in enumerate(sorted((sweep_dir / "blocks").iterdir())):
        if number % 2:
            path.write_text('{"episodes": [')
    with viewed(sweep_dir) as page:
        found = page.get()
        assert (
            "24 episodes so far: the sweep is not finished" in found.text
            and found.text.count("color-mix") == 4
        )
        assert ("result.json cannot be read" in found.text) == (result is not None)
        for path in (sweep_dir / "blocks").iterdir():
            path.unlink()
        assert "0 episodes so far" in page.get().text
        (sweep_dir / "blocks" / "00_000_000_0000000.json").write_text(json.dumps(block(0, 0, 0, 3)))
        assert "50.0 %" in page.get().text


@pytest.mark.parametrize("video", [False, True])
def test_a_dataset(tmp_path: Path, viewed: Viewed, video: bool) -> None:
    written = episodes.write(tmp_path / "pushes", video=video)
    with viewed(tmp_path / "pushes") as page:
        listed = page.get().text
        assert (
            "3 episodes, 15 frames at 10 per second" in listed
            and listed.count('href="/episodes/') == 3
            and "task 1" in listed
        )
        data = page.get("/episodes/2").data
        action = next(curve for curve in data["curves"] if curve["title"] == "action")
        assert action["x"] == [0.1 * step for step in range(7)] or np.allclose(
            action["x"], np.arange(7) / 10
        )
        assert np.allclose(list(action["lines"].values()), written[2]["action"].T) and list(
            action["lines"]
        ) == ["dx", "dy"]
        assert data["frames"] == {
            "number": 2,
            "fps": 10.0,
            "count": 7,
            "cameras": ["front", "wrist"],
        }
        for camera, name in enumerate((episodes.FRONT, episodes.WRIST)):
            shown = np.asarray(Image.open(io.BytesIO(page.get(f"/episodes/2/{camera}/4.jpg").body)))
            assert (
                shown.shape == written[2][name][4].shape
                and abs(shown.mean() - written[2][name][4].mean()) < 3
            )
        assert (
            page.get("/episodes/2/0/7.jpg").status == page.get("/episodes/3/0/0.jpg").status == 404
        )
        assert page.get("/episodes/2/2/0.jpg").status == page.get("/episodes/x").status == 404
        assert "there is no episode 3: the last one is 2" in page.get("/episodes/3").text


def test_a_dataset_of_an_older_version(tmp_path: Path, viewed: Viewed) -> None:
    episodes.write(tmp_path / "new" / "pushes")
    rewrite(tmp_path / "new" / "pushes", tmp_path / "old" / "pushes", V20)
    answers = []
    for name in ("new", "old"):
        with viewed(tmp_path / name / "pushes") as page:
            answers.append([page.get(path).text for path in ("/", "/episodes/2")])
    assert answers[0] == answers[1] and "3 episodes" in answers[0][0]


def test_a_long_dataset_is_on_several_pages(tmp_path: Path, viewed: Viewed) -> None:
    episodes.write(tmp_path / "pushes", lengths=(1,) * 201)
    with viewed(tmp_path / "pushes") as page:
        first, second, strange = page.get("/"), page.get("/?page=2"), page.get("/?page=-1<b>")
        assert (
            "/episodes/199" in first.text
            and "/episodes/200" not in first.text
            and "page=2" in first.text
        )
        assert "/episodes/200" in second.text and "/episodes/199" not in second.text
        assert strange.status == 200 and "<b>" not in strange.text


def test_a_dataset_that_is_being_recorded(tmp_path: Path, viewed: Viewed) -> None:
    episodes.write(tmp_path / "pushes")
    info = (tmp_path / "pushes" / "meta" / "info.json").rename(tmp_path / "info.json")
    with viewed(tmp_path / "pushes") as page:
        first = page.get()
        assert "its recording was never finished" in first.text
        info.rename(tmp_path / "pushes" / "meta" / "info.json")
        assert "3 episodes" in page.get("/", If_None_Match=first.headers["etag"]).text


def test_values_that_are_no_numbers_are_left_out(
    tmp_path: Path, viewed: Viewed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlinf_vla.data.lerobot_format.first_not_finite",
        lambda values: 3 if values.shape[1:] == (2,) else None,
    )
    directory = tmp_path / "pushes"
    with monkeypatch.context() as patch:
        patch.setattr("rlinf_vla.data.lerobot_format.first_not_finite", lambda values: None)
        episodes.write(directory)
    with viewed(directory) as page:
        found = page.get("/episodes/0")
        assert "action is not finite in episode 0, frame 3" in found.text
        assert "observation.state" in [curve["title"] for curve in found.data["curves"]]


# what may not happen

OUTSIDE = [
    "/videos/../recipe.yaml",
    "/videos/..%2frecipe.yaml",
    "/videos/%2e%2e/recipe.yaml",
    "/videos/%2e%2e%2fsecret.mp4",
    "/videos/..%2f..%2fsecret.mp4",
    "/videos/..%5c..%5csecret.mp4",
    "/videos/link.mp4",
    "/videos/folder.mp4",
    "/videos/folder.mp4/secret.mp4",
    "/videos/pipe.mp4",
    "/videos/",
    "/videos/notes.txt",
    "/videos/%00.mp4",
    "/videos/" + "a" * 5000 + ".mp4",
    "/../secret.mp4",
    "//etc/passwd",
    "/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/static/../app.py",
    "/static/..%2fapp.py",
    "/static/%2e%2e%2f%2e%2e%2fcli%2fmain.py",
    "/recipe.yaml",
    "/episodes/0",
    "/episodes/0/0/0.jpg",
    "/episodes/-1",
]


def test_no_path_leads_out_of_the_directory(run_dir: Path, viewed: Viewed) -> None:
    (run_dir / "secret.mp4").write_text("SECRET")
    (run_dir.parent / "secret.mp4").write_text("SECRET")
    (run_dir / "videos" / "link.mp4").symlink_to(run_dir.parent / "secret.mp4")
    (run_dir / "videos" / "folder.mp4").symlink_to(run_dir.parent)
    (run_dir / "videos" / "notes.txt").write_text("SECRET")
    os.mkfifo(run_dir / "videos" / "pipe.mp4")
    with viewed(run_dir) as page:
        for path in OUTSIDE:
            found = page.get(path)
            assert found.status in (400, 404), (path, found.status)
            assert (
                "SECRET" not in found.text
                and "root:" not in found.text
                and "import" not in found.text
            ), path


def test_files_that_are_links_to_elsewhere_are_not_read(
    run_dir: Path, sweep_dir: Path, viewed: Viewed
) -> None:
    elsewhere = run_dir.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("metrics.jsonl", "recipe.yaml", "timeline.json"):
        shutil.move(run_dir / name, elsewhere / name)
        (run_dir / name).symlink_to(elsewhere / name)
    os.mkfifo(run_dir / "predicted.json")
    shutil.move(run_dir / "evaluation", elsewhere / "evaluation")
    (run_dir / "evaluation").symlink_to(elsewhere / "evaluation")
    shutil.move(run_dir / "videos", elsewhere / "videos")
    (run_dir / "videos").symlink_to(elsewhere / "videos")
    with viewed(run_dir) as page:
        found = page.get()
        assert (
            "recipe.yaml could not be read: it is a link that leads out of the directory"
            in found.text
        )
        assert "predicted.json could not be read: it is no file" in found.text
        assert (
            found.data["curves"] == []
            and "algorithm.gamma" not in found.text
            and "10.0 %" not in found.text
        )
        assert page.get("/videos/before_PushCube_3.mp4").status == 404
    shutil.move(sweep_dir / "result.json", elsewhere / "result.json")
    (sweep_dir / "result.json").symlink_to(elsewhere / "result.json")
    with viewed(sweep_dir) as page:
        assert "result.json cannot be read (ValueError: it is a link" in page.get().text


def test_a_dataset_with_a_link_to_elsewhere_is_not_read(tmp_path: Path, viewed: Viewed) -> None:
    episodes.write(tmp_path / "pushes")
    shutil.move(tmp_path / "pushes" / "data", tmp_path / "data")
    (tmp_path / "pushes" / "data").symlink_to(tmp_path / "data")
    with viewed(tmp_path / "pushes") as page:
        assert (
            " it is a link that leads out of the directory" in page.get().text
            and page.get("/episodes/0/0/0.jpg").status == 404
        )


def test_text_of_files_is_no_html(run_dir: Path, sweep_dir: Path, viewed: Viewed) -> None:
    for directory in (run_dir, sweep_dir):
        with viewed(directory) as page:
            found = page.get()
            assert (
                "injected" in found.text
                and "<script>document" not in found.text
                and "<img src=x" not in found.text
            )
            assert "script" not in found.headers["content-security-policy"], (
                "scripts of this server only: default-src"
            )
            assert found.headers["content-security-policy"].startswith("default-src 'self';")


def test_nothing_can_be_changed(run_dir: Path, viewed: Viewed) -> None:
    import urllib.error
    import urllib.request

    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    with viewed(run_dir) as page:
        page.get()
        for method in ("POST", "PUT", "DELETE"):
            for path in ("/", "/videos/before_PushCube_3.mp4"):
                request = urllib.request.Request(
                    f"http://127.0.0.1:{page.port}{path}", b"", method=method
                )
                with pytest.raises(urllib.error.HTTPError) as refusal:
                    urllib.request.urlopen(request, timeout=60)
                with refusal.value:
                    assert refusal.value.code == 405
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "my_evil.example", "[::1", "", "192.168.0.1"]
)
def test_a_name_of_another_machine_is_refused(run_dir: Path, viewed: Viewed, host: str) -> None:
    """A web page whose name an attacker lets lead to 127.0.0.1 cannot read the view."""
    with viewed(run_dir) as page:
        assert page.get("/", Host=host).status in (400, 403)
        assert page.get("/", Host=f"localhost:{page.port}").status == 200


def test_a_token_is_asked_for_once(run_dir: Path, viewed: Viewed) -> None:
    with viewed(run_dir, "sesame", loopback=False) as page:
        for path in (
            "/",
            "/?token=",
            "/?token=sesam",
            "/?token=%ff",
            "/static/view.js",
            "/videos/before_PushCube_3.mp4",
        ):
            assert page.get(path).status == 401, path
        assert page.get("/", Cookie="rlinf_vla_view=sesam").status == 401
        first = page.get("//evil.example/?token=sesame")
        assert (first.status, first.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=strict"} <= set(first.headers["set-cookie"].split("; "))
        cookie = first.headers["set-cookie"].partition(";")[0]
        assert (
            page.get("/", Cookie=cookie).status
            == page.get("/static/view.js", Cookie=cookie).status
            == 200
        )
