"""Sequences of recorded or labelled steps, for recurrent networks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ludus.core.batch import Batch
from ludus.core.types import Tensors
from ludus.experience.rollout import select_prefix


class SequenceShape(NamedTuple):
    """What a batch of sequences has."""

    steps: int  # of each sequence
    burn_in: int  # steps before them, for the hidden state
    columns: int  # number of sequences

    @property
    def span(self) -> int:
        """All steps of a sequence."""
        return self.burn_in + self.steps


def draw_sequences(
    steps: Tensors, oldest: int, shape: SequenceShape, gamma: float, generator: torch.Generator
) -> Batch:
    """Draw sequences ``[T+1, M, …]``, with replacement, from the steps ``[n, B, …]`` of B environments.

    ``steps`` has observation/…, action/…, first, real, reward, terminated and truncated, the last four of the
    transition from each step. They are a ring: step 0 comes after step n − 1, and ``oldest`` is the one that continues
    nothing. ``first`` of the batch is true wherever the hidden state starts from zero: where an episode begins, and
    where the steps before are not known, at the start of a sequence and at ``oldest``. After the latter, the burn-in is
    not ``real``: it only warms up the hidden state.
    """
    (count, rows), device = steps["first"].shape, steps["first"].device
    start, row = (torch.randint(n, (shape.columns,), generator=generator).to(device) for n in (count, rows))
    time = torch.arange(shape.span + 1, device=device).unsqueeze(1)  # [T+1, 1]
    index = (start + time) % count  # [T+1, M]
    drawn = {name: x[index, row] for name, x in steps.items()}
    first = drawn["first"] | (index == oldest) | (time == 0)
    reset = torch.where(first, time, 0).cummax(0).values
    begun = torch.where(drawn["first"], time, -1).cummax(0).values
    known = (begun == reset) | (time - reset >= shape.burn_in)
    reward, terminated, truncated = (drawn[name][:-1] for name in ("reward", "terminated", "truncated"))
    return Batch(
        observation=select_prefix(drawn, "observation"),
        first=first,
        action={name: x[:-1] for name, x in select_prefix(drawn, "action").items()},
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        discount=(~terminated).to(torch.float32) * gamma,
        real=(drawn["real"] & known)[:-1],
        weight=torch.ones_like(reward),
        experience={},
        index=index * rows + row,
    )
