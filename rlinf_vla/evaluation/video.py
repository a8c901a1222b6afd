"""Write videos of episodes as H.264 in MP4, which every browser plays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from rlinf_vla.core.io import replacing

Frame = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``, RGB."""

TEXT_SIZE = 11
"""Font size in pixels."""


def write_video(path: Path, frames: Frame | Sequence[Frame], fps: float, title: str = "") -> None:
    """Write uint8 ``[N, H, W, 3]`` frames atomically. Raises ValueError without frames.

    ``title`` becomes the container's title tag, so that a caption stays with its video. Odd sizes
    grow by one row or column, because yuv420p halves both.
    """
    if len(frames) == 0:
        raise ValueError(f"no frames for {path}")
    height, width = frames[0].shape[:2]
    # faststart puts the index first: a browser starts before it has read the whole file
    options = {"movflags": "+faststart"}
    with (
        replacing(path) as aside,
        av.open(str(aside), "w", format="mp4", options=options) as container,
    ):
        container.metadata["title"] = title
        rate = Fraction(fps).limit_denominator(1000)
        stream = container.add_stream(
            "libx264", rate=rate, options={"crf": "23", "preset": "veryfast"}
        )
        stream.width = width + width % 2
        stream.height = height + height % 2
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        container.mux(stream.encode(None))


def annotate(frame: Frame, lines: Sequence[str]) -> Frame:
    """Return a copy of ``[H, W, 3]`` with white text on a dark bottom strip; long lines wrap."""
    font = ImageFont.load_default(TEXT_SIZE)
    height, width = frame.shape[:2]
    margin = 4
    line_height = TEXT_SIZE + 3
    wrapped = [part for line in lines for part in _wrap(line, font, width - 2 * margin)]
    top = max(0, height - line_height * len(wrapped) - margin)
    result = frame.copy()
    result[top:] //= 3
    image = Image.fromarray(result)
    draw = ImageDraw.Draw(image)
    for row, text in enumerate(wrapped):
        draw.text((margin, top + margin // 2 + row * line_height), text, fill="white", font=font)
    return np.asarray(image)


def _wrap(line: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    rows = [""]
    for word in line.split():
        longer = f"{rows[-1]} {word}".strip()
        if rows[-1] and font.getlength(longer) > width:
            rows.append(word)
        else:
            rows[-1] = longer
    return rows
