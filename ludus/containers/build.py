"""Build agents, environments, updaters and evaluators from settings."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ludus.agents import AGENTS
from ludus.containers.evaluate import Evaluator
from ludus.containers.freeze import freeze
from ludus.containers.team import Team
from ludus.containers.threads import requested_threads
from ludus.core.agent import Actor, Agent
from ludus.core.cache import ExperienceCache
from ludus.core.config import Plan
from ludus.core.environment import DEFAULT_ROLE, EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.imports import resolve
from ludus.core.network import Network, SubModule
from ludus.core.rows import Rows
from ludus.core.spec import Specs, is_one_discrete
from ludus.environments.config import EnvConfig
from ludus.experience.memory import check_fits, free_bytes, rollout_bytes
from ludus.managers.base import BatchManager
from ludus.managers.make import make_manager
from ludus.managers.roles import AgentRows, RolesManager, agents_of, refuse_unowned
from ludus.networks.build import build_network, network_spec
from ludus.networks.config import NetworkConfig
from ludus.networks.modular import ModularNetwork
from ludus.networks.placement import device_of, is_placed
from ludus.parallel.resources import cores, free_memory
from ludus.preprocess.rewards import preprocessed_goal_reward
from ludus.settings.ineffective import find_ineffective, refuse_ineffective
from ludus.settings.networks import PlannedNetwork, plan_networks
from ludus.settings.settings import Resolved, Settings, adapt_defaults

LARGE_IMAGE = 64  # pixels of the smaller side from which policy and value share a trunk by default
MANY_PARAMETERS = 500_000  # of a layer over a flattened map: a hint from here on
# optimizer steps that repay a compilation of ten seconds or more: each saves a fifth of a millisecond on up to 256
# transitions, and more on larger batches
REPAID, REPAID_BATCH = 50_000, 256
# Multiplications of the largest layer per batch and thread; fewer are not faster with another thread. Measured: PPO (64
# units) gains from a batch of 4,096 rows on, SAC (256 units, 256 rows) gains, DQN (120-84, 128 rows) does not.
WORK_PER_THREAD = 2**23


class Engines(NamedTuple):
    """Device, threads and engines, decided once per run and logged."""

    device: torch.device
    threads: int
    acting: str  # numpy or torch
    update: str  # eager or compiled
    obstacle: str = ""  # why the update is eager where compiling it would pay off


def build_agent(settings: Settings[Any], observation: Specs, action: Specs, device: torch.device | str) -> Agent:
    """Build the networks and the agent; the initialization depends on the seed alone."""
    kind = resolve(settings.agent_name, AGENTS, "agent")
    if not (isinstance(kind, type) and issubclass(kind, Agent)):
        raise UserError(f'agent "{settings.agent_name}" is not a subclass of ludus.core.agent.Agent.')
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f'agent "{settings.agent_name}" lacks {", ".join(missing)}; see ludus.core.agent.Agent.')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        planned = planned_networks(settings, observation, action)
        networks = {name: build_network(*plan) for name, plan in planned.items()}
        rows = settings.batch_rows // settings.ranks
        agent: Agent = kind(observation, action, settings.agent, networks, rows)
    freeze(agent, settings.freeze)
    if isinstance(device, str):
        device = choose_device(device, memory_needed(settings, agent, observation))
    return agent.to(device)


def planned_networks(settings: Settings[Any], observation: Specs, action: Specs) -> dict[str, PlannedNetwork]:
    """Return the networks of the agent, with ``network.shared`` decided."""
    return plan_networks(settings, observation, action, _shares(settings, observation))


def outline_agent(settings: Settings[Any], observation: Specs, action: Specs) -> Agent | None:
    """Build the agent on the meta device, for its shapes; None with an agent or network of the user's own."""
    configs = (settings.network, *map(settings.network_for, settings.per_network))
    if ":" in settings.agent_name or any(":" in name for config in configs for name in (config.name, *config.pieces)):
        return None
    with torch.device("meta"):
        return build_agent(settings, observation, action, torch.device("meta"))


def bytes_of(agent: nn.Module) -> int:
    """Return the memory of an agent's tensors."""
    return sum(x.nbytes for x in (*agent.parameters(), *agent.buffers()))


def refuse_too_large(agent: nn.Module) -> None:
    """Refuse a meta agent whose tensors would not fit in free memory."""
    fix = "lower network.hidden, network.lstm_size or env.num"
    check_fits("The networks need", bytes_of(agent), free_memory(), fix)


def build_learner(
    resolved: Resolved, observation: Specs, action: Specs, device: str, new: bool = True, role: str = ""
) -> Agent:
    """Build the agent that a run trains, or that of a role; refuse bad settings before anything large is allocated."""
    settings = resolved.settings
    if new:
        refuse_ineffective(resolved, observation, action)
    _refuse_large_rollout(settings, observation)
    _refuse_large_networks(settings, observation, action)
    agent = build_agent(settings, observation, action, device)
    if agent.uses_agent_rewards and settings.preprocess.reward:
        raise UserError(
            f"preprocess.reward is {' '.join(settings.preprocess.reward)}, but {settings.agent_name} learns from the "
            "rewards of each agent, to which it does not apply; change them in the environment."
        )
    if role and agent.needs_teacher:
        raise UserError(
            f"Role {role} has agent {settings.agent_name}, which learns from a teacher, and roles have none; train it "
            "alone."
        )
    if role and agent.needs_dataset:
        raise UserError(
            f"Role {role} has agent {settings.agent_name}, which learns from recorded episodes, and roles have none; "
            "train it alone."
        )
    agent.check_trainable()
    return agent


def build_cache(
    agent: Agent, manager: EnvironmentManager, rows: Rows, rewards: Callable[[Tensor], Tensor] | None = None
) -> ExperienceCache:
    """Make the agent's cache for these rows; ``rewards`` are the ops on rewards."""
    if agent.needs_goal_reward:  # only then must the environment have it
        agent.goal_reward = manager.goal_reward()
        if agent.goal_reward is not None and rewards is not None:
            agent.goal_reward = preprocessed_goal_reward(agent.goal_reward, rewards)
    return agent.make_cache(rows)


def _refuse_large_rollout(settings: Settings[Any], observation: Specs) -> None:
    """Refuse a rollout that does not fit in memory."""
    plan, rows = settings.agent.plan(settings.batch_rows), settings.batch_rows
    if length := plan.rollout:
        needed = rollout_bytes(length, rows, observation, plan.rollout_copies, plan.rollout_floats)
        what = f"agent.rollout is {length}, and learning from {length} steps of {rows} environments needs"
        check_fits(what, needed, _free(settings.device), "lower agent.rollout or env.num")


def _refuse_large_networks(settings: Settings[Any], observation: Specs, action: Specs) -> None:
    """Refuse networks that do not fit in memory with gradients and two moments."""
    outline = outline_agent(settings, observation, action)
    if outline is not None:
        millions = sum(p.numel() for p in outline.parameters()) / 1e6
        needed = 4 * sum(p.nbytes for p in outline.parameters())
        what = f"Learning with networks of {millions:,.0f} million parameters needs"
        fix = "lower network.hidden, or make the observations smaller"
        check_fits(what, needed, _free(settings.device), fix)


def _free(device: str) -> int:
    """Return the free bytes of a device by its setting; ``auto``: of the one with most."""
    if device == "auto":
        return max([*_gpu_memory(), free_memory()])
    return free_bytes(choose_device(device), "")


def _shares(settings: Settings[Any], observation: Specs) -> bool:
    """Return whether policy and value share a part; ``auto``: with large images, where a second CNN is expensive.

    The policy's last layer starts near 0, so in a shared trunk the value's gradient is about 100 times the policy's at
    first, and features for the policy are learned late.
    """
    if settings.network.shared != "auto":
        return settings.network.shared != "no"
    if settings.per_network:
        return False  # networks with different settings cannot share
    return any(min(shape[-2:]) >= LARGE_IMAGE for shape in _image_shapes(observation))


def _image_shapes(observation: Specs) -> list[tuple[int, ...]]:
    """Return the shapes of the observations that go through a CNN, after preprocessing."""
    spec = network_spec(observation, {})
    return [shape for shape in NetworkConfig().feature_shapes(spec.inputs, spec.categories).values() if len(shape) > 2]


def adapt_to_environment(resolved: Resolved, observation: Specs, action: Specs, agents: int = 1) -> Resolved:
    """Adapt settings to what is not known before the environment exists: the agents, their images and actions."""
    settings, given = resolved.settings, resolved.settings.env.agents
    if agents != given:
        if given != EnvConfig.agents:
            raise UserError(
                f"env.agents is {given}, but {agents} of each environment share a policy; leave it out, since the "
                "environment decides it."
            )
        settings = replace(settings, env=replace(settings.env, agents=agents))
        resolved = Resolved(settings, resolved.origins | {"env.agents": "chosen"})
    resolved = adapt_defaults(resolved, bool(_image_shapes(observation)), is_one_discrete(action))
    resolved.settings.check_run_length()
    return resolved


def decide_sharing(settings: Settings[Any], observation: Specs, action: Specs) -> Settings[Any]:
    """Resolve ``network.shared = "auto"`` in the settings, for agents that can share."""
    if settings.network.shared != "auto" or "network.shared" in dict(find_ineffective(settings, observation, action)):
        return settings
    shared: Literal["yes", "no"] = "yes" if _shares(settings, observation) else "no"
    return replace(settings, network=replace(settings.network, shared=shared))


def evaluation_rows(settings: Settings[Any]) -> int:
    """Return the number of environments of an evaluation."""
    return min(settings.evaluation.episodes, settings.evaluation.environments or settings.env.num)


def build_evaluator(
    settings: Settings[Any],
    agent: Actor,
    environment: Callable[..., Any] | None = None,
    branch: int = 1,
    rows: Rows | None = None,
) -> Evaluator:
    """Build the evaluator with its own environments and seeds; another ``branch`` gives other episodes.

    ``rows``: play only the episodes of these rows, as one of several processes.
    """
    held = rows or Rows.all(evaluation_rows(settings))

    def make() -> EnvironmentManager:
        manager = make_manager(settings.env, held, None, environment, branch, settings.preprocess)
        manager.set_action_transform(agent.action_transform)
        return manager

    given, limit = settings.evaluation, settings.env.max_episode_steps
    return Evaluator(make, given.episodes, settings.seed, given.greedy, rows, limit)


def choose_device(name: str, needs: int = 0) -> torch.device:
    """Return the device; ``auto``: the GPU with most free memory if it has ``needs`` bytes, else the CPU."""
    if name == "auto":
        free = _gpu_memory()
        return torch.device(f"cuda:{free.index(max(free))}" if free and max(free) >= needs else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f'device is "{name}", which this machine does not have; use cpu or auto.') from error
    return device


def _gpu_memory() -> list[int]:
    """Return the free bytes of each GPU."""
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]


def memory_needed(settings: Settings[Any], agent: Agent, observation: Specs) -> int:
    """Return the bytes of parameters, gradients, two moments and stored experience."""
    parameters = sum(p.numel() * p.element_size() for p in agent.parameters())
    row = sum(spec.size * np.dtype(spec.dtype).itemsize // spec.stack for spec in observation.values())
    plan: Plan = settings.agent.plan(settings.batch_rows)
    return 4 * parameters + row * (settings.batch_rows * (plan.rollout + 1) + plan.replay)


def choose_engines(settings: Settings[Any], agent: Agent) -> Engines:
    """Choose threads, acting engine and update engine; switches the agent to numpy acting."""
    batch = 0 if agent.recurrent else settings.agent.plan(settings.batch_rows).batch
    threads = settings.threads or requested_threads() or max(1, default_threads(agent, batch) // settings.ranks)
    acting = "torch"
    if settings.engine == "auto" and agent.use_numpy():
        acting = "numpy"
    device = device_of(agent)
    return Engines(device, threads, acting, *_choose_update(settings, agent, device))


def default_threads(module: nn.Module, batch: int = 0) -> int:
    """Return all cores for convolutions on the CPU, else one for each ``WORK_PER_THREAD`` of the largest layer."""
    if all(p.device.type != "cpu" for p in module.parameters()):
        return 1
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(m, convolutions) for m in module.modules()):
        return cores()
    layers = [p[0] if p.dim() > 2 else p for p in module.parameters()]  # p[0]: of one member of an ensemble
    largest = max((p.numel() for p in layers), default=0)
    return max(1, min(cores(), batch * largest // WORK_PER_THREAD))


def _choose_update(settings: Settings[Any], agent: Agent, device: torch.device) -> tuple[str, str]:
    """Return ``update`` and ``obstacle`` of the engines."""
    plan: Plan = settings.agent.plan(settings.batch_rows)
    episodes = f"{settings.agent_name} learns from batches of whole episodes, whose shapes change"
    obstacle = _compile_obstacle(agent) if plan.fixed_shapes else episodes
    if settings.compile == "on":
        if obstacle:
            raise UserError(f"compile is on, but {obstacle}; set compile to auto or off.")
        return "compiled", ""
    larger = max(1, plan.batch / REPAID_BATCH) if device.type == "cpu" else 1  # a GPU mostly saves launches of kernels
    repaid = settings.nb_step * settings.env.agents * plan.optimizer_steps * larger >= REPAID
    has_compiler = bool(shutil.which(os.environ.get("CXX", "g++")))
    if settings.compile == "off" or not repaid or not has_compiler:
        return "eager", ""
    return ("eager", obstacle) if obstacle else ("compiled", "")


def _compile_obstacle(agent: Agent) -> str:
    """Name the part of an agent whose update is not compiled; empty if there is none."""
    if any(map(is_placed, agent.parameters())):
        return "the network has parts in an OnDevices"
    if not agent.recurrent:
        return ""
    networks = [module for module in agent.modules() if isinstance(module, ModularNetwork)]
    parts = [part for network in networks for part in network.parts]
    pieces = {part.kind for part in parts if isinstance(part.module, SubModule) and part.module.recurrent}
    return f"a recurrent network has shapes that change ({', '.join(sorted(pieces)) or 'a custom one'})"


def linear_networks(agent: Agent) -> str:
    """Return a warning about networks without a hidden layer, or an empty string; none where that is the default."""
    if agent.config.NETWORK_DEFAULTS.get("hidden") == ():
        return ""
    named = {name: module for name, module in agent.named_modules() if isinstance(module, Network) and module.linear}
    linear = [f'"{name[9:]}"' for name in named if re.fullmatch(r"networks\.\w+", name)]  # no targets, no members
    if not linear:
        return ""
    which = f"Network {linear[0]} has" if len(linear) == 1 else f"Networks {' and '.join(linear)} have"
    return (
        f"{which} no hidden layer, so what is learned is linear in the observation; set network.body to mlp and "
        "network.hidden to layers such as 64 64."
    )


def flattened_maps(agent: Agent) -> str:
    """Return a warning about the first large layer that gets a flattened map or list, or an empty string."""
    for name, network in agent.named_modules():
        if not isinstance(network, ModularNetwork) or not re.fullmatch(r"networks\.\w+", name):
            continue
        shapes = {part.name: part.output_shape for part in network.parts}
        size = sum(p.numel() for p in network.parameters())
        for part in network.parts:
            own = 0 if part.module is None else sum(p.numel() for p in part.module.parameters())
            maps = [given for given in part.inputs if len(shapes.get(given, ())) > 1]
            if len(part.input_shape) == 1 and maps and own > max(MANY_PARAMETERS, size // 2):
                return (
                    f'{part.kind} ({part.name}) has {own:,} of the {size:,} parameters of network "{name[9:]}", since '
                    f"it gets {shapes[maps[0]]} of {maps[0]} flattened; a convolution as network.body, such as "
                    "small_cnn, or a source that gives a vector needs fewer."
                )
    return ""


def refuse_nameless(id: str, environment: Callable[..., Any] | None) -> None:
    """Refuse an environment without an import path, such as a lambda or a local class."""
    if environment is None and "<" in id:
        raise UserError(
            f'The environment "{id}" of this run has no name to import it by: load or resume it from Python with what '
            "makes it, as in ludus.load(run, environment=make)."
        )


def build_manager(
    settings: Settings[Any], environment: Callable[..., Any] | None = None, rank: int = 0
) -> EnvironmentManager:
    """Make the training environments of a rank; one, which shows what they are like, if others or none are stepped."""
    refuse_nameless(settings.env.id, environment)
    one = settings.container in ("impala", "offline")
    rows: int | Rows = 1 if one else Rows.of_rank(rank, settings.ranks, settings.env.num)
    joint = make_manager(settings.env, rows, environment=environment, preprocess=settings.preprocess)
    return divide_environments(joint, settings)


def divide_environments(joint: BatchManager, settings: Settings[Any]) -> EnvironmentManager:
    """Return environments with several agents as rows of single agents, unless the agent learns from whole worlds."""
    try:
        parts = divide_agents(joint, settings)
    except UserError:
        joint.close()
        raise
    return RolesManager(joint, parts) if parts else joint


def divide_agents(joint: BatchManager, settings: Settings[Any]) -> dict[str, AgentRows]:
    """Return the rows of the agents of each role; nothing for single agents, and where worlds are not divided."""
    agents = agents_of(joint.observation)
    kind = resolve(settings.agent_name, AGENTS, "agent")
    if settings.roles.agents and (not agents or kind.layout == "joint"):
        why = f"agent {settings.agent_name} learns for all agents together" if agents else "there is a single agent"
        raise UserError(f"roles.agents is {settings.roles.agents}, but {why} in {joint.name}; leave it out.")
    if not agents or kind.layout == "joint":
        return {}
    refuse_unowned(joint, agents)
    for role, name in settings.roles.names().items():
        if resolve(name, AGENTS, "agent").layout == "joint":
            raise UserError(
                f'role "{role}" (roles.agents) has the agent {name}, which learns for all agents together; use --agent '
                f"{name} without roles, or another agent for the role, such as ppo or mappo."
            )
    if settings.roles.agents:
        return {role: AgentRows(joint, own, role) for role, own in settings.roles.assign(agents).items()}
    return {DEFAULT_ROLE: AgentRows(joint, agents)}


def agents_per_environment(manager: EnvironmentManager) -> int:
    """Return how many agents of each environment share the policy."""
    return next(iter(manager.roles.values())).agents


def make_actor(agent: Actor, manager: EnvironmentManager) -> Actor:
    """Return what plays whole environments with an agent: the agent itself, or a team if they have several agents."""
    if isinstance(agent, Team) or not isinstance(manager, RolesManager):
        return agent
    return Team({DEFAULT_ROLE: agent}, manager.parts)
