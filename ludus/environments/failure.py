"""What a user sees when an environment's own code raises: one sentence with the place; the traceback is its cause."""

from __future__ import annotations

import traceback
from pathlib import Path

from ludus.core.errors import UserError

PACKAGES = ("site-packages", "dist-packages")
SEEDED = "declare it as reset(self, *, seed=None, options=None)"


def failed(environment: str, call: str, error: Exception) -> UserError:
    """The error to raise from ``error``, which came out of a call of the environment's."""
    if isinstance(error, UserError):
        return error
    fix = f"mend it there; `ludus check {environment}` tries it without training"
    if isinstance(error, TypeError) and call == "reset" and ("seed" in str(error) or "options" in str(error)):
        fix = SEEDED
    return UserError(f"{environment}: {call} raised {type(error).__name__}: {_said(error)}{_place(error)}; {fix}.")


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"


def _place(error: Exception) -> str:
    """Where it was raised: the innermost line of the user's own, else of a package, if there is any."""
    library = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    own = [f for f in frames if not any(package in f.filename for package in PACKAGES)] or frames
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
