"""ε-greedy: a uniformly random action with probability ε, else the greedy one (Watkins 1989)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludus.core.errors import check_ranges
from ludus.core.schedule import Schedule
from ludus.core.types import Tensors

BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


class Epsilon:
    """The schedule of ε, optionally with a different ε for each environment.

    With ``ladder`` α, environment i of N explores with ε_i = ε^(1 + α·i/(N−1)), as in Ape-X and R2D2, which use
    ε = 0.4 and α = 7 (Horgan et al. 2018). A single environment uses ε.

    To act, compare the ``explore`` numbers of ``draw`` with ``value``, the current ε. The ladder is part of these
    numbers, so a group of rows needs no ε per row, and ``update`` takes effect at the next step although numbers are
    drawn for many steps ahead.
    """

    def __init__(
        self,
        schedule: Literal["linear", "exponential", "constant"] = "linear",
        start: float = 1.0,  # ε of the whole run for "constant"; or a schedule in place of the other arguments
        end: float = 0.05,
        share: float = 0.1,  # fraction of the run until ``end`` is reached
        ladder: float = 0.0,  # α; 0: the same ε for all environments
    ) -> None:
        given = SimpleNamespace(epsilon_start=start, epsilon_end=end, epsilon_share=share, epsilon_ladder=ladder)
        both = ("epsilon_start", "epsilon_end")
        check_ranges(
            given, fraction=(*both, "epsilon_share"), positive=("epsilon_share",), nonnegative=("epsilon_ladder",)
        )
        if schedule == "exponential":
            check_ranges(given, positive=both)
        if isinstance(start, Schedule):
            self.schedule = start
        elif schedule == "constant":
            self.schedule = Schedule("constant", start)
        else:
            self.schedule = Schedule(schedule, start, end, share)
        self.ladder = ladder
        self.value = self.schedule.at(0.0)

    def update(self, progress: float) -> float:
        """Set ε by the fraction of the run that is done (0 to 1) and return it."""
        self.value = self.schedule.at(progress)
        return self.value

    def draw(self, steps: int, batch: int, size: int, generator: torch.Generator) -> Tensors:
        """Draw random numbers for ``size`` actions: ``explore`` ``[steps, B]`` and ``choice`` ``[steps, B, size]``.

        ``explore`` of row i is below ε with probability ε_i, since u < ε^e is the same as u^(1/e) < ε.
        """
        device = generator.device
        explore = torch.rand(steps, batch, generator=generator, device=device)
        if self.ladder:
            exponents = 1 + self.ladder * torch.arange(batch, dtype=torch.float64) / max(batch - 1, 1)
            roots = exponents.reciprocal().to(device, torch.float32)
            explore = explore.pow(roots).clamp(max=BELOW_ONE)  # so that ε = 1 always explores
        return {"explore": explore, "choice": torch.rand(steps, batch, size, generator=generator, device=device)}


def epsilon_greedy(
    q: Tensor, uniform: Tensor, choice: Tensor, epsilon: float | Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return a random allowed action where ``uniform`` < ε, else the allowed action with the highest ``q``.

    ``q`` ``[…, A]``; ``uniform`` ``[…]`` in [0, 1); ``choice`` ``[…, A]`` i.i.d. continuous noise, of which the largest
    gives the random action; ``epsilon`` a number or ``[…]``; ``mask`` ``[…, A]``, 0 for forbidden actions. Returns
    int64 ``[…]``, 0 where the mask forbids every action.
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
    """Do the same as ``epsilon_greedy`` in numpy."""
    explore = uniform < epsilon
    scores = np.where(explore[..., None], choice, q) if 1 in explore.tobytes() else q
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    action: NDArray[np.int64] = scores.argmax(-1)
    return action
