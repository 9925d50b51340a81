"""Redo the learning that a black box holds, step by step, and find where the numbers first went bad."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ludus.containers.blackbox import FOLDER, buffer_places, essential, extra_states, generators, spoilt_parameters
from ludus.containers.build import build_agent, build_updater, choose_device, outline_agent
from ludus.containers.threads import use_threads
from ludus.containers.updater import LocalUpdater
from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Spec, Specs
from ludus.core.types import State, Tensors
from ludus.core.updater import LossFunction, Updater
from ludus.runs import checkpoint as checkpoints
from ludus.runs.folder import RunDirectory
from ludus.settings.settings import Settings, from_flat
from ludus.settings.trust import read_run_settings

LARGE_SPECS = 1 << 26  # bytes
NAN_IN_BACKWARD = "returned nan values"  # what PyTorch's anomaly mode says


class Span(NamedTuple):
    """The range of a tensor's finite numbers, and how many are none."""

    low: float
    high: float
    nan: int
    infinite: int
    size: int


class BadModule(NamedTuple):
    """The first module whose output was not finite."""

    name: str
    kind: str  # its class, and where that is defined
    origin: str
    inputs: Span  # what it was given
    output: Span
    parameters_finite: bool


@dataclass
class Replay:
    """What came of it."""

    settings: Settings[Any]
    wrong: State  # what ended the run
    step: int  # of the run
    batch: Batch
    metrics: dict[str, float]  # of the learning, as the run saw them
    again: dict[str, float] = field(default_factory=dict)  # and as the replay did
    reproduced: Literal["exactly", "nearly", "no"] = "no"
    steps: list[dict[str, float]] = field(default_factory=list)  # metrics of every optimizer step
    bad: int | None = None  # the first step that went wrong
    part: Batch | None = None  # what that step learned from
    parameters: dict[str, Span] = field(default_factory=dict)  # before that step, by network
    module: BadModule | None = None
    backward: str = ""  # where NaN first came up on the way back
    gradients: list[str] = field(default_factory=list)  # parameters whose gradient was not finite in that step


def replay(run: RunDirectory, folder: Path | None = None, trust: bool = False) -> Replay:
    """Redo what the black box of a run holds; nothing in the run changes.

    ``trust``: import what the run names, though this user did not make it on this machine.
    """
    place = run.path / FOLDER if folder is None else folder.parent.resolve() / folder.name
    if not place.exists():
        raise UserError(
            f'There is no black box "{folder or place}": one is saved when a loss, gradient, reward or observation '
            "first is not finite."
        )
    settings = from_flat(read_run_settings(run.path, run.config, trust, unused=("env.",)).flat)
    with checkpoints.opened(place) as checkpoint:
        _refuse_other(settings, checkpoint)
        state, meta = checkpoint.read(), checkpoint.meta
    try:
        device = choose_device(settings.device)
        specs = [_specs(state["specs"][name]) for name in ("observation", "action")]
        batch = _batch(state, device)
        found = Replay(settings, state["wrong"], int(meta["step"]), batch, state["metrics"])
        if found.wrong["kind"] != "learning":
            found.reproduced = "exactly" if same(_pick(batch, found.wrong), found.wrong["value"]) else "no"
            return found
        agent = build_agent(settings, specs[0], specs[1], device)
        with use_threads(settings.threads or torch.get_num_threads()):  # another number gives other last digits
            _redo(_Scene(agent, build_updater(settings, agent), state, device), found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f'The black box "{place}" does not fit the settings and the code of its run ({type(error).__name__}: '
            f"{reason}); replay it with the agent and network that made it."
        ) from error
    return found


def _refuse_other(settings: Settings[Any], checkpoint: checkpoints.Checkpoint) -> None:
    """Refuse a black box of another network than the settings ask for, before anything of it is read or built."""
    try:
        saved = {name: tuple(x.shape) for name, x in checkpoint.outline["parameters"].items()}
        both = checkpoint.read("specs")["specs"] if checkpoint.bytes("specs") < LARGE_SPECS else {}
        agent = outline_agent(settings, *(_specs(both[name]) for name in ("observation", "action")))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return  # told when it is put together
    if agent is not None and saved != {name: tuple(p.shape) for name, p in agent.named_parameters()}:
        raise UserError(
            f'The black box "{checkpoint.folder}" is of another network than the settings of its run ask for; undo '
            "what was changed in its config.toml."
        )


class _Scene:
    """The agent and its updater, which can be put back to where the black box saw them."""

    def __init__(self, agent: Agent, updater: LocalUpdater, state: State, device: torch.device) -> None:
        self.agent, self.updater, self.state, self.device = agent, updater, state, device

    @contextmanager
    def begin(self) -> Iterator[Batch]:
        """Put everything back and give the batch, a new copy; the caller's random numbers stay as they were."""
        state, agent = self.state, self.agent
        _put(dict(agent.named_parameters()), state["parameters"])
        for name, owner, key in buffer_places(agent):
            saved = state["buffers"][name]
            owner[key] = None if saved is None else saved.to(self.device, copy=True)
        for name, module in extra_states(agent).items():
            module.set_extra_state(state["extra"][name])
        for name, generator in generators(agent).items():
            generator.set_state(state["generators"][name])
        self.updater.load_state_dict(state["updater"])
        with torch.random.fork_rng([] if self.device.type == "cpu" else [self.device]):
            torch.set_rng_state(state["torch"])
            if state["cuda"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"], self.device)
            yield _batch(state, self.device)


class _Recorder(Updater):
    """Passes all on to an updater and notes the metrics of every step; looks closely at the step numbered ``at``."""

    def __init__(self, inner: LocalUpdater, found: Replay, at: int | None = None) -> None:
        self._inner, self._found, self._at = inner, found, at
        self.steps: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # an agent of one's own may use more than an Updater promises

    @property
    def by_hand(self) -> bool:  # type: ignore[override]
        return self._inner.by_hand

    @property
    def learning_rate(self) -> float:
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._inner.learning_rate = rate

    def step(self, loss: LossFunction, batch: Batch, group: str = "all") -> Tensors:
        if self._at is not None and len(self.steps) == self._at:
            self._look(loss, batch)
        rate = self._inner.learning_rate
        metrics = self._inner.step(loss, batch, group)
        spoilt = float(len(spoilt_parameters(self._inner.agent)))
        self.steps.append(
            {name: float(x) for name, x in metrics.items()} | {"learning_rate": rate, "spoilt parameters": spoilt}
        )
        return metrics

    def _look(self, loss: LossFunction, batch: Batch) -> None:
        """Go forward and back without a step, and leave the learning there."""
        found, inner, agent = self._found, self._inner, self._inner.agent
        found.part, found.parameters = batch, _by_network(agent)
        inner.flat.gradient.zero_()
        inner.train(True)
        with _anomalies(found):
            losses, _ = loss(batch)
            if not any(x.requires_grad for x in losses.values()):  # a loss by hand has no graph to look at
                losses, _ = agent.compute_loss(batch)
            inner.total(losses).backward()  # type: ignore[no-untyped-call]
        finite = {name: x.grad is None or bool(torch.isfinite(x.grad).all()) for name, x in agent.named_parameters()}
        found.gradients = [name for name, good in finite.items() if not good]
        raise _Seen

    def mean(self, x: Tensor) -> Tensor:
        return self._inner.mean(x)

    def state_dict(self) -> State:
        return self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._inner.load_state_dict(state)


class _Seen(Exception):
    """The failing step has been looked at."""


def _redo(scene: _Scene, found: Replay) -> None:
    """Learn once as the run did, to see if and at which step it fails; then again up to there, watching."""
    with scene.begin() as batch:
        recorder = _Recorder(scene.updater, found)
        metrics = scene.agent.learn(batch, recorder).metrics
    found.steps, found.again = recorder.steps, {name: float(x) for name, x in metrics.items()}
    found.bad = next((i for i, step in enumerate(found.steps) if _failed(step)), None)
    found.reproduced = _compare(found, spoilt_parameters(scene.agent))
    if found.reproduced == "no":
        return
    watcher = _Recorder(scene.updater, found, at=found.bad)
    with scene.begin() as batch, _watched(scene.agent, watcher, found):
        try:
            if found.bad is None:  # a learning of the agent's own, without the updater
                found.parameters = _by_network(scene.agent)
                with _anomalies(found):
                    scene.agent.learn(batch, watcher)
            else:
                scene.agent.learn(batch, watcher)
        except _Seen:
            pass


def _compare(found: Replay, spoilt: list[str]) -> Literal["exactly", "nearly", "no"]:
    bad = {name for name, x in found.again.items() if essential(name) and not math.isfinite(x)}
    if not bad and not spoilt:
        return "no"
    equal = found.metrics.keys() == found.again.keys() and all(
        same(x, found.again[k]) for k, x in found.metrics.items()
    )
    return "exactly" if equal and spoilt == found.wrong["parameters"] else "nearly"


def _failed(step: Mapping[str, float]) -> bool:
    return bool(step["spoilt parameters"]) or any(essential(k) and not math.isfinite(x) for k, x in step.items())


@contextmanager
def _watched(agent: Agent, watcher: _Recorder, found: Replay) -> Iterator[None]:
    """Note the first module whose output is not finite, before the first step or in the failing one."""

    def look(name: str, module: nn.Module, given: Any, output: Any) -> None:
        if found.module is not None or len(watcher.steps) not in (0, found.bad if found.bad is not None else 0):
            return
        after = span(*_tensors(output))
        if after.nan or after.infinite:
            finite = all(bool(torch.isfinite(p).all()) for p in module.parameters())
            kind = type(module)
            found.module = BadModule(name, kind.__name__, kind.__module__, span(*_tensors(given)), after, finite)

    def hook(name: str) -> Callable[..., None]:
        return lambda module, given, named, output: look(name, module, (given, named), output)

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True) for name, module in agent.named_modules() if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _anomalies(found: Replay) -> Iterator[None]:
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
            found.backward = str(error).split(". ")[0].rstrip(".") + _origin(trace)


def _origin(trace: str) -> str:
    """The line of code in a traceback that is nearest to the operation and not PyTorch's own."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', trace)
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    if not own:
        return ""
    file, line, function, code = own[-1]
    return f", in {function} ({Path(file).name}, line {line}): {code.strip()}"


def span(*tensors: Tensor) -> Span:
    """The range of all numbers of some tensors."""
    finite, nan, infinite, size = [], 0, 0, 0
    for x in tensors:
        x = x.detach()
        good = torch.isfinite(x)
        nan, infinite = nan + int(torch.isnan(x).sum()), infinite + int(torch.isinf(x).sum())
        size += x.numel()
        if bool(good.any()):
            finite += [float(x[good].min()), float(x[good].max())]
    return Span(min(finite, default=math.nan), max(finite, default=math.nan), nan, infinite, size)


def same(a: float, b: float) -> bool:
    """Whether two numbers are equal, NaN being equal to itself."""
    return a == b or (math.isnan(a) and math.isnan(b))


def _by_network(agent: Agent) -> dict[str, Span]:
    """The range of parameters by the first two parts of their name: ``networks.actor``."""
    grouped: dict[str, list[Tensor]] = {}
    for name, p in agent.named_parameters():
        grouped.setdefault(".".join(name.split(".")[:2]), []).append(p)
    return {name: span(*tensors) for name, tensors in grouped.items()}


def _tensors(value: Any) -> list[Tensor]:
    """All floating-point tensors in whatever a module takes or gives."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [x for item in inner for x in _tensors(item)]


def _pick(batch: Batch, wrong: State) -> float:
    x = batch.reward if wrong["kind"] == "reward" else batch.observation[wrong["name"]]
    return float(x[(wrong["time"], wrong["row"], *wrong["element"])])


def _put(own: Tensors, saved: Tensors) -> None:
    if own.keys() != saved.keys():
        raise ValueError(f"it has the parameters {', '.join(sorted(own.keys() ^ saved.keys()))}")
    with torch.no_grad():
        for name, x in own.items():
            if x.shape != saved[name].shape:
                raise ValueError(f"{name} has shape {tuple(saved[name].shape)} there and {tuple(x.shape)} here")
            x.copy_(saved[name])


def _batch(state: State, device: torch.device) -> Batch:
    """The batch in new memory, laid out as it was."""

    def make(x: Any, stride: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: make(item, stride[name]) for name, item in x.items()}
        if not isinstance(x, Tensor):
            return x
        if 0 in stride:  # expanded: several places share one number
            return x.to(device, copy=True)
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device).copy_(x)

    made = make(state["batch"], state["strides"])
    made["state"], made["last_state"] = HiddenState(made["state"]), HiddenState(made["last_state"])
    return Batch(**made)


def _specs(saved: State) -> Specs:
    def restored(spec: State) -> Any:
        return {key: tuple(x) if isinstance(x, list) else x for key, x in spec.items()}

    return {name: Spec(**restored(spec)) for name, spec in saved.items()}
