"""What a checkpoint holds of a worker, and the way back: after it, every number is what it would have been."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ludus.containers.blackbox import generators
from ludus.containers.build import bytes_of
from ludus.containers.evaluate import Evaluation
from ludus.core.cache import ExperienceCache
from ludus.core.errors import UserError
from ludus.core.hidden_state import HiddenState
from ludus.core.types import State
from ludus.experience.replay import ExperienceReplay
from ludus.managers.history import LARGEST, LONGEST

if TYPE_CHECKING:
    from ludus.containers.local import LocalWorker
    from ludus.runs.checkpoint import Checkpoint

STEP = 256  # bytes that a step of a rollout may take beside its observation and action
SNAPSHOT = 1 << 20  # bytes that the snapshot of an environment may take
ROOM = 1 << 26  # bytes for all that does not grow with anything


def worker_state(worker: LocalWorker) -> State:
    """All that a resume needs, by part; in the midst of an update, without the rollout that it breaks off."""
    whole, device = worker.began and worker.between, worker.device
    replay = worker.began and worker.in_call and isinstance(worker.cache, ExperienceReplay)
    replay = replay and worker.cache.config.save_replay  # type: ignore[attr-defined]
    return {
        "agent": dict(worker.agent.state_dict()),
        "updater": worker.updater.state_dict(),
        "noise": worker.noise.state_dict(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "generators": {name: generator.get_state() for name, generator in generators(worker.agent).items()},
        "manager": worker.manager.state_dict() if whole else None,
        "cache": worker.cache.state_dict() if whole or replay else None,
        "groups": [[rows.start, rows.stop] for rows in worker.manager.groups],
        "hidden_state": dict(worker.hidden_state),
        "evaluator": worker.evaluator.state_dict(),
        "counters": _counters(worker),
    }


def _counters(worker: LocalWorker) -> State:
    last = worker.last_evaluation
    return {
        "step": worker.local_step_count,
        "updates": worker.updates,
        "best": worker.best,
        "evaluated_at": worker.evaluated_at,
        "evaluation": None if last is None else [list(last.returns), list(last.lengths)],
        "owed": worker.owed,
    } | worker.episodes.state_dict()


def restore_worker(worker: LocalWorker, state: State) -> str:
    """Take over a run where ``worker_state`` saw it; return how the environments came back."""
    try:
        _take_learning(worker, state)
        _take_counters(worker, state["counters"])
        return _take_experience(worker, state)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The checkpoint does not fit this run's settings and code ({type(error).__name__}: {reason}); bring back "
            "the agent, network and environment that it was made with."
        ) from error


def refuse_too_much(checkpoint: Checkpoint, worker: LocalWorker) -> None:
    """Refuse a checkpoint that would take more memory than a worker of these settings can have saved.

    For environments that come with packages: what one of the user's own saves is not known.
    """
    rows, manager, config = worker.manager.batch, worker.manager, worker.settings.agent
    learned = bytes_of(worker.agent)
    action = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manager.action.values())
    step = sum(spec.size * np.dtype(spec.dtype).itemsize for spec in manager.observation.values()) + action + STEP
    kept = rows * step * (getattr(config, "rollout", 0) + 2) + _most_bytes(worker.cache)
    actions = min(LARGEST, LONGEST * rows * action)
    most = 8 * learned + 2 * (kept + actions) + rows * SNAPSHOT + ROOM
    if (size := checkpoint.bytes()) > most:
        raise UserError(
            f'The checkpoint "{checkpoint.folder}" holds {size / 1e6:,.0f} MB, where the settings of its run can need '
            f"{most / 1e6:,.0f} MB at most: take another checkpoint, or copy it again from its source."
        )


def _most_bytes(cache: ExperienceCache) -> int:
    """What a cache of kept experience takes at most."""
    return cache.most_bytes if isinstance(cache, ExperienceReplay) else int(getattr(cache, "bytes", 0))


def _take_learning(worker: LocalWorker, state: State) -> None:
    worker.agent.load_state_dict(state["agent"])
    worker.updater.load_state_dict(state["updater"])
    worker.noise.load_state_dict(state["noise"])
    worker.evaluator.load_state_dict(state["evaluator"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and worker.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], worker.device)
    for name, generator in generators(worker.agent).items():
        generator.set_state(state["generators"][name])


def _take_counters(worker: LocalWorker, counters: State) -> None:
    worker.local_step_count, worker.updates = counters["step"], counters["updates"]
    worker.best, worker.evaluated_at, worker.owed = counters["best"], counters["evaluated_at"], counters["owed"]
    last = counters["evaluation"]
    worker.last_evaluation = None if last is None else Evaluation(*last)
    worker.episodes.load_state_dict(counters)


def _take_experience(worker: LocalWorker, state: State) -> str:
    if state["cache"] is not None and state["groups"] != [[rows.start, rows.stop] for rows in worker.manager.groups]:
        raise UserError(
            f"The checkpoint was made with {len(state['groups'])} groups of environments, and now there are "
            f"{len(worker.manager.groups)}; set env.alternate and env.num back to what they were."
        )
    if state["cache"] is not None:
        worker.cache.load_state_dict(state["cache"])
    if state["manager"] is None:  # the run broke off in a rollout: go on with episodes that it has not seen
        worker.env_seed = (worker.env_seed + 1 + worker.local_step_count) % (2**31 - 1)
        _forget(worker, torch.ones(worker.manager.batch, dtype=torch.bool))
        return "restarted at an episode boundary: the run broke off in the midst of an update"
    worker.manager.load_state_dict(state["manager"])
    worker.env_step = worker.manager.last().to(worker.device)
    worker.cache.amend(worker.env_step)
    worker.hidden_state = HiddenState(state["hidden_state"]).map(lambda x: x.to(worker.device))
    worker.began = True
    _forget(worker, worker.env_step.first)
    return worker.manager.restored


def _forget(worker: LocalWorker, first: torch.Tensor) -> None:
    """Let the reward scaler drop the open returns of rows that begin an episode: those before may have been lost."""
    scaler = getattr(worker.agent, "reward_scaler", None)
    if scaler is not None:
        scaler.carried[first] = 0
