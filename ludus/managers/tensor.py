"""Environments that step torch tensors on a device, without copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludus.core.environment import TensorEnvironment
from ludus.core.errors import UserError
from ludus.core.spec import Spec
from ludus.core.step import EnvStep, Episode
from ludus.core.types import State, Tensors
from ludus.environments.config import DEFAULTS, EnvConfig
from ludus.environments.observations import ObservationReader
from ludus.environments.spaces import Layout
from ludus.managers import saved_state
from ludus.managers.vector import VectorizedManager
from ludus.preprocess.actions import ActionPreprocessor, rescaling

Function = Callable[[Tensor], Tensor]


class TensorEnvManager(VectorizedManager):
    """Steps a ``TensorEnvironment``, which has same-step autoreset.

    Returns and lengths of episodes are summed on the device and copied to the host by ``episodes``.
    """

    backend = "tensor"

    def __init__(self, env: TensorEnvironment, name: str, config: EnvConfig = DEFAULTS, branch: int = 0) -> None:
        actions = Layout(env.action_space, "action", name)
        reader = ObservationReader(env.observation_space, actions.specs, replace(config, mask=""), {}, name)
        if reader.layout.padded:
            raise UserError(
                f"{name}: env.backend tensor takes no Sequence, Graph or OneOf; give a padded Box [N, F] called units, "
                "for example, and its mask, a MultiBinary [N] called units/mask."
            )
        super().__init__(name, env.num_envs, reader, actions, branch)
        if config.mask and config.mask in reader.specs:
            raise UserError(
                f'{name}: env.backend tensor does not support action masks yet, but it observes "{config.mask}".'
            )
        self._env, self._resets, self._warned_final = env, 0, False
        self._sent: Any = None
        self._functions: dict[str, Function] = {}
        self._total, self._length = torch.zeros(0), torch.zeros(0, dtype=torch.int64)  # [B], of running episodes
        self._log: list[tuple[Tensor, Tensor, Tensor]] = []  # by step: ended, return and length [B]

    def set_action_transform(self, action_transform: Mapping[str, str]) -> None:
        super().set_action_transform(action_transform)  # checks the transforms
        self._functions = {
            name: tensor_transform(self.action[name], how) for name, how in action_transform.items() if how != "none"
        }
        for name, leaf in self.layout.leaves.items():
            if leaf.start is not None:
                self._functions[name] = _shift(leaf.start)

    def reset(self, seed: int) -> EnvStep:
        self._resets = 0
        return super().reset(seed)

    def send(self, actions: Tensors, group: int = 0) -> None:
        actions = {name: self._functions[name](x) if name in self._functions else x for name, x in actions.items()}
        self._sent = actions if len(self.action) > 1 else next(iter(actions.values()))

    def episodes(self) -> list[Episode]:
        self._read_log()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def state_dict(self) -> State:
        self._read_log()
        step = self._last
        return {
            "seed": self._seed,
            "branch": self._branch,
            "resets": self._resets,
            "finished": [list(episode) for episode in self._finished],
            "total": self._total,
            "length": self._length,
            "observation": dict(step.observation),
            "last": {name: getattr(step, name) for name in ("reward", "terminated", "truncated", "first", "real")},
            "env": self._env.state_dict() if hasattr(self._env, "state_dict") else None,
            "stacks": {} if self.frame_stack is None else dict(self.frame_stack.stacks),
        }

    def load_state_dict(self, state: State) -> None:
        rows = len(state["total"])
        if rows != self.batch:
            raise UserError(f"The checkpoint holds {rows} environments, env.num is {self.batch}; set it to {rows}.")
        self._seed, self._branch, self._resets = int(state["seed"]), int(state["branch"]), int(state["resets"])
        self._finished = [Episode(*episode) for episode in state["finished"]]
        reasons = self._restore(state)
        if self.frame_stack is not None:
            self.frame_stack.load(state["stacks"], self._last)
        self.restored = saved_state.describe_restore(reasons, self.batch, self.name)

    def _restore(self, snapshot: State) -> dict[int, str]:
        self._reset_rows()
        if snapshot["env"] is None or not hasattr(self._env, "load_state_dict"):
            return dict.fromkeys(range(self.batch), "it has no state_dict and load_state_dict")
        device = self._total.device
        self._env.load_state_dict(snapshot["env"])
        self._resets = int(snapshot["resets"])
        self._total, self._length = snapshot["total"].to(device), snapshot["length"].to(device)
        observation = {name: x.to(device) for name, x in snapshot["observation"].items()}
        self._set_step(EnvStep(observation, **{name: x.to(device) for name, x in snapshot["last"].items()}))
        return {}

    def _reset_rows(self) -> None:
        observation = self._named(self._call_env("reset", self.batch_seed(self._resets)))
        self._resets += 1  # every reset has another seed
        for name, x in observation.items():
            wanted = (self.batch, *self.reader.specs[name].shape)
            if tuple(x.shape) != wanted:
                raise UserError(
                    f'{self.name}: observation "{name}" has shape {tuple(x.shape)}, but its space and num_envs say '
                    f"{wanted}; fix the space or the observation."
                )
        device = next(iter(observation.values())).device
        zeros = torch.zeros(self.batch, device=device)
        false = torch.zeros(self.batch, dtype=torch.bool, device=device)
        self._total, self._length = zeros, torch.zeros(self.batch, dtype=torch.int64, device=device)
        self._log = []
        self._set_step(EnvStep(observation, zeros, false, false, ~false, false))

    def _step_rows(self, group: int) -> None:
        observation, reward, terminated, truncated, final = self._call_env("step", self._sent)
        ended = terminated | truncated
        total, length = self._total + reward, self._length + 1
        self._log.append((ended, total, length))
        self._total, self._length = total.masked_fill(ended, 0), length.masked_fill(ended, 0)
        if final is None and not self._warned_final:
            self._warned_final = True
            self.on_warning(
                f"{self.name} gives no final observations, so the value of a truncated episode's last step stands in "
                "for that of the state after it."
            )
        final = None if final is None else self._named(final)
        flags = terminated, truncated, ended, torch.ones_like(ended)
        self._set_step(EnvStep(self._named(observation), reward.to(torch.float32), *flags, final))

    def count_real(self, steps: dict[str, EnvStep]) -> int:
        """Return the number of all environments, without a look at the device: each step is real."""
        return self.batch

    def _set_step(self, step: EnvStep) -> None:
        self._last, self._steps = step, [step]

    def _read_log(self) -> None:
        """Copy the episodes that ended since the last call to the host."""
        if self._log:
            flags, totals, lengths = (torch.stack(x).cpu().numpy() for x in zip(*self._log, strict=True))
            for step, row in np.argwhere(flags).tolist():
                self._finished.append(Episode(row, float(totals[step, row]), int(lengths[step, row]), None, {}))
            self._log = []

    def _named(self, observation: Tensor | Tensors) -> Tensors:
        """Return observations by the names of their specs."""
        if isinstance(observation, Tensor):
            return {next(iter(self.observation)): observation}
        return {name: observation[name] for name in self.observation}


def tensor_transform(spec: Spec, how: str) -> Function:
    """Return the transform of ``ActionPreprocessor`` for one action, for tensors on any device."""
    ActionPreprocessor({"action": spec}, {"action": how})  # checks the transform
    low, high = spec.bounds
    scale, shift = (high - low, low) if how == "unit" else rescaling(spec)
    least, most = np.where(spec.bounded, -1.0, low), np.where(spec.bounded, 1.0, high)
    if how == "unit":
        least, most = np.zeros_like(low), np.ones_like(high)
    dtype = getattr(torch, spec.dtype)
    constants: dict[torch.device, list[Tensor]] = {}

    def transform(x: Tensor) -> Tensor:
        if x.device not in constants:
            arrays = (scale, shift, least, most, low, high)
            constants[x.device] = [torch.tensor(c, dtype=torch.float32, device=x.device) for c in arrays]
        scale_, shift_, least_, most_, low_, high_ = constants[x.device]
        x = x.tanh() if how == "tanh" else torch.minimum(torch.maximum(x, least_), most_)
        x = torch.minimum(torch.maximum(x * scale_ + shift_, low_), high_)
        return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)

    return transform


def _shift(start: Any) -> Function:
    """Shift discrete actions that start at a number other than 0."""
    return lambda x: x + torch.as_tensor(start, device=x.device)
