"""What a checkpoint of a worker holds, and how it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ludus.containers.evaluate import Evaluation, Evaluator
from ludus.containers.learner import SeatLearner
from ludus.containers.roles import by_role
from ludus.core.agent import Agent
from ludus.core.container import Container
from ludus.core.environment import EnvironmentManager
from ludus.core.errors import UserError
from ludus.core.types import State
from ludus.logging.episodes import RecentEpisodes

if TYPE_CHECKING:
    from ludus.containers.network_check import NetworkCheck
    from ludus.containers.self_play import Pool


class ResumableWorker(Container):
    """A worker whose run can be saved and resumed."""

    agent: Agent
    manager: EnvironmentManager
    evaluator: Evaluator
    learners: list[SeatLearner]
    pool: Pool | None
    network_check: NetworkCheck | None
    device: torch.device
    env_seed: int
    local_step_count: int
    updates: int
    episodes: RecentEpisodes
    best: float | None
    last_evaluation: Evaluation | None
    evaluated_at: int
    began: bool  # the environments were reset or restored
    between: bool  # between updates
    in_call: bool  # interrupted inside a call of an environment, so the cache is consistent
    owed: bool  # an evaluation is due (again)

    def state_dict(self) -> State:
        """Return all that a resume needs; in the middle of an update, without the incomplete rollout."""
        whole, in_call = self.began and self.between, self.began and self.in_call
        last = self.last_evaluation

        def cache_state(learner: SeatLearner) -> State | None:  # None in the middle of an update, unless complete there
            kept = whole or (in_call and learner.cache.saved_within_update)
            return learner.cache.state_dict() if kept else None

        return {
            "agent": dict(self.agent.state_dict()),
            "updater": by_role(self.learners, lambda learner: learner.updater.state_dict()),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "generators": {name: generator.get_state() for name, generator in generators(self.agent).items()},
            "cache": by_role(self.learners, cache_state),
            "last_metrics": by_role(self.learners, lambda learner: dict(learner.metrics)),
            "evaluator": self.evaluator.state_dict(),
            "pool": None if self.pool is None else self.pool.state_dict(),
            **self._collector_state(whole),
            "dataset": None if self.agent.dataset is None else self.agent.dataset.fingerprint,
            "counters": {
                "step": self.local_step_count,
                "updates": self.updates,
                "best": self.best,
                "evaluated_at": self.evaluated_at,
                "evaluation": None if last is None else [list(last.returns), list(last.lengths), dict(last.infos)],
                "owed": self.owed,
                "network_checked_at": 0 if self.network_check is None else self.network_check.checked_at,
            }
            | self.episodes.state_dict(),
        }

    def load_state_dict(self, state: State) -> str:
        """Restore a run; return how the environments were restored."""
        try:
            return self._load(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"The checkpoint does not fit this run's settings and code ({type(error).__name__}: {reason}); bring "
                "back the agent, network and environment that it was made with."
            ) from error

    def _load(self, state: State) -> str:
        dataset = self.agent.dataset
        if dataset is not None and state["dataset"] != dataset.fingerprint:
            raise UserError(
                f'The recorded episodes in "{dataset.name}" (data.path) are others than those that the run learned '
                "from, so it cannot be resumed; bring back the file."
            )
        self.agent.load_state_dict(state["agent"])
        for learner in self.learners:
            learner.updater.load_state_dict(learner.own(state["updater"]))
            learner.metrics = dict(learner.own(state.get("last_metrics", {})))
        if self.pool is not None:
            self.pool.load_state_dict(state["pool"])
        self.evaluator.load_state_dict(state["evaluator"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)
        for name, generator in generators(self.agent).items():
            generator.set_state(state["generators"][name])
        counters = state["counters"]
        self.local_step_count, self.updates = counters["step"], counters["updates"]
        self.best, self.evaluated_at, self.owed = counters["best"], counters["evaluated_at"], counters["owed"]
        if self.network_check is not None:
            self.network_check.checked_at = counters["network_checked_at"]
        last = counters["evaluation"]
        self.last_evaluation = None if last is None else Evaluation(*last)
        self.episodes.load_state_dict(counters)
        return self._load_collector(state)

    def _collector_state(self, whole: bool) -> State:
        """Return what continues the collection of experience; without the environments unless ``whole``."""
        return {
            "noise": by_role(self.learners, lambda learner: learner.seat.noise.state_dict()),
            "manager": self.manager.state_dict() if whole else None,
            "groups": [[rows.start, rows.stop] for rows in self.manager.groups],
            "hidden_state": by_role(self.learners, lambda learner: dict(learner.seat.hidden_state)),
        }

    def _load_collector(self, state: State) -> str:
        """Restore the cache and what ``_collector_state`` returned; return how the environments were restored."""
        groups = [[rows.start, rows.stop] for rows in self.manager.groups]
        caches = [learner.own(state["cache"]) for learner in self.learners]
        if any(cache is not None for cache in caches) and state["groups"] != groups:
            raise UserError(
                f"The checkpoint was made with {len(state['groups'])} groups of environments, and now there are "
                f"{len(groups)}; set env.alternate and env.num back to what they were."
            )
        for learner, cache in zip(self.learners, caches, strict=True):
            learner.seat.noise.load_state_dict(learner.own(state["noise"]))
            if cache is not None:
                learner.cache.load_state_dict(cache)
        if state["manager"] is None:  # interrupted in a rollout: continue with new episodes
            self.env_seed = (self.env_seed + 1 + self.local_step_count) % (2**31 - 1)
            return "restarted at an episode boundary: the run was interrupted in the middle of an update"
        self.manager.load_state_dict(state["manager"])
        last = self.manager.last_roles()
        for learner in self.learners:
            learner.resume_at(last[learner.role], learner.own(state["hidden_state"]))
        self.began = True
        return self.manager.restored


def generators(agent: Agent) -> dict[str, torch.Generator]:
    """Return the random generators of the agent and its modules by name."""
    held = [(prefix, key, x) for prefix, module in agent.named_modules() for key, x in vars(module).items()]
    return {f"{prefix}.{key}".lstrip("."): x for prefix, key, x in held if isinstance(x, torch.Generator)}
