"""Cameras as H.264 video: one mp4 holds many episodes, one after the other, and a frame is found by its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from rlinf_vla.datasets.lerobot_format import Frame
from rlinf_vla.protocols import ImageSize
from rlinf_vla.types import UserError

TOLERANCE = 1e-4
"""Seconds by which a frame may miss its time, as in lerobot."""

_KEYFRAMES = 2
"""Every so many frames there is one that needs no other, so that a frame in the middle is cheap to reach; as in lerobot."""
_OPTIONS = {"crf": "18", "preset": "veryfast", "g": str(_KEYFRAMES), "bf": "0"}


class VideoFile:
    """An mp4 that grows at its end and can be read once it is closed. ``frames`` and ``bytes`` say how long and large it is by now."""

    def __init__(self, path: Path, size: ImageSize, fps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frames = self.bytes = 0
        self._step = Fraction(1, fps)
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream: Any = self._container.add_stream("libx264", rate=fps, options=_OPTIONS)
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "yuv420p"

    def add(self, frames: Iterable[Frame]) -> None:
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = self.frames, self._step
            self.frames += 1
            self._mux(self._stream.encode(frame))

    def close(self) -> None:
        self._mux(self._stream.encode(None))
        self._container.close()

    def _mux(self, packets: Sequence[Any]) -> None:
        self.bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)


def video_info(size: ImageSize, fps: int) -> dict[str, Any]:
    """What ``meta/info.json`` says of a camera's videos."""
    height, width = size
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": "yuv420p",
        "video.fps": fps,
        "video.channels": 3,
        "video.g": _KEYFRAMES,
        "video.crf": int(_OPTIONS["crf"]),
        "video.preset": _OPTIONS["preset"],
        "has_audio": False,
        "is_depth_map": False,
    }


def read_frames(path: Path, times: Sequence[float]) -> Iterator[Frame]:
    """The frames at ``times`` (seconds since the video began, rising), each within :data:`TOLERANCE`.

    Raises UserError where the video cannot be read or has no such frame.
    """
    try:
        yield from _decode(path, times)
    except (av.error.FFmpegError, IndexError) as error:  # no stream at all is an IndexError
        reason = getattr(error, "strerror", None) or "it holds no video"
        raise UserError(f"{path} cannot be decoded ({reason}): copy the dataset again") from None


def _decode(path: Path, times: Sequence[float]) -> Iterator[Frame]:
    wanted = iter(times)
    time = next(wanted, None)
    if time is None:
        return
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        # the last keyframe before it; one tick of margin, because times are rounded
        container.seek(round(time / stream.time_base) - 1, stream=stream)
        for frame in container.decode(stream):
            if frame.pts is None:
                continue
            shown = float(frame.pts * stream.time_base)
            while time is not None and abs(shown - time) <= TOLERANCE:
                yield np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                time = next(wanted, None)
            if time is None:
                return
            if shown > time:
                raise UserError(f"{path} has no frame at {time:.4f} s, the next one is at {shown:.4f} s: the video is of another dataset")
    raise UserError(f"{path} ends before {time:.4f} s: the video is cut short, copy the dataset again")
