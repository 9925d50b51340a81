"""An environment with two roles, which see and do different things."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ludus.core.environment import Role, RoleManager
from ludus.core.spec import Spec
from ludus.core.step import EnvStep
from ludus.core.types import Tensors

CHOICES = 3
SPEAKER = Role({"target": Spec((CHOICES,), "float32")}, {"message": Spec((), "int64", "categorical", sizes=(CHOICES,))})
LISTENER = Role(
    {"heard": Spec((CHOICES + 1,), "float32")}, {"choice": Spec((), "int64", "categorical", sizes=(CHOICES,))}
)


class SpeakerListener(RoleManager):
    """A speaker sees a target and says a word; one step later a listener, who sees only the word, has to choose it.

    Both get 1 if it does. Rows are reset in the step in which they end. Without the word a listener is right in one
    case of three.
    """

    def __init__(self, environments: int, groups: int = 1) -> None:
        size = environments // groups
        self.groups = [slice(i * size, (i + 1) * size) for i in range(groups)]
        self.count, self._generator = environments, torch.Generator()
        self._sent: list[dict[str, Tensors]] = [{} for _ in self.groups]
        self.rewards: list[float] = []

    @property
    def roles(self) -> Mapping[str, Role]:
        return {"speaker": SPEAKER, "listener": LISTENER}

    def reset_roles(self, seed: int) -> dict[str, EnvStep]:
        self._generator.manual_seed(seed)
        self._target = torch.randint(CHOICES, (self.count,), generator=self._generator)
        self._word = torch.full((self.count,), CHOICES)  # CHOICES: none yet
        no = torch.zeros(self.count, dtype=torch.bool)
        self._last = self._step(slice(None), torch.zeros(self.count), no, real=no, first=~no)
        return self._last

    def send_roles(self, actions: dict[str, Tensors], group: int = 0) -> None:
        self._sent[group] = actions

    def recv_roles(self, group: int = 0) -> dict[str, EnvStep]:
        rows, sent = self.groups[group], self._sent[group]
        target, word = self._target[rows], self._word[rows]
        ended = word < CHOICES
        reward = (ended & (sent["listener"]["choice"] == target)).float()
        drawn = torch.randint(CHOICES, target.shape, generator=self._generator)
        self._target[rows] = torch.where(ended, drawn, target)
        self._word[rows] = torch.where(ended, CHOICES, sent["speaker"]["message"])
        self.rewards.append(float(reward.sum() / ended.sum().clamp(min=1)))
        steps = self._step(rows, reward, ended, real=torch.ones_like(ended), first=ended)
        for role, step in steps.items():
            for old, new in zip(self._last[role][1:6], step[1:6], strict=True):
                old[rows] = new  # type: ignore[index]
            for name, x in step.observation.items():
                self._last[role].observation[name][rows] = x
        return steps

    def last_roles(self) -> dict[str, EnvStep]:
        return self._last

    def count_real(self, steps: dict[str, EnvStep]) -> int:
        return len(steps["speaker"].real)

    def _step(self, rows: slice, reward: Tensor, ended: Tensor, real: Tensor, first: Tensor) -> dict[str, EnvStep]:
        seen = {
            "speaker": {"target": one_hot(self._target[rows], CHOICES).float()},
            "listener": {"heard": one_hot(self._word[rows], CHOICES + 1).float()},
        }
        flat = reward, ended, torch.zeros_like(ended), first, real
        return {role: EnvStep(observation, *(x.clone() for x in flat)) for role, observation in seen.items()}
