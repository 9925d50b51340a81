"""The settings of a run, merged from defaults, preset, file and flags, with the origin of each value."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

from ludus.agents import AGENTS, CONFIGS
from ludus.core.config import AgentConfig, RunOutline
from ludus.core.errors import UserError, did_you_mean, naming_role
from ludus.core.imports import name_for, resolve
from ludus.core.schedule import Schedule
from ludus.environments.config import EnvConfig
from ludus.environments.config import validate as validate_environment
from ludus.exploration import NOISES
from ludus.networks import NETWORKS, SUBMODULES
from ludus.networks.config import NetworkConfig
from ludus.preprocess.config import PreprocessConfig
from ludus.settings.config_file import flatten
from ludus.settings.parse import parse_value
from ludus.settings.trust import LOCAL_CLUSTER, import_from_current_folder, read_file_settings

A = TypeVar("A", bound=AgentConfig)
Flat = dict[str, Any]  # dotted key → value, as in {"agent.learning_rate": 0.001}

DEFAULT_AGENT = "ppo"
NO_PRESET = "none"
ALIASES = {  # short names of settings
    "agent": "agent.name",
    "network": "network.name",
    "data": "data.path",
    "stop_at": "evaluation.stop_at",
    "roles": "roles.agents",
    "ranks": "distrib.ranks",
    "workers": "impala.workers",
    "cluster": "impala.cluster",
}
PIECES = ("network.body", *(f"network.{place}{rank}d" for place in ("net", "head") for rank in (1, 2, 3, 4)))
# known names of the settings that name a class
TABLES = {
    "agent.name": AGENTS,
    "agent.noise": NOISES,
    "network.name": NETWORKS,
    **dict.fromkeys(PIECES, SUBMODULES),
}
MINIMUM = {"nb_step": 1, "seed": 0, "threads": 0, "log_every": 0, "checkpoint_every": 0, "keep": 1}
# settings whose place a schedule takes, and the values that turn them off
REPLACED = {
    "learning_rate": ("learning_rate_schedule", "constant"),
    "clip": ("clip_schedule", "constant"),
    "epsilon_start": ("epsilon_schedule", "constant"),
    "noise_sigma": ("noise_sigma_end", None),
}
MAX_NAME_LENGTH = 80  # characters of a run's name or tag
MAXIMUM = {"seed": 2**63 - 1, "threads": 1024}  # seeds: limit of torch; threads: far more end the process
ADAPTED = "default for this run"  # origin of defaults that were adapted to the run
# Evaluations and checkpoints are by default at least so many rollouts apart, unless a run has no more than so many.
ROLLOUTS_APART, MOST_EVALUATIONS = 10, 20
EACH = "each"  # roles.agents: every agent of the environment is a role
ROLE = re.compile(r"[A-Za-z_][\w-]*")  # names of roles
CLUSTER_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:.]+\]:\d{1,5}")  # host:port


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the policy is evaluated, in separate environments."""

    # env steps between evaluations, by default at least 10 rollouts; 0: only at the end. Lower: a finer curve, slower
    every: int = 25_000
    episodes: int = 20  # episodes per evaluation; more narrow the confidence interval but take longer
    environments: int = 0  # parallel environments for evaluation; 0: env.num
    stop_at: float | None = None  # stop the run once the mean return of an evaluation reaches this
    greedy: bool = True  # take the most likely action; off: sample actions, as in training

    def validate(self) -> None:
        """Refuse invalid settings."""
        check_minimum("evaluation.every", self.every, 0)
        check_minimum("evaluation.episodes", self.episodes, 1)
        check_minimum("evaluation.environments", self.environments, 0)
        if self.stop_at is not None and not self.every:
            raise UserError(
                f"evaluation.stop_at is {self.stop_at:g}, but evaluation.every is 0, so there are no evaluations; set "
                "evaluation.every to a number of steps, such as 5000."
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Recorded episodes to learn from."""

    # an .npz file of recorded episodes, as `ludus record` writes, minari:ID for a local Minari dataset, or a run (its
    # folder, or latest), whose best policy then plays data.episodes of them
    path: Annotated[str, "FILE|RUN"] = ""
    episodes: int = 20  # episodes to record, if data.path is a run
    # replay agents that also act: the share of recorded steps in each batch (RLPD); higher: closer to the recordings
    share: float = 0.5

    def validate(self) -> None:
        """Refuse invalid settings."""
        if not 0 < self.share < 1:
            raise UserError(
                f"data.share is {self.share:g}, but must be between 0 and 1; to learn from data.path alone, set "
                "container to offline."
            )
        check_minimum("data.episodes", self.episodes, 1)
        if self.share != type(self).share and not self.path:
            raise UserError(f"data.share is {self.share:g}, but there is no data.path; name a file there.")


@dataclass(frozen=True, kw_only=True)
class NetworkCheckConfig:
    """When the networks are checked during training: ranges, NaN, dead units, gradients."""

    every: int = 0  # env steps between checks, into log.txt and metrics.jsonl; 0: none
    # your own checks as package.module:function, called as function(name, module, inputs, output) for every module;
    # what they return is reported
    functions: tuple[str, ...] = ()

    def validate(self) -> None:
        """Refuse invalid settings."""
        check_minimum("network_check.every", self.every, 0)
        if self.functions and not self.every:
            raise UserError(
                f"network_check.functions is {' '.join(self.functions)}, but network_check.every is 0, so there are no "
                "checks; set network_check.every to a number of steps, such as 10000."
            )


@dataclass(frozen=True, kw_only=True)
class DistribConfig:
    """Settings of the container distrib: processes that learn together, each with a part of the environments."""

    # number of processes; 0: as many as torchrun started, else one for each GPU, or for each core of the CPU
    ranks: int = 0
    timeout: float = 1800.0  # seconds to wait for another rank, also while rank 0 evaluates or compiles

    def validate(self, environments: int, multiple_of: int = 1) -> None:
        """Refuse invalid settings; the agent needs a multiple of ``multiple_of`` environments."""
        check_minimum("distrib.ranks", self.ranks, 0)
        if not 0 < self.timeout < 1e9:
            raise UserError(f"distrib.timeout is {self.timeout:g}; give a number of seconds, such as 1800.")
        if self.ranks and environments % self.ranks:
            group = math.lcm(self.ranks, multiple_of)
            more = -(-environments // group) * group
            raise UserError(
                f"env.num is {environments}, which {self.ranks} ranks cannot share equally; set env.num to {more}, or "
                "distrib.ranks to a number that divides it."
            )


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig:
    """Settings of the container impala: worker processes that act while the host learns from their unrolls."""

    workers: int = 2  # worker processes, which share the env.num environments equally
    # device on which workers compute actions: cpu, cuda, cuda:1, …; with a GPU, env.backend subproc lets each worker
    # compute the actions of many environment processes in one batch
    device: str = "cpu"
    # unrolls (agent.rollout steps of a worker's environments) per batch; 0: as many as workers
    unrolls: int = 0
    # learn from the unrolls that have arrived, at least one and at most impala.unrolls, instead of waiting for all
    dynamic: bool = False
    # unrolls of a worker that may wait while it fills another; more: it waits less for the learner, and unrolls are
    # older; 0: it waits until each unroll was learned from
    queue: int = 1
    max_lag: int = 10  # drop unrolls of weights that are more than this many updates old
    # how often workers that fail or hang are replaced before the run stops; also how often a host in a cluster is
    max_restarts: int = 10
    timeout: float = 60.0  # seconds that one step or reset of a worker's environments may take before it counts as hung
    # where workers and host are: empty: processes of this machine; auto: actors of Ray on this machine, started for the
    # run; host:port: actors of a running Ray cluster
    cluster: Annotated[str, "ADDRESS"] = ""
    cpus_per_worker: float = 1.0  # CPUs of the Ray cluster that each worker reserves
    gpus_per_worker: float = 0.0  # GPUs of the Ray cluster that each worker reserves; 0.25: four workers share one
    # other resources that each worker reserves, as named by `ray start --resources`: they select machines
    resources: Annotated[tuple[str, ...], "NAME=AMOUNT"] = ()
    # CPUs of the Ray cluster that the host reserves. It is on the machine of the command if that has all that the host
    # reserves, else on another one, which must have the same folder of runs (shared storage)
    host_cpus: float = 0.0
    host_gpus: float = 0.0  # GPUs of the Ray cluster that the host reserves
    host_resources: Annotated[tuple[str, ...], "NAME=AMOUNT"] = ()  # other resources that the host reserves

    def validate(self, environments: int) -> None:
        """Refuse invalid settings."""
        for name, smallest in (("workers", 1), ("unrolls", 0), ("queue", 0), ("max_lag", 0), ("max_restarts", 0)):
            check_minimum(f"impala.{name}", getattr(self, name), smallest)
        if not 0 < self.timeout < 1e9:
            raise UserError(f"impala.timeout is {self.timeout:g}; give a number of seconds, such as 60.")
        check_maximum("impala.queue", self.queue, 32)  # each slot takes file descriptors
        if not self.queue and self.unrolls > self.workers:
            raise UserError(
                f"impala.queue is 0, so each of {self.workers} workers gives one unroll per batch, but impala.unrolls "
                f"is {self.unrolls}; lower it to {self.workers} at most, or raise impala.queue."
            )
        if environments % self.workers:
            more = -(-environments // self.workers) * self.workers
            raise UserError(
                f"env.num is {environments}, which {self.workers} workers cannot share equally; set env.num to {more}, "
                "or impala.workers to a number that divides it."
            )
        self._validate_cluster()

    def _validate_cluster(self) -> None:
        host = ("host_cpus", "host_gpus", "host_resources")
        placement = ("cpus_per_worker", "gpus_per_worker", "resources", *host)
        changed = [name for name in placement if getattr(self, name) != getattr(type(self), name)]
        if not self.cluster:
            if changed:
                raise UserError(
                    f"impala.{changed[0]} is {getattr(self, changed[0])}, but impala.cluster is empty, so all is in "
                    "processes of this machine; leave it out, or set impala.cluster to auto or to an address."
                )
            return
        check_cluster("impala.cluster", self.cluster)
        if self.queue > 1:
            raise UserError(
                f"impala.queue is {self.queue}, but a worker in a cluster has at most two unrolls under way; set it to "
                "1 or 0."
            )
        if not 0 < self.cpus_per_worker < 1e6:
            raise UserError(f"impala.cpus_per_worker is {self.cpus_per_worker:g}; give a positive number, such as 1.")
        for name in ("gpus_per_worker", "host_cpus", "host_gpus"):
            if not 0 <= getattr(self, name) < 1e6:
                raise UserError(f"impala.{name} is {getattr(self, name):g}; give 0 or a positive number.")
        if (self.device == "cpu") != (not self.gpus_per_worker):
            raise UserError(
                f"impala.device is {self.device} and impala.gpus_per_worker is {self.gpus_per_worker:g}: a cluster "
                "gives a worker the GPUs that it reserves; set both, or none."
            )
        for name in ("resources", "host_resources"):
            if getattr(self, name) and self.cluster == LOCAL_CLUSTER:
                raise UserError(
                    f"impala.{name} is {' '.join(getattr(self, name))}, but impala.cluster is auto, which has one "
                    "machine; leave it out."
                )
        self.reserved()
        self.host_reserved()  # both refuse resources that are not NAME=AMOUNT

    def reserved(self) -> dict[str, float]:
        """Return the resources that each worker reserves, by their names in Ray."""
        return self._reserved(self.cpus_per_worker, self.gpus_per_worker, "resources")

    def host_reserved(self) -> dict[str, float]:
        """Return the resources that the host reserves, by their names in Ray."""
        return self._reserved(self.host_cpus, self.host_gpus, "host_resources")

    def _reserved(self, cpus: float, gpus: float, others: str) -> dict[str, float]:
        found = {"CPU": cpus, "GPU": gpus}
        for text in getattr(self, others):
            name, _, amount = text.partition("=")
            try:
                found[name] = float(amount)
            except ValueError:
                found[name] = 0.0
            if not name or not 0 < found[name] < 1e6:
                raise UserError(f'impala.{others} has "{text}"; give NAME=AMOUNT, such as simulator=1.')
        return {name: amount for name, amount in found.items() if amount}

    def batch_rows(self, rows: int) -> tuple[int, int]:
        """Return the rows of the smallest and of the largest batch, given those of all environments."""
        each = rows // self.workers
        largest = each * (self.unrolls or self.workers)
        return each if self.dynamic else largest, largest


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """Environments with several agents: which of them have a policy of their own."""

    # the agent of each role, as in 'predator=ppo, prey=dqn'; each: every agent of the environment is a role of its own;
    # empty: all agents share one policy
    agents: Annotated[str, "ROLE=AGENT,..."] = ""
    # which agents of the environment have a role, as in 'predator=adversary_*, prey=agent_*'; by default those with the
    # name of the role, alone or before a number: predator, predator_0, predator_1
    members: Annotated[str, "ROLE=PATTERN,..."] = ""

    @property
    def each(self) -> bool:
        """Whether every agent of the environment is a role of its own."""
        return self.agents.strip() == EACH

    def names(self) -> dict[str, str]:
        """Return the name of the agent of each role; none with ``each``, or if all agents share one policy."""
        return {} if self.each else _parse_pairs("roles.agents", self.agents, "predator=ppo, prey=dqn")

    def assign(self, agents: Iterable[str]) -> dict[str, list[str]]:
        """Return the agents of an environment by role; every one must have exactly one role."""
        agents = list(agents)
        if self.each:
            if wrong := [agent for agent in agents if not ROLE.fullmatch(agent)]:
                raise UserError(f'roles.agents is each, but "{wrong[0]}" is not a plain name; name the roles instead.')
            return {agent: [agent] for agent in agents}
        patterns = _parse_pairs("roles.members", self.members, "predator=adversary_*, prey=agent_*")
        roles = {role: [agent for agent in agents if _is_member(agent, role, patterns)] for role in self.names()}
        listed = ", ".join(agents)
        for role, members in roles.items():
            if not members:
                raise UserError(
                    f'role "{role}" (roles.agents) has no agent of the environment, whose agents are {listed}; say '
                    f"which ones, as in --roles.members '{role}=NAME*'."
                )
        for agent in agents:
            having = [role for role, members in roles.items() if agent in members]
            if len(having) != 1:
                what = f"several roles ({', '.join(having)})" if having else "no role (roles.agents)"
                raise UserError(
                    f"{agent} has {what}; give every agent of the environment ({listed}) exactly one, as in --roles "
                    "'NAME=ppo, OTHER=dqn' or --roles each, and its name with --roles.members."
                )
        return roles

    def validate(self) -> None:
        """Refuse invalid settings."""
        if self.members and not self.names():
            raise UserError(
                f'roles.members is "{self.members}", but there are no roles to give; name them with --roles, as in '
                "--roles 'predator=ppo, prey=dqn'."
            )
        patterns = _parse_pairs("roles.members", self.members, "predator=adversary_*, prey=agent_*")
        if unknown := [role for role in patterns if role not in self.names()]:
            raise UserError(
                f'roles.members names the role "{unknown[0]}", which is not in roles.agents ({self.agents}); add it '
                f"there.{did_you_mean(unknown[0], self.names())}"
            )


@dataclass(frozen=True, kw_only=True)
class SelfPlayConfig:
    """Games: a shared policy learns as one player of each, against frozen older selves."""

    # env steps between copies of the policy that become opponents; 0: no self-play, the policy plays and learns as all
    # players. Lower: opponents are more alike
    every: int = 0
    size: int = 10  # newest copies that are opponents; more: it forgets less how to beat older ones
    latest: float = 0.5  # share of games against the current policy; 0: only against copies, which are easier to beat

    def validate(self) -> None:
        """Refuse invalid settings."""
        check_minimum("self_play.every", self.every, 0)
        check_minimum("self_play.size", self.size, 1)
        if not 0 <= self.latest <= 1:
            raise UserError(f"self_play.latest is {self.latest:g}; give a share from 0 to 1.")


def _parse_pairs(key: str, text: str, example: str) -> dict[str, str]:
    """Parse ``role=value, role=value``."""
    pairs: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        role, _, value = (part.strip() for part in item.partition("="))
        if not ROLE.fullmatch(role) or role in RolesConfig.__dataclass_fields__:
            raise UserError(f'{key} has "{item}", whose role is not a plain name; write it like {example}.')
        if not value:
            raise UserError(
                f'{key} has the role "{role}" without {"an agent" if key == "roles.agents" else "a pattern"}'
                f"; write it like {example}."
            )
        if role in pairs:
            raise UserError(f'{key} gives the role "{role}" twice; keep one of them.')
        pairs[role] = value
    return pairs


def _is_member(agent: str, role: str, patterns: Mapping[str, str]) -> bool:
    if role in patterns:
        return fnmatchcase(agent, patterns[role])
    return re.fullmatch(rf"{re.escape(role)}(_?\d+)?", agent) is not None


@dataclass(frozen=True, kw_only=True)
class Settings(Generic[A]):
    """All settings of a run; ``A`` is the Config of the agent."""

    # algorithm: ppo, dqn, sac or another of `ludus list agents`, or your own class as package.module:Class
    agent_name: Annotated[str, "NAME"] = DEFAULT_AGENT
    # environment steps to train for, summed over all environments; schedules end at this step
    nb_step: int = 100_000
    seed: int = 0  # random seed; the same seed, settings and machine give the same run
    device: str = "auto"  # cpu, cuda, cuda:1, …; auto: the GPU with the most free memory if there is one
    # CPU threads of torch; 0: OMP_NUM_THREADS if set, else all cores for CNNs on the CPU, and for MLPs one, or more if
    # batches or layers are large
    threads: int = 0
    # compile the update with torch.compile; auto: if the run is long enough for compiling to pay off
    compile: Literal["auto", "on", "off"] = "auto"
    engine: Literal["auto", "torch"] = "auto"  # what computes actions; auto: numpy for MLPs on the CPU, else torch
    # how to run: local: in this process; offline: in this process, from data.path alone, with nb_step updates; distrib:
    # in several, which share one gradient (data-parallel training); impala: in this process, with workers that act
    # meanwhile
    container: Literal["local", "offline", "distrib", "impala"] = "local"
    name: str = ""  # name of the run, appended to the name of its folder and shown by `ludus list runs`
    tags: tuple[str, ...] = ()  # tags of the run, shown by `ludus list runs`; --tag WORD adds one and may be repeated
    runs: Annotated[str, "FOLDER"] = "runs"  # folder in which the folder of the run is created
    init_from: Annotated[str, "RUN"] = ""  # run to take initial weights from (fine-tuning)
    # load only these tensors of init_from, by their names in this agent: networks.actor.*; empty: all, which must fit;
    # what that run lacks or has in another shape is not loaded, and reported
    init_load: Annotated[tuple[str, ...], "PATTERN"] = ()
    init_rename: Annotated[tuple[str, ...], "OLD=NEW"] = ()  # first rename tensors of init_from: old.*=new.*
    # parameters and normalizers that are not learned, by name: networks.*.pieces.source/*
    freeze: Annotated[tuple[str, ...], "PATTERN"] = ()
    log_every: int = 2_000  # env steps between lines of metrics; 0: none
    checkpoint_every: int = 50_000  # env steps between checkpoints, by default at least 10 rollouts; 0: only at the end
    keep: int = 3  # number of newest checkpoints to keep, besides the best
    quiet: bool = False  # no live console; log.txt is written in any case
    env: EnvConfig
    agent: A
    network: NetworkConfig = field(default_factory=NetworkConfig)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    network_check: NetworkCheckConfig = field(default_factory=NetworkCheckConfig)
    data: DataConfig = field(default_factory=DataConfig)
    distrib: DistribConfig = field(default_factory=DistribConfig)
    impala: ImpalaConfig = field(default_factory=ImpalaConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    self_play: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    # settings of single networks: network.critic.hidden is {"critic": {"hidden": …}}
    per_network: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # settings of single roles: roles.prey.agent.gamma is {"prey": {"agent": {"gamma": …}}}
    per_role: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)

    def for_role(self, role: str, agents: int = 1) -> Settings[Any]:
        """Return the settings of a role with so many agents per environment, as those of a run with its agent alone.

        ``agent.*`` and ``network.*`` apply to roles with the agent of ``agent.name``; others begin with defaults.
        """
        name, own = self.roles.names().get(role, self.agent_name), self.per_role.get(role, {})
        config, same = agent_config(name), name == self.agent_name
        agent, given = dict(own.get("agent", {})), dict(own.get("network", {}))
        single, network, tables = _pop_tables(given), self.network, self.per_network
        if not same:
            defaults = _unflatten(dict(config.NETWORK_DEFAULTS))
            tables = _pop_tables(defaults)
            network = NetworkConfig(**defaults)
        return replace(
            self,
            agent_name=name,
            agent=replace(self.agent, **agent) if same else config(**agent),
            network=replace(network, **given),
            per_network={key: {**tables.get(key, {}), **single.get(key, {})} for key in {**tables, **single}},
            env=replace(self.env, agents=agents),
            roles=RolesConfig(),
            per_role={},
        )

    def with_role(self, role: str, own: Settings[Any]) -> Settings[A]:
        """Return these settings with all that ``for_role`` returns for a role."""
        tables = {"agent": vars(own.agent), "network": vars(own.network) | dict(own.per_network)}
        return replace(self, per_role={**self.per_role, role: tables})

    def network_for(self, name: str) -> NetworkConfig:
        """Return the settings of one network: ``network`` with its own settings over it."""
        return replace(self.network, **self.per_network.get(name, {}))

    @property
    def may_be_recurrent(self) -> bool:
        """Whether some network is recurrent, or custom and so possibly recurrent."""
        networks = (self.network, *map(self.network_for, self.per_network))
        return any(network.may_be_recurrent for network in networks)

    @property
    def agent_names(self) -> str:
        """The name of the agent, or those of all roles, joined by ``-``."""
        return "-".join(dict.fromkeys(self.roles.names().values())) or self.agent_name

    @property
    def ranks(self) -> int:
        """The number of processes that learn together."""
        return max(1, self.distrib.ranks) if self.container == "distrib" else 1

    @property
    def rows(self) -> int:
        """The rows of all environments: one each, or one for each of the agents that share the policy."""
        return self.env.num * self.env.agents

    @property
    def batch_rows(self) -> int:
        """The rows of the learner's batches, of the smallest one if they differ."""
        if self.container != "impala" or not self.agent.plan(self.rows).rollout:
            return self.rows
        return self.impala.batch_rows(self.rows)[0]

    def check_run_length(self) -> None:
        """Refuse a run that would end before its first update."""
        if self.container != "offline":  # there every step is an update
            self.agent.check_run_length(self.nb_step, self.env.num, self.env.agents)

    def validate(self) -> None:
        """Refuse values out of range, here and in every group."""
        for name, smallest in MINIMUM.items():
            check_minimum(name, getattr(self, name), smallest)
        for name, largest in MAXIMUM.items():
            check_maximum(name, getattr(self, name), largest)
        for key, text in (("name", self.name), *(("tags", tag) for tag in self.tags)):
            if not text.isprintable() or len(text) > MAX_NAME_LENGTH or (key == "tags" and not text.strip()):
                raise UserError(
                    f"{key} has {text!r}, but must be text of at most {MAX_NAME_LENGTH} printable characters."
                )
        for key in ("init_load", "init_rename"):
            if getattr(self, key) and not self.init_from:
                raise UserError(
                    f"{key} is {' '.join(getattr(self, key))}, but there is no init_from; name a run there."
                )
        validate_environment(self.env)
        self.preprocess.validate()
        self._validate_agent()
        self.evaluation.validate()
        self.network_check.validate()
        self.data.validate()
        self._validate_container()
        self._validate_roles()
        self.network.validate()
        for name in self.per_network:
            self.network_for(name).validate(f"network.{name}")

    def _validate_agent(self) -> None:
        self.agent.check_schedules()
        self.agent.validate()
        for name, schedule in self.agent.schedules().items():
            if schedule.needs_returns and not self.evaluation.every:
                raise UserError(
                    f"agent.{name} is {schedule}, which follows the returns of evaluations, but evaluation.every is 0; "
                    "set it to a number of steps, such as 5000."
                )

    def _validate_container(self) -> None:
        if self.container == "offline" and not self.data.path:
            raise UserError("container is offline, which trains on recorded episodes alone; name them with data.path.")
        if self.container == "distrib":
            self.distrib.validate(self.env.num, self.agent.ENV_NUM_MULTIPLE_OF)
        if self.container == "impala":
            self.impala.validate(self.env.num)
            if self.env.repeat_seeds > 1:
                raise UserError(
                    f"env.repeat_seeds is {self.env.repeat_seeds}, but in the container impala each worker has seeds "
                    "of its own; leave it out."
                )
            if self.impala.host_gpus and self.device == "cpu":
                raise UserError(
                    f"impala.host_gpus is {self.impala.host_gpus:g}, but device is cpu, so the host would not use "
                    "them; leave one of them out."
                )
        for name, group in {"distrib": self.distrib, "impala": self.impala}.items():  # settings of one container alone
            changed = [key for key, value in vars(group).items() if value != getattr(type(group), key)]
            if changed and self.container != name:
                raise UserError(
                    f"{name}.{changed[0]} is {getattr(group, changed[0])}, but container is {self.container}, which "
                    f"does not use it; set container to {name}."
                )

    def _validate_roles(self) -> None:
        self.roles.validate()
        self.self_play.validate()
        if self.self_play.every and (self.container == "offline" or self.roles.agents):
            what = f"roles.agents is {self.roles.agents}" if self.roles.agents else f"container is {self.container}"
            raise UserError(
                f"{what}, but self_play.every is {self.self_play.every}, and self-play needs games with one policy for "
                "all players; leave one of them out."
            )
        if not self.roles.agents:
            return
        for role in self.roles.names():
            own = self.for_role(role)
            with naming_role(role):
                own._validate_agent()
            own.network.validate(f"roles.{role}.network")
        online = "local, distrib or impala"
        single = {
            "container": ("offline" if self.container == "offline" else online, online),
            "compile": ("off" if self.compile == "auto" else self.compile, "off"),
            "network_check.every": (self.network_check.every, 0),
            "init_from": (self.init_from, ""),
            "data.path": (self.data.path, ""),
            "freeze": (" ".join(self.freeze), ""),
        }
        for key, (value, only) in single.items():
            if value != only:
                raise UserError(
                    f"{key} is {value}, but with several roles (roles.agents) it can only be {only or 'empty'}; leave "
                    "it out, or let all agents share one policy."
                )


class Resolved(NamedTuple):
    """Settings with the origin of each: ``default``, ``preset <name>``, ``file <path>``, ``flag`` or ``argument``.

    The origin of a default that the agent adapted to the run is ``ADAPTED``.
    """

    settings: Settings[Any]
    origins: dict[str, str]


def check_minimum(key: str, value: float, smallest: float) -> None:
    """Refuse a value below ``smallest``."""
    if value < smallest:
        raise UserError(f"{key} is {value}, but must be at least {smallest}.")


def check_maximum(key: str, value: float, largest: float) -> None:
    """Refuse a value above ``largest``."""
    if value > largest:
        raise UserError(f"{key} is {value}, but must be at most {largest}.")


def check_cluster(key: str, address: str) -> None:
    """Refuse what is not the address of a Ray cluster."""
    if address != LOCAL_CLUSTER and not CLUSTER_ADDRESS.fullmatch(address):
        raise UserError(
            f'{key} is "{address}"; give auto, or the address of a Ray cluster as host:port, such as 10.0.0.1:6379.'
        )


def resolve_settings(
    environment: str | None = None,
    agent: str | type[Any] | None = None,
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    origin: str = "flag",
    trust: bool = False,
) -> Resolved:
    """Merge defaults, preset, file and overrides, where the later ones win.

    If ``preset`` is not given, the one for the environment and the agent is used if there is one; ``"none"`` turns
    that off. ``origin`` is that of the overrides, which may hold classes. With ``trust``, code that the file names is
    imported, whoever wrote the file.
    """
    chosen = flatten(overrides or {})
    chosen |= {key: name for key, name in (("env.id", environment), ("agent.name", agent)) if name is not None}
    chosen = {ALIASES.get(key, key): value for key, value in chosen.items()}
    layers = [(origin, {key: to_import_path(key, value) for key, value in chosen.items()})]
    if file is not None:
        layers.insert(0, (f"file {file}", read_file_settings(Path(file), trust)))
    import_from_current_folder(layers[-1][1])
    known = {key: value for _, layer in layers for key, value in layer.items()}
    if preset is None:
        preset = find_preset(known.get("env.id", ""), known.get("agent.name", DEFAULT_AGENT))
    if preset != NO_PRESET:
        layers.insert(0, (f"preset {preset}", load_preset(preset)))
    return adapt_defaults(_build(layers))


def adapt_defaults(resolved: Resolved, images: bool = False, one_discrete: bool = True) -> Resolved:
    """Replace defaults by those that the agent recommends for this run, also those that were replaced before.

    Evaluations and checkpoints are further apart if rollouts are large.
    """
    settings, origins = resolved
    kind = resolve(settings.agent_name, AGENTS, "agent")
    run = RunOutline(settings.nb_step, settings.env.num, settings.may_be_recurrent, images, one_discrete)
    usual = vars(type(settings.agent)())
    before = {name: value for name, value in usual.items() if origins.get(f"agent.{name}") == ADAPTED}
    agent = replace(settings.agent, **before)
    origins = origins | {f"agent.{name}": "default" for name in before}
    adapted = {
        name: value
        for name, value in kind.adapt_defaults(agent, run).items()
        if origins.get(f"agent.{name}") == "default" and value != vars(agent)[name]
    }
    settings = replace(settings, agent=replace(agent, **adapted))
    origins = origins | {f"agent.{name}": ADAPTED for name in adapted}
    offline = settings.agent.ONLY_OFFLINE or settings.agent.PREFERS_OFFLINE
    if offline and origins.get("container") == "default" and settings.data.path:
        settings = replace(settings, container="offline")
        origins["container"] = ADAPTED
    if settings.container == "offline" and origins.get("evaluation.every") in ("default", ADAPTED):
        settings = replace(settings, evaluation=replace(settings.evaluation, every=max(1, settings.nb_step // 10)))
        origins["evaluation.every"] = ADAPTED
    kinds = [resolve(name, AGENTS, "agent") for name in settings.roles.names().values()] or [kind]
    if all(each.global_state for each in kinds) and not settings.env.global_state:
        settings = replace(settings, env=replace(settings.env, global_state=True))
        origins["env.global_state"] = ADAPTED
    rollout = settings.batch_rows // settings.env.agents * settings.agent.plan(settings.batch_rows).rollout
    apart = min(ROLLOUTS_APART * rollout, settings.nb_step // MOST_EVALUATIONS)
    if origins.get("evaluation.every") == "default" and apart > settings.evaluation.every:
        settings = replace(settings, evaluation=replace(settings.evaluation, every=apart))
        origins["evaluation.every"] = ADAPTED
    if origins.get("checkpoint_every") == "default" and apart > settings.checkpoint_every:
        settings = replace(settings, checkpoint_every=apart)
        origins["checkpoint_every"] = ADAPTED
    return Resolved(settings, origins)


def to_import_path(key: str, value: Any) -> Any:
    """Replace a class or function by its import path."""
    if key in ("env.wrappers", "network_check.functions"):
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(name_for(item, {}) if callable(item) else item for item in items)
    if isinstance(value, type):
        return name_for(value, TABLES.get(key, {}))
    if key in TABLES and not isinstance(value, str):
        raise UserError(
            f"{key} is an object of class {type(value).__name__}; give a class, a name of `ludus list`, or "
            "package.module:Class."
        )
    return value


def class_overrides(agent: Any = None, network: Any = None, wrappers: Any = None) -> Flat:
    """Return the settings that a Python caller overrides, with classes replaced by their import paths."""
    given = {"agent.name": agent, "network.name": network, "env.wrappers": wrappers}
    return {key: to_import_path(key, value) for key, value in given.items() if value is not None}


def to_flat(settings: Settings[Any]) -> Flat:
    """Return every setting by its dotted key, as in ``config.toml``; the inverse of ``from_flat``."""
    nested = {key: vars(value) if is_dataclass(value) else value for key, value in vars(settings).items()}
    nested["agent"] = {"name": nested.pop("agent_name"), **nested["agent"]}
    nested["network"] = nested["network"] | nested.pop("per_network")
    nested["roles"] = nested["roles"] | nested.pop("per_role")
    return {key: str(x) if isinstance(x, Schedule) else x for key, x in flatten(nested).items()}


def from_flat(flat: Mapping[str, Any]) -> Settings[Any]:
    """Build settings from dotted keys; missing ones get their defaults."""
    return _build([("file config.toml", flatten(flat))]).settings


def chosen_agent(agent: str | None, preset: str | None, file: str | Path | None, trust: bool = False) -> str:
    """Return the name of the agent that ``resolve_settings`` will use."""
    named = load_preset(preset) if preset not in (None, NO_PRESET) else {}
    read = read_file_settings(Path(file), trust) if file is not None else {}
    return agent or (named | read).get("agent.name", DEFAULT_AGENT)


def chosen_roles(roles: str | None, file: str | Path | None, trust: bool = False) -> dict[str, str]:
    """Return the agents by role that ``resolve_settings`` will use."""
    read = read_file_settings(Path(file), trust) if file is not None else {}
    return RolesConfig(agents=roles if roles is not None else str(read.get("roles.agents", ""))).names()


def setting_types(agent: str, roles: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the type of every setting by its dotted key, for a run with this agent, or these by role."""
    hints = get_type_hints(Settings) | {"agent": agent_config(agent)}
    found: dict[str, Any] = {"agent.name": hints.pop("agent_name")}
    del hints["per_network"], hints["per_role"]
    for name, annotation in hints.items():
        if is_dataclass(annotation):
            inner = get_type_hints(annotation)
            found |= {f"{name}.{part.name}": inner[part.name] for part in fields(annotation)}
        else:
            found[name] = annotation
    for network in resolve(agent, AGENTS, "agent").network_names:
        own = {f"network.{network}.{name}": hint for name, hint in get_type_hints(NetworkConfig).items()}
        del own[f"network.{network}.shared"]
        found |= own
    for role, name in (roles or {}).items():
        own = {key: hint for key, hint in setting_types(name).items() if key.startswith(("agent.", "network."))}
        del own["agent.name"]
        found |= {f"roles.{role}.{key}": hint for key, hint in own.items()}
    return found


def agent_config(name: str) -> type[Any]:
    """Return the Config class of an agent."""
    kind = resolve(parse_value("agent.name", name, str, "file"), AGENTS, "agent")
    if name not in AGENTS:
        from ludus.core.agent import Agent  # imports torch

        if not (isinstance(kind, type) and issubclass(kind, Agent)):
            raise UserError(f'agent "{name}" is not a subclass of ludus.core.agent.Agent.')
    config = resolve(name, CONFIGS, "agent") if name in CONFIGS else getattr(kind, "Config", None)
    if not (isinstance(config, type) and issubclass(config, AgentConfig)):
        raise UserError(
            f'agent "{name}" has no attribute Config, a dataclass that derives from ludus.core.config.AgentConfig or '
            "another agent's Config; see examples/my_agent.py."
        )
    for setting in fields(config):
        if setting.default is MISSING and setting.default_factory is MISSING:
            raise UserError(f'agent "{name}": the setting {setting.name} has no default; add one in its Config.')
    return config


def network_defaults(config: type[AgentConfig]) -> Flat:
    """Return the network settings that an agent's Config overrides in NETWORK_DEFAULTS."""
    return {f"network.{name}": value for name, value in config.NETWORK_DEFAULTS.items()}


def presets() -> dict[str, tuple[str, Flat]]:
    """Return all presets by name (``cartpole/ppo``): environment and settings."""
    found: dict[str, tuple[str, Flat]] = {}
    for entry in sorted(files("ludus.settings.presets").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            tables = tomllib.loads(entry.read_text(encoding="utf-8"))
            environment = tables.pop("environment")
            for agent, table in tables.items():
                found[f"{entry.name.removesuffix('.toml')}/{agent}"] = (environment, flatten(table))
    return found


def find_preset(environment: str, agent: str) -> str:
    """Return the name of the preset for this environment and agent, or ``none``."""
    fitting = (name for name, (of, _) in presets().items() if _fits(environment, of) and name.endswith(f"/{agent}"))
    return next(fitting, NO_PRESET)


def _fits(environment: str, preset_for: str) -> bool:
    """Compare an environment with that of a preset: an id, with or without version, or a pattern such as ``ALE/*``."""
    if preset_for.endswith("*"):
        return environment.startswith(preset_for.removesuffix("*"))
    return bool(environment) and environment in (preset_for, preset_for.rpartition("-v")[0])


def load_preset(name: str) -> Flat:
    """Return the settings of a preset, including its agent."""
    known = presets()
    if name not in known:
        raise UserError(
            f'Unknown preset "{name}".{did_you_mean(name, known)} See `ludus list presets`; none turns presets off.'
        )
    return {"agent.name": name.rpartition("/")[2]} | known[name][1]


def _build(layers: list[tuple[str, Flat]]) -> Resolved:
    values = {key: value for _, layer in layers for key, value in layer.items()}
    origins = {key: origin for origin, layer in layers for key in layer}
    if not values.get("env.id"):
        raise UserError("No environment was given; add one, as in `ludus train CartPole-v1`.")
    values.setdefault("agent.name", DEFAULT_AGENT)
    agent = values["agent.name"]
    config = agent_config(agent)
    roles = RolesConfig(agents=str(values.get("roles.agents", ""))).names()
    types, values = setting_types(agent, roles), network_defaults(config) | values
    parsed: Flat = {}
    for key, value in values.items():
        origin = origins.get(key, "default")
        if key not in types:
            from ludus.settings.ineffective import unknown_setting  # imports all agents

            raise unknown_setting(key, origin, agent, types)
        parsed[key] = parse_value(key, value, types[key], origin)
    _use_schedules(parsed, "agent.", config, origins)
    for role, name in roles.items():
        _use_schedules(parsed, f"roles.{role}.agent.", agent_config(name), origins)
    settings = _make(_unflatten(parsed), config)
    settings.validate()
    return Resolved(settings, {key: origins.get(key, "default") for key in to_flat(settings)})


def _use_schedules(parsed: Flat, prefix: str, config: type[Any], origins: dict[str, str]) -> None:
    """Turn off settings of an agent whose place a schedule takes; refuse them if the user gave both."""
    defaults = vars(config())
    names = [
        key.removeprefix(prefix) for key, x in parsed.items() if isinstance(x, Schedule) and key.startswith(prefix)
    ]
    for name in names:
        replaced, off = REPLACED.get("learning_rate" if name.endswith("learning_rate") else name, ("", None))
        if replaced not in defaults:
            continue
        key, other = f"{prefix}{name}", f"{prefix}{replaced}"
        given, origin = parsed.get(other, defaults[replaced]), origins.get(other, "default")
        if given == off:
            continue
        if not origin.startswith(("default", "preset")):
            raise UserError(
                f"{other} is {given} ({origin}), but {key} is {parsed[key]}, a schedule of its own; leave one out."
            )
        parsed[other], origins[other] = off, f"default, since {key} is a schedule"


def _unflatten(flat: Flat) -> Flat:
    nested: Flat = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        table = nested
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    return nested


def _make(nested: Flat, config: type[A]) -> Settings[A]:
    agent = nested.pop("agent")
    name = agent.pop("name")
    parts = {
        "env": EnvConfig,
        "network": NetworkConfig,
        "preprocess": PreprocessConfig,
        "evaluation": EvaluationConfig,
        "network_check": NetworkCheckConfig,
        "data": DataConfig,
        "distrib": DistribConfig,
        "impala": ImpalaConfig,
        "roles": RolesConfig,
        "self_play": SelfPlayConfig,
    }
    per_network, per_role = (_pop_tables(nested.get(key, {})) for key in ("network", "roles"))
    made = {key: make(**nested.pop(key, {})) for key, make in parts.items()}
    return Settings(
        agent_name=name, agent=config(**agent), per_network=per_network, per_role=per_role, **made, **nested
    )


def _pop_tables(table: Flat) -> Flat:
    """Remove the nested tables from a table, and return them."""
    return {key: table.pop(key) for key, value in list(table.items()) if isinstance(value, dict)}
