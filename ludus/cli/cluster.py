"""``ludus cluster check [ADDRESS]``: test a Ray cluster before a long run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ludus.cli.arguments import parse, wants_help
from ludus.cli.help import show_help
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.settings.settings import check_cluster, resolve_settings
from ludus.settings.trust import LOCAL_CLUSTER

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.containers.ray import NodeReport

CHECK = "check"
FAILED = 1  # exit code if a run could not use the cluster


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Test a Ray cluster: machines, CPUs, versions, token authentication, an environment and the object store.

    Each line is one test; the exit code is 1 if one fails.
    """

    # host:port of the cluster; auto: Ray on this machine, started for the test
    address: Annotated[str, "ADDRESS"] = LOCAL_CLUSTER
    # an environment that every machine must be able to make: a Gymnasium id, or package.module:Class
    env: Annotated[str, "ENV"] = ""


def run(argv: list[str]) -> int:
    """Print one line for each test; the exit code is 1 if one fails."""
    if wants_help(argv):
        show_help(Arguments, f"cluster {CHECK}")
    if argv[:1] != [CHECK]:
        raise UserError("`ludus cluster` tests Ray clusters: write `ludus cluster check [ADDRESS]`.")
    arguments = parse(Arguments, argv[1:], f"cluster {CHECK}")
    check_cluster("ADDRESS", arguments.address)
    env = resolve_settings(arguments.env).settings.env if arguments.env else None
    from ludus.containers.impala import needs_ray

    try:
        with needs_ray():
            from ludus.containers.machines import is_loopback, versions
            from ludus.containers.ray import inspect_cluster
        nodes = inspect_cluster(arguments.address, env)
    except UserError as error:
        say(f"error  {error}")
        return FAILED
    needs_token = not all(is_loopback(node.address) for node in nodes)
    lines = list(describe(nodes, versions(), arguments.env, needs_token))
    for passed, line in lines:
        say(f"{'ok' if passed else 'error':<5}  {line}")
    return 0 if all(passed for passed, _ in lines) else FAILED


def describe(
    nodes: Sequence[NodeReport], expected: Mapping[str, str], env: str, needs_token: bool
) -> Iterator[tuple[bool, str]]:
    """Return the result of each test: whether it passed, and a line; ``expected`` are the versions of this process."""
    yield True, f"nodes: {len(nodes)} ({', '.join(node.address for node in nodes)})"
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    yield cpus > 0, f"CPUs: {cpus:g}; GPUs: {gpus:g}"
    lost = [node for node in nodes if not node.found]
    if lost:
        yield False, f"answers: {lost[0].address} did not answer: {lost[0].problem}"
    nodes = [node for node in nodes if node.found]
    own = ", ".join(f"{name} {version}" for name, version in expected.items())
    other = [node for node in nodes if node.found != expected]
    if other:
        found = ", ".join(f"{name} {version}" for name, version in other[0].found.items())
        yield False, f"versions: {found} on {other[0].address}, but {own} here; install the same on all"
    else:
        yield True, f"versions: {own} on all nodes"
    if needs_token:
        without = [node.address for node in nodes if not node.has_token]
        yield (
            not without,
            (
                f"token authentication: off on {', '.join(without)}; set RAY_AUTH_MODE=token there before `ray start`"
                if without
                else "token authentication: on"
            ),
        )
    if env:
        failed = [node for node in nodes if node.problem]
        yield (
            not failed,
            (
                f"environment: {env} cannot be made on {failed[0].address}: {failed[0].problem}"
                if failed
                else f"environment: {env} can be made on all nodes"
            ),
        )
    speeds = [f"{node.bytes_per_second / 1e6:,.0f} MB/s from {node.address}" for node in nodes]
    yield True, f"object store: {', '.join(speeds)}"
