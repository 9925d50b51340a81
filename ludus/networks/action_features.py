"""Actions as the input of a network: one vector of numbers in [−1, 1] and one-hot choices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ludus.core.spec import Specs
from ludus.core.types import Tensors
from ludus.networks.policy import Policy
from ludus.preprocess.observation import OneHot


class ActionFeatures(nn.Module):
    """Maps policy-space actions of any kind to one vector ``[…, size]``.

    Two actions that the environment takes for the same have the same features: continuous ones are clipped or squashed
    as its ``action_transform`` does, and the parts that a choice does not use (``agent.arguments``) are 0.
    """

    def __init__(self, action: Specs, action_transform: Mapping[str, str]) -> None:
        super().__init__()
        self.action = action
        self._transform = {name: action_transform.get(name, "none") for name in action}
        categorical = {name: spec for name, spec in action.items() if spec.kind == "categorical"}
        self._names = {name: f"action/{name.replace('.', '·')}" for name in categorical}
        self.choices = nn.ModuleDict(
            {self._names[name]: OneHot(spec.sizes, len(spec.shape)) for name, spec in categorical.items()}
        )
        for name, spec in action.items():
            if spec.kind == "continuous":
                bounded = torch.from_numpy(spec.bounded.reshape(-1).copy())
                self.register_buffer(self._buffer(name), bounded, persistent=False)
        self.size = sum(sum(spec.sizes) if spec.kind == "categorical" else spec.size for spec in action.values())

    def forward(self, action: Tensors, policy: Policy) -> Tensor:
        """Return the features of actions ``[T, B, …]``."""
        used = policy.used_parts(action)
        parts = []
        for name, x in action.items():
            part = self._part(name, x)
            parts.append(part if name not in used else part * used[name].unsqueeze(-1))
        return torch.cat(parts, -1)

    def _part(self, name: str, x: Tensor) -> Tensor:
        spec = self.action[name]
        if spec.kind == "categorical":
            features: Tensor = self.choices[self._names[name]](x)
            return features
        flat = x.reshape(*x.shape[: x.dim() - len(spec.shape)], spec.size).float()
        if spec.kind == "binary":
            return flat
        match self._transform[name]:
            case "tanh":
                return flat.tanh()
            case "unit":
                return flat.clamp(0, 1) * 2 - 1
            case _:
                return torch.where(getattr(self, self._buffer(name)), flat.clamp(-1, 1), flat)

    @staticmethod
    def _buffer(name: str) -> str:
        return f"bounded/{name.replace('.', '·')}"
