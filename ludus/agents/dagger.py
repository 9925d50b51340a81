"""DAgger: the student acts, a teacher labels what it meets, and the student clones all labels (Ross et al. 2011)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch

from ludus.agents.bc import BC, BCConfig
from ludus.core.batch import Batch, Learned
from ludus.core.config import Plan
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.schedule import Schedule
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import Updater
from ludus.experience.aggregate import LABEL, AggregateCache, AggregateSequences
from ludus.experience.memory import spec_bytes
from ludus.ops.policy_gradient import entropy_loss, share_sum, shares, value_loss

TEACHER = "teacher"  # prefix of its hidden state
MIX = "teacher/mix"  # noise that decides which rows the teacher steps


@dataclass(frozen=True)
class DAggerConfig(BCConfig):
    """Settings of DAgger: those of behaviour cloning, and its own."""

    ONLY_OFFLINE: ClassVar[bool] = False
    SCHEDULABLE = (*BCConfig.SCHEDULABLE, "gamma", "beta", "gae_lambda")
    teacher: Annotated[str, "RUN"] = ""  # run whose best policy labels the observations; of the same environment
    rollout: int = 64  # steps per environment between two rounds of learning
    updates: int = 32  # optimizer steps per round, each on agent.batch_size of all labelled steps so far
    # the share of actions that the teacher takes: it falls linearly from this to 0 at agent.beta_end of the run, or
    # follows a schedule
    beta: float = 1.0
    beta_end: float = 0.5  # share of the run after which the student acts alone: raise if it fails early at first
    labels: int = 200_000  # labelled steps to keep, over all environments; more: older ones, more memory
    n_step: int = 0  # of the value function: n-step returns instead of GAE; 0: GAE
    gae_lambda: float = 0.95  # of the value function: 1: Monte Carlo (less bias); 0: one-step TD (less variance)
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(self, fraction=("beta", "beta_end", "gae_lambda"), nonnegative=("n_step",))
        check_ranges(self, positive=("rollout", "updates", "labels"))

    def locate(self, find_run: Callable[[str], str]) -> Self:
        """Name the teacher by its folder."""
        return replace(self, teacher=find_run(self.teacher)) if self.teacher else self

    def plan(self, rows: int) -> Plan:
        """``updates`` optimizer steps per rollout, and one of the value function."""
        transitions = rows * self.rollout
        return Plan(self.rollout, 1, 5, optimizer_steps=(self.updates + 1) / transitions, batch=self.batch_size)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Also ``gae_lambda`` without a value, and ``beta_end`` without a share of the teacher."""
        yield from super().unused(observation, action, rows)
        if not self.value_coef:
            yield from ((name, "agent.value_coef is 0, so no value is learned") for name in ("gae_lambda", "n_step"))
        elif self.n_step:
            yield "gae_lambda", f"agent.n_step is {self.n_step}, and n-step returns take the place of GAE"
        if not self.beta:
            yield "beta_end", "agent.beta is 0, so the teacher takes no actions"
        elif isinstance(self.beta, Schedule):
            yield "beta_end", f"agent.beta is {self.beta}, a schedule of its own"


class DAgger(BC):
    """Clones a teacher's actions in the observations that the student meets."""

    Config: type[Any] = DAggerConfig
    needs_dataset = learns_offline = False
    needs_teacher = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.beta = self.config.beta

    def check_trainable(self) -> None:
        """Refuse settings without a teacher."""
        if not self.config.teacher:
            raise UserError(
                "agent.teacher is empty; name the run of a trained policy, which labels what the student meets."
            )

    @property
    def teacher_run(self) -> str:  # type: ignore[override]
        """The setting ``agent.teacher``."""
        return str(self.config.teacher)

    def initial_state(self, batch: int) -> HiddenState:
        """Also that of a recurrent teacher."""
        state = super().initial_state(batch)
        if self.teacher is not None:
            state |= self.teacher.initial_state(batch).with_prefix(TEACHER)
        return state

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Also draw which rows the teacher steps."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            uniform = torch.rand(steps, rows.total, generator=g, device=g.device)
            return self.policy.draw(steps, rows.total, g) | {MIX: uniform}

        return Noise(draw, generator, rows, chunk=self.policy.noise_steps or 16)

    def make_cache(self, rows: Rows) -> AggregateCache:
        """Make the cache of rollouts and labelled steps; recorded episodes are the first of these."""
        config = self.config
        specs = (*self.observation.values(), *self.policy.action.values())
        given: dict[str, Any] = {
            "capacity": config.labels,
            "updates": config.updates,
            "step_bytes": sum(map(spec_bytes, specs)),
        }
        rollout = config.rollout, rows.size, self.given_gamma, self.device, config.normalize_reward
        cache: AggregateCache
        if self.recurrent:
            cache = AggregateSequences(*rollout, **given, shape=config.sequences)
        else:
            cache = AggregateCache(*rollout, **given, batch_size=config.batch_size)
        if self.dataset is not None:
            cache.add_dataset(self.dataset, self.inverter)
        return cache

    def use_numpy(self) -> bool:
        """Act in torch: the teacher acts too."""
        return False

    @torch.inference_mode()
    def _act(self, step: EnvStep, state: HiddenState, noise: Tensors | None) -> AgentStep:
        """In training, take the student's most likely action or the teacher's, and keep the teacher's as the label."""
        if noise is None or not self.training:
            return super()._act(step, state, noise)
        assert self.teacher is not None, "a teacher is set before training"
        seen = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        outputs, after = self.outputs(seen, state, step.first.unsqueeze(0), self.acting_networks)
        outputs = {name: x.squeeze(0) for name, x in outputs.items()}
        own, _ = self.policy.sample(outputs, step.observation, None)
        # both hidden states follow all observations, whoever acts
        label, taught = self.teacher.label(step, state.select(TEACHER))
        theirs = noise[MIX] < self.beta
        action = {
            name: torch.where(theirs.reshape(-1, *[1] * (x.dim() - 1)), label[name].to(x.dtype), x)
            for name, x in own.items()
        }
        experience = {f"{LABEL}{name}": x for name, x in label.items()}
        if "value" in outputs:
            experience["value"] = outputs["value"].squeeze(-1)
        return AgentStep(action, experience, HiddenState(after | taught.with_prefix(TEACHER)))

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Fit the value function to a fresh rollout, or clone a batch of labelled steps."""
        if batch.index is not None:
            batch = self.with_zero_state(batch.without_last_observation())
            share = shares(batch.real.float(), sum_over_ranks=updater.sum)
            return Learned(updater.step(self.compute_loss, replace(batch, share=share), "all"))
        metrics: Tensors = {}
        if self.config.value_coef:
            prepared = self.prepare(batch, updater.sum).without_last_observation()
            share = shares(prepared.real.float(), sum_over_ranks=updater.sum)
            metrics = updater.step(self.critic_loss, replace(prepared, share=share), "all")
        self.update_statistics(batch, updater.sum)
        return Learned(metrics)

    def critic_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return the squared error of the value function."""
        outputs, _ = self.outputs(batch.observation, batch.state, batch.first, self.value_networks)
        error = value_loss(outputs["value"].squeeze(-1), batch.experience["return"])
        return {"value": share_sum(error, batch.share)}, {}

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return −log π(label|s) and entropy losses of labelled steps."""
        terms, _ = self.evaluate(batch)
        losses = {
            "policy": share_sum(-terms["log_prob"], batch.share),
            "entropy": share_sum(entropy_loss(terms["entropy"]), batch.share),
        }
        return losses, {}

    def schedule(self, progress: float) -> Mapping[str, float]:
        """Set the teacher's share of actions, and return it with the learning rate."""
        values, end = super().schedule(progress), self.config.beta_end
        if "beta" in values:
            self.beta = values["beta"]
        else:
            self.beta = self.config.beta * max(1 - progress / end, 0.0) if end else 0.0
        return {"beta": self.beta, **values}
