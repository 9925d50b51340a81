import sys

import numpy as np
import pytest

from ludus.core.errors import UserError
from ludus.logging.video import write_video

ffmpeg = pytest.importorskip("imageio_ffmpeg")
image = pytest.importorskip("PIL.Image")


def frames(count: int = 10, height: int = 33, width: int = 47):
    for i in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : width * i // count] = (200, 30, 90)
        yield frame


def test_mp4_of_an_odd_size(tmp_path):
    path = write_video(frames(), tmp_path / "videos" / "a.mp4", fps=20)
    assert path == tmp_path / "videos" / "a.mp4"
    reader = ffmpeg.read_frames(str(path))
    meta = next(reader)
    pictures = [np.frombuffer(data, np.uint8).reshape(34, 48, 3) for data in reader]
    assert meta["size"] == (48, 34)
    assert len(pictures) == 10
    assert abs(pictures[-1][10, 10].astype(int) - (200, 30, 90)).max() < 30
    assert [file.name for file in path.parent.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("asked", ["a.gif", "a.mp4"])
def test_gif_where_asked_or_without_ffmpeg(tmp_path, monkeypatch, asked):
    if asked == "a.mp4":
        monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    path = write_video(frames(), tmp_path / asked, fps=50)
    assert path == tmp_path / "a.gif"
    with image.open(path) as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (10, (47, 33), 20)


def test_without_any_encoder_the_package_is_named(tmp_path, monkeypatch):
    for name in ("imageio_ffmpeg", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="pip install imageio-ffmpeg"):
        write_video(frames(), tmp_path / "a.mp4", fps=20)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "no frames"),
        ([np.zeros((4, 4, 3))], "float64"),
        ([np.zeros((4, 4), np.uint8)], r"\[4, 4\]"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)], r"\[4, 6, 3\]"),
        ([None], "no frames"),
    ],
)
@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_bad_frames_are_one_sentence_and_leave_no_file(tmp_path, bad, says, name):
    with pytest.raises(UserError, match=says):
        write_video(bad, tmp_path / name, fps=20)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_rate(tmp_path):
    with pytest.raises(UserError, match="above 0"):
        write_video(frames(), tmp_path / "a.mp4", fps=0)
