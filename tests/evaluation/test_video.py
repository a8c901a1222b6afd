from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from rlinf_vla.evaluation.video import annotate, write_video


def moving_square(count: int, height: int, width: int) -> np.ndarray:
    frames = np.zeros((count, height, width, 3), np.uint8)
    for index, frame in enumerate(frames):
        frame[..., 2] = 120
        frame[8:24, index : index + 16] = (220, 40, 40)
    return frames


@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 97)])
def test_a_video_shows_the_written_frames(tmp_path: Path, height: int, width: int) -> None:
    frames = moving_square(20, height, width)
    path = tmp_path / "episode.mp4"
    write_video(path, frames, fps=12.5, title="push the cube · seed 3 · success")

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 12.5
        assert container.metadata["title"] == "push the cube · seed 3 · success"
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(shown) == 20
    assert shown[0].shape == (height + height % 2, width + width % 2, 3)
    for original, decoded in zip(frames, shown, strict=True):
        assert np.abs(decoded[:height, :width].astype(int) - original).mean() < 12
    # The index precedes the frames, so that a browser can start at once.
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")
    assert [each.name for each in tmp_path.iterdir()] == ["episode.mp4"]


def test_a_failed_video_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "episode.mp4"
    write_video(path, moving_square(3, 32, 32), fps=10)
    before = path.read_bytes()
    with pytest.raises(ValueError):
        write_video(path, [np.zeros((32, 32, 3), np.uint8), np.zeros((10, 10), np.uint8)], fps=10)
    with pytest.raises(ValueError, match="no frames"):
        write_video(path, [], fps=10)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["episode.mp4"]


def test_annotate_writes_at_the_bottom_of_a_copy() -> None:
    frame = np.full((96, 128, 3), 90, np.uint8)
    result = annotate(frame, ["pick up the red cube and put it on the plate", "step 12"])
    assert (frame == 90).all()
    assert result.shape == frame.shape and result.dtype == np.uint8
    assert (result[:40] == 90).all()
    assert result[40:].max() > 200 and result[90, 1].tolist() == [30, 30, 30]
    # A longer line wraps, and therefore needs more space.
    short = annotate(frame, ["step 12"])
    assert (short != 90).any(axis=(1, 2)).sum() < (result != 90).any(axis=(1, 2)).sum()


def test_annotate_never_fails_for_lack_of_space() -> None:
    assert annotate(
        np.zeros((16, 16, 3), np.uint8), ["a very long instruction indeed", "step 1", ""]
    ).shape == (16, 16, 3)
