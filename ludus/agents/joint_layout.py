"""The joint layout (environments/multiagent.py): observations, actions and results of all agents as single tensors."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from ludus.core.errors import UserError
from ludus.core.spec import Specs, mask_name, network_inputs
from ludus.core.types import Tensors
from ludus.environments.multiagent import ABSENT, ACTIVE, ENTERED, REWARD, STATUS, TERMINATED, TRUNCATED
from ludus.preprocess.observation import ObsPreprocessor

OWN = "own"  # what a network of each agent gets: that agent's observations


class JointLayout(nn.Module):
    """Converts between tensors by name, as in the joint layout, and tensors ``[..., N, size]`` of N agents.

    Agents with shorter observations are padded with zeros, and those with fewer choices with choices that are never
    allowed. Each agent takes one Discrete action, or, if ``continuous``, a bounded Box.
    """

    def __init__(self, algorithm: str, observation: Specs, action: Specs, continuous: bool = False) -> None:
        super().__init__()
        self.agents = list(dict.fromkeys(spec.result_of for spec in observation.values() if spec.result_of))
        if len(self.agents) < 2:
            raise UserError(
                f"{algorithm} is for environments with several agents, but this one has a single agent; use ppo, dqn "
                "or sac."
            )
        self.actions = [_action_of(agent, action, algorithm, continuous) for agent in self.agents]
        self._specs = [action[name] for name in self.actions]
        self._masks = [mask if (mask := mask_name(name, action)) in observation else "" for name in self.actions]
        shapes = ObsPreprocessor(network_inputs(observation)).shapes
        owned = [[name for name in shapes if name.startswith(f"{agent}/")] for agent in self.agents]
        for agent, names in zip(self.agents, owned, strict=True):
            _check_vectors(algorithm, agent, {name: shapes[name] for name in names})
        self._owned = [name for names in owned for name in names]
        widths = [sum(shapes[name][0] for name in names) for names in owned]
        self.size, self.features = len(self.agents), max(widths)  # N, and F: the longest observation
        sizes = [spec.size if spec.kind == "continuous" else spec.sizes[0] for spec in self._specs]
        self.sizes, self.width = sizes, max(sizes)  # choices, or numbers, of each agent's action; A: the most of them
        self.discrete = [spec.kind == "categorical" for spec in self._specs]
        self.padded, self._equal = min(sizes) < self.width, min(widths) == self.features
        # where each feature of each agent is among all agents' features; the last place holds a zero
        ends = list(accumulate(widths))
        rows = [[*range(end - n, end), *[ends[-1]] * (self.features - n)] for n, end in zip(widths, ends, strict=True)]
        self.index: Tensor
        self.exists: Tensor  # [N, A]: whether the choice or number exists
        self.is_discrete: Tensor  # [N, 1]
        self.register_buffer("index", torch.tensor(rows).flatten(), persistent=False)
        self.register_buffer("exists", torch.arange(self.width) < torch.tensor(sizes)[:, None], persistent=False)
        self.register_buffer("is_discrete", torch.tensor(self.discrete)[:, None], persistent=False)

    def own(self, inputs: Tensors) -> Tensor:
        """Return each agent's preprocessed observations ``[T, B, N, F]``."""
        flat = torch.cat([inputs[name] for name in self._owned], -1)
        if not self._equal:
            flat = functional.pad(flat, (0, 1)).index_select(-1, self.index)
        return flat.view(*flat.shape[:-1], self.size, self.features)

    def rewards(self, observation: Tensors) -> Tensor:
        """Return the rewards ``[T, B, N]`` of the transitions that led to these observations."""
        return torch.stack([observation[f"{REWARD}/{agent}"] for agent in self.agents], -1)

    def active(self, observation: Tensors) -> Tensor:
        """Return which agents are in the world and act next, ``[T, B, N]``."""
        status = self._status(observation)
        return (status == ACTIVE) | (status == ENTERED)

    def absent(self, observation: Tensors) -> Tensor:
        """Return which agents are not in the world and did not leave it in this step, ``[T, B, N]``."""
        return self._status(observation) == ABSENT

    def entered(self, observation: Tensors) -> Tensor:
        """Return which agents entered the world in this step, later than at its reset, ``[T, B, N]``."""
        return self._status(observation) == ENTERED

    def continues(self, observation: Tensors) -> Tensor:
        """Return which agents have a next action for values, ``[T, B, N]``: also those cut off by a time limit."""
        return self.active(observation) | (self._status(observation) == TRUNCATED)

    def terminated(self, observation: Tensors) -> Tensor:
        """Return which agents terminated in the transitions that led to these observations, ``[T, B, N]``."""
        return self._status(observation) == TERMINATED

    def _status(self, observation: Tensors) -> Tensor:
        return torch.stack([observation[f"{STATUS}/{agent}"] for agent in self.agents], -1)

    def masks(self, observation: Tensors) -> Tensor | None:
        """Return which choices are allowed, ``[T, B, N, A]`` or ``[N, A]``; None if all are."""
        if not any(self._masks):
            return self.exists if self.padded else None
        given = [observation[mask].bool() if mask else None for mask in self._masks]
        shape = next(x for x in given if x is not None).shape[:-1]
        pairs = zip(given, self.exists, strict=True)
        rows = [exists.expand(*shape, -1) if x is None else _pad(x, self.width) for x, exists in pairs]
        return torch.stack(rows, -2)

    def encode(self, action: Tensors) -> Tensor:
        """Return actions as vectors ``[T, B, N, A]``: one-hot choices, and the numbers of a Box."""
        rows = []
        for name, spec in zip(self.actions, self._specs, strict=True):
            x = action[name]
            if spec.kind == "categorical":
                rows.append(functional.one_hot(x, self.width).float())
            else:
                rows.append(_pad(x.reshape(*x.shape[:2], spec.size), self.width))
        return torch.stack(rows, -2)

    def decode(self, vectors: Tensor) -> Tensors:
        """Return the actions ``[B, …]`` by name of vectors ``[B, N, A]``."""
        chosen, actions = vectors.argmax(-1), {}
        for i, (name, spec) in enumerate(zip(self.actions, self._specs, strict=True)):
            if spec.kind == "categorical":
                actions[name] = chosen[:, i]
            else:
                actions[name] = vectors[:, i, : spec.size].reshape(len(vectors), *spec.shape)
        return actions


def _pad(x: Tensor, size: int) -> Tensor:
    """Append zeros, or False, to the last dimension."""
    return functional.pad(x, (0, size - x.shape[-1]))


def _action_of(agent: str, action: Specs, algorithm: str, continuous: bool) -> str:
    """Return the name of an agent's only action; refuse any other."""
    found = {name: spec for name, spec in action.items() if name == agent or name.startswith(f"{agent}/")}
    choices = [name for name, spec in found.items() if spec.kind == "categorical" and spec.shape == ()]
    boxes = [name for name, spec in found.items() if spec.kind == "continuous" and spec.bounded.all()]
    fits = choices + (boxes if continuous else [])
    if len(found) == len(fits) == 1:
        return fits[0]
    taken = "a Discrete action, or a Box with finite bounds" if continuous else "a Discrete action"
    given = ", ".join(f"{spec.kind} of shape {spec.shape}" for spec in found.values()) or "none"
    raise UserError(f"{algorithm} takes {taken} of each agent, but {agent} has {given}; use ippo or mappo.")


def _check_vectors(algorithm: str, agent: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse an agent that has an image or a list among its observations, or none at all."""
    if not shapes:
        raise UserError(f"{algorithm} needs observations of each agent, but {agent} has none.")
    for name, shape in shapes.items():
        if len(shape) != 1:
            raise UserError(
                f'{algorithm} takes vectors, but the observation "{name}" has shape {shape}; flatten it with env.axes '
                f"{name}=vector, or use ippo or mappo."
            )
