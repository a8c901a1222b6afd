"""PhysX's GPU library, from a server on this machine with the published archive's layout, and which backend it is for."""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import pytest
import torch

from rlinf_vla.cli import doctor
from rlinf_vla.config.errors import UserError
from rlinf_vla.core import plugins
from rlinf_vla.envs.maniskill import physx_gpu, vulkan
from rlinf_vla.envs.maniskill.config import ManiSkillConfig
from rlinf_vla.envs.maniskill.plugin import plugin
from tests.skips import needs

pytestmark = needs("maniskill")

VERSION = "105.1-physx-5.3.1.patch0"
LIBRARY = b"\x7fELF, and 300 MB more"


def archive(name: str) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w") as opened:
        opened.writestr("libOther_64.so", b"other")
        opened.writestr(name, LIBRARY)
    return file.getvalue()


class Releases(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}
    requested: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requested.append(self.path)
        status, body = self.answers["zip"]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the installed SAPIEN looks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(physx_gpu, "version", lambda: VERSION)
    return tmp_path / ".sapien" / "physx" / VERSION


@pytest.fixture
def releases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that were requested."""
    Releases.answers["zip"] = (200, archive(physx_gpu.NAME))
    Releases.requested.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Releases)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(physx_gpu, "RELEASES", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    yield Releases.requested
    server.shutdown()
    thread.join()
    server.server_close()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def test_several_at_once_fetch_it_once(
    releases: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as threads:
        for fetched in [threads.submit(physx_gpu.fetch) for _ in range(4)]:
            fetched.result()
    physx_gpu.fetch()
    assert releases == [f"/{VERSION}/linux-so.zip"]
    assert files(folder) == {physx_gpu.NAME, "libOther_64.so"}
    assert (folder / physx_gpu.NAME).read_bytes() == LIBRARY
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fetching PhysX's GPU library, once") and str(folder) in line


def test_an_arm_processor_has_an_archive_of_its_own(
    releases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    physx_gpu.fetch()
    assert releases == [f"/{VERSION}/linux-aarch64-so.zip"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, b"none"), "404"),
        ((200, archive(physx_gpu.NAME)[:-30]), "not a zip file"),
        ((200, archive("elsewhere/" + physx_gpu.NAME)), f"no {physx_gpu.NAME} in the archive"),
    ],
)
def test_a_failure_leaves_nothing_and_says_what_to_do(
    releases: list[str], folder: Path, answer: tuple[int, bytes], reason: str
) -> None:
    Releases.answers["zip"] = answer
    with pytest.raises(UserError) as caught:
        physx_gpu.fetch()
    line = str(caught.value)
    assert reason in line and "\n" not in line
    assert f"unzip {physx_gpu.address()} into {folder}, or use env.backend=cpu" in line
    assert files(folder) == set()
    Releases.answers["zip"] = (200, archive(physx_gpu.NAME))
    physx_gpu.fetch()
    assert (folder / physx_gpu.NAME).read_bytes() == LIBRARY


def test_without_a_network_the_line_says_where_the_file_belongs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(physx_gpu, "RELEASES", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=rf"cannot be fetched .*unzip http.* into {folder}"):
        physx_gpu.fetch()


def test_a_library_that_was_put_there_is_used(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / physx_gpu.NAME).write_bytes(LIBRARY)
    physx_gpu.fetch()
    assert files(folder) == {physx_gpu.NAME}


def test_the_installed_sapien_tells_its_version() -> None:
    """Not imported here: it changes how this process finds Vulkan."""
    assert re.fullmatch(r"[\d.]+-physx-[\w.]+", physx_gpu.version())


@pytest.fixture
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_VLA_VULKAN_DIR", str(tmp_path / "vulkan"))  # where drivers are kept
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")


def test_the_gpu_is_used_if_vulkan_sees_it_and_only_then_the_library_is_fetched(
    a_gpu: None, releases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def accepted(driver: vulkan.Driver) -> bool:
        asked.append((driver.render_backend, driver.environment))
        return True

    monkeypatch.setattr(vulkan, "accepted", accepted)
    for few in (ManiSkillConfig(num_envs=16), ManiSkillConfig(num_envs=64, backend="cpu")):
        assert plugin.backend(few) == "cpu"
    assert not releases and not asked
    started: dict[str, Any] = {}

    def environments(*given: object, **keys: object) -> list[object]:
        started.update(keys)
        return []

    monkeypatch.setattr("rlinf_vla.envs.vector_env.environments", environments)
    plugin.create(ManiSkillConfig(num_envs=64), 1)
    assert started["device"] == torch.device("cuda", 1)
    assert started["environment"]["CUDA_VISIBLE_DEVICES"] == "6"
    assert asked == [("gpu", {"CUDA_VISIBLE_DEVICES": "6"})], "the GPU of this process"
    assert len(releases) == 1


def test_a_gpu_that_vulkan_does_not_see(
    a_gpu: None,
    releases: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vulkan, "accepted", lambda driver: driver.render_backend == "cpu")
    with pytest.raises(
        UserError, match=r"^env.backend=gpu: Vulkan does not see .*env.backend=cpu$"
    ):
        plugin.create(ManiSkillConfig(backend="gpu"), 1)
    with caplog.at_level(logging.WARNING):
        assert plugin.backend(ManiSkillConfig(num_envs=64)) == "cpu"
    (line,) = caplog.messages
    assert line.startswith("env.backend=auto: Vulkan") and line.endswith("on the CPU instead")
    assert not releases


def test_doctor_fetches_it(
    a_gpu: None,
    releases: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vulkan, "accepted", lambda driver: True)
    monkeypatch.setattr(plugins, "envs", lambda: {"maniskill": plugin})
    monkeypatch.setattr(plugins, "robots", dict)
    doctor.run([])
    out = capsys.readouterr().out
    assert f"note  PhysX on the GPU: optional: {folder / physx_gpu.NAME} is missing" in out
    assert not releases
    Releases.answers["zip"] = (404, b"none")
    code = doctor.run([])
    assert doctor.run(["--fix"]) == code, "an optional repair that fails is told, and that is all"
    assert f"into {folder}" in capsys.readouterr().out
    Releases.answers["zip"] = (200, archive(physx_gpu.NAME))
    doctor.run(["--fix"])
    assert f"ok    PhysX on the GPU: {folder / physx_gpu.NAME}" in capsys.readouterr().out


def test_doctor_tells_of_a_gpu_that_vulkan_does_not_see(
    a_gpu: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vulkan, "accepted", lambda driver: driver.render_backend == "cpu")
    (check,) = [check for check in plugin.diagnose() if check.name == "ManiSkill on the GPU"]
    assert not check.ok and check.detail.startswith("optional") and "libnvidia-gl" in check.fix
