"""The base class of agents' settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from ludus.core.errors import UserError
from ludus.core.schedule import Schedule
from ludus.core.spec import Specs

# why some settings cannot be schedules
FIXED = {
    "gamma": "the returns of recorded episodes are computed with it once",
    "optimizer_eps": "the optimizer is made with it",
    "adam_beta1": "the optimizer is made with it",
    "log_std_init": "it is an initial value",
    "priority_exponent": "priorities are stored as powers with it",
    "v_min": "the network's outputs are about fixed atoms",
    "v_max": "the network's outputs are about fixed atoms",
    "epsilon_ladder": "random numbers of many steps are drawn with it",
    "noise_clip": "noise of many steps is drawn with it",
    "beta_end": "agent.beta is the setting that takes a schedule",
    "epsilon_end": "agent.epsilon_start is the setting that takes a schedule of ε",
    "epsilon_share": "agent.epsilon_start is the setting that takes a schedule of ε",
    "noise_sigma_end": "agent.noise_sigma is the setting that takes a schedule of the noise",
}
OF_OPTIMIZER = ("max_grad_norm", "weight_decay")  # settings of a parameter group that may be schedules


class Plan(NamedTuple):
    """How often an agent updates and how much it stores; used for memory estimates and to choose engines."""

    rollout: int = 0  # steps of each environment per rollout; 0: no rollouts
    rollout_copies: int = 1  # copies of a rollout's observations in memory during learning
    rollout_floats: int = 0  # additional float32 copies, of normalized observations
    replay: int = 0  # transitions in the replay buffer
    optimizer_steps: float = 0.0  # per environment step
    batch: int = 0  # transitions per optimizer step
    fixed_shapes: bool = True  # whether all batches have the same shape, so that an update can be compiled once


class RunOutline(NamedTuple):
    """What an agent's defaults may depend on."""

    nb_step: int
    environments: int
    recurrent: bool  # whether a network may be recurrent
    images: bool  # whether an observation is an image; False until the environment exists
    one_discrete: bool  # whether the action is a single Discrete; True until the environment exists


class UnusedSetting(NamedTuple):
    """Settings that have no effect, depending on the value of another setting."""

    names: str  # separated by spaces
    depends_on: str
    is_unused: Callable[[Any], Any]  # called with the value of ``depends_on``
    reason: str  # {} stands for that value


def run_length(nb_step: int, agents: int) -> str:
    """Say how long a run is for what counts the steps of each agent."""
    return f"nb_step is {nb_step:,}" + (f" for each of {agents} agents" if agents > 1 else "")


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent; subclasses are frozen dataclasses with a default and a comment per field."""

    NETWORK_DEFAULTS: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # defaults of network.* for this agent
    UNUSED: ClassVar[tuple[UnusedSetting, ...]] = ()
    ONLY_OFFLINE: ClassVar[bool] = False  # trained without acting: the container is offline
    UNUSED_OFFLINE: ClassVar[tuple[str, ...]] = ()  # settings that do nothing in the container offline
    UNUSED_FEED_FORWARD: ClassVar[tuple[str, ...]] = ()  # settings that do nothing without a recurrent network
    PREFERS_OFFLINE: ClassVar[bool] = False  # the container is offline where data.path is given and no container
    ENV_NUM_MULTIPLE_OF: ClassVar[int] = 1  # env.num must be a multiple of this
    # settings that may be schedules, besides learning rates, weights of losses (``…_coef``) and those of OF_OPTIMIZER:
    # the agent reads them from ``Agent.config`` whenever it uses them, or changes what it made of them in
    # ``Agent.schedule``
    SCHEDULABLE: ClassVar[tuple[str, ...]] = ()

    def schedules(self) -> dict[str, Schedule]:
        """Return the settings that are schedules, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Schedule)}

    def check_schedules(self) -> None:
        """Refuse schedules of settings that have one value for the whole run."""
        for name, value in self.schedules().items():
            rate = name.endswith("learning_rate")
            if not rate and name not in (*self.SCHEDULABLE, *OF_OPTIMIZER) and not name.endswith("_coef"):
                why = FIXED.get(name, "the agent reads it once, when it is made")
                raise UserError(
                    f"agent.{name} is {value}, but it cannot change during a run, since {why}; give a number."
                )
            if name == "max_grad_norm" and value.low <= 0:
                raise UserError(
                    f"agent.max_grad_norm is {value}, which reaches {value.low:g}; a schedule of it must stay above 0."
                )
            if value.needs_returns and not rate:
                raise UserError(
                    f"agent.{name} is {value}, but only learning rates can follow the returns of evaluations; give "
                    "another schedule, such as linear."
                )

    def validate(self) -> None:
        """Raise a UserError for invalid values."""

    def locate(self, find_run: Callable[[str], str]) -> Self:
        """Return the settings with the runs that they name replaced by their folders, so that a resume finds them."""
        return self

    def check_run_length(self, nb_step: int, environments: int, agents: int = 1) -> None:
        """Raise a UserError if ``nb_step`` steps end before the first update; ``agents`` of each environment learn."""

    def why_no_update(self, steps: int, environments: int, agents: int, cache: Mapping[str, float]) -> str:
        """Explain why a run of ``steps`` steps had no update, given the metrics of its cache; empty if unknown."""
        return ""

    def plan(self, rows: int) -> Plan:
        """Return the plan for ``rows`` environments."""
        return Plan()

    def unused(self, observation: Specs, action: Specs, rows: int) -> Iterator[tuple[str, str]]:
        """Yield every setting that has no effect, with the reason."""
        for names, depends_on, is_unused, reason in self.UNUSED:
            if is_unused(value := getattr(self, depends_on)):
                yield from ((name, reason.format(value)) for name in names.split())
