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
    """Experience for a learner, time-major. Rows that are not ``real`` are padding across an episode boundary."""

    observation: Tensors  # [T+1, B, …]; [T, B, …] in a minibatch, where no successor is needed
    first: Tensor  # [T+1, B] bool; [T, B] in a minibatch
    action: Tensors  # [T, B, …]
    reward: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    discount: Tensor  # [T, B] γ·(1−terminated)
    real: Tensor  # [T, B] bool: this transition happened; False is padding
    weight: Tensor  # [T, B] importance weights of a prioritized replay, else 1; padding has one too
    experience: Tensors  # [T, B, …]
    # [T, B] what each row counts in a mean over the rows of all ranks, 0 for padding; set in learn, before a loss
    share: Tensor = field(default_factory=lambda: torch.empty(0))
    state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=0
    last_state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=T
    # [T, B, …] where episodes are reset in the same step and the environment gives it: the last observation of an
    # episode that ended at t, in place of which observation[t+1] begins the next one. Empty: not known.
    final: Tensors = field(default_factory=dict)
    # [T, B] what belongs to a row but not to the network: "return", the running discounted return, for reward scaling
    row_state: Tensors = field(default_factory=dict)
    version: Tensor | None = None  # [B] from workers: the version of the weights that acted
    index: Tensor | None = None  # from a replay: a monotone write number
    # n-step returns from a replay, for agents that ask: the states s_{t+1} to s_{t+n−1} that a return passes, as
    # observation/… and action/… [n−1, B, …], and discount [n−1, B]: γ^k, or 0 where the return had stopped by then
    window: Tensors = field(default_factory=dict)

    @property
    def continues(self) -> Tensor:
        """``[T, B]``: 1 where a trace may pass from t to t+1, else 0.

        It stops at terminated, truncated or ``first[t+1]``, and before padding: where an episode was lost without an
        ending, V(s_{t+1}) is the last thing known of it.
        """
        passes = self.real & ~(self.terminated | self.truncated | self.first[1:])
        passes[:-1] &= self.real[1:]
        return passes.to(self.reward.dtype)

    def next_value(self, value: Tensor, final_value: Tensor | None = None) -> Tensor:
        """``[T, B]``: the value of the state that each transition led to, from V of all observations ``[T+1, B]``.

        Where an episode ended and was reset in the same step, that is ``final_value``, V of its last observation
        ``[T, B]``. Where the last observation is not known (None), V(s_t) stands in for it.
        """
        reset = self.real & self.first[1:]
        return torch.where(reset, value[:-1] if final_value is None else final_value, value[1:])

    def minibatches(
        self, n: int, by: Literal["transition", "environment"], generator: torch.Generator
    ) -> Iterator[Batch]:
        """Yield ``n`` parts in a new random order; sizes differ by one at most and nothing is dropped.

        By ``transition`` a part is ``[1, M]``: rows with no order in time, for feed-forward networks. By
        ``environment`` it is ``[T, b]``: whole columns with the hidden state at their start, for recurrent ones.
        """
        time, columns = self.reward.shape
        head = self.without_last_observation()
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

    def without_last_observation(self) -> Batch:
        """The same transitions without the last observation, which a loss on (s, a) does not need."""
        time = self.reward.shape[0]
        return replace(
            self,
            observation={k: x[:time] for k, x in self.observation.items()},
            first=self.first[:time],
            last_state=HiddenState(),
            final={},
            row_state={},
        )

    def skip_steps(self, time: int) -> Batch:
        """The same without its first steps; the hidden state that it starts from is no longer known."""
        later = self._map(lambda x: x[time:])
        return replace(later, last_state=self.last_state, index=self.index)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every ``[T, B, …]`` tensor; ``final`` and ``row_state`` are left out."""
        return Batch(
            observation={k: function(x) for k, x in self.observation.items()},
            first=function(self.first),
            action={k: function(x) for k, x in self.action.items()},
            reward=function(self.reward),
            terminated=function(self.terminated),
            truncated=function(self.truncated),
            discount=function(self.discount),
            real=function(self.real),
            weight=function(self.weight),
            experience={k: function(x) for k, x in self.experience.items()},
            share=function(self.share) if self.share.numel() else self.share,
        )


def _pick(x: Tensor, columns: Tensor) -> Tensor:
    """``x[:, columns]``; images that lie channels-last in memory stay so, which ``index_select`` alone would undo."""
    if x.dim() == 5 and not x.is_contiguous():
        return x.movedim(2, -1).index_select(1, columns).movedim(-1, 2)
    return x.index_select(1, columns)
