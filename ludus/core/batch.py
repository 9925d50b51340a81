"""What a learner reads: experience, time-major."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors


class Learned(NamedTuple):
    """What came of a batch: metrics (0-dimensional tensors) and, for a replay, new priorities."""

    metrics: Tensors
    priority: Tensor | None = None


@dataclass
class Batch:
    """Experience for a learner, time-major. ``weight`` is 0 where ``first[t+1]``: such a transition never was."""

    observation: Tensors  # [T+1, B, …]; [T, B, …] in a minibatch, where no successor is needed
    first: Tensor  # [T+1, B] bool; [T, B] in a minibatch
    action: Tensors  # [T, B, …]
    reward: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    discount: Tensor  # [T, B] γ·(1−terminated)
    weight: Tensor  # [T, B] 1 for real transitions, else 0
    experience: Tensors  # [T, B, …]
    state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=0
    last_state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=T
    index: Tensor | None = None  # from a replay: a monotone write number
    # n-step returns from a replay, for agents that ask: the states s_{t+1} to s_{t+n−1} that a return passes, as
    # observation/… and action/… [n−1, B, …], and discount [n−1, B]: γ^k, or 0 where the return had stopped by then
    window: Tensors = field(default_factory=dict)

    @property
    def continues(self) -> Tensor:
        """``[T, B]``: 1 where a trace may pass from t to t+1, else 0.

        It stops at terminated, truncated or ``first[t+1]``, and before a transition that never was: where an episode
        was lost without an ending, V(s_{t+1}) is the last thing known of it.
        """
        real = self.weight > 0
        passes = (real & ~(self.terminated | self.truncated)).to(self.weight.dtype)
        passes[:-1] *= real[1:]
        return passes

    def minibatches(
        self, n: int, by: Literal["transition", "environment"], generator: torch.Generator
    ) -> Iterator[Batch]:
        """Yield ``n`` parts in a new random order; sizes differ by one at most and nothing is dropped.

        By ``transition`` a part is ``[1, M]``: rows with no order in time, for feed-forward networks. By
        ``environment`` it is ``[T, b]``: whole columns with the hidden state at their start, for recurrent ones.
        """
        time, columns = self.reward.shape
        head = self.without_successor()
        source = head._map(lambda x: x.reshape(1, time * columns, *x.shape[2:])) if by == "transition" else head
        if n == 1:  # one part has no order that matters
            yield source
            return
        order = torch.randperm(source.reward.shape[1], generator=generator, device=generator.device)
        order = order.to(self.reward.device)
        mixed, start = source._map(lambda x: _pick(x, order)), 0  # all at once; the parts are views
        for part in order.tensor_split(n):
            end = start + len(part)
            picked = mixed._map(lambda x, start=start, end=end: x[:, start:end])  # type: ignore[misc]
            start = end
            yield replace(picked, state=self.state.rows(part)) if by == "environment" else picked

    def without_successor(self) -> Batch:
        """The same transitions without the last observation, which a loss on (s, a) does not need."""
        time = self.reward.shape[0]
        return replace(
            self,
            observation={k: x[:time] for k, x in self.observation.items()},
            first=self.first[:time],
            last_state=HiddenState(),
        )

    def since(self, time: int) -> Batch:
        """The same without its first steps; the hidden state that it starts from is no longer known."""
        later = self._map(lambda x: x[time:])
        return replace(later, last_state=self.last_state, index=self.index)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every ``[T, B, …]`` tensor."""
        return Batch(
            observation={k: function(x) for k, x in self.observation.items()},
            first=function(self.first),
            action={k: function(x) for k, x in self.action.items()},
            reward=function(self.reward),
            terminated=function(self.terminated),
            truncated=function(self.truncated),
            discount=function(self.discount),
            weight=function(self.weight),
            experience={k: function(x) for k, x in self.experience.items()},
        )


def _pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x[:, columns]``; images that lie channels-last in memory stay so, which ``index_select`` alone would undo."""
    if x.dim() == 5 and not x.is_contiguous():
        return x.movedim(2, -1).index_select(1, columns).movedim(-1, 2)
    return x.index_select(1, columns)
