"""End-of-run hints, and warnings about runs with too little experience for an update."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.core.types import State
from ludus.environments.config import EnvConfig
from ludus.experience import native
from ludus.experience.config import ReplayConfig
from ludus.experience.rollout_replay import RolloutReplayConfig
from ludus.managers.simple import SimpleEnvManager
from ludus.parallel.resources import cores
from ludus.settings.settings import to_flat

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

ATARI_SCREENS = ((210, 160), (250, 160))  # NTSC and PAL
LOW_EXPLAINED_VARIANCE = 0.1  # a hint below this
MIN_UPDATES = 10  # no hints after fewer updates
HIGH_ENVIRONMENT_SHARE = 0.6  # of the time: a hint above this
MAX_PROBLEMS = 3  # of networks in the hints
SLOW_STEP = 1e-3  # seconds for all environments above which processes help: they cost 0.1 to 0.3 ms per step


def hints(worker: LocalWorker, explained_variance: float, first_step: int = 0) -> list[str]:
    """Suggest settings that would likely have helped; empty if the task is solved.

    ``first_step`` is the step at which this process started or resumed the run.
    """
    if is_solved(worker) or worker.updates <= MIN_UPDATES:
        return []
    found = []
    last = worker.last_evaluation
    varies = last is None or len(last.returns) == 1 or last.std > 1e-6 * abs(last.mean)
    if (
        explained_variance < LOW_EXPLAINED_VARIANCE
        and varies
        and to_flat(worker.settings).get("agent.normalize_reward") is False
    ):
        found.append(
            f"Hint: the value function explains only {max(explained_variance, 0.0):.0%} of the returns' variance. "
            "If the return does not improve, try --agent.normalize-reward or a higher --agent.learning-rate."
        )
    share = worker.clock.shares().get("environment", 0.0)  # of this process
    if (
        share > HIGH_ENVIRONMENT_SHARE
        and cores() > 1
        and worker.manager.batch > 1
        and isinstance(worker.manager, SimpleEnvManager)
    ):
        steps = max(worker.local_step_count - first_step, 1) / worker.manager.batch
        if worker.clock.nanoseconds["environment"] / steps > SLOW_STEP * 1e9:
            found.append(
                f"Hint: stepping the environments took {share:.0%} of the time; try --env.backend subproc, which uses "
                f"{cores()} processes."
            )
    if advice := worker.advice():
        found.append(f"Hint: {advice[0].lower()}{advice[1:]}")
    if worker.network_check is not None and worker.network_check.last is not None:
        last_check = worker.network_check.last
        found += [f"Hint: at the last network check, {problem.text}" for problem in last_check.problems[:MAX_PROBLEMS]]
    config = worker.settings.agent
    if isinstance(config, ReplayConfig) and config.prioritized and native.LIBRARY is None:
        found.append(
            "Hint: priorities were sampled without compiled code, which is slow; reinstall Ludus with a C compiler."
        )
    return found


def raw_frames(config: EnvConfig, observation: Specs) -> str:
    """Suggest preprocessing for raw Atari frames; empty for other environments."""
    shapes = [spec.shape for spec in observation.values() if spec.shape[:2] in ATARI_SCREENS]
    if not config.id.startswith("ALE/") or not shapes:
        return ""
    return (
        f"Hint: {config.id} gives raw frames ({' x '.join(map(str, shapes[0]))}, not stacked). For the usual 84 x 84 "
        "grayscale frames in stacks of 4, add --env.options frameskip=1 --env.wrappers "
        "gymnasium.wrappers:AtariPreprocessing 'gymnasium.wrappers:FrameStackObservation(stack_size=4)'."
    )


def is_solved(worker: LocalWorker) -> bool:
    """Whether an evaluation reached ``evaluation.stop_at`` or the reward threshold registered with Gymnasium."""
    from ludus.environments.gym import find_spec, is_path

    id, targets = worker.settings.env.id, [worker.settings.evaluation.stop_at]
    if not is_path(id):
        with suppress(UserError):  # an environment that only EnvPool has
            targets.append(find_spec(id).reward_threshold)
    return worker.best is not None and any(target is not None and worker.best >= target for target in targets)


def why_no_update(worker: LocalWorker, step: int = 0) -> list[str]:
    """Explain why there was no update since ``step``, when the cache was empty; empty if the agent does not know."""
    settings, steps = worker.learners[0].settings, worker.local_step_count - step
    env = settings.env
    why = settings.agent.why_no_update(steps, env.num, env.agents, worker.cache.metrics()) if steps else ""
    return [f"There was no update{' since the resume' * bool(step)}: {why}."] if why else []


def missing_replay(worker: LocalWorker, state: State) -> str:
    """Explain the effect of a checkpoint without the replay buffer; empty if it is saved or there is none."""
    for learner in worker.learners:
        config = learner.settings.agent
        off_policy = isinstance(config, ReplayConfig)
        if not off_policy and not (isinstance(config, RolloutReplayConfig) and config.replay_ratio):
            continue
        if config.save_replay and learner.own(state["cache"]) is not None:  # None: it ended in the middle of an update
            continue
        replayed = "" if off_policy else " from replayed rollouts"
        return (
            f" The replay buffer was not saved: there is no update{replayed} before another agent.warmup = "
            f"{config.warmup:,} steps."
        )
    return ""


def too_few_steps_left(worker: LocalWorker) -> str:
    """Warn that a resumed run ends before its replay buffer has enough data for an update."""
    config, left = worker.settings.agent, worker.settings.nb_step - worker.local_step_count
    if not isinstance(config, ReplayConfig) or left <= 0:  # only an evaluation is left
        return ""
    filled = min(config.batch_size * config.stride, config.replay)
    if left > max(config.warmup, filled):
        return ""
    return (
        f"The {left:,} steps left are too few for an update: the warm-up takes {config.warmup:,} and a batch about "
        f"{filled:,}; raise --nb-step."
    )
