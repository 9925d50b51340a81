"""A black box for numbers: when the first one is none, all that redoes the failing learning is saved.

Before a learning the parameters, the optimizer's moments, buffers and generators are copied into memory that is made
once. Where a loss, a gradient or a parameter is not finite afterwards, or the batch itself holds such a number, the
copy and the batch become a folder ``blackbox`` in the run, and ``ludus replay RUN`` shows how it came about. Where
learnings are short and many, as from a replay, only every so many of them begin with a copy and the others keep their
batch: what is lost is learned again, to the bit, up to the one that failed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.spec import is_mask
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.environments.findings import outside
from ludus.experience.validate import Bounds, NotFinite, check_batch
from ludus.runs import checkpoint as checkpoints

FOLDER = "blackbox"
ROOM = 64_000_000  # bytes for batches that were learned from since everything was copied


class BlackBox:
    """Goes around every ``agent.learn``: ``before(batch)`` and ``after(metrics)``; either ends the run if it must."""

    def __init__(
        self, agent: Agent, updater: Updater, manager: EnvironmentManager, run: Path | None = None, every: int = 1
    ) -> None:
        self._updater, self._manager = updater, manager
        self._agent, self._device = agent, next(agent.parameters()).device
        self._flat = getattr(updater, "flat", None)  # all trainable parameters in one block, where there is one
        flat = set() if self._flat is None else {place[0] for place in self._flat.places}
        self._loose = {name: p for name, p in agent.named_parameters() if name not in flat}
        learning = [p for p in self._loose.values() if p.requires_grad]  # what is frozen only follows
        self._watched = learning if self._flat is None else [*learning, self._flat.value]
        self._buffers = buffer_places(agent)
        self._extra = extra_states(agent)
        self._generators = generators(agent)
        self._kept: State = {}
        self._batch: Batch | None = None
        self._every = every  # learnings from one copy of everything to the next
        self._since: list[tuple[Batch, float]] = []  # what was learned since, and the step sizes
        self._memory: list[list[Tensor]] = [[] for _ in range(every)]  # for these batches
        self._masked = any(map(is_mask, manager.observation))
        replaced = "desired_goal" if getattr(agent.config, "hindsight", 0) else ""  # by goals that were reached
        seen = {name: spec for name, spec in manager.observation.items() if name != replaced}
        self._bounds = Bounds(seen, self._device)
        self.run = run  # the folder to save in; without one, nothing is saved
        self.step = 0  # decisions up to now, for the report; the container counts them
        self.saved = False

    def before(self, batch: Batch) -> None:
        """Refuse a batch with numbers that are none; keep what redoes the learning that follows."""
        self._batch = batch
        if len(self._since) in (0, self._every):
            self._keep()
            self._since.clear()
            for name, value in self._bounds.find(batch.observation).items():
                self._manager.on_report(f"{getattr(self._manager, 'name', 'The environment')}: {outside(name, value)}")
        self._note(batch)
        if self._every == 1 or self._masked:  # else a number that is none shows in the loss, and is looked for then
            self._check(batch)

    def after(self, metrics: Tensors) -> None:
        """End the run if a loss, the gradient's norm or a parameter is no number."""
        found = [x for name, x in metrics.items() if essential(name)] + [x.sum() for x in self._watched]
        if self._device.type != "cpu":
            found = torch.stack([x.detach().to(self._device, torch.float32) for x in found]).tolist()  # one wait
        if math.isfinite(sum(map(float, found))):
            return
        values = {name: float(x) for name, x in metrics.items()}
        spoilt = [f"{name} is {x}" for name, x in values.items() if essential(name) and not math.isfinite(x)]
        names = spoilt_parameters(self._agent)
        if not spoilt and not names:  # sums may overflow where no term does
            return
        what = (spoilt or ["parameters are not finite"])[0]
        self._rewind()
        if self._batch is not None:
            self._check(self._batch)
        self._end(
            f"Training diverged: {what} at step {self.step}; lower agent.learning_rate, or "
            "turn on agent.normalize_reward if rewards are large; earlier checkpoints are whole.",
            {"kind": "learning", "spoilt": spoilt, "parameters": names},
            values,
        )

    def _keep(self) -> None:
        live: State = {
            "flat": None if self._flat is None else self._flat.value,
            "loose": self._loose,
            "buffers": {name: owner[key] for name, owner, key in self._buffers},
            "extra": {name: module.get_extra_state() for name, module in self._extra.items()},
            "updater": self._updater.state_dict(),
        }
        with torch.no_grad():
            self._kept = copied(live, self._kept)
        self._kept["torch"] = torch.get_rng_state()
        self._kept["cuda"] = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._kept["generators"] = {name: generator.get_state() for name, generator in self._generators.items()}

    def _check(self, batch: Batch) -> None:
        """End the run if the batch holds a number that is none."""
        try:
            check_batch(batch, self._manager.action, getattr(self._manager, "name", "The environment"))
        except NotFinite as error:
            self._keep()
            self._end(str(error), error.fault._asdict(), {})

    def _note(self, batch: Batch) -> None:
        """Keep a batch, of which a replay uses the memory again."""
        if self._every > 1:
            live, memory = _tensors(batch), self._memory[len(self._since)]
            self._every = max(1, min(self._every, ROOM // sum(x.nbytes for x in live)))
            if [x.shape for x in live] != [x.shape for x in memory]:
                memory[:] = [x.clone() for x in live]
            else:
                torch._foreach_copy_(memory, live)
        self._since.append((batch, self._updater.learning_rate))

    def _rewind(self) -> None:
        """Go back to the last copy, and learn again what came before the learning that failed."""
        if len(self._since) < 2:
            return
        kept, rate = self._kept, self._updater.learning_rate
        with torch.no_grad():
            if self._flat is not None:
                self._flat.value.copy_(kept["flat"])
            for name, p in self._loose.items():
                p.copy_(kept["loose"][name])
            for name, owner, key in self._buffers:
                if (buffer := owner[key]) is not None:
                    buffer.copy_(kept["buffers"][name])
        for name, module in self._extra.items():
            module.set_extra_state(kept["extra"][name])
        self._updater.load_state_dict(kept["updater"])
        torch.set_rng_state(kept["torch"])
        if kept["cuda"] is not None:
            torch.cuda.set_rng_state(kept["cuda"], self._device)
        for name, generator in self._generators.items():
            generator.set_state(kept["generators"][name])
        for (batch, step_size), memory in zip(self._since[:-1], self._memory, strict=False):
            self._updater.learning_rate = step_size
            self._agent.learn(_with_tensors(batch, iter(memory)), self._updater)
        self._updater.learning_rate = rate
        self._keep()

    def _end(self, message: str, wrong: dict[str, Any], metrics: dict[str, float]) -> NoReturn:
        if self.run is None:
            raise UserError(message)
        try:
            checkpoints.save(self.run / FOLDER, self._state(wrong, metrics), {"step": self.step})
        except UserError as error:  # a full disk, say: what ends the run matters more
            raise UserError(f"{message} What led to it could not be saved: {error}") from error
        self.saved = True
        raise UserError(f"{message} `ludus replay {shlex.quote(str(self.run))}` shows how it came about.")

    def _state(self, wrong: dict[str, Any], metrics: dict[str, float]) -> State:
        assert self._batch is not None
        kept = dict(self._kept)
        flat = kept.pop("flat")
        named: Tensors = {}
        if self._flat is not None:
            named = dict(zip([place[0] for place in self._flat.places], self._flat.views(flat), strict=True))
        batch: State = {field.name: getattr(self._batch, field.name) for field in fields(self._batch)}
        return kept | {
            "parameters": named | kept.pop("loose"),
            "batch": batch,
            "strides": _strides(batch),  # images may lie channels-last, where convolutions give other last digits
            "specs": {name: _plain(getattr(self._manager, name)) for name in ("observation", "action")},
            "wrong": wrong,
            "metrics": metrics,
        }


def essential(name: str) -> bool:
    """Whether a metric must be finite for learning to go on: an infinite gradient is clipped to nothing."""
    return name.startswith("loss/") or name == "gradient_norm"


def spoilt_parameters(agent: Agent) -> list[str]:
    """The parameters that hold a number that is none."""
    return [name for name, p in agent.named_parameters() if not bool(torch.isfinite(p).all())]


def buffer_places(agent: Agent) -> list[tuple[str, dict[str, Tensor | None], str]]:
    """Where every buffer is looked up, those that no state dict holds too; a module may put another in its place."""
    found = [(prefix, owner._buffers) for prefix, owner in agent.named_modules()]
    return [(f"{prefix}.{key}".lstrip("."), buffers, key) for prefix, buffers in found for key in buffers]


def extra_states(agent: Agent) -> dict[str, nn.Module]:
    """The modules that keep more than tensors."""
    own = nn.Module.get_extra_state
    return {name: module for name, module in agent.named_modules() if type(module).get_extra_state is not own}


def generators(agent: Agent) -> dict[str, torch.Generator]:
    """The generators of random numbers that the agent and its modules hold."""
    held = [(prefix, key, x) for prefix, module in agent.named_modules() for key, x in vars(module).items()]
    return {f"{prefix}.{key}".lstrip("."): x for prefix, key, x in held if isinstance(x, torch.Generator)}


def copied(value: Any, into: Any) -> Any:
    """A copy of a nested state, in the tensors of ``into`` where they fit."""
    if isinstance(value, Tensor):
        fits = isinstance(into, Tensor) and into.shape == value.shape and into.dtype == value.dtype
        return into.copy_(value) if fits else value.detach().clone()
    if isinstance(value, Mapping):
        held = into if isinstance(into, dict) else {}
        return {key: copied(x, held.get(key)) for key, x in value.items()}
    return [copied(x, None) for x in value] if isinstance(value, list) else value


def _tensors(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in a fixed order."""
    values = [getattr(batch, field.name) for field in fields(batch)]
    return [x for value in values for x in (value.values() if isinstance(value, dict) else [value]) if x is not None]


def _with_tensors(batch: Batch, tensors: Iterator[Tensor]) -> Batch:
    """The batch with these in place of its own."""
    made: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, dict):
            made[field.name] = type(value)({name: next(tensors) for name in value})
        else:
            made[field.name] = None if value is None else next(tensors)
    return Batch(**made)


def _strides(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.stride())
    return {key: _strides(x) for key, x in value.items()} if isinstance(value, Mapping) else None


def _plain(specs: Mapping[str, Any]) -> State:
    return {name: asdict(spec) for name, spec in specs.items()}
