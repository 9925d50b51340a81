"""The one exception for mistakes that a user can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's: one sentence that names the thing, the value and the fix.

    The command line prints it without a traceback and exits with code 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``' Did you mean "x"?'`` for the known name nearest to ``name``, else an empty string."""
    names = list(known)
    if len(name.strip("-:. ")) < 2:  # anything would be near
        return ""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not found:  # wrong case, or a piece of a longer name
        found = [k for k in names if name.lower() in k.lower() or k.lower() in name.lower()][:1]
    return f' Did you mean "{found[0]}"?' if found else ""
