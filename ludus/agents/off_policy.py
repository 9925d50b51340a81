"""The base class of agents that learn from a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch
from ludus.core.cache import CacheReader
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import Updater
from ludus.experience.hindsight import tensor_reward
from ludus.experience.recorded_replay import MixedReplay, RecordedReplay, recorded_part
from ludus.experience.replay import ExperienceReplay
from ludus.experience.replay_unroll import LastItems, ReplayUnroll
from ludus.exploration.parameter_noise import SEED, ParameterNoise
from ludus.networks.placement import device_of
from ludus.networks.target import TargetNetworks
from ludus.ops.policy_gradient import shares
from ludus.preprocess.action_inverter import ActionInverter
from ludus.preprocess.normalization import ObsNormalizer, RewardScaler, StatisticsRows, update_statistics
from ludus.preprocess.observation import ObsPreprocessor

CURRENT, NEXT = slice(-1), slice(1, None)  # of the T+1 observations of a batch
MEAN = "mean_share"  # importance weights normalized to sum 1, for means in metrics
UNROLL = 32  # steps of an unroll of transitions


class OffPolicy(Agent):
    """Networks, target networks, a replay buffer, and burn-in of recurrent networks.

    A subclass lists in ``acting`` the networks that choose actions, which have their hidden states stored, and in
    ``with_target`` those that have a target network; ``more`` are other modules with a target.
    """

    generator: torch.Generator
    corrects_old_unrolls = True  # they go to the replay
    uses_dataset = mixes_dataset = learns_offline = True
    soft = False  # whether values include an entropy bonus, which n-step returns add at every intermediate state
    acting: tuple[str, ...]
    with_target: tuple[str, ...]

    def __init__(
        self,
        observation: Specs,
        action: Specs,
        config: Any,
        networks: Mapping[str, Network],
        more: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.observation, self.action = config, observation, action
        self.networks = nn.ModuleDict(networks)
        self.target = TargetNetworks({name: networks[name] for name in self.with_target} | dict(more or {}))
        self.preprocess = ObsPreprocessor(observation)
        # of stacks the replay keeps single frames, so the statistics of new steps cannot be those of stacks
        stacks = [result for name, result in self.preprocess.names if observation[name].stack > 1]
        others = {name: spec for name, spec in self.preprocess.outputs.items() if name not in stacks}
        self.normalizer = ObsNormalizer(others) if config.normalize_observation else None
        names = [] if self.normalizer is None else self.normalizer.names
        if self.normalizer is not None and stacks and not names:
            raise UserError(
                f'agent.normalize_observation is on, but "{stacks[0]}" is a stack of frames, which agents with a '
                "replay buffer do not normalize; turn it off."
            )
        self.preprocess_normalized = self.preprocess.select(names) if names else None  # for statistics of new steps
        self.reward_scaler = RewardScaler() if config.normalize_reward else None
        self.recurrent = any(network.recurrent for network in networks.values())
        if self.recurrent and not config.sequence:
            raise UserError(
                "A recurrent network learns from sequences: set agent.sequence, such as to 20, and agent.burn_in, such "
                "as to 10; or use a feed-forward network."
            )
        self.generator = torch.Generator()
        self.updates, self.progress = 0, 0.0
        self.parameter_noise: ParameterNoise | None = None  # of the acting network
        self._uniform_share: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return device_of(self)

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Pass actions to the environment unchanged."""
        return {}

    def initial_state(self, batch: int) -> HiddenState:
        """Return zeros for the acting networks, named network/place/name."""
        return self.zeros(self.acting, batch)

    def zeros(self, names: tuple[str, ...], batch: int) -> HiddenState:
        """Return the initial hidden state of some networks."""
        state = HiddenState()
        for name in names:
            state |= self.networks[name].initial_state(batch).with_prefix(name)  # type: ignore[operator]
        return state

    def check_trainable(self) -> None:
        """Refuse sequences where no network is recurrent."""
        if self.config.sequence and not self.recurrent:
            raise UserError(
                f"agent.sequence is {self.config.sequence}, but the network is not recurrent and needs no sequences; "
                "set network.body to lstm or another recurrent piece, or agent.sequence, agent.burn_in and "
                "agent.overlap to 0."
            )

    @property
    def needs_goal_reward(self) -> bool:  # type: ignore[override]
        """Whether hindsight replaces goals, so that rewards are computed again."""
        return bool(self.config.hindsight)

    def make_cache(self, rows: Rows) -> ExperienceReplay:
        """Make the replay buffer, or with recorded episodes one that has them too, or nothing else (offline)."""
        reward = None if self.goal_reward is None else tensor_reward(self.goal_reward)
        with self.given_config():  # the replay follows the schedules of its settings itself
            config, ranks = self.config.for_rows(rows), rows.total // rows.size
        kept = (self.action, self.initial_state(1), self.soft, ranks)
        options = (config, rows.size, self.given_gamma, self.observation, self.device, reward, *kept)
        if self.dataset is None:
            return ExperienceReplay(*options)
        offline = self.dataset_share == 1
        part = config.batch_size if offline else recorded_part(config.batch_size, self.dataset_share)
        to_policy = ActionInverter(self.action, self.action_transform)
        specs = (self.given_gamma, self.observation, self.action)
        part_config = replace(config, batch_size=part)
        recorded = RecordedReplay(part_config, self.dataset, to_policy, *specs, self.device, self.soft)
        return recorded if offline else MixedReplay(recorded, *options)

    def make_unroll(self, rows: Rows, memory: Tensors | None = None) -> ReplayUnroll:
        """Make what a worker sends to the replay: the steps between two starts of sequences, or ``UNROLL`` of them."""
        config = self.config
        length = config.stride if config.sequence else self.unroll_steps or UNROLL
        items = None
        if config.prioritized:
            kept = (self.action, self.initial_state(1), self.soft)
            small = config.for_unrolls(length, rows.size)
            items = LastItems(small, rows.size, self.given_gamma, self.observation, self.device, None, *kept)
        return ReplayUnroll(length, rows, self.device, memory, items, self.td_errors)

    def td_errors(self, batch: Batch) -> Tensor:
        """Return the |δ| ``[B]`` of items read from a prioritized replay, as ``learn`` computes their priorities."""
        raise UserError(f"{type(self).__name__} computes no priorities of single items; turn off agent.prioritized.")

    def acting_state(self) -> Tensors:
        """Add the number of updates; without target networks, unless workers compute TD errors.

        Without the perturbed network either, which every worker draws itself.
        """
        state = super().acting_state() | {"updates": torch.tensor(self.updates)}
        without = ("parameter_noise.perturbed.", *(() if self.config.prioritized else ("target.",)))
        return {k: x for k, x in state.items() if not k.startswith(without)}

    def load_acting_state(self, state: Tensors) -> None:
        """Copy the tensors, and set the number of updates."""
        super().load_acting_state(state)
        self.updates = int(state["updates"])

    def critic_inputs(self, batch: Batch) -> Tensors:
        """Return what critics see besides observations: the batch's actions ``[T, B, K]`` in [−1, 1], if anything."""
        return {}

    @property
    def target_states(self) -> slice:
        """The states of a batch that targets are computed from: the next ones; all with a recurrent network."""
        return slice(None) if self.recurrent else NEXT

    def draw(self, batch: Batch, *shape: int, uniform: bool = False) -> Tensor:
        """Draw random numbers to learn from a batch with, on its device; normal unless ``uniform``."""
        made = torch.rand if uniform else torch.randn
        return made(*shape, generator=self.generator).to(batch.reward.device)

    def inputs(self, observation: Tensors) -> Tensors:
        """Preprocess and normalize raw observations ``[T, B, …]`` for the networks and their targets alike."""
        ready: Tensors = self.preprocess(observation)
        return ready if self.normalizer is None else self.normalizer(ready)

    def step_inputs(self, step: EnvStep) -> Tensors:
        """Return the inputs of the networks for one step, ``[1, B, …]``."""
        return self.inputs({name: x.unsqueeze(0) for name, x in step.observation.items()})

    def observe(self, cache: CacheReader, updater: Updater) -> None:
        """Update the normalizer and the reward scale with new environment steps, each once.

        Rows with a NaN or Inf are left out; the run ends when such a row is drawn.
        """
        if self.normalizer is not None or self.reward_scaler is not None:
            self._observe(cache, updater)

    @torch.no_grad()
    def _observe(self, cache: CacheReader, updater: Updater) -> None:
        preprocess = self.preprocess_normalized
        names = [] if preprocess is None else list(preprocess.specs)
        fresh, returns = cache.fresh(names, with_returns=self.reward_scaler is not None)
        if updater.ranks == 1 and not sum(map(len, (*fresh.values(), () if returns is None else returns))):
            return  # as with recorded episodes after the first call
        rows: list[StatisticsRows] = []
        if self.normalizer is not None and preprocess is not None:
            ready = preprocess({name: x.unsqueeze(0) for name, x in fresh.items()})
            weight = torch.stack([x.flatten(2).isfinite().all(-1) for x in ready.values()]).all(0)
            rows += self.normalizer.rows(ready, weight)
        if self.reward_scaler is not None and returns is not None:
            rows.append((self.reward_scaler.statistics, returns, returns.isfinite()))
        update_statistics(rows, updater.sum)

    def with_scaled_reward(self, batch: Batch) -> Batch:
        """Return the batch with scaled rewards; the replay holds raw ones."""
        if self.reward_scaler is None:
            return batch
        batch = copy(batch)
        batch.reward = self.reward_scaler.scale(batch.reward)
        return batch

    def unscale_value(self, value: Tensor) -> Tensor:
        """Undo the reward scale."""
        return value if self.reward_scaler is None else value / self.reward_scaler.statistics.scale

    def run(
        self,
        name: str,
        observation: Tensors,
        state: HiddenState,
        first: Tensor,
        target: bool = False,
        *,
        network: nn.Module | None = None,
        **more: Any,
    ) -> tuple[Tensors, HiddenState]:
        """Run a network, or its target, on preprocessed observations ``[T, B, …]``.

        ``network`` runs in place of it, such as a perturbed copy. ``more`` are arguments of some kinds of networks,
        such as ``members`` of an ensemble.
        """
        if network is None:
            network = (self.target.networks if target else self.networks)[name]
        outputs, new = network(observation, state.select(name) if state else state, first, **more)
        return outputs, new.with_prefix(name) if new else new

    def run_acting(
        self, observation: Tensors, state: HiddenState, first: Tensor, noise: Tensors | None
    ) -> tuple[Tensors, HiddenState]:
        """Run the acting network on preprocessed observations ``[1, B, …]``; with ``noise``, its perturbed copy.

        Evaluations, loaded policies and opponents of self-play are not perturbed, also where they sample actions. The
        hidden state is the perturbed copy's, as stale for a replay as that of any older network: the burn-in renews it.
        """
        if noise is None or self.parameter_noise is None or not self.training:
            return self.run(self.acting[0], observation, state, first)
        self.parameter_noise.resample_on_reset(first[0], noise[SEED])
        return self.run(self.acting[0], observation, state, first, network=self.parameter_noise.perturbed)

    def perturbed_distance(
        self, batch: Batch, outputs: Tensors, perturbed: Tensors, sum_over_ranks: SumOverRanks = single_rank
    ) -> Tensor:
        """Return how far the choices for a prepared batch are from those of a perturbed acting network."""
        raise NotImplementedError

    @torch.no_grad()
    def burn_in_state(self, batch: Batch, name: str, target: bool = False, also: Tensors | None = None) -> HiddenState:
        """Return a network's hidden state after the burn-in, which it starts from zero if it does not act.

        ``also`` are further inputs ``[T, B, …]``, such as a critic's actions.
        """
        steps, columns = self.config.burn_in, batch.reward.shape[1]
        start = self.zeros((name,), columns).map(lambda x: x.to(self.device))
        start |= {key: x for key, x in batch.state.items() if key in start}
        if not steps:
            return start
        observation = self.inputs({key: x[:steps] for key, x in batch.observation.items()})
        observation |= {key: x[:steps] for key, x in (also or {}).items()}
        return self.run(name, observation, start, batch.first[:steps], target)[1]

    def refuse_recurrent_value(self) -> None:
        """Refuse ``value`` with a recurrent critic, whose hidden state is not tracked while acting."""
        if self.recurrent:
            raise UserError(
                f"{type(self).__name__} gives no value with a recurrent critic, whose hidden state "
                "is not tracked while acting; a2c, ppo and dqn do."
            )

    def with_shares(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Add ``share`` (importance weight over the number of real rows, for losses) and ``MEAN`` (for metrics)."""
        if self.config.prioritized or self.config.sequence:
            weighted = batch.real * batch.weight
            sums = torch.stack([batch.real.sum().to(weighted.dtype), weighted.sum()])
            count, total = sum_over_ranks(sums).unbind()
            share = weighted / count.clamp(min=1)
            mean = weighted / total.clamp(min=1e-8) if self.config.prioritized else share
        else:  # uniformly sampled transitions are all real and have weight 1
            if self._uniform_share is None or self._uniform_share.shape != batch.real.shape:
                self._uniform_share = shares(batch.real, sum_over_ranks=sum_over_ranks)
            share = mean = self._uniform_share
        batch = with_experience(batch, **{MEAN: mean})
        batch.share = share
        return batch

    def finish_update(self, target_every: int = 1) -> None:
        """Count an update, and move the target networks at every ``target_every``-th."""
        self.updates += 1
        if self.updates % target_every == 0:
            self.target.update(self.config.tau)

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Also keep the progress, with which a checkpoint restores scheduled values."""
        self.progress = progress
        return super().schedule(progress)

    def get_extra_state(self) -> dict[str, float]:
        """Save the number of updates, for target networks, and the progress, for exploration."""
        return {"updates": self.updates, "progress": self.progress}

    def set_extra_state(self, state: Any) -> None:
        self.updates = int(state["updates"])
        self.schedule(state["progress"])


def intermediate_observations(batch: Batch) -> tuple[Tensors, Tensor]:
    """Return the observations ``[n − 1, B, …]`` between an n-step transition's ends, and their ``first`` (False)."""
    start = "observation/"
    observation = {name.removeprefix(start): x for name, x in batch.window.items() if name.startswith(start)}
    return observation, torch.zeros_like(batch.window["discount"], dtype=torch.bool)


def with_experience(batch: Batch, **more: Tensor) -> Batch:
    """Return the batch with more tensors for its loss."""
    made = object.__new__(Batch)  # takes a tenth of the time of dataclasses.replace
    vars(made).update(vars(batch), experience=batch.experience | more)
    return made
