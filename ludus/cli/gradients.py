"""``ludus show gradients RUN``: draw the gradient of each layer at a network check of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ludus.cli.arguments import parse
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.logging.gradient_picture import LayerGradient, draw_gradients
from ludus.logging.metrics import read_metrics
from ludus.runs.folder import RunDirectory

PREFIX, MEAN, MAX = "network/", "/gradient_mean", "/gradient_max"  # of the metrics of a network check


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Draw mean and maximum of the absolute gradient of each layer, as found by a network check of a run.

    The run must have been trained with --network-check.every.
    """

    # folder of a run, folder with several runs (the latest is used), or latest
    run: Annotated[str, "RUN"]
    step: int | None = None  # the check nearest to this step; by default the last one
    svg: Annotated[str, "FILE"] = "gradients.svg"  # file to draw into
    # folder in which to look for latest
    runs: Annotated[str, "FOLDER"] = "runs"


def run(argv: list[str]) -> int:
    """Write the picture, and print its numbers."""
    arguments = parse(Arguments, argv, "show gradients")
    directory = RunDirectory.open(arguments.run, arguments.runs)
    step, layers = find_gradients(directory, arguments.step)
    try:
        Path(arguments.svg).write_text(draw_gradients(layers, f"Gradients at step {step:,}"), encoding="utf-8")
    except OSError as error:
        raise UserError(f'--svg is "{arguments.svg}", which cannot be written: {error.strerror}.') from error
    width = max(map(len, layers))
    say(f"{directory.path}, step {step:,}: absolute gradient of each layer, before clipping")
    say(f"  {'layer':<{width}}  {'mean':>9}  {'max':>9}")
    for name, gradient in layers.items():
        say(f"  {name:<{width}}  {gradient.mean:>9.3g}  {gradient.max:>9.3g}")
    say(f"Saved in {arguments.svg}.")
    return 0


def find_gradients(run: RunDirectory, step: int | None = None) -> tuple[int, dict[str, LayerGradient]]:
    """Return the step of a check and the gradients by layer: of the last check, or of the one nearest to ``step``."""
    checks = [line for line in read_metrics(run.metrics) if any(_is_gradient(name) for name in line)]
    if not checks:
        raise UserError(f'The run "{run.path}" has no network check: train with --network-check.every, such as 10000.')
    found = checks[-1] if step is None else min(checks, key=lambda line: abs(line["step"] - step))
    names = [name.removeprefix(PREFIX).removesuffix(MEAN) for name in found if _is_gradient(name)]
    layers = {name: LayerGradient(found[f"{PREFIX}{name}{MEAN}"], found[f"{PREFIX}{name}{MAX}"]) for name in names}
    return int(found["step"]), layers


def _is_gradient(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(MEAN)
