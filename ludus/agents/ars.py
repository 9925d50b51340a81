"""ARS: augmented random search, which learns from the returns of perturbed policies alone (Mania et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludus.core.agent import Agent
from ludus.core.batch import Batch, Learned
from ludus.core.errors import UserError, check_ranges
from ludus.core.hidden_state import HiddenState
from ludus.core.network import Network, NetworkSpec
from ludus.core.noise import Noise
from ludus.core.rows import Rows
from ludus.core.spec import Specs, network_inputs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import Tensors
from ludus.core.updater import Group, Updater
from ludus.experience.episodes import EpisodeCache, EpisodeConfig
from ludus.networks.build import network_spec
from ludus.networks.module_checks import uses_methods_of
from ludus.networks.numpy_actor import ACTIVATIONS, NumpyActor
from ludus.networks.placement import device_of
from ludus.networks.policy import Policy
from ludus.networks.policy_config import HeadsConfig, PolicyConfig
from ludus.ops.random_search import ars_weights
from ludus.preprocess.normalization import ObsNormalizer, unused_normalizer
from ludus.preprocess.observation import ObsPreprocessor

T = TypeVar("T")
ENVIRONMENT = "environment"  # experience: the number of a row's environment
LINEAR = MappingProxyType({"hidden": ()})


@dataclass(frozen=True)
class ARSConfig(HeadsConfig, EpisodeConfig):
    """Settings of ARS; each pair of environments plays one direction, so env.num is twice their number."""

    NETWORK_DEFAULTS = LINEAR
    ENV_NUM_MULTIPLE_OF = 2
    SCHEDULABLE = ("perturbation", "alive_bonus")
    learning_rate: float = 0.02  # α, the step size: raise for speed, lower when the return collapses
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: falls to 0 at nb_step
    perturbation: float = 0.05  # ν, standard deviation of the perturbations of parameters: larger explores further
    top: int = 0  # b, directions with the best returns that a step uses; 0: all
    alive_bonus: float = 0.0  # subtracted from each reward, where environments pay for every step survived
    # vectors by running mean and standard deviation, saved with the policy (ARS-V2); off: ARS-V1
    normalize_observation: bool = True

    def validate(self) -> None:
        """Refuse values that cannot train."""
        positive = ("learning_rate", "perturbation", "episodes")
        check_ranges(self, positive=positive, nonnegative=("top",), finite=("alive_bonus",))

    def check_run_length(self, nb_step: int, environments: int, agents: int = 1) -> None:
        """Refuse environments that do not make pairs, or too few pairs."""
        if environments % self.ENV_NUM_MULTIPLE_OF:
            raise UserError(
                f"env.num is {environments}, but ars plays each direction forwards and backwards in two environments; "
                "set it to an even number."
            )
        if self.top > environments // 2:
            raise UserError(
                f"agent.top is {self.top}, more than the {environments // 2} directions (env.num / 2); lower it, or "
                "raise env.num."
            )

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """``normalize_observation`` where there is nothing to normalize."""
        yield from unused_normalizer(self, observation)


class ARS(Agent):
    """A deterministic policy, moved along random directions in proportion to the returns that they gave.

    Environments 2k and 2k + 1 play the policy moved along direction k and against it, for whole episodes. Agents that
    share an environment play the same policy, and their returns are averaged.
    """

    Config: type[Any] = ARSConfig
    network_names = ("actor",)
    seed: Tensor

    def __init__(
        self, observation: Specs, action: Specs, config: Any, networks: Mapping[str, Network], batch: int
    ) -> None:
        super().__init__()
        self.config, self.observation, self.action = config, observation, action
        self.networks = nn.ModuleDict(networks)
        self.preprocess = ObsPreprocessor(network_inputs(observation))
        self.policy = Policy(action, PolicyConfig(heads=config.heads), self.preprocess.shapes).requires_grad_(False)
        self.policy.rename_masks(self.preprocess.masks)
        self.policy.find_conditional_masks(observation)
        self.normalizer = ObsNormalizer(self.preprocess.outputs) if config.normalize_observation else None
        if networks["actor"].recurrent:
            raise UserError(
                "ars needs a feed-forward network, but this one is recurrent; set network.net1d, network.body and "
                "network.head1d to pieces without memory, such as identity1d, or use ppo."
            )
        # directions depend on this seed, their number and the number of updates; it is drawn as the parameters are, so
        # that it is the same on all ranks
        self.register_buffer("seed", torch.randint(2**31 - 1, ()))
        self.updates = 0
        # of the perturbed policies until the next update, also if a schedule goes on; None: not used yet
        self.perturbation: float | None = None
        self._candidates: dict[tuple[str, int, int, int], Any] = {}  # by engine, update, first environment and rows
        self._numpy: NumpyActor | None = None

    @classmethod
    def requirements(cls, observation: Specs, action: Specs, config: Any, shared: bool) -> dict[str, NetworkSpec]:
        """Ask for a policy."""
        spec = network_spec(observation, {})
        policy = Policy(action, PolicyConfig(heads=config.heads), spec.inputs)
        return {"actor": spec._replace(outputs=policy.outputs, over=policy.over)}

    @property
    def action_transform(self) -> Mapping[str, str]:
        """Return the policy's."""
        return self.policy.action_transform

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return device_of(self)

    def initial_state(self, batch: int) -> HiddenState:
        """Return an empty state."""
        return HiddenState()

    def parameter_groups(self) -> dict[str, Group]:
        """Return the policy's parameters, to be moved by plain steps."""
        return {"all": Group(tuple(self.trainable().values()), self.config.learning_rate, optimizer="sgd")}

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are searched, by their names in the network."""
        return {name: p for name, p in self.networks["actor"].named_parameters() if p.requires_grad}

    def make_noise(self, rows: Rows, generator: torch.Generator) -> Noise:
        """Return the number of each row's environment, by which its perturbation is chosen."""

        def draw(steps: int, g: torch.Generator) -> Tensors:
            return {ENVIRONMENT: (torch.arange(rows.total, device=g.device) // rows.agents).expand(steps, -1)}

        return Noise(draw, generator, rows)

    def make_cache(self, rows: Rows) -> EpisodeCache:
        """Make a cache of whole episodes."""
        return EpisodeCache(self.config.episodes, rows.size, 1.0, self.observation, self.action, self.device)

    def use_numpy(self) -> bool:
        """Act in numpy where the network is a plain MLP of one vector on the CPU, for one Discrete or Box action."""
        ours = uses_methods_of(self, ARS, ("act", "_act", "candidates"))
        unmasked = len(network_inputs(self.observation)) == len(self.observation)
        if ours and unmasked and all(p.requires_grad for p in self.networks["actor"].parameters()):
            self._numpy = NumpyActor.build(dict(self.networks), self.policy, self.preprocess, self.normalizer)
        return self._numpy is not None

    def act(self, step: EnvStep, state: HiddenState, noise: Tensors | None = None) -> AgentStep:
        """Take the most likely action, in training with ``noise`` that of each row's perturbed policy."""
        experience = {} if noise is None else dict(noise)
        played = experience.get(ENVIRONMENT) if self.training else None  # an evaluation plays the policy itself
        if self._numpy is None or not self._numpy.usable():
            action = self._act(step, played)
        elif played is None:
            action = self._numpy.act(step, state, None).action
        else:
            action = self._act_numpy(step, played)
        return AgentStep(action, experience, state)

    @torch.no_grad()
    def _act(self, step: EnvStep, environments: Tensor | None) -> Tensors:
        ready = self.preprocess({name: x.unsqueeze(0) for name, x in step.observation.items()})
        ready = ready if self.normalizer is None else self.normalizer(ready)
        first = step.first.unsqueeze(0)
        if environments is None:
            outputs, _ = self.networks["actor"](ready, HiddenState(), first)
        else:
            outputs = self._run_candidates(environments, ready, first)
        return self.policy.sample({k: x.squeeze(0) for k, x in outputs.items()}, step.observation, None)[0]

    def _act_numpy(self, step: EnvStep, environments: Tensor) -> Tensors:
        run = self._cached_until_update("numpy", environments, lambda: self._numpy_population(environments))
        ((seen, x),) = step.observation.items()
        output = run(x.numpy() if self.normalizer is None else self.normalizer.numpy(x.numpy(), seen))
        ((name, spec),) = self.action.items()
        return {name: torch.from_numpy(output.argmax(1) if spec.kind == "categorical" else output)}

    def _numpy_population(self, environments: Tensor) -> NumpyPopulation:
        return NumpyPopulation(self.networks["actor"], self.candidates(environments).values())

    def distribution(self, step: EnvStep, state: HiddenState) -> Mapping[str, Tensors]:
        """Refuse: the policy is deterministic."""
        raise UserError("ARS has no distribution of actions, since its policy is deterministic; use policy.act.")

    def _run_candidates(self, environments: Tensor, observation: Tensors, first: Tensor) -> Tensors:
        """Run the network on ``[1, B, …]``, row by row with the parameters of each."""
        parameters = self._cached_until_update("torch", environments, lambda: self.candidates(environments))
        results = []
        for row in range(len(environments)):
            part = slice(row, row + 1)
            given = {name: x[:, part] for name, x in observation.items()}, HiddenState(), first[:, part]
            of_row = {name: x[row] for name, x in parameters.items()}
            results.append(torch.func.functional_call(self.networks["actor"], of_row, given)[0])
        return {name: torch.cat([outputs[name] for outputs in results], 1) for name in results[0]}

    def _cached_until_update(self, engine: str, environments: Tensor, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is the same for these rows until the next update."""
        key = engine, self.updates, int(environments[0]), len(environments)
        if key not in self._candidates:
            self._candidates = {k: x for k, x in self._candidates.items() if k[1] == self.updates}
            self._candidates[key] = make()
        found: T = self._candidates[key]
        return found

    def candidates(self, environments: Tensor) -> Tensors:
        """Return the parameters ``[B, …]`` of the perturbed policies that rows of these environments play."""
        if self.perturbation is None:
            self.perturbation = float(self.config.perturbation)
        parameters = self.trainable()
        sign = torch.where(environments % 2 == 0, 1.0, -1.0).unsqueeze(1)
        directions = torch.from_numpy(np.stack([self.direction(number // 2) for number in environments.tolist()]))
        moved = self.perturbation * sign * directions.to(environments.device)  # [B, P]
        parts = torch.split(moved, [p.numel() for p in parameters.values()], 1)
        return {
            name: p.detach() + part.reshape(-1, *p.shape).to(p.device)
            for (name, p), part in zip(parameters.items(), parts, strict=True)
        }

    def direction(self, number: int) -> NDArray[np.float32]:
        """Return a direction of this update: standard normal numbers ``[P]`` for all parameters."""
        size = sum(p.numel() for p in self.trainable().values())
        return np.random.default_rng([int(self.seed), self.updates, number]).standard_normal(size, np.float32)

    def learn(self, batch: Batch, updater: Updater) -> Learned:
        """Move the parameters by the returns of all environments and ranks, and update the observation filter."""
        config, environments = self.config, batch.experience[ENVIRONMENT][0]
        total = torch.where(batch.real, batch.reward - config.alive_bonus, 0.0).sum(0, dtype=torch.float64)
        here = int(environments[-1] - environments[0]) + 1
        agents = len(environments) // here
        returns = total.new_zeros(updater.ranks * here).index_add(0, environments, total / (agents * config.episodes))
        returns = updater.sum(returns)
        positive, negative = returns.view(-1, 2).unbind(1)
        weights = ars_weights(positive, negative, config.top or len(positive)).float().cpu()
        directions = np.stack([self.direction(number) for number in range(len(weights))])  # [N, P]
        metrics = updater.apply(self._flat(-(weights @ torch.from_numpy(directions)), updater), "all")
        self.updates, self.perturbation = self.updates + 1, None
        if self.normalizer is not None:
            seen = self.preprocess({name: x[:-1] for name, x in batch.observation.items()})
            self.normalizer.update(seen, batch.real, updater.sum)
        found = {"perturbed_return": returns.mean(), "perturbed_return_std": returns.std(correction=0)}
        return Learned(metrics | {name: x.float() for name, x in found.items()})

    @staticmethod
    def _flat(gradient: Tensor, updater: Updater) -> Tensor:
        """Lay out a gradient ``[P]`` as the updater does."""
        flat = torch.zeros_like(updater.parameters("all"))
        views = updater.split(flat, "all")
        for view, part in zip(views, torch.split(gradient, [x.numel() for x in views]), strict=True):
            view.copy_(part.view_as(view))
        return flat

    def compute_loss(self, batch: Batch) -> tuple[Tensors, Tensors]:
        """Refuse: the returns of perturbed policies take the place of a loss."""
        raise UserError("ARS has no loss, since it learns from the returns of perturbed policies alone.")

    def get_extra_state(self) -> dict[str, Any]:
        """Save the number of updates, on which directions depend, and the size of perturbations since the last."""
        return {"updates": self.updates, "perturbation": self.perturbation}

    def set_extra_state(self, state: Any) -> None:
        """Restore them."""
        self.updates, self.perturbation, self._candidates = int(state["updates"]), state.get("perturbation"), {}


class NumpyPopulation:
    """A plain MLP with other parameters for each row: weights and biases of its layers in order, ``[B, …]`` each."""

    def __init__(self, network: Any, parameters: Iterable[Tensor]) -> None:
        self._activate = ACTIVATIONS[network.plain_mlp().activation]
        flat = [x.numpy() for x in parameters]
        pairs = zip(flat[::2], flat[1::2], strict=True)
        *self._hidden, self._last = [(weight.swapaxes(1, 2).copy(), bias[:, None]) for weight, bias in pairs]

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        x = x[:, None]  # [B, 1, F]
        for weight, bias in self._hidden:
            x = x @ weight
            x += bias
            self._activate(x, out=x)
        weight, bias = self._last
        output: NDArray[np.float32] = (x @ weight + bias)[:, 0]
        return output
