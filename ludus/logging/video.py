"""Videos of episodes: mp4 where ffmpeg is there, else an animated gif."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.core.errors import UserError
from ludus.core.files import delete, link_error, make_folder, open_folder, open_regular_file, temporary_name

Frame = NDArray[np.uint8]  # [H, W, 3]


def write_video(frames: Iterable[Frame], path: Path, fps: float, follows: bool = True) -> Path:
    """Write ``frames`` and return the path of the file, whose ending may be ``.gif`` where ``.mp4`` cannot be made.

    The folder is made where there is none; only where it ``follows`` may it be a link.
    """
    if not fps > 0:
        raise UserError(f'The video "{path}" cannot have {fps} frames per second: give a number above 0.')
    encoder = _encoder("imageio_ffmpeg") if path.suffix != ".gif" else None
    pillow = _encoder("PIL.Image")
    if encoder is None and pillow is None:
        raise UserError("Videos need one more package: install it with `pip install imageio-ffmpeg`.")
    path = path.with_suffix(".gif" if encoder is None else ".mp4")
    name = temporary_name(path.suffix)  # both encoders want the right ending, and a path
    try:
        make_folder(path.parent)
        with (
            open_folder(path.parent, follow_links=follows) as folder,
            open_regular_file(name, "xb", folder) as file,  # made first: a folder that takes no files is told at once
            TemporaryDirectory(prefix="ludus-") as private,
        ):
            try:
                checked, made = _checked(iter(frames), path), Path(private) / name
                if encoder is not None:
                    _write_mp4(encoder, checked, made, fps)
                else:
                    _write_gif(pillow, checked, made, fps)
                with made.open("rb") as source:
                    shutil.copyfileobj(source, file)
                os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                delete(name, folder)
                raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise link_error(path.parent) from error
        raise UserError(
            f'The video "{path}" cannot be written ({error.strerror}): give another place with --out FILE.'
        ) from error
    return path


def _encoder(module: str) -> Any:
    """The module, or None where it (or the ffmpeg program that it needs) is not installed."""
    try:
        found = importlib.import_module(module)
        if module == "imageio_ffmpeg":
            found.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return None
    return found


def _checked(frames: Iterator[Frame], path: Path) -> Iterator[Frame]:
    """The same frames, the first one looked at already: all uint8 ``[H, W, 3]`` and of one size."""
    first = next(frames, None)
    if first is None:
        raise UserError(f'The video "{path}" has no frames: play at least one step in an environment that renders.')
    shape = np.shape(first)

    def check(frame: Frame) -> Frame:
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != shape or 0 in shape:
            raise UserError(
                f'A frame of the video "{path}" is {frame.dtype} {list(frame.shape)}: the environment must render '
                f"uint8 [height, width, 3], of one size all along."
            )
        return frame

    return itertools.chain([check(first)], map(check, frames))


def _write_mp4(ffmpeg: Any, frames: Iterator[Frame], path: Path, fps: float) -> None:
    first = next(frames)
    height, width = (n + n % 2 for n in first.shape[:2])  # the usual pixel format halves both
    writer = ffmpeg.write_frames(str(path), (width, height), fps=fps, macro_block_size=2)
    writer.send(None)
    try:
        for frame in itertools.chain([first], frames):
            padding = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
            writer.send(np.ascontiguousarray(np.pad(frame, padding, mode="edge")))
    finally:
        writer.close()


def _write_gif(pillow: Any, frames: Iterator[Frame], path: Path, fps: float) -> None:
    images = (pillow.fromarray(frame) for frame in frames)
    milliseconds = max(round(1000 / fps), 20)  # many viewers slow anything faster down to 100
    next(images).save(path, save_all=True, append_images=images, duration=milliseconds, loop=0)
