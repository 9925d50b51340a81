"""Turn an exception in an environment's code into one sentence and the user's part of the traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from ludus.core.errors import UserError

PACKAGES = ("site-packages", "dist-packages")
FIX_RESET = "declare it as reset(self, *, seed=None, options=None)"


def environment_error(environment: str, call: str, error: Exception) -> UserError:
    """Return the UserError to raise from an exception in a call of the environment."""
    if isinstance(error, UserError):
        return error
    fix = f"fix it there; `ludus check {environment}` tries it without training"
    if isinstance(error, TypeError) and call == "reset" and ("seed" in str(error) or "options" in str(error)):
        fix = FIX_RESET
    message = " ".join(str(error).split()) or "no message"
    frames = _user_frames(traceback.extract_tb(error.__traceback__))
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    result = UserError(f"{environment}: {call} raised {type(error).__name__}: {message}{place}; {fix}.")
    result.details = "" if fix == FIX_RESET else user_traceback(error)
    return result


def user_traceback(error: BaseException) -> str:
    """Format the traceback of an error and its causes, with the frames of the user's files alone; "" without any."""
    shown = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [shown]
    found = False
    while chain:
        link = chain.pop()
        if link is not None:
            frames = _user_frames(link.stack)
            link.stack = traceback.StackSummary.from_list(frames)
            found |= bool(frames)
            chain += [link.__cause__, link.__context__]
    return "".join(shown.format()) if found else ""


def _user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames in the user's files, or else those in packages and the standard library."""
    ludus, python = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)
    frames = [f for f in stack if not f.filename.startswith(ludus)]
    outside_packages = [f for f in frames if not any(package in f.filename for package in PACKAGES)]
    user = [f for f in outside_packages if not f.filename.startswith((python, "<frozen"))]
    return user or outside_packages or frames
