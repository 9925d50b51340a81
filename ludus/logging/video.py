"""Write videos of episodes as mp4, or as animated gif without ffmpeg."""

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
    """Write ``frames`` and return the path of the file, which ends in ``.gif`` if ``.mp4`` is not possible.

    The folder is created if needed; it may be a link only if ``follows``.
    """
    if not fps > 0:
        raise UserError(f'The video "{path}" cannot have {fps} frames per second: use a number above 0.')
    encoder = _encoder("imageio_ffmpeg") if path.suffix != ".gif" else None
    pillow = _encoder("PIL.Image")
    if encoder is None and pillow is None:
        raise UserError("Videos need ffmpeg: `pip install imageio-ffmpeg`.")
    path = path.with_suffix(".gif" if encoder is None else ".mp4")
    name = temporary_name(path.suffix)  # encoders need the right suffix
    try:
        make_folder(path.parent)
        with (
            open_folder(path.parent, follow_links=follows) as folder,
            open_regular_file(name, "xb", folder) as file,  # created first, to fail early if the folder is not writable
            TemporaryDirectory(prefix="ludus-") as private,
        ):
            try:
                checked, made = _checked(iter(frames), path), Path(private) / name
                if encoder is not None:
                    _write_mp4(encoder, checked, made, fps)
                else:
                    images = (pillow.fromarray(frame) for frame in checked)
                    milliseconds = max(round(1000 / fps), 20)  # many viewers slow down faster ones
                    next(images).save(made, save_all=True, append_images=images, duration=milliseconds, loop=0)
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
            f'The video "{path}" cannot be written ({error.strerror}): choose another path with --out FILE.'
        ) from error
    return path


def _encoder(module: str) -> Any:
    """Import a module; None if it, or the ffmpeg program that it needs, is not installed."""
    try:
        found = importlib.import_module(module)
        if module == "imageio_ffmpeg":
            found.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return None
    return found


def _checked(frames: Iterator[Frame], path: Path) -> Iterator[Frame]:
    """Check that all frames are uint8 ``[H, W, 3]`` of the same size; the first one immediately."""
    first = next(frames, None)
    if first is None:
        raise UserError(f'The video "{path}" has no frames: the environment rendered none.')
    shape = np.shape(first)

    def check(frame: Frame) -> Frame:
        frame = np.asarray(frame)
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != shape or 0 in shape:
            raise UserError(
                f'A frame of the video "{path}" is {frame.dtype} {list(frame.shape)}: the environment must render '
                "uint8 [height, width, 3] of a constant size."
            )
        return frame

    return itertools.chain([check(first)], map(check, frames))


def _write_mp4(ffmpeg: Any, frames: Iterator[Frame], path: Path, fps: float) -> None:
    first = next(frames)
    height, width = (n + n % 2 for n in first.shape[:2])  # yuv420p needs even sizes
    writer = ffmpeg.write_frames(str(path), (width, height), fps=fps, macro_block_size=2)
    writer.send(None)
    try:
        for frame in itertools.chain([first], frames):
            padding = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
            writer.send(np.ascontiguousarray(np.pad(frame, padding, mode="edge")))
    finally:
        writer.close()
