"""Ops on the rewards that an agent learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludus.core.dataset import Dataset
from ludus.core.environment import GoalReward
from ludus.core.spec import Spec
from ludus.preprocess.config import REWARD_OPS, reward_ops
from ludus.preprocess.pipeline import make_op


def make_reward_ops(pipeline: Iterable[str]) -> Callable[[Tensor], Tensor] | None:
    """Make the ops of ``preprocess.reward``, which map rewards ``[B]``; None without any."""
    modules = []
    for op in reward_ops(pipeline):
        modules.append(make_op(op, "rewards", Spec((), "float32"), REWARD_OPS, "preprocess.reward"))
    return nn.Sequential(*modules) if modules else None


def preprocessed_rewards(dataset: Dataset, rewards: Callable[[Tensor], Tensor] | None) -> Dataset:
    """Return the recorded episodes with the same ops on their rewards."""
    if rewards is None:
        return dataset
    changed = [rewards(torch.from_numpy(episode.reward)).numpy() for episode in dataset.episodes]
    episodes = (episode._replace(reward=x) for episode, x in zip(dataset.episodes, changed, strict=True))
    return Dataset(tuple(episodes), dataset.name)


def preprocessed_goal_reward(goal_reward: GoalReward, rewards: Callable[[Tensor], Tensor]) -> GoalReward:
    """Return the reward function of hindsight replay with the same ops."""

    def compute(*goals: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any] | None]:
        reward, ends = goal_reward(*goals)
        return rewards(torch.from_numpy(reward)).numpy(), ends

    return compute
