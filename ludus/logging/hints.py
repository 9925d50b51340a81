"""End-of-run hints, and warnings about a replay that is too empty to learn from."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ludus.core.errors import UserError
from ludus.core.spec import Specs
from ludus.core.types import State
from ludus.environments.config import EnvConfig
from ludus.experience.config import ReplayConfig
from ludus.experience.rollout_replay import RolloutReplayConfig
from ludus.parallel.resources import cores
from ludus.settings.settings import to_flat

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker

ATARI_SCREENS = ((210, 160), (250, 160))  # NTSC and PAL
POOR = 0.1  # explained variance below which a hint is due
FEW = 10  # updates up to which there is nothing to say
SLOW = 0.6  # share of the time in environments above which one is due
WORTH = 1e-3  # seconds of a step of all environments above which processes pay: they cost 0.1 to 0.3 ms a step


def hints(worker: LocalWorker, explained: float, begun: int = 0) -> list[str]:
    """Settings that would likely have helped; empty where the task is solved.

    ``explained`` is the share of the returns that the value function explains, ``begun`` the step at which this process
    took the run over.
    """
    if is_solved(worker) or worker.updates <= FEW:
        return []
    found = []
    last = worker.last_evaluation
    varies = (
        last is None or len(last.returns) == 1 or last.std > 1e-6 * abs(last.mean)
    )  # else there is no variance to explain
    if explained < POOR and varies and to_flat(worker.settings).get("agent.normalize_reward") is False:
        found.append(
            f"The value function explains {max(explained, 0.0):.0%} of the returns. If the policy is stuck, "
            "--agent.normalize-reward or a higher --agent.learning-rate often helps."
        )
    share = worker.clock.shares()["environment"]
    if share > SLOW and cores() > 1 and worker.manager.batch > 1 and _steps_here(worker):
        steps = max(worker.local_step_count - begun, 1) / worker.manager.batch
        if worker.clock.nanoseconds["environment"] / steps > WORTH * 1e9:
            found.append(
                f"Stepping the environments took {share:.0%} of the time: --env.backend subproc does it in {cores()} "
                "processes."
            )
    return found + _uncompiled(worker)


def raw_frames(config: EnvConfig, observation: Specs) -> str:
    """A hint to preprocess raw Atari frames; empty for other environments."""
    shapes = [spec.shape for spec in observation.values() if spec.shape[:2] in ATARI_SCREENS]
    if not config.id.startswith("ALE/") or not shapes:
        return ""
    return (
        f"The frames of {config.id} are raw ({' x '.join(map(str, shapes[0]))}, none stacked); the usual ones are "
        "84 x 84, grey and 4 of them stacked: --env.options frameskip=1 --env.wrappers "
        "gymnasium.wrappers:AtariPreprocessing 'gymnasium.wrappers:FrameStackObservation(stack_size=4)'."
    )


def is_solved(worker: LocalWorker) -> bool:
    """Whether an evaluation has reached the target of the settings, or the threshold registered with Gymnasium."""
    targets = [worker.settings.evaluation.stop_at, _threshold(worker.settings.env.id)]
    return worker.best is not None and any(target is not None and worker.best >= target for target in targets)


def _threshold(id: str) -> float | None:
    from ludus.environments.gym import find_spec, is_path  # most runs end without it

    if is_path(id):
        return None
    with suppress(UserError):  # an environment of EnvPool alone
        return find_spec(id).reward_threshold
    return None


def _uncompiled(worker: LocalWorker) -> list[str]:
    config = worker.settings.agent
    if not (isinstance(config, ReplayConfig) and config.prioritized):
        return []
    from ludus.experience import native  # most runs do without it

    if native.LIBRARY is not None:
        return []
    return ["Priorities were drawn without compiled code, which is far slower: install Ludus anew, with a C compiler."]


def _steps_here(worker: LocalWorker) -> bool:
    from ludus.managers.simple import SimpleEnvManager  # most runs do without it

    return isinstance(worker.manager, SimpleEnvManager)


def no_update(worker: LocalWorker, step: int = 0) -> list[str]:
    """Why there was no update since ``step``, when the replay was empty; empty without a replay."""
    config, steps = worker.settings.agent, worker.local_step_count - step
    if not isinstance(config, ReplayConfig) or not steps:
        return []
    size = int(worker.cache.metrics()["replay/size"])
    items, longer = ("sequences", "agent.sequence") if config.sequence else ("transitions", "agent.n_step")
    if steps <= config.warmup:
        why = f"{steps:,} steps do not end the warm-up; take more, or lower agent.warmup, {config.warmup:,}"
    elif size < config.batch_size:
        why = (
            f"the replay held {size:,} {items} of the {config.batch_size:,} that agent.batch_size asks for; take more "
            f"steps, or lower agent.batch_size or {longer}"
        )
    else:
        why = (
            f"the steps after the warm-up and the first {config.batch_size:,} {items} were too few for one at "
            f"agent.updates_per_step {config.updates_per_step:g}; take more, or raise it"
        )
    return [f"No update was made{' since the resume' * bool(step)}: {why}."]


def left_out(worker: LocalWorker, state: State) -> str:
    """What follows where a checkpoint lacks the replay; empty where it has it or there is none."""
    config = worker.settings.agent
    every = isinstance(config, ReplayConfig)
    if not every and not (isinstance(config, RolloutReplayConfig) and config.replay_ratio):
        return ""
    if config.save_replay and state["cache"] is not None:  # a checkpoint lacks it where the run broke off
        return ""
    return (
        f" The replay was not saved and fills anew: there will be no update{'' if every else ' from kept rollouts'} "
        f"before agent.warmup, {config.warmup:,} steps, has passed once more."
    )


def too_few_left(worker: LocalWorker) -> str:
    """A warning where a resumed run ends before its replay has filled again."""
    config, left = worker.settings.agent, worker.settings.nb_step - worker.local_step_count
    if not isinstance(config, ReplayConfig) or left <= 0:  # an evaluation is all that is left
        return ""
    each = config.sequence - config.overlap if config.sequence else 1  # steps from one item to the next
    filled = min(config.batch_size * each, config.replay)
    if left > max(config.warmup, filled):
        return ""
    return (
        f"The {left:,} steps left are too few for an update: the warm-up takes {config.warmup:,}, and a batch about "
        f"{filled:,}; raise --nb-step."
    )
