"""ε-greedy: a uniformly random choice with probability ε, else the best one (Watkins 1989)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import UserError, check_ranges, did_you_mean
from ludus.core.types import Tensors
from ludus.exploration.schedule import Kind, Schedule

BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


class Epsilon:
    """How often to explore: a schedule over the run, the same for all environments or a ladder over them.

    With ``ladder`` α, environment i of N explores with ε_i = ε^(1 + α·i/(N−1)), where ε is what the schedule says:
    most of them hardly explore, the first do it all the time (Horgan et al. 2018; ε = 0.4 and α = 7, for R2D2 too). A
    single environment has ε itself.

    Acting compares the numbers of ``draw`` with ``level``, which is ε. The ladder lies in these numbers, so that a
    group of rows need not know where in the batch it is, and ``set`` shows at the next step, not when all numbers are
    used up. It costs less than a microsecond: ε may change at every step.
    """

    def __init__(
        self,
        schedule: Kind = "linear",
        start: float = 1.0,  # constant: ε of the whole run
        end: float = 0.05,
        share: float = 0.1,  # of the run, until ``end`` is reached
        ladder: float = 0.0,  # α; 0: all environments alike
    ) -> None:
        if schedule not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise UserError(
                f'agent.epsilon_schedule is "{schedule}"; use one of {kinds}.{did_you_mean(schedule, get_args(Kind))}'
            )
        given = SimpleNamespace(epsilon_start=start, epsilon_end=end, epsilon_share=share, epsilon_ladder=ladder)
        both = ("epsilon_start", "epsilon_end")
        check_ranges(
            given, fraction=(*both, "epsilon_share"), positive=("epsilon_share",), nonnegative=("epsilon_ladder",)
        )
        if schedule == "exponential":
            check_ranges(given, positive=both)
        self.schedule, self.ladder = Schedule(schedule, start, end, share), ladder
        self.level = self.schedule.at(0.0)

    def set(self, progress: float) -> float:
        """Take ε from the share of the run that is done (0 to 1); return it."""
        self.level = self.schedule.at(progress)
        return self.level

    def exponents(self, batch: int) -> Tensor:
        """1 + α·i/(N−1) for each of ``batch`` environments, in float64."""
        return 1 + self.ladder * torch.arange(batch, dtype=torch.float64) / max(batch - 1, 1)

    def values(self, batch: int) -> Tensor:
        """The ε of each of ``batch`` environments now, ``[B]``."""
        return (self.level ** self.exponents(batch)).float()

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensors:
        """The numbers of ``steps`` choices among ``size``: ``explore`` ``[steps, B]``, ``choice`` ``[steps, B, size]``.

        ``explore`` of row i is below ε with probability ε_i, as u < ε^e is u^(1/e) < ε.
        """
        device = generator.device
        explore = torch.rand(steps, batch, generator=generator, device=device)
        if self.ladder:
            roots = self.exponents(batch).reciprocal().to(device, torch.float32)
            explore = explore.pow(roots).clamp(max=BELOW_ONE)  # ε = 1 explores always
        return {"explore": explore, "choice": torch.rand(steps, batch, size, generator=generator, device=device)}


def epsilon_greedy(
    q: Tensor, uniform: Tensor, choice: Tensor, epsilon: float | Tensor, mask: Tensor | None = None
) -> Tensor:
    """Choose where ``uniform`` < ε an allowed action at random, else the allowed one of the highest ``q``.

    ``q`` ``[…, A]``, ``uniform`` ``[…]`` in [0, 1), ``choice`` ``[…, A]`` independent numbers of any one continuous
    distribution, whose largest marks the random action; ``epsilon`` one number or ``[…]``; ``mask`` ``[…, A]``: 0
    forbids. Returns ``[…]`` int64. Where a mask forbids everything the action is 0.
    """
    scores = torch.where((uniform < epsilon).unsqueeze(-1), choice, q)
    if mask is not None:
        scores = torch.where(mask.bool(), scores, -torch.inf)
    return scores.argmax(-1)


def epsilon_greedy_numpy(
    q: NDArray[np.float32],
    uniform: NDArray[np.float32],
    choice: NDArray[np.float32],
    epsilon: float,
    mask: NDArray[Any] | None = None,
) -> NDArray[np.int64]:
    """As ``epsilon_greedy``, for acting in numpy."""
    explore = uniform < epsilon
    scores = np.where(explore[..., None], choice, q) if 1 in explore.tobytes() else q
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    action: NDArray[np.int64] = scores.argmax(-1)
    return action
