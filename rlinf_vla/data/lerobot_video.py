"""Write and read cameras as H.264 mp4 of consecutive episodes; frames are found by timestamp."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from rlinf_vla.config.errors import UserError
from rlinf_vla.core.protocols import ImageSize
from rlinf_vla.data import lerobot_format as form
from rlinf_vla.data.lerobot_format import Frame

TOLERANCE = 1e-4
"""Maximum seconds between a frame's timestamp and the requested time; as in lerobot."""

_KEYFRAMES = 2
"""Keyframe interval in frames; short, so that seeking is cheap. As in lerobot."""
_OPTIONS = {"crf": "18", "preset": "veryfast", "g": str(_KEYFRAMES), "bf": "0"}


class VideoFile:
    """An mp4 to append frames to, readable once closed; ``frames`` and ``bytes`` written so far."""

    def __init__(self, path: Path, size: ImageSize, fps: int) -> None:
        self.frames = self.bytes = 0
        self._step = Fraction(1, fps)
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream: Any = self._container.add_stream("libx264", rate=fps, options=_OPTIONS)
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "yuv420p"

    def add(self, frames: Iterable[Frame]) -> None:
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = self.frames
            frame.time_base = self._step
            self.frames += 1
            self._mux(self._stream.encode(frame))

    def close(self) -> None:
        self._mux(self._stream.encode(None))
        self._container.close()

    def _mux(self, packets: Sequence[Any]) -> None:
        self.bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)


def video_info(size: ImageSize, fps: int) -> dict[str, Any]:
    """Return a camera's ``info`` entry in ``meta/info.json``."""
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


def read_frames(
    path: Path, times: Sequence[float], size: ImageSize | None = None
) -> Iterator[Frame]:
    """Yield the frames at ``times`` (ascending seconds since the video's start), within TOLERANCE.

    Raises UserError if the video cannot be read, has no such frame, another ``size``, or other
    pixels than 8 bits of colour.
    """
    try:
        yield from _decode(path, times, size)
    except (
        av.error.FFmpegError,
        IndexError,
    ) as error:  # a file without video stream raises IndexError
        reason = getattr(error, "strerror", None) or "it holds no video"
        raise UserError(f"{path} cannot be decoded ({reason}): copy the dataset again") from None


def _decode(path: Path, times: Sequence[float], size: ImageSize | None) -> Iterator[Frame]:
    remaining = iter(times)
    time = next(remaining, None)
    if time is None:
        return
    with av.open(
        str(path), format="mp4"
    ) as container:  # a playlist could name other files and machines
        stream = container.streams.video[0]
        _require_size(path, stream, size)
        assert stream.time_base is not None
        # seeks the last keyframe before the time; one tick of margin, because times are rounded
        container.seek(round(time / stream.time_base) - 1, stream=stream)
        for frame in container.decode(stream):
            if frame.pts is None:
                continue
            _require_size(path, frame, size)
            if [part.bits for part in frame.format.components] != [8, 8, 8]:
                raise UserError(
                    f"{path} holds {frame.format.name}, colours of 8 bits are needed: convert it"
                )
            frame_time = float(frame.pts * stream.time_base)
            while time is not None and abs(frame_time - time) <= TOLERANCE:
                yield np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                time = next(remaining, None)
            if time is None:
                return
            if frame_time > time:
                raise UserError(
                    f"{path} has no frame at {time:.4f} s, the next one is at {frame_time:.4f} s: the video is of another dataset"
                )
    raise UserError(
        f"{path} ends before {time:.4f} s: the video is cut short, copy the dataset again"
    )


def _require_size(path: Path, video: Any, size: ImageSize | None) -> None:
    if size not in (None, (video.height, video.width)):
        raise UserError(
            f"{path} has a video of {video.height}x{video.width} pixels where {form.INFO} says {size[0]}x{size[1]}"
        )
