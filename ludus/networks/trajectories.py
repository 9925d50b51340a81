"""Columns of experience cut into trajectories at every ``first``, and put together again."""

from __future__ import annotations

import torch
from torch import Tensor


def split_and_pad_trajectories(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Cut ``x`` ``[T, B, …]`` at every ``first`` ``[T, B]`` into trajectories ``[L, K, …]`` with their mask ``[L, K]``.

    A trajectory begins at t=0 or at a ``first``; they come column by column, in order of time. L is the longest; the
    shorter ones end in zeros, where the mask is false.
    """
    time, batch = first.shape
    begins = first.t().clone()  # [B, T], so that trajectories lie one after another
    begins[:, 0] = True
    starts = begins.reshape(-1).nonzero().squeeze(1)  # [K]
    ends = torch.cat([starts[1:], starts.new_tensor([time * batch])])
    lengths = ends - starts
    mask = torch.arange(int(lengths.max()), device=x.device).unsqueeze(1) < lengths  # [L, K]
    padded = x.new_zeros(mask.shape[1], mask.shape[0], *x.shape[2:])  # [K, L, …]
    padded[mask.t()] = x.transpose(0, 1).reshape(time * batch, *x.shape[2:])
    return padded.transpose(0, 1), mask


def unpad_trajectories(x: Tensor, mask: Tensor, time: int) -> Tensor:
    """Undo ``split_and_pad_trajectories``: from ``[L, K, …]`` and its mask to ``[T, B, …]``."""
    rows = x.transpose(0, 1)[mask.t()]  # [B·T, …]
    return rows.reshape(-1, time, *x.shape[2:]).transpose(0, 1)
