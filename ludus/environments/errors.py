"""What a user sees when an environment's own code raises: its stack, and one sentence with the place."""

from __future__ import annotations

import traceback
from pathlib import Path

from ludus.core.errors import UserError

PACKAGES = ("site-packages", "dist-packages")
SEEDED = "declare it as reset(self, *, seed=None, options=None)"


def environment_error(environment: str, call: str, error: Exception) -> UserError:
    """The error to raise from ``error``, which came out of a call of the environment's."""
    if isinstance(error, UserError):
        return error
    fix = f"fix it there; `ludus check {environment}` tries it without training"
    if isinstance(error, TypeError) and call == "reset" and ("seed" in str(error) or "options" in str(error)):
        fix = SEEDED
    mistake = UserError(f"{environment}: {call} raised {type(error).__name__}: {_said(error)}{_place(error)}; {fix}.")
    mistake.details = "" if fix == SEEDED else user_traceback(error)
    return mistake


def user_traceback(error: BaseException) -> str:
    """The traceback of ``error`` and of what caused it, trimmed to the user's own files; empty if there are none."""
    shown = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException | None] = [shown]
    found = False
    while links:
        link = links.pop()
        if link is not None:
            own = _own(link.stack)
            link.stack = traceback.StackSummary.from_list(own)
            found |= bool(own)
            links += [link.__cause__, link.__context__]
    return "".join(shown.format()) if found else ""


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"


def _place(error: Exception) -> str:
    """Where it was raised: the innermost line of the user's own, else of a package, if there is any."""
    own = _own(traceback.extract_tb(error.__traceback__))
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def _own(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames in the user's own files; those of packages and the standard library where there are no others."""
    ours, python = str(Path(__file__).parents[1]), str(Path(traceback.__file__).parent)
    frames = [f for f in stack if not f.filename.startswith(ours)]
    theirs = [f for f in frames if not any(package in f.filename for package in PACKAGES)]
    return [f for f in theirs if not f.filename.startswith((python, "<frozen"))] or theirs or frames
