"""``ludus show preprocess ENV``: print what each op of ``preprocess.*`` makes of observations, rewards and actions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from ludus.cli.arguments import wants_help
from ludus.cli.help import show_help
from ludus.cli.output import say
from ludus.cli.train import parse
from ludus.preprocess.config import PreprocessConfig, reward_ops, split_calls

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.core.spec import Spec
    from ludus.settings.settings import Settings

COMMAND = "show preprocess"
Line = tuple[str, str, str, str]  # name or op, where it runs, dtype and shape of the result


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print shapes and types of observations before and after each op of preprocess.observation.

    Takes all flags of `ludus train` and refuses what it would refuse.
    """

    # a Gymnasium id such as CartPole-v1, or your own environment as package.module:Class
    environment: Annotated[str, "ENV"]
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)


def run(argv: list[str]) -> int:
    """Print the pipelines."""
    if wants_help(argv):
        show_help(Arguments, COMMAND)
    say(describe(parse(argv, COMMAND).settings))
    return 0


def describe(settings: Settings[Any]) -> str:
    """Return the pipelines as trees, with a column for each property."""
    from ludus.managers.make import make_manager
    from ludus.preprocess.rewards import make_reward_ops

    raw = make_manager(replace(settings.env, axes=()), 1)
    raw.close()
    manager = make_manager(settings.env, 1, preprocess=settings.preprocess)
    manager.close()
    make_reward_ops(settings.preprocess.reward)  # refuses wrong arguments
    lines = _observations(raw.observation, manager.observation, settings.preprocess)
    lines += [("reward", "", "float32", "()")]
    lines += _branches([(op.text, "device", "", "") for op in reward_ops(settings.preprocess.reward)])
    ops = [text for item in settings.preprocess.action for text in split_calls(item)]
    for name, spec in manager.action.items():
        lines += [(name, "", *_type(spec)), *_branches([(text, "environment", "", "") for text in ops])]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in lines)


def _observations(raw: dict[str, Spec], ready: dict[str, Spec], preprocess: PreprocessConfig) -> list[Line]:
    """Return the lines of all observations; ``ready`` are those that the agent gets, with ops on the device."""
    from ludus.core.spec import network_inputs
    from ludus.preprocess.observation import ObsPreprocessor
    from ludus.preprocess.trace import trace_ops

    inputs = ObsPreprocessor(network_inputs(ready))
    results = dict(inputs.names)  # observation → input of networks
    before = {name: raw.get(name, replace(spec, ops=())) for name, spec in ready.items()}
    traced = trace_ops(before, preprocess.observation)
    lines: list[Line] = []
    for name, spec in before.items():
        below: list[Line] = [(op.text, op.place, *_type(op.output)) for op in traced.get(name, [])]
        if name in results:
            result = results[name]
            below.append((f"network: {result}", "device", *_type(inputs.outputs[result])))
            if mask := inputs.masks.get(result):
                below.append((f"mask: {mask}", "device", *_type(inputs.outputs[mask])))
        elif name in traced:
            below.append(("not seen by networks", "", "", ""))
        lines += [(name, "" if name in raw else "environment", *_type(spec)), *_branches(below)]
    return lines


def _branches(lines: list[Line]) -> list[Line]:
    last = len(lines) - 1
    return [(("└─ " if i == last else "├─ ") + line[0], *line[1:]) for i, line in enumerate(lines)]


def _type(spec: Spec) -> tuple[str, str]:
    return spec.dtype, str(spec.shape)
