"""ACER: actor-critic with experience replay (Wang et al. 2017), Retrace (one Discrete action) or V-trace targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import not_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from ludus.agents.actor_critic import ActorCritic, with_perplexity
from ludus.agents.parameter_noise import add_parameter_noise
from ludus.core.batch import Batch, Learned
from ludus.core.config import Plan, RunOutline, UnusedSetting
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec, Shapes
from ludus.core.rows import Rows
from ludus.core.spec import Specs, is_one_discrete
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import SumOverRanks, Tensors, single_rank
from ludus.core.updater import OptimizerName, Updater
from ludus.experience.rollout_replay import RolloutReplay, RolloutReplayConfig
from ludus.networks.build import network_spec
from ludus.networks.conditional_policy import make_policy
from ludus.networks.policy import Policy
from ludus.networks.policy_config import PolicyConfig
from ludus.networks.target import TargetNetworks
from ludus.ops.distributions import categorical_kl, categorical_mode, categorical_sample
from ludus.ops.policy_gradient import entropy_loss, policy_gradient_loss, shares, value_loss
from ludus.ops.retrace import acer_policy_loss, acer_weights, retrace
from ludus.ops.trust_region import kl_gradient_logits, policy_gradient_logits, trust_region_loss
from ludus.ops.vtrace import VTrace, vtrace
from ludus.preprocess.normalization import unused_normalizer


@dataclass(frozen=True)
class ACERConfig(PolicyConfig, RolloutReplayConfig):
    """Settings of ACER."""

    UNUSED = (
        UnusedSetting("average_decay", "trust_region", not_, "agent.trust_region is 0, which needs no average"),
        UnusedSetting(
            "replay warmup save_replay", "replay_ratio", not_, "agent.replay_ratio is 0, so nothing is replayed"
        ),
    )
    SCHEDULABLE = (
        *RolloutReplayConfig.SCHEDULABLE,
        "gamma",
        "trace_lambda",
        "importance_clip",
        "trust_region",
        "average_decay",
        "parameter_noise",
    )
    learning_rate: float = 7e-4  # raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    gamma: float = 0.99  # discount: nearer 1 looks further ahead and learns slower
    # retrace: Q of each choice of one Discrete; vtrace: V, any action, and the default for other actions
    targets: Literal["retrace", "vtrace"] = "retrace"
    trace_lambda: float = 1.0  # λ of the targets: 0: one step; lower: less variance, more bias
    # largest importance ratio; the bias of the truncation is corrected with Retrace; 1 by default with V-trace
    importance_clip: float = 10.0
    trust_region: float = 1.0  # δ: bound on the KL gradient to the average policy; lower is slower; 0: no bound
    average_decay: float = 0.99  # of the average policy per update
    entropy_coef: float = 0.01  # raise when the policy becomes deterministic too early
    value_coef: float = 0.5  # weight of the loss of Q or V; matters with a shared trunk
    # noise on the policy's parameters besides sampling, adapted so that the KL of both policies is this, such as 0.01
    parameter_noise: float = 0.0
    max_grad_norm: float = 10.0  # gradients are scaled down to this norm; 0: never
    optimizer: OptimizerName = "rmsprop"  # rmsprop: PyTorch's; rmsprop_tf: TensorFlow's
    weight_decay: float = 0.0  # shrinks weights at each step: adamw apart from the gradient, others as a penalty
    optimizer_eps: float = 1e-5  # raise for smoother steps
    normalize_observation: bool = False  # vectors by running mean and standard deviation, saved with the policy
    normalize_reward: bool = False  # by the running standard deviation of the discounted return

    def validate(self) -> None:
        """Refuse values that cannot train."""
        super().validate()
        check_ranges(
            self,
            fraction=("gamma", "trace_lambda", "average_decay"),
            positive=("learning_rate", "rollout", "replay", "importance_clip", "optimizer_eps"),
            nonnegative=(
                "replay_ratio",
                "warmup",
                "trust_region",
                "parameter_noise",
                "entropy_coef",
                "value_coef",
                "max_grad_norm",
                "weight_decay",
            ),
        )
        if self.average_decay == 1:
            raise UserError("agent.average_decay is 1, so the average would never move; 0.99 is usual.")

    def plan(self, rows: int) -> Plan:
        """One optimizer step per fresh rollout and ``replay_ratio`` on replayed ones."""
        floats = 5 if self.normalize_observation else 0  # measured
        steps = (1 + self.replay_ratio) / (rows * self.rollout)
        return Plan(self.rollout, 1, floats, self.replay, steps, rows * self.rollout)

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Settings of continuous actions, the normalizer, trust region and replay that do nothing."""
        yield from self.unused_distribution(action)
        yield from unused_normalizer(self, observation)
        yield from super().unused(observation, action, rows)


@dataclass(frozen=True)
class ACERVTraceConfig(ACERConfig):
    """ACER with V-trace targets (Espeholt et al. 2018) in place of Retrace."""

    targets: Literal["retrace", "vtrace"] = "vtrace"  # retrace: Q of each choice of a Discrete; vtrace: V, any action
    importance_clip: float = 1.0  # of the targets' ratios too; above 1: less bias, more variance


class _Targets(NamedTuple):
    """Targets and policy gradient weights of a batch."""

    weights: Tensor  # [T, B, A] of each log π(a|s) in the policy gradient
    value: Tensor  # [T, B] Q of the action taken, or V; with a graph
    target: Tensor  # [T, B] of that value


class ACER(ActorCritic):
    """One step on each fresh rollout, then some on replayed ones, within a trust region around an average policy."""

    Config: type[Any] = ACERConfig
    corrects_old_unrolls = True

    @classmethod
    def adapt_defaults(cls, config: Any, run: RunOutline) -> dict[str, Any]:
        """Use V-trace for other actions than one Discrete; replayed rollouts give short runs enough updates."""
        if run.one_discrete and config.targets == "retrace":
            return {}
        usual = ACERVTraceConfig()
        return {"targets": usual.targets, "importance_clip": usual.importance_clip}

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__(observation, action, config, networks, batch)
        self._one_discrete = is_one_discrete(action)
        self._action = next(iter(action))
        self._logits, self._observation = f"policy/{self._action}", observation
        acting: dict[str, nn.Module] = {name: network for name, network in networks.items() if name != "critic"}
        add_parameter_noise(self, config.parameter_noise)
        self.has_trust_region = bool(config.trust_region)
        self.average = TargetNetworks(acting | {"policy": self.policy} if self.has_trust_region else {})
        self._policy_networks = list(acting)
        if config.targets == "retrace":
            self.value_networks = list(networks)  # V is the policy's mean of Q

    @staticmethod
    def make_policy(action: Specs, config: Any, inputs: Shapes) -> Policy:
        """Make the policy; Retrace needs one Discrete action."""
        if config.targets == "retrace" and not is_one_discrete(action):
            found = ", ".join(f"{name} ({spec.kind}, shape {spec.shape})" for name, spec in action.items())
            raise UserError(
                f"agent.targets is retrace, which needs one Discrete action, but this environment has {found}; set it "
                "to vtrace."
            )
        return make_policy(action, config, inputs)

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for one network with policy and Q (Retrace) or V (V-trace), or one for each."""
        spec = network_spec(observation, {})
        policy = cls.make_policy(action, config, spec.inputs)
        value: Shapes = {"value": (1,)}
        over = policy.over
        if config.targets == "retrace":
            (choices,) = policy.outputs.values()
            value = {"q": choices}
            over = dict.fromkeys((*over, "q"), *over.values()) if over else {}
        spec = spec._replace(over=over)
        if shared:
            return {"actor_critic": spec._replace(outputs=policy.outputs | value)}
        return {"actor": spec._replace(outputs=policy.outputs), "critic": spec._replace(outputs=value)}

    def make_cache(self, rows: Rows) -> RolloutReplay:
        """Make a cache of the fresh rollout and earlier ones."""
        with self.given_config():  # the cache follows the schedule of the replay ratio itself
            config, ranks = self.config.for_rows(rows), rows.total // rows.size
        given = (self._observation, self.device, config.normalize_reward, ranks)
        return RolloutReplay(config, rows.size, self.given_gamma, *given)

    def acting_state(self) -> Tensors:
        """Leave out the average policy, which only learning uses."""
        return {name: x for name, x in super().acting_state().items() if not name.startswith("average.")}

    @torch.inference_mode()
    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Sample with ``noise``, else take the mode; the experience is log-probabilities, all of a Discrete."""
        if not self._one_discrete:
            return self._act(step, state, noise)
        observation = {name: x.unsqueeze(0) for name, x in step.observation.items()}
        names = self._policy_networks if noise is None and not self.tracks_value else self.acting_networks
        outputs, state = self.acting_outputs(observation, state, step.first.unsqueeze(0), names, noise)
        log_policy = self._masked_logits(outputs, observation).squeeze(0).log_softmax(-1)
        if noise is None:
            return AgentStep({self._action: categorical_mode(log_policy)}, {}, state)
        action = categorical_sample(log_policy, noise[self._action])
        return AgentStep({self._action: action}, {"log_policy": log_policy}, state)

    def experience(self, outputs: Tensors, observation: Tensors, action: Tensors, log_prob: Tensor) -> Tensors:
        """Return the log-probability alone, since stored values would be too old in a replay."""
        return {"log_prob": log_prob}

    @torch.inference_mode()
    def value(self, step: EnvStep, state: HiddenState) -> Tensor:
        """Return V, or E_π[Q]."""
        if self.config.targets == "vtrace":
            return super().value(step, state)
        outputs = self._outputs_without(step, state, without="")
        probabilities = self._masked_logits(outputs, step.observation).softmax(-1)
        return self.unscale_value((probabilities * outputs["q"].reshape(probabilities.shape)).sum(-1))

    def _value_of(self, observation: Tensors, state: HiddenState) -> Tensor:
        if self.config.targets == "vtrace":
            return super()._value_of(observation, state)
        step = {name: x.unsqueeze(0) for name, x in observation.items()}
        rows = len(next(iter(observation.values())))
        outputs, _ = self.outputs(step, state, torch.zeros(1, rows, dtype=torch.bool, device=self.device))
        probabilities = self._masked_logits(outputs, step).softmax(-1)
        return (probabilities * outputs["q"].reshape(probabilities.shape)).sum(-1)[0]

    def _masked_logits(self, outputs: Tensors, observation: Tensors) -> Tensor:
        return self.policy.distribution(outputs, {}, observation)[self._logits]

    @torch.no_grad()
    def prepare(self, batch: Batch, sum_over_ranks: SumOverRanks = single_rank) -> Batch:
        """Scale the rewards, and add the rows' shares and where traces continue."""
        return replace(
            batch,
            reward=self.scaled_reward(batch, sum_over_ranks),
            share=shares(batch.real.to(batch.reward.dtype), sum_over_ranks=sum_over_ranks),
            experience=batch.experience | {"continues": batch.continues},
        )

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Return policy gradient (within the trust region), value and entropy losses over real rows."""
        ready = self.inputs(batch.observation)
        outputs = _run(self.networks, ready, batch.state, batch.first)
        average: Tensors = {}
        if self.has_trust_region:
            with torch.no_grad():
                networks = {name: self.average.networks[name] for name in self._policy_networks}
                average = _run(networks, ready, batch.state, batch.first)
        return (self._loss_of_logits if self._one_discrete else self._loss_of_policy)(batch, outputs, average)

    def _loss_of_logits(self, batch: Batch, outputs: Tensors, average: Tensors) -> tuple[Tensors, Tensors]:
        """Return the losses of one Discrete action, whose gradients by the logits are known."""
        logits = self._masked_logits(outputs, batch.observation)  # [T+1, B, A], masked
        log_p = logits.log_softmax(-1)
        learn = (self._by_retrace if self.config.targets == "retrace" else self._by_vtrace)(outputs, log_p, batch)
        logits, log_p, share = logits[:-1], log_p[:-1], batch.share
        metrics: Tensors = {}
        if self.has_trust_region:
            with torch.no_grad():
                around = self._masked_logits(average, batch.observation)[:-1]
                g, k = policy_gradient_logits(learn.weights, log_p), kl_gradient_logits(around, log_p)
                metrics = self._trust_region_metrics(g, k, categorical_kl(around, log_p), share)
            policy = trust_region_loss(logits, g, k, self.config.trust_region)
        else:
            policy = acer_policy_loss(log_p, learn.weights)
        losses = {
            "policy": (policy * share).sum(),
            "value": (value_loss(learn.value, learn.target) * share).sum(),
            "entropy": ((log_p.exp() * log_p).sum(-1) * share).sum(),
        }
        return losses, metrics

    def _loss_of_policy(self, batch: Batch, outputs: Tensors, average: Tensors) -> tuple[Tensors, Tensors]:
        """Return the losses of any action, by V-trace; gradients by the parameters of distributions are computed."""
        action, share, value = batch.action, batch.share, outputs["value"].squeeze(-1)  # value: [T+1, B]
        outputs, average, observation = (
            {name: x[:-1] for name, x in tensors.items()} for tensors in (outputs, average, batch.observation)
        )
        terms = self.policy.evaluate(outputs, action, observation)
        made = self._vtrace(terms["log_prob"].detach() - batch.experience["log_prob"], value, batch)
        metrics: Tensors = {}
        if self.has_trust_region:
            statistics = self.policy.distribution(outputs, action, observation)
            average_policy: Any = self.average.networks["policy"]
            with torch.no_grad():
                around = average_policy.distribution(average, action, observation)
            new = {name: x.detach() for name, x in statistics.items()}
            kl = partial(self.policy.kl_between, around, action=action)
            gradient = grad(lambda p: (self.policy.log_prob_of(p, action) * made.advantage).sum())(new)
            kl_gradient = grad(lambda p: kl(p).sum())(new)
            phi, g, k = (torch.cat([x[name] for name in new], -1) for x in (statistics, gradient, kl_gradient))
            metrics = self._trust_region_metrics(g, k, kl(new), share)
            policy = trust_region_loss(phi, g, k, self.config.trust_region)
        else:
            policy = policy_gradient_loss(terms["log_prob"], made.advantage)
        losses = {
            "policy": (policy * share).sum(),
            "value": (value_loss(value[:-1], made.target) * share).sum(),
            "entropy": (entropy_loss(terms["entropy"]) * share).sum(),
        }
        return losses, metrics

    def _trust_region_metrics(self, g: Tensor, k: Tensor, kl: Tensor, share: Tensor) -> Tensors:
        """Return the share of rows where the trust region binds, and the KL to the average policy."""
        held = ((g * k).sum(-1) > self.config.trust_region).to(share.dtype)
        return {"held_back": (held * share).sum(), "kl": (kl * share).sum()}

    def _by_retrace(self, outputs: Tensors, log_p: Tensor, batch: Batch) -> _Targets:
        """Return Retrace targets and truncated policy gradient weights with bias correction."""
        config, action, log_mu = self.config, batch.action[self._action], batch.experience["log_policy"]
        q = outputs["q"].reshape(log_p.shape)  # [T+1, B, A]
        taken = q[:-1].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            value = (log_p.exp() * q).sum(-1)
            log_ratio = (log_p[:-1] - log_mu).gather(-1, action.unsqueeze(-1)).squeeze(-1)
            traced = log_ratio, batch.reward, batch.discount, batch.experience["continues"], taken
            target = retrace(*traced, batch.next_value(value, self._final_values(batch)), config.trace_lambda)
            given = log_p[:-1], log_mu, action, target, q[:-1], value[:-1]
            return _Targets(acer_weights(*given, config.importance_clip), taken, target)

    def _by_vtrace(self, outputs: Tensors, log_p: Tensor, batch: Batch) -> _Targets:
        """Return V-trace targets and policy gradient weights; without Q the bias is not corrected."""
        action, value = batch.action[self._action], outputs["value"].squeeze(-1)  # value: [T+1, B]
        with torch.no_grad():
            log_ratio = (log_p[:-1] - batch.experience["log_policy"]).gather(-1, action.unsqueeze(-1)).squeeze(-1)
            made = self._vtrace(log_ratio, value, batch)
            at = action.unsqueeze(-1), made.advantage.unsqueeze(-1)
            weights = torch.zeros_like(log_p[:-1]).scatter_(-1, *at)
        return _Targets(weights, value[:-1], made.target)

    @torch.no_grad()
    def _vtrace(self, log_ratio: Tensor, value: Tensor, batch: Batch) -> VTrace:
        """Return V-trace targets and advantages from the values ``[T+1, B]``."""
        value_t, clip = batch.next_value(value, self._final_values(batch)), self.config.importance_clip
        traced = log_ratio, batch.reward, batch.discount, batch.experience["continues"], value[:-1], value_t
        return vtrace(*traced, rho_bar=clip, lambda_=self.config.trace_lambda, pg_rho_bar=clip)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Take one step, update the average policy, and the statistics from a fresh rollout."""
        metrics = updater.step(self.compute_loss, self.prepare(batch, updater.sum), "all")
        if self.has_trust_region:
            self.average.update(1 - self.config.average_decay)
        if batch.index is None:
            self.update_statistics(batch, updater.sum)
        return Learned(with_perplexity(metrics))


def _run(networks: Any, ready: Tensors, state: HiddenState, first: Tensor) -> Tensors:
    """Run networks on preprocessed observations ``[T, B, …]``."""
    outputs: Tensors = {}
    for name, network in networks.items():
        outputs |= network(ready, state.select(name) if state else state, first)[0]
    return outputs
