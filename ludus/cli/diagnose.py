"""``ludus diagnose RUN``: compute the loss of a failed update again, and say where the first NaN or Inf appears."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from ludus.cli.arguments import parse
from ludus.logging.terminal import Console
from ludus.runs.folder import RunDirectory
from ludus.settings.settings import to_flat

if TYPE_CHECKING:  # they import torch, and `--help` should not
    from torch import Tensor

    from ludus.runs.diagnose import Diagnosis

NOT_REPRODUCED = 1  # exit code
BEFORE = 3  # environment steps shown before the bad one
ELEMENTS = 6  # numbers shown of an observation or an action
LARGE_REWARD, LARGE_OBSERVATION, LARGE_RATE, LARGE_PARAMETER = 1e5, 1e3, 1e-2, 1e3  # beyond these they are suspects


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compute the loss of a run's failed update again, and say where the first NaN or Inf appears."""

    # The folder of a run, a folder of runs (its latest is taken), or latest.
    run: Annotated[str, "RUN"]
    dump: Annotated[str, "FOLDER"] = ""  # where it is, if it was moved out of the run
    trust: bool = False  # import what the run's config.toml names, though you did not make it on this machine
    runs: Annotated[str, "FOLDER"] = "runs"  # where latest is looked for


def run(argv: list[str]) -> int:
    """Diagnose and print; the exit code is 0 if the failure came again."""
    given = parse(Arguments, argv, "diagnose")
    directory = RunDirectory.open(given.run, given.runs)  # a wrong name is told before torch is imported
    from ludus.runs.diagnose import diagnose

    found = diagnose(directory, Path(given.dump) if given.dump else None, given.trust)
    console, settings = Console(), found.settings
    title = f"{settings.env.id}, {settings.agent_name}: {directory.path}, step {found.step:,}"
    console.print(Text(title), style="bold", soft_wrap=True)
    console.print(Text(_verdict(found) + "\n"), soft_wrap=True)
    for label, text in found.lines:
        _say(console, label, text)
    console.print()
    if found.wrong["kind"] != "learning":
        _show_environment(console, found)
    _show_numbers(console, found)
    if line := advice(found):
        console.print(Text.assemble(("fix", "bold green"), f"  {line}"), soft_wrap=True)
    return 0 if found.again else NOT_REPRODUCED


def _verdict(found: Diagnosis) -> str:
    wrong = found.wrong
    if wrong["kind"] != "learning":
        there = "is in the saved batch" if found.again else "is not in the saved batch, which was changed since"
        return f"The {wrong['kind']} that is {wrong['value']} {there}."
    said = f"The run ended because {(wrong['spoilt'] or ['a gradient was not finite'])[0]}."
    if found.again:
        return f"{said} Computed again, the update fails in the same way."
    return (
        f"{said} Computed again, it does NOT fail. It may depend on what no parameter, buffer or batch holds (a "
        "counter of the agent's own, a random number), or on a compiled update or another machine."
    )


def _show_environment(console: Console, found: Diagnosis) -> None:
    """The steps of one environment up to the one that gave the bad number."""
    from ludus.runs.diagnose import whose

    wrong, batch = found.wrong, found.batch
    row, time = wrong["row"], wrong["time"]
    step = time if wrong["kind"] == "observation" else time + 1  # the observation that came with it
    element = f"[{', '.join(map(str, wrong['element']))}]" if wrong["element"] else ""
    what = "the reward" if wrong["kind"] == "reward" else f'observation "{wrong["name"]}"{element}'
    begins = step == 0 and batch.index is None  # a rollout before it would have shown what it ended with
    by = "reset()" if begins or bool(batch.first[step, row]) else "step()"
    _say(console, "where", f"{whose(batch, row, step)}: {what} from its {by}")
    table = _table("t", *batch.observation, *(_label("action", k) for k in batch.action), "reward", "ended")
    for t in range(max(0, step - BEFORE), min(step, len(batch.reward)) + 1):
        acted = [_row(x[t, row]) if t < len(x) else "" for x in batch.action.values()]
        came = [_number(batch.reward[t - 1, row].item()), _ending(found, t - 1, row)] if t else ["", ""]
        seen = [_row(x[t, row]) for x in batch.observation.values()]
        table.add_row(str(t), *seen, *acted, *came, style="red" if t == step else "")
    console.print(table)
    console.print(Text("Reward and ending came with the observation on their line; the action is the answer to it.\n"))


def _ending(found: Diagnosis, t: int, row: int) -> str:
    batch = found.batch
    if bool(batch.first[t + 1, row]):
        return "reset"
    return "terminated" if bool(batch.terminated[t, row]) else "truncated" if bool(batch.truncated[t, row]) else ""


def _show_numbers(console: Console, found: Diagnosis) -> None:
    from ludus.runs.diagnose import value_range

    batch = found.batch
    tensors = {_label("observation", k): x for k, x in batch.observation.items()}
    tensors |= {_label("action", k): x for k, x in batch.action.items()} | {"reward": batch.reward} | batch.experience
    ranges = {name: value_range(x) for name, x in tensors.items()}
    ranges |= {f"parameters of {k}": x for k, x in found.parameters.items()}
    table = _table("numbers", "min", "max", "NaN", "infinite")
    for name, x in ranges.items():
        counts = [str(count) if count else "" for count in (x.nan, x.infinite)]
        table.add_row(name, _number(x.low), _number(x.high), *counts, style="red" if x.nan + x.infinite else "")
    console.print(table, "")


def advice(found: Diagnosis) -> str:
    """What to change, by what was found: the likeliest, or nothing where nothing was found."""
    if not found.again:
        return ""
    if found.wrong["kind"] != "learning":
        return _advice_environment(found)
    settings, batch = to_flat(found.settings), found.batch
    from ludus.runs.diagnose import value_range

    reward = value_range(batch.reward).largest
    if reward > LARGE_REWARD and settings.get("agent.normalize_reward") is False:
        return f"Rewards reach {_number(reward)}: turn on --agent.normalize-reward, or scale them in the environment."
    for name, x in batch.observation.items():
        size = value_range(x).largest if x.is_floating_point() else 0.0
        if size > LARGE_OBSERVATION and settings.get("agent.normalize_observation") is False:
            return f'Observation "{name}" reaches {_number(size)}: turn on --agent.normalize-observation.'
    rate = settings.get("agent.learning_rate", math.nan)
    clip = " and set --agent.max-grad-norm 0.5" if settings.get("agent.max_grad_norm") == 0 else ""
    slower = f"lower --agent.learning-rate from {rate:g}, to {3e-4 if rate > LARGE_RATE else rate / 3:.1g} say{clip}."
    if grown := {name: x.largest for name, x in found.parameters.items() if x.largest > LARGE_PARAMETER}:
        return f"The parameters of {', '.join(grown)} had grown to {_number(max(grown.values()))}: {slower}"
    if found.culprit:
        return f"Correct the forward of {found.culprit}: its inputs and parameters are finite, its output is not."
    if found.backward and found.finite_losses and not found.bad_module:
        return (
            "Correct the gradient of that operation: it is NaN though the loss is finite, as that of a root or a norm "
            "is at 0, or of a torch.where whose other branch overflows."
        )
    return f"Probably the steps are too large: {slower}"


def _advice_environment(found: Diagnosis) -> str:
    wrong, batch = found.wrong, found.batch
    row, before = wrong["row"], wrong["time"] - (wrong["kind"] == "observation")
    by_action = before >= 0 and not bool(batch.first[before + 1, row])  # and not by a reset
    actions = {k: x[before, row] for k, x in batch.action.items()} if by_action else {}
    for name, x in actions.items():
        if not bool(x.isfinite().all()):
            return (
                f'The action "{name}" that led there was {_row(x)} already, so the policy broke before the environment '
                "did: lower --agent.learning-rate."
            )
    what = f"a reward of {wrong['value']}"
    if wrong["kind"] == "observation":
        what = f'{wrong["value"]} in observation "{wrong["name"]}"'
    led = ", ".join(f"{_label('action', name)} {_row(x)}" for name, x in actions.items())
    environment = found.settings.env.id
    return (
        f"{environment} gives {what}{f' after {led}' if led else ''}: fix it there; `ludus check {environment}` helps."
    )


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
