"""Recorded episodes for agents: which may have them, and what they must not contain."""

from __future__ import annotations

from typing import Any

import torch

from ludus.core.agent import Agent
from ludus.core.config import AgentConfig
from ludus.core.dataset import Dataset
from ludus.core.errors import UserError
from ludus.core.spec import Specs, is_mask, network_inputs
from ludus.data.load import load_dataset
from ludus.networks.conditional_policy import make_policy
from ludus.networks.policy import Policy
from ludus.networks.policy_config import PolicyConfig
from ludus.ops.distributions import MASKED
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.observation import ObsPreprocessor
from ludus.preprocess.rewards import make_reward_ops, preprocessed_rewards
from ludus.settings.settings import Settings


def give_dataset(settings: Settings[Any], agent: Agent, observation: Specs, action: Specs) -> None:
    """Load the recorded episodes that the settings name and give them to the agent; refuse what does not fit it."""
    check_dataset_use(settings, agent)
    path, offline = settings.data.path, settings.container == "offline"
    if not path:
        return
    dataset = load_dataset(path, observation, action)
    refuse_masked(dataset, observation, action, settings.agent)
    agent.dataset = preprocessed_rewards(dataset, make_reward_ops(settings.preprocess.reward))
    agent.dataset_share = 1.0 if offline else settings.data.share


def check_dataset_use(settings: Settings[Any], agent: Agent | type[Agent]) -> None:
    """Refuse recorded episodes for an agent that does not learn from them, and the lack of them for one that must."""
    name, path, offline = settings.agent_name, settings.data.path, settings.container == "offline"
    if agent.needs_dataset and not path:
        raise UserError(
            f"{name} learns from recorded episodes; name them with --data FILE.npz, --data minari:ID or --data RUN for "
            "those of a trained policy."
        )
    if offline and not agent.learns_offline:
        raise UserError(f"container is offline, but {name} learns by acting; set container to local.")
    if settings.agent.ONLY_OFFLINE and not offline:
        raise UserError(
            f"{name} learns from recorded episodes alone, which container {settings.container} does not do; set "
            "container to offline, and data.path to an .npz file or minari:ID."
        )
    if not path:
        return
    if not agent.uses_dataset:
        raise UserError(f'data.path is "{path}", but {name} does not learn from recorded episodes; leave it out.')
    if settings.data.share != type(settings.data).share and (offline or not agent.mixes_dataset):
        raise UserError(
            f"data.share is {settings.data.share:g}, but {name} does not mix recorded steps into its batches here; "
            "leave it out."
        )


@torch.no_grad()
def refuse_masked(dataset: Dataset, observation: Specs, action: Specs, config: AgentConfig) -> None:
    """Refuse recorded actions that a mask forbids: no policy can take them, and no value of them is ever corrected."""
    if not any(is_mask(name) for name in observation):
        return
    if isinstance(config, PolicyConfig):  # parts of an action may depend on each other, or leave others unused
        preprocess = ObsPreprocessor(network_inputs(observation))
        policy = make_policy(action, config, preprocess.shapes)
        policy.rename_masks(preprocess.masks)
    else:
        policy = Policy({name: spec for name, spec in action.items() if spec.kind != "continuous"})
    policy.find_conditional_masks(observation)
    to_policy = ActionInverter(policy.action, policy.action_transform)
    for number, episode in enumerate(dataset.episodes):
        taken = {name: torch.from_numpy(x) for name, x in to_policy(episode.action).items()}
        seen = {name: torch.from_numpy(x[:-1]) for name, x in episode.observation.items()}  # masks of lists too
        outputs = {name: torch.zeros(episode.length, *shape) for name, shape in policy.outputs.items()}
        if bool((policy.evaluate(outputs, taken, seen)["log_prob"] < MASKED / 2).any()):
            raise UserError(
                f'The dataset "{dataset.name}" has an action in episode {number} (from 0) that the action mask at its '
                "step forbids; remove that episode."
            )
