"""Settings of agents with a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import not_
from types import MappingProxyType
from typing import ClassVar, Self

import torch

from ludus.core.config import AgentConfig, Plan, UnusedSetting, run_length
from ludus.core.errors import UserError, check_ranges
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.preprocess.normalization import unused_normalizer

# network defaults of some agents, which they refer to in NETWORK_DEFAULTS
WIDE_MLP = MappingProxyType({"hidden": (256, 256), "activation": "relu"})
LSTM_BODY = MappingProxyType({"body": "lstm"})


@dataclass(frozen=True)
class ReplayConfig(AgentConfig):
    """Settings shared by all agents with a replay buffer."""

    UNUSED: ClassVar[tuple[UnusedSetting, ...]] = (
        UnusedSetting("priority_exponent importance_exponent", "prioritized", not_, "agent.prioritized is off"),
        UnusedSetting(
            "importance_exponent", "priority_exponent", not_, "agent.priority_exponent is 0, so there is no bias"
        ),
        UnusedSetting("burn_in overlap", "sequence", not_, "agent.sequence is 0, so single transitions are drawn"),
    )
    SCHEDULABLE: ClassVar[tuple[str, ...]] = ("gamma", "updates_per_step", "importance_exponent", "hindsight")
    UNUSED_OFFLINE: ClassVar[tuple[str, ...]] = ("replay", "warmup", "updates_per_step", "save_replay")
    replay: int = 100_000  # capacity in transitions, over all environments; more: older experience, more memory
    batch_size: int = 256  # transitions (or sequences) per update
    warmup: int = 1_000  # steps before the first update
    updates_per_step: float = 1.0  # more: learns from fewer steps and takes longer; 0.25: one update every 4 steps
    n_step: int = 1  # steps of n-step returns: more propagate rewards faster, with more bias off-policy
    prioritized: bool = False  # prioritized replay: sample by TD error, with importance weights
    priority_exponent: float = 0.6  # 0: uniform; 1: proportional to the TD error
    importance_exponent: float = 0.4  # exponent of the importance weights at first; 1 at nb_step, or by a schedule
    sequence: int = 0  # length of replayed sequences, for recurrent networks; 0: single transitions
    burn_in: int = 0  # steps before each sequence that only warm up the hidden state
    overlap: int = 0  # steps that one sequence shares with the next
    normalize_observation: bool = False  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = False  # by the running standard deviation of the discounted return, when they are drawn
    hindsight: float = 0.0  # share of transitions whose goal becomes one that was reached (HER), as in 0.8
    save_replay: bool = True  # save it in checkpoints, for an exact resume; off: smaller, and a resume warms up again
    replay_folder: str = ""  # store it in files in this folder instead of in memory

    @property
    def span(self) -> int:
        """Transitions of an item that is drawn: n steps, or a sequence with its burn-in."""
        return self.burn_in + self.sequence if self.sequence else self.n_step

    @property
    def stride(self) -> int:
        """Steps between the starts of two items."""
        return self.sequence - self.overlap if self.sequence else 1

    def validate(self) -> None:
        """Refuse invalid values."""
        check_ranges(
            self,
            fraction=("gamma", "tau", "priority_exponent", "importance_exponent", "hindsight"),
            positive=("replay", "batch_size", "updates_per_step", "n_step", "learning_rate", "optimizer_eps"),
            nonnegative=("warmup", "sequence", "burn_in", "overlap", "max_grad_norm"),
        )
        if self.batch_size * max(1, self.sequence) > self.replay:
            what = f"{self.batch_size} sequences of {self.sequence} steps" if self.sequence else f"{self.batch_size}"
            raise UserError(
                f"agent.batch_size is {what}, more than agent.replay, {self.replay}; lower it, or raise agent.replay."
            )
        if self.warmup > self.replay:
            raise UserError(f"agent.warmup is {self.warmup}, more than agent.replay, {self.replay}; lower it.")
        if not self.sequence and (self.burn_in or self.overlap):
            raise UserError("agent.burn_in and agent.overlap apply to sequences; set agent.sequence, such as to 20.")
        if self.sequence and self.burn_in > self.sequence:
            raise UserError(
                f"agent.burn_in is {self.burn_in}, longer than agent.sequence, {self.sequence}; lower it: nothing "
                "is learned from the burn-in."
            )
        if self.sequence and self.overlap >= self.sequence:
            raise UserError(f"agent.overlap is {self.overlap}, but must be less than agent.sequence, {self.sequence}.")
        if self.sequence and self.hindsight:
            raise UserError("agent.hindsight works on single transitions; set agent.sequence to 0, or hindsight to 0.")

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also ``learning_rate`` where every network has a separate one, as in ``actor_learning_rate``."""
        found = list(super().unused(observation, action, rows))
        yield from found
        yield from unused_normalizer(self, observation)
        separate = [name for name in vars(self) if name.endswith("_learning_rate") and name not in dict(found)]
        if separate and all(getattr(self, name) for name in separate):
            yield "learning_rate", f"{', '.join(f'agent.{name}' for name in separate)} take its place"

    def plan(self, rows: int) -> Plan:
        """Return the replay's transitions in memory (0 with a folder) and the optimizer steps per env step."""
        replay, batch = 0 if self.replay_folder else self.replay, self.batch_size * max(1, self.sequence)
        return Plan(replay=replay, optimizer_steps=self.updates_per_step, batch=batch)

    def check_run_length(self, nb_step: int, environments: int, agents: int = 1) -> None:
        """Refuse a run that would end before the first update."""
        rows, length = environments * agents, run_length(nb_step, agents)
        if self.warmup >= nb_step * agents:
            raise UserError(
                f"agent.warmup is {self.warmup}, but {length}, so nothing would ever be learned; lower agent.warmup, "
                "or raise nb_step."
            )
        first = rows * (self.span + self.stride * (-(-self.batch_size // rows) - 1))  # fewest steps for a full batch
        if first > nb_step * agents:
            raise UserError(
                f"A batch of agent.batch_size {self.batch_size} takes {first:,} steps to be in the replay, but "
                f"{length}, so nothing would ever be learned; lower agent.batch_size, or raise nb_step."
            )

    def why_no_update(self, steps: int, environments: int, agents: int, cache: Mapping[str, float]) -> str:
        """Name what the replay buffer lacked."""
        size = int(cache["replay/size"])
        items, longer = ("sequences", "agent.sequence") if self.sequence else ("transitions", "agent.n_step")
        if steps * agents <= self.warmup:
            taken = f"{steps:,} steps" + (f" of {agents} agents" if agents > 1 else "")
            return f"{taken} are fewer than agent.warmup = {self.warmup:,}; raise nb_step or lower agent.warmup"
        if size < self.batch_size:
            return (
                f"the replay buffer held {size:,} {items}, fewer than agent.batch_size = {self.batch_size:,}; raise "
                f"nb_step, or lower agent.batch_size or {longer}"
            )
        return (
            f"too few steps followed the warm-up and the first {self.batch_size:,} {items} for one update at "
            f"agent.updates_per_step = {self.updates_per_step:g}; raise nb_step or agent.updates_per_step"
        )

    def for_rows(self, rows: Rows) -> Self:
        """Return the settings of a process that has some of the run's rows: its part of replay, warm-up and batch.

        Each of its steps stands for one in every process, so it earns as many updates as all of them; the replay sees
        to that.
        """
        ranks = rows.total // rows.size
        if self.batch_size % ranks:
            raise UserError(
                f"agent.batch_size is {self.batch_size}, which {ranks} ranks cannot share equally; set it to "
                f"{-(-self.batch_size // ranks) * ranks}."
            )
        return replace(
            self,
            replay=self.replay // ranks,
            warmup=self.warmup // ranks,
            batch_size=self.batch_size // ranks,
        )

    def for_unrolls(self, length: int, rows: int) -> Self:
        """Return the settings of a replay that holds the items which unrolls of ``length`` steps complete."""
        kept, items = self.span + length + 2 * self.stride, length // self.stride
        same = replace(self, prioritized=False, hindsight=0.0, warmup=0, replay_folder="")
        return replace(same, replay=kept * rows, batch_size=items * rows)

    def check_replay_size(self, batch: int, device: torch.device) -> None:
        """Refuse a replay that can never hold one batch, and files unless the device is the CPU."""
        length = self.replay // batch
        if self.sequence:
            shortest, what = self.span + self.stride, f"sequences of {self.span} steps"
        else:
            shortest, what = self.n_step + 2, f"agent.n_step {self.n_step}"
        items = max(length - self.span, 0) // self.stride * batch
        holds = f"agent.replay is {self.replay}: {length} steps of each of {batch} environments"
        if length < shortest:
            raise UserError(f"{holds}, too few for {what}; raise it to {shortest * batch} or more.")
        if items < self.batch_size:
            raise UserError(f"{holds}, so never {self.batch_size} (agent.batch_size) to draw; raise it, or lower that.")
        if self.replay_folder and device.type != "cpu":
            raise UserError(
                f'agent.replay_folder is "{self.replay_folder}", but the run is on {device}; set device to cpu, or '
                "leave agent.replay_folder empty."
            )
