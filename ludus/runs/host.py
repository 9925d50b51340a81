"""Run the host of a Ray cluster from the process of the command: show its output, pass signals on, replace it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ludus.containers.hook import OnUpdate
from ludus.containers.impala import needs_ray
from ludus.containers.signals import handle_signals
from ludus.core.errors import UserError
from ludus.logging.logfile import LogFile
from ludus.logging.remote import Terminal
from ludus.runs.folder import RunDirectory
from ludus.settings.settings import Flat, from_flat


class Order(NamedTuple):
    """What a host is to do: train with these settings, in a new run or in one that it resumes."""

    settings: Flat
    origins: dict[str, str]
    trust: bool  # the run in ``init_from``
    run: str = ""  # folder of the run to resume
    signs: bool = True  # whether to sign its settings as this user's


def run_in_cluster(
    function: Callable[..., Any], order: Order, on_update: OnUpdate | None, environment: Callable[..., Any] | None
) -> Any:
    """Return the result of ``function(terminal, order, on_update, environment)`` in the host of a cluster.

    A host that dies is replaced by one that resumes the run.
    """
    with needs_ray():
        from ludus.containers.ray import Cluster, HostDied, RemoteHost, interruption, refuse_unpicklable
    settings, asked, died = from_flat(order.settings), list[int](), 0
    impala = settings.impala
    refuse_unpicklable(on_update)
    with ExitStack() as stack:
        cluster = Cluster(impala.cluster, math.ceil(impala.workers * impala.cpus_per_worker + impala.host_cpus))
        stack.callback(cluster.close)
        stack.enter_context(handle_signals(lambda number, frame: asked.append(number)))
        while True:
            terminal = Terminal(settings.quiet)
            host = RemoteHost(impala, asked, waits=died > 0)
            try:
                folder = Path(order.run or settings.runs).absolute()
                return host.run(function, (order, on_update, environment), folder, terminal.shape, terminal.show)
            except HostDied as error:
                died += 1
                terminal.close()
                if terminal.run is not None:  # resumed with the settings that the host has decided
                    opened = terminal.run
                    order = order._replace(run=opened.path, settings=opened.settings, origins=opened.origins)
                run = RunDirectory(Path(order.run)) if order.run else None
                next_step = _what_next(run, host.stopping > 0, died > impala.max_restarts)
                if run is not None and run.path.is_dir():
                    LogFile(run.log).warning(f"{error}; {next_step}.\n{error.__cause__}")
                if died > impala.max_restarts and not host.stopping:
                    raise UserError(
                        f"More than {impala.max_restarts} hosts failed (impala.max_restarts), the last one so: "
                        f"{error}; fix the cause, and resume the run, or raise impala.max_restarts."
                    ) from error
                terminal.note(f"{error}; {next_step}.")
                if host.stopping:
                    raise interruption(host.stopping) from error
            finally:
                terminal.close()
                host.end()


def _what_next(run: RunDirectory | None, stops: bool, too_many: bool) -> str:
    """Return what happens after the death of a host."""
    if stops or too_many:
        resume = "" if run is None else f"; `ludus resume {shlex.quote(str(run.path))}` continues the run"
        return f"{'it was asked to stop' if stops else 'it is not replaced'}{resume}"
    if run is None:
        return "a new one starts the run"
    if run.latest_checkpoint() is None:
        return "there is no checkpoint yet, so a new one starts the run again"
    return "a new one resumes the run from its newest checkpoint"
