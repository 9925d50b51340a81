"""A batch of experience, time-major, and the result of learning from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ludus.core.hidden_state import HiddenState
from ludus.core.types import Tensors

NO_SHARE = torch.empty(0)
# the tensors ``[T, B, …]`` of a batch that it always has, and those by name
FLAT = ("first", "reward", "terminated", "truncated", "discount", "real", "weight")
NAMED = ("observation", "action", "experience")


class Learned(NamedTuple):
    """The result of learning from a batch: metrics (0-dimensional tensors) and new priorities for a replay buffer."""

    metrics: Tensors
    priority: Tensor | None = None


@dataclass
class Batch:
    """Experience to learn from, time-major."""

    observation: Tensors  # [T+1, B, …]; [T, B, …] in a minibatch, where no successor is needed
    first: Tensor  # [T+1, B] bool; [T, B] in a minibatch
    action: Tensors  # [T, B, …]
    reward: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    discount: Tensor  # [T, B] γ·(1−terminated)
    real: Tensor  # [T, B] bool; False is padding across an episode boundary
    weight: Tensor  # [T, B] importance weights of a prioritized replay, else 1; also set for padding
    experience: Tensors  # [T, B, …] more by name: what acting stored, and what learn adds for the loss
    # [T, B] weight of each row in a mean over the rows of all ranks, 0 for padding; set in learn, before the loss
    share: Tensor = NO_SHARE
    state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=0
    last_state: HiddenState = field(default_factory=HiddenState)  # [B, …] at t=T
    # [T, B, …] same-step resets: the last observation of an episode that ended at t (observation[t+1] is the first of
    # the next one); empty if the environment does not provide it
    final: Tensors = field(default_factory=dict)
    # per-row state outside of the network: "return" [T, B], the running discounted return, for reward scaling, or
    # "carried" [B], with which an agent computes it (experience/carrying_rollout.py)
    row_state: Tensors = field(default_factory=dict)
    version: Tensor | None = None  # [B] from workers: the version of the weights that acted
    index: Tensor | None = None  # from a replay: increases with every write
    # from an n-step replay, for agents that ask for it: the intermediate states s_{t+1} to s_{t+n−1} as observation/…
    # and action/… [n−1, B, …], and discount [n−1, B]: γ^k, or 0 after the end of the return
    window: Tensors = field(default_factory=dict)

    @property
    def continues(self) -> Tensor:
        """``[T, B]``: 1 where a trace (GAE, V-trace, n-step) may pass from t to t+1, else 0.

        Traces stop at an episode boundary, and before padding: an episode that was lost (a crashed worker) bootstraps
        from its last observation.
        """
        continues = self.real & ~(self.terminated | self.truncated | self.first[1:])
        continues[:-1] &= self.real[1:]
        return continues.to(self.reward.dtype)

    def next_value(self, value: Tensor, final_value: Tensor | None = None) -> Tensor:
        """Return the value of each transition's successor ``[T, B]``, given V of all observations ``[T+1, B]``.

        Where an episode was reset in the same step, this is ``final_value`` ``[T, B]``, V of its last observation, or
        V(s_t) if that is None.
        """
        reset = self.real & self.first[1:]
        return torch.where(reset, value[:-1] if final_value is None else final_value, value[1:])

    def minibatches(
        self, n: int, by: Literal["transition", "environment"], generator: torch.Generator
    ) -> Iterator[Batch]:
        """Yield ``n`` minibatches in random order; sizes differ by at most one and nothing is dropped.

        By ``transition`` they are ``[1, M]``, for feed-forward networks. By ``environment`` they are ``[T, b]``: whole
        sequences with the hidden state at their start, for recurrent networks.
        """
        source = self.without_last_observation()
        if by == "transition":
            source = source._map(lambda x: x.flatten(0, 1).unsqueeze(0))
        if n == 1:  # no need to shuffle
            yield source
            return
        order = torch.randperm(source.reward.shape[1], generator=generator, device=generator.device)
        order = order.to(self.reward.device)
        shuffled, start = source._map(lambda x: select_columns(x, order)), 0  # the minibatches are views of it
        for part in order.tensor_split(n):
            end = start + len(part)
            minibatch = shuffled._map(lambda x, start=start, end=end: x[:, start:end])  # type: ignore[misc]
            start = end
            yield replace(minibatch, state=self.state.rows(part)) if by == "environment" else minibatch

    def without_last_observation(self) -> Batch:
        """Return the batch without the observation at T, for losses that need no successor."""
        time = len(self.reward)
        return replace(self._map(lambda x: x[:time]), state=self.state, index=self.index)

    def skip_steps(self, n: int) -> Batch:
        """Return the batch without its first ``n`` steps; it has no initial hidden state."""
        return replace(self._map(lambda x: x[n:]), last_state=self.last_state, index=self.index)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every ``[T, B, …]`` tensor except ``final`` and ``row_state``, which are dropped."""
        mapped: dict[str, Any] = {name: function(getattr(self, name)) for name in FLAT}
        for kind in NAMED:
            mapped[kind] = {name: function(x) for name, x in getattr(self, kind).items()}
        return Batch(**mapped, share=function(self.share) if self.share.numel() else self.share)


def select_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return ``x[:, columns]``, preserving the memory layout of channels-last images."""
    if x.dim() == 5 and not x.is_contiguous():
        return x.movedim(2, -1).index_select(1, columns).movedim(-1, 2)
    return x.index_select(1, columns)
