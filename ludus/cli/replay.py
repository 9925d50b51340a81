"""``ludus replay RUN``: redo the update in which a run's numbers went bad, and say where and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.table import Table
from rich.text import Text

from ludus.cli.arguments import parse
from ludus.logging.terminal import Console
from ludus.runs.folder import RunDirectory

if TYPE_CHECKING:  # they import torch, and `--help` should not
    from torch import Tensor

    from ludus.runs.diagnose import Replay, Span

NOT_REPRODUCED = 1  # exit code
BEFORE = 3  # steps shown before the bad one
ELEMENTS = 6  # numbers shown of an observation or an action
LARGE_REWARD, LARGE_OBSERVATION, LARGE_RATE, LARGE_PARAMETER = 1e5, 1e3, 1e-2, 1e3  # beyond these they are suspects


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Redo the update in which a run's numbers went bad, step by step, and say where it began."""

    # The folder of a run, a folder of runs (its latest is taken), or latest.
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    blackbox: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ""  # where it is, if it was moved out of the run
    trust: tyro.conf.FlagCreatePairsOff[bool] = (
        False  # import what the run's config.toml names, though you did not make it on this machine
    )
    runs: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs"  # where latest is looked for


def run(argv: list[str]) -> int:
    """Replay and print; the exit code is 0 if the failure came again."""
    given = parse(Arguments, argv, "replay")
    directory = RunDirectory.open(given.run, given.runs)  # a wrong name is told before torch is imported
    from ludus.runs.diagnose import replay

    found = replay(directory, Path(given.blackbox) if given.blackbox else None, given.trust)
    console = Console()
    settings = found.settings
    console.print(
        Text(f"{settings.env.id}, {settings.agent_name}: {directory.path}, step {found.step:,}"),
        style="bold",
        soft_wrap=True,
    )
    console.print(Text(_verdict(found) + "\n"), soft_wrap=True)
    if found.wrong["kind"] == "learning":
        _show_learning(console, found)
    else:
        _show_environment(console, found)
    _show_numbers(console, found)
    if line := advice(found):
        console.print(Text.assemble(("fix", "bold green"), f"  {line}"), soft_wrap=True)
    return NOT_REPRODUCED if found.reproduced == "no" else 0


def _verdict(found: Replay) -> str:
    if found.wrong["kind"] != "learning":
        there = {"no": "is not in the saved batch, which was changed since", "exactly": "is in the saved batch"}
        return f"The {found.wrong['kind']} that is {found.wrong['value']} {there[found.reproduced]}."
    spoilt = [*found.wrong["spoilt"], *(f"parameter {name} is not finite" for name in found.wrong["parameters"])]
    said = f"The run ended because {spoilt[0]}."
    if found.reproduced == "exactly":
        return f"{said} Redone, the update fails in the same way: every metric has the same value again."
    if found.reproduced == "nearly":
        why = " (the run's update was compiled, this one is not)" if found.settings.compile == "on" else ""
        return f"{said} Redone, the update fails too, though not with the same values{why}."
    return (
        f"{said} Redone, the update does NOT fail. It may depend on what no parameter, buffer or torch generator holds "
        "(a counter of the agent's own, a global random number), or on a compiled update or another machine."
    )


def _show_learning(console: Console, found: Replay) -> None:
    if acted := _acted(found):
        _say(console, "acting", acted)
    if found.bad is not None:
        bad = found.steps[found.bad]
        names = [f"{k} is {_number(x)}" for k, x in bad.items() if k.startswith("loss/") and not math.isfinite(x)]
        names += [f"the gradient's norm is {_number(bad['gradient_norm'])}"] * (not math.isfinite(bad["gradient_norm"]))
        _say(console, "step", f"{_place(found)}: {', '.join(names) or 'parameters are not finite after it'}")
    if found.module is not None:
        at, cause = found.module, found.module.inputs
        given = f"from inputs between {_number(cause.low)} and {_number(cause.high)}"
        if cause.nan or cause.infinite:
            given = f"from inputs of which {cause.nan + cause.infinite} of {cause.size} are not finite"
        whose = "its parameters are finite" if at.parameters_finite else "its parameters are not finite"
        _say(console, "forward", f"{at.name} ({at.kind}) gives {_bad(at.output)} {given}; {whose}")
    elif found.reproduced != "no":
        where = "" if _finite_losses(found) else ", but not the loss made of them"
        _say(console, "forward", f"the output of every module is finite{where}")
        if found.backward:
            _say(console, "backward", found.backward)
    if found.gradients:
        shown = ", ".join(found.gradients[:3]) + (", …" if len(found.gradients) > 3 else "")
        _say(console, "gradients", f"not finite in {len(found.gradients)} parameters: {shown}")
    if found.reproduced != "no":
        console.print()
    if found.steps:
        _show_steps(console, found)


def _show_steps(console: Console, found: Replay) -> None:
    """The optimizer steps up to the first bad one."""
    last = len(found.steps) - 1 if found.bad is None else found.bad
    first = max(0, last - BEFORE)
    names = [k for k in found.steps[0] if k.startswith("loss/") or k in ("gradient_norm", "learning_rate")]
    table = _table("step", *(k.removeprefix("loss/").replace("_", " ") for k in names))
    for i in range(first, last + 1):
        table.add_row(str(i + 1), *(_number(found.steps[i][k]) for k in names), style="red" if i == found.bad else "")
    console.print(table, "")


def _show_environment(console: Console, found: Replay) -> None:
    """The steps of one environment up to the one that gave the bad number."""
    wrong, batch = found.wrong, found.batch
    row, time = wrong["row"], wrong["time"]
    step = time if wrong["kind"] == "observation" else time + 1  # the observation that came with it
    element = f"[{', '.join(map(str, wrong['element']))}]" if wrong["element"] else ""
    what = "the reward" if wrong["kind"] == "reward" else f'observation "{wrong["name"]}"{element}'
    begins = step == 0 and batch.index is None  # a rollout before it would have shown what it ended with
    by = "reset()" if begins or bool(batch.first[step, row]) else "step()"
    _say(console, "where", f"{_whose(found, row, step)}: {what} from its {by}")
    table = _table("t", *batch.observation, *(_label("action", k) for k in batch.action), "reward", "ended")
    for t in range(max(0, step - BEFORE), min(step, len(batch.reward)) + 1):
        acted = [_row(x[t, row]) if t < len(x) else "" for x in batch.action.values()]
        came = [_number(batch.reward[t - 1, row].item()), _ending(found, t - 1, row)] if t else ["", ""]
        seen = [_row(x[t, row]) for x in batch.observation.values()]
        table.add_row(str(t), *seen, *acted, *came, style="red" if t == step else "")
    console.print(table)
    console.print(Text("Reward and ending came with the observation on their line; the action is the answer to it.\n"))


def _whose(found: Replay, row: int, t: int) -> str:
    """The environment and time in a rollout, or the item of a batch that was drawn from a replay."""
    length, items = found.batch.reward.shape
    if found.batch.index is None:
        return f"environment {row}, t={t} of {length} in the rollout"
    return f"item {row} of the batch of {items} from the replay, t={t} of {length} in it"


def _ending(found: Replay, t: int, row: int) -> str:
    batch = found.batch
    if bool(batch.first[t + 1, row]):
        return "reset"
    return "terminated" if bool(batch.terminated[t, row]) else "truncated" if bool(batch.truncated[t, row]) else ""


def _show_numbers(console: Console, found: Replay) -> None:
    from ludus.runs.diagnose import span

    batch = found.batch
    spans: dict[str, Span] = {_label("observation", k): span(x) for k, x in batch.observation.items()}
    spans |= {_label("action", k): span(x) for k, x in batch.action.items()} | {"reward": span(batch.reward)}
    spans |= {k: span(x) for k, x in batch.experience.items()}
    if found.part is not None:
        made = {k: x for k, x in found.part.experience.items() if k not in batch.experience}
        spans |= {f"{k}, in the failing step": span(x) for k, x in made.items()}
    spans |= {f"parameters of {k}, before it": x for k, x in found.parameters.items()}
    table = _table("numbers", "min", "max", "NaN", "infinite")
    for name, x in spans.items():
        counts = [str(count) if count else "" for count in (x.nan, x.infinite)]
        table.add_row(name, _number(x.low), _number(x.high), *counts, style="red" if x.nan + x.infinite else "")
    console.print(table, "")


def advice(found: Replay) -> str:
    """What to change, by what was found: the likeliest, or nothing where nothing was found."""
    if found.reproduced == "no":
        return ""
    if found.wrong["kind"] != "learning":
        return _of_environment(found)
    return (
        _of_sizes(found)
        or _of_growth(found)
        or _of_code(found)
        or f"Probably the steps are too large: {_slower(found)}"
    )


def _of_environment(found: Replay) -> str:
    wrong, batch = found.wrong, found.batch
    row, before = wrong["row"], wrong["time"] - (wrong["kind"] == "observation")
    by_action = before >= 0 and not bool(batch.first[before + 1, row])  # and not by a reset
    actions = {k: x[before, row] for k, x in batch.action.items()} if by_action else {}
    for name, x in actions.items():
        if not _all_finite(x):
            return (
                f'The action "{name}" that led there was {_row(x)} already, so the policy broke before the environment '
                f"did: {_slower(found)}"
            )
    what = f"a reward of {wrong['value']}"
    if wrong["kind"] == "observation":
        what = f'{wrong["value"]} in observation "{wrong["name"]}"'
    led = ", ".join(f"{_label('action', name)} {_row(x)}" for name, x in actions.items())
    after = f" after {led}" if led else ""
    environment = found.settings.env.id
    return f"{environment} gives {what}{after}: mend it there; `ludus check {environment}` helps."


def _of_sizes(found: Replay) -> str:
    from ludus.runs.diagnose import span

    agent, batch = found.settings.agent, found.batch
    reward = _size(span(batch.reward))
    if reward > LARGE_REWARD and not getattr(agent, "normalize_reward", True):
        return f"Rewards reach {_number(reward)}: turn on --agent.normalize-reward, or scale them in the environment."
    for name, x in batch.observation.items():
        size = _size(span(x)) if x.is_floating_point() else 0.0
        if size > LARGE_OBSERVATION and not getattr(agent, "normalize_observation", True):
            return f'Observation "{name}" reaches {_number(size)}: turn on --agent.normalize-observation.'
    return ""


def _of_growth(found: Replay) -> str:
    grown = {name: _size(x) for name, x in found.parameters.items() if _size(x) > LARGE_PARAMETER}
    if not grown:
        return ""
    return f"The parameters of {', '.join(grown)} had grown to {_number(max(grown.values()))}: {_slower(found)}"


def _of_code(found: Replay) -> str:
    at = found.module
    if at is None and found.backward and _finite_losses(found):
        return (
            "Mend the gradient of that operation: it is NaN though the loss is finite, as that of a root or a norm is "
            "at 0, or of a torch.where whose other branch overflows."
        )
    if at is None or at.origin.partition(".")[0] in ("torch", "ludus"):
        return ""
    if at.inputs.nan or at.inputs.infinite or not at.parameters_finite:
        return ""
    return f"Mend the forward of {at.kind} ({at.origin}): its inputs and parameters are finite, its output is not."


def _acted(found: Replay) -> str:
    """What acting gave that was no number already, before any learning of it."""
    batch, bad = found.batch, []
    for name, x in (batch.action | batch.experience).items():
        if not _all_finite(x):
            time, row = (~x.isfinite()).nonzero()[0, :2].tolist()
            bad.append((time, row, name))
    if not bad:
        return ""
    time, row, name = min(bad)
    return f"{name} was not finite already when the policy acted ({_whose(found, row, time)})"


def _finite_losses(found: Replay) -> bool:
    step = found.steps[found.bad] if found.bad is not None else found.again
    return all(math.isfinite(x) for name, x in step.items() if name.startswith("loss/"))


def _all_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _slower(found: Replay) -> str:
    agent = found.settings.agent
    rate = getattr(agent, "learning_rate", math.nan)
    to = 3e-4 if rate > LARGE_RATE else rate / 3
    clip = " and set --agent.max-grad-norm 0.5" if getattr(agent, "max_grad_norm", 1.0) == 0 else ""
    return f"lower --agent.learning-rate from {rate:g}, to {to:.1g} say{clip}."


def _size(x: Span) -> float:
    return max(abs(x.low), abs(x.high)) if math.isfinite(x.low) else 0.0


def _place(found: Replay) -> str:
    agent, bad = found.settings.agent, found.bad or 0
    place = f"optimizer step {bad + 1} of {len(found.steps)}"
    parts = getattr(agent, "minibatches", 0)
    if parts and hasattr(agent, "epochs") and len(found.steps) % parts == 0:  # whole epochs, so it is PPO's way
        place += f" (epoch {bad // parts + 1}, minibatch {bad % parts + 1})"
    return place


def _bad(x: Span) -> str:
    kinds = [f"{count} {what}" for count, what in ((x.nan, "NaN"), (x.infinite, "infinite")) if count]
    return f"{' and '.join(kinds)} of {x.size} numbers"


def _say(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<9}", "bold"), f" {text}"), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _row(x: Tensor) -> str:
    numbers: list[Any] = x.reshape(-1).tolist()
    shown = " ".join(map(_number, numbers[:ELEMENTS])) + (" …" if len(numbers) > ELEMENTS else "")
    return shown if x.dim() == 0 or len(numbers) == 1 else f"[{shown}]"


def _label(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind} {name}"


def _number(x: float) -> str:
    return f"{x:.4g}"
