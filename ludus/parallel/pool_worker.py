"""The child side of ``pool.ProcessPool``: call functions by their import paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ludus.core import imports
from ludus.parallel.message import read_message, write_message


def serve(settings: Mapping[str, Any], fds: Mapping[str, int]) -> NoReturn:
    """Answer requests until this process is ended. An exception ends it, and the launcher reports the traceback."""
    first = []
    if settings["context"]:
        first = [imports.resolve(settings["context"], {}, "function")(settings["worker"])]
    while True:
        os.eventfd_read(fds["go"])
        request = read_message(fds["request"])
        function = imports.resolve(request["function"], {}, "function")
        write_message(fds["reply"], function(*first, request["item"]))
        os.eventfd_write(fds["done"], 1)
