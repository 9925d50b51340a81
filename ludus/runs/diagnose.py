"""Compute the loss of a failed update again, and find where the first NaN or Inf appears."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludus.containers.build import build_agent, choose_device, outline_agent
from ludus.containers.guard import is_essential
from ludus.containers.threads import use_threads
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.types import State, Tensors
from ludus.core.updater import LossFunction
from ludus.runs import checkpoint as checkpoints
from ludus.runs.failure import FOLDER
from ludus.runs.folder import RunDirectory
from ludus.runs.policy import agent_of_checkpoint, mismatch
from ludus.settings.settings import Settings, from_flat
from ludus.settings.trust import read_run_settings

LARGE_SPECS = 1 << 26  # bytes
NAN_IN_BACKWARD = "returned nan values"  # what PyTorch's anomaly mode says
UNFIT = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


class Range(NamedTuple):
    """The range of a tensor's finite numbers, and how many are not finite."""

    low: float
    high: float
    nan: int
    infinite: int
    size: int

    @property
    def largest(self) -> float:
        """The largest size of a finite number."""
        return max(abs(self.low), abs(self.high)) if math.isfinite(self.low) else 0.0


@dataclass
class Diagnosis:
    """What was found."""

    settings: Settings[Any]
    wrong: State  # what ended the run: an observation, a reward, or the learning
    step: int  # of the run
    batch: Batch
    again: bool = False  # whether it fails again
    lines: list[tuple[str, str]] = field(default_factory=list)  # what and where, in the order of the computation
    parameters: dict[str, Range] = field(default_factory=dict)  # by network
    bad_module: bool = False  # whether the output of a module was not finite
    culprit: str = ""  # the user's own class whose output was not finite though its inputs and parameters were
    backward: str = ""  # the operation whose gradient was NaN first
    finite_losses: bool = True


def diagnose(run: RunDirectory, folder: Path | None = None, trust: bool = False) -> Diagnosis:
    """Read what a failed update left and compute its loss again; nothing in the run changes.

    ``trust``: import what the run names, though this user did not make it on this machine.
    """
    place = run.path / FOLDER if folder is None else folder.parent.resolve() / folder.name
    if not place.exists():
        raise UserError(
            f'There is no dump "{folder or place}": one is saved when a loss, gradient, reward or observation first is '
            "not finite."
        )
    settings = from_flat(read_run_settings(run.path, run.config, trust, unused=("env.",)).flat)
    with checkpoints.opened(place) as checkpoint:
        _refuse_other(settings, checkpoint)
        state, meta = checkpoint.read(), checkpoint.meta
    try:
        device = choose_device(settings.device)
        found = Diagnosis(settings, state["wrong"], int(meta["step"]), _batch(state["batch"], device))
        if found.wrong["kind"] != "learning":
            value = _pick(found.batch, found.wrong)
            found.again = value == found.wrong["value"] or (math.isnan(value) and math.isnan(found.wrong["value"]))
            return found
        specs = [_specs(state["specs"][name]) for name in ("observation", "action")]
        agent = build_agent(settings, specs[0], specs[1], device)
        updater = LocalUpdater(agent)
        _load(agent, updater, state)
        with use_threads(settings.threads or torch.get_num_threads()), torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            _look(agent, updater, found, state["step"], device)
    except UNFIT as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f'The dump "{place}" does not fit the settings and the code of its run ({type(error).__name__}: {reason}); '
            "read it with the agent and network that made it."
        ) from error
    return found


def _refuse_other(settings: Settings[Any], checkpoint: checkpoints.Checkpoint) -> None:
    """Refuse a dump of another network than the settings ask for, before anything of it is read or built."""
    saved = agent_of_checkpoint(checkpoint)
    try:
        both = checkpoint.read("specs")["specs"] if checkpoint.bytes("specs") < LARGE_SPECS else {}
        agent = outline_agent(settings, *(_specs(both[name]) for name in ("observation", "action")))
    except UNFIT:
        return  # told when it is put together
    if agent is not None and (tensor := mismatch(agent, saved)):
        raise UserError(
            f'The dump "{checkpoint.folder}" is of another network than the settings of its run ask for ({tensor}); '
            "undo what was changed in its config.toml."
        )


def _load(agent: Agent, updater: LocalUpdater, state: State) -> None:
    agent.load_state_dict(state["agent"])
    with torch.no_grad():
        for name, buffer in agent.named_buffers():
            buffer.copy_(state["buffers"][name])
    updater.load_state_dict(state["updater"])


class _Watcher(LocalUpdater):
    """Looks at the losses and gradients of every step and applies none; leaves at the first that is not finite."""

    def __init__(self, inner: LocalUpdater, found: Diagnosis) -> None:
        self.__dict__.update(inner.__dict__)
        self.found = found

    def step(self, loss: LossFunction, batch: Batch, group: str = "all") -> Tensors:
        found = self.found
        self.flat.gradient.zero_()
        self.train(True)
        with _anomalies(found):
            losses, metrics = loss(batch)
            bad = [f"loss/{name} is {float(x):.4g}" for name, x in losses.items() if not math.isfinite(x)]
            found.finite_losses = not bad
            self.total(losses).backward()  # type: ignore[no-untyped-call]
        names = {name: p.grad for name, p in self.agent.named_parameters() if p.grad is not None}
        spoilt = [name for name, gradient in names.items() if not bool(gradient.isfinite().all())]
        norm = self.flat.gradient.norm()
        if bad or spoilt or found.backward or not math.isfinite(norm):
            if not found.bad_module:
                found.lines.append(("forward", "the output of every module is finite"))
            if bad:
                found.lines.append(("loss", ", ".join(bad)))
            if found.backward:
                found.lines.append(("backward", found.backward))
            if spoilt:
                shown = ", ".join(spoilt[:3]) + (", …" if len(spoilt) > 3 else "")
                found.lines.append(("gradients", f"not finite in {len(spoilt)} parameters: {shown}"))
            elif not found.backward:
                found.lines.append(("gradients", f"their norm is {float(norm):.4g}"))
            found.again = True
            raise _Seen
        self.train(False)
        return self.report(losses, metrics) | {"gradient_norm": norm}


class _Seen(Exception):
    """The failing step was found."""


def _look(agent: Agent, updater: LocalUpdater, found: Diagnosis, step: State | None, device: torch.device) -> None:
    """Compute the failing step again, or where that was not saved, learn from the batch step by step."""
    found.parameters = _by_network(agent)
    if acted := _acted(found.batch):
        found.lines.append(("acting", acted))
    watcher = _Watcher(updater, found)
    with _watched(agent, found):
        try:
            if step is not None and step["loss"]:
                watcher.step(getattr(agent, step["loss"]), _batch(step["batch"], device), step["group"])
                return
            metrics: Tensors = {}
            with _anomalies(found):  # of an agent that learns without the updater
                metrics = agent.learn(found.batch, watcher).metrics
            bad = [name for name, x in metrics.items() if is_essential(name) and not math.isfinite(x)]
            found.again = bool(bad or found.backward or found.lines)
        except _Seen:
            pass


@contextmanager
def _watched(agent: Agent, found: Diagnosis) -> Iterator[None]:
    """Note the first module whose output is not finite."""

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, given: Any, named: Any, output: Any) -> None:
            after = value_range(*_tensors(output))
            if found.bad_module or not after.nan + after.infinite:
                return
            found.bad_module = True
            before, kind = value_range(*_tensors((given, named))), type(module)
            finite = all(bool(p.isfinite().all()) for p in module.parameters())
            own = kind.__module__.partition(".")[0] not in ("torch", "ludus")
            if own and finite and not before.nan + before.infinite:
                found.culprit = f"{kind.__name__} ({kind.__module__})"
            inputs = f"between {before.low:.4g} and {before.high:.4g}"
            if before.nan + before.infinite:
                inputs = f"of which {before.nan + before.infinite} of {before.size} are not finite"
            counts = [f"{n} {what}" for n, what in ((after.nan, "NaN"), (after.infinite, "infinite")) if n]
            gives = (
                f"{name} ({kind.__name__}) gives {' and '.join(counts)} of {after.size} numbers from inputs {inputs}"
            )
            found.lines.append(("forward", f"{gives}; its parameters are {'' if finite else 'not '}finite"))

        return look

    modules = [(name, module) for name, module in agent.named_modules() if name]
    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _anomalies(found: Diagnosis) -> Iterator[None]:
    """Run under PyTorch's anomaly mode, which names the operation whose gradient is NaN and where it was called."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                yield
        except RuntimeError as error:
            if NAN_IN_BACKWARD not in str(error):
                raise
            trace = next((str(w.message) for w in said if "Traceback of forward call" in str(w.message)), "")
            frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
            own = [frame for frame in frames if "/torch/" not in frame[0]]
            found.backward = str(error).split(". ")[0].rstrip(".")
            if own:
                file, line, function, code = own[-1]
                found.backward += f", in {function} ({Path(file).name}, line {line}): {code.strip()}"


def value_range(*tensors: Tensor) -> Range:
    """The range of all numbers of some tensors."""
    finite, nan, infinite, size = [], 0, 0, 0
    for x in tensors:
        x = x.detach()
        good = torch.isfinite(x)
        nan, infinite = nan + int(torch.isnan(x).sum()), infinite + int(torch.isinf(x).sum())
        size += x.numel()
        if bool(good.any()):
            finite += [float(x[good].min()), float(x[good].max())]
    return Range(min(finite, default=math.nan), max(finite, default=math.nan), nan, infinite, size)


def whose(batch: Batch, row: int, t: int) -> str:
    """The environment and time in a rollout, or the item of a batch that was drawn from a replay."""
    length, items = batch.reward.shape
    if batch.index is None:
        return f"environment {row}, t={t} of {length} in the rollout"
    return f"item {row} of the batch of {items} from the replay, t={t} of {length} in it"


def _acted(batch: Batch) -> str:
    """What acting gave that was not finite already, before any learning from it."""
    given = {name: (~x.isfinite()).nonzero() for name, x in (batch.action | batch.experience).items()}
    bad = [(*places[0, :2].tolist(), name) for name, places in given.items() if len(places)]
    if not bad:
        return ""
    time, row, name = min(bad)
    return f"{name} was not finite already when the policy acted ({whose(batch, row, time)})"


def _by_network(agent: Agent) -> dict[str, Range]:
    """The range of parameters by the first two parts of their name: ``networks.actor``."""
    grouped: dict[str, list[Tensor]] = {}
    for name, p in agent.named_parameters():
        grouped.setdefault(".".join(name.split(".")[:2]), []).append(p)
    return {name: value_range(*tensors) for name, tensors in grouped.items()}


def _tensors(value: Any) -> list[Tensor]:
    """All floating-point tensors in whatever a module takes or gives."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [x for item in inner for x in _tensors(item)]


def _pick(batch: Batch, wrong: State) -> float:
    x = batch.reward if wrong["kind"] == "reward" else batch.observation[wrong["name"]]
    return float(x[(wrong["time"], wrong["row"], *wrong["element"])])


def _batch(state: State, device: torch.device) -> Batch:
    def moved(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: moved(item) for name, item in x.items()}
        return x.to(device) if isinstance(x, Tensor) else x

    made: dict[str, Any] = {
        name: HiddenState(moved(x)) if name.endswith("state") else moved(x) for name, x in state.items()
    }
    return Batch(**made)


def _specs(saved: State) -> Specs:
    def restored(spec: State) -> Any:
        return {key: tuple(x) if isinstance(x, list) else x for key, x in spec.items()}

    return {name: Spec(**restored(spec)) for name, spec in saved.items()}
