"""Stable-Baselines3 (and sb3-contrib) on the jobs of ``protocol.py``: ``python -m benchmarks.peers cartpole``."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.protocol import EVALUATION_EVERY, JOBS, SOLVED, Meter, PPOSettings, arguments, emit, evaluate_cartpole


class BatchedVecEnv(VecEnv):
    """A batched environment with Stable-Baselines3's interface, without a Python loop unless an episode ended.

    That contract is same-step autoreset: the observation after an ending is already the new episode's, the last
    one of the old episode is in ``infos[i]["terminal_observation"]``. A backend adds ``_step`` and ``_restart``.
    """

    def __init__(self, num_envs: int, observation_space: Any, action_space: Any) -> None:
        super().__init__(num_envs, observation_space, action_space)
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._nothing: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def _step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        raise NotImplementedError

    def _restart(self, rows: Any) -> Any:
        raise NotImplementedError

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        observation, reward, terminated, truncated = self._step(self._actions)
        self._returns += reward
        self._lengths += 1
        done = terminated | truncated
        if not done.any():
            return observation, reward, done, self._nothing
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        rows = np.flatnonzero(done)
        for i in rows:
            infos[i] = {
                "terminal_observation": observation[i].copy(),
                "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                "episode": {"r": self._returns[i], "l": self._lengths[i], "t": time.perf_counter()},
            }
        self._returns[rows], self._lengths[rows] = 0, 0
        observation[rows] = self._restart(rows)
        return observation, reward, done, infos

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return []

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [True] * self.num_envs  # episode statistics are kept here: no Monitor is needed


class NativeCartPole(BatchedVecEnv):
    """Gymnasium's vector CartPole with resets in the same step."""

    def __init__(self, num_envs: int, seed: int) -> None:
        env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point")
        self._env: Any = env.unwrapped
        super().__init__(num_envs, self._env.single_observation_space, self._env.single_action_space)
        self._seed = seed

    def reset(self) -> Any:
        return self._env.reset(seed=self._seed)[0]

    def _step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        observation, reward, terminated, truncated, _ = self._env.step(actions)
        return observation, reward, terminated, truncated

    def _restart(self, rows: Any) -> Any:
        env = self._env
        env.state[:, rows] = env.np_random.uniform(env.low, env.high, size=(4, len(rows)))
        env.steps[rows] = 0
        env.prev_done[:] = False
        return env.state[:, rows].T


class EnvPoolPong(BatchedVecEnv):
    """EnvPool's Pong (84×84×4 uint8) with resets in the same step."""

    def __init__(self, num_envs: int, seed: int) -> None:
        import envpool

        self._env = envpool.make("Pong-v5", env_type="gymnasium", num_envs=num_envs, seed=seed)
        super().__init__(num_envs, self._env.observation_space, self._env.action_space)

    def reset(self) -> Any:
        return self._env.reset()[0]

    def _step(self, actions: Any) -> tuple[Any, Any, Any, Any]:
        observation, reward, terminated, truncated, _ = self._env.step(actions)
        return observation, reward, terminated, truncated

    def _restart(self, rows: Any) -> Any:
        return self._env.reset(rows.astype(np.int32))[0]


class Watch(BaseCallback):
    """Measures the speed between updates and ends the run when done."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter, self._enough = meter, False

    def _on_rollout_start(self) -> None:
        self._enough = self._meter.update(self.num_timesteps)

    def _on_step(self) -> bool:
        return not self._enough


class FirstUpdate(BaseCallback):
    """Ends the run after the first update."""

    def _on_step(self) -> bool:
        steps: int = self.model.n_steps  # type: ignore[attr-defined]
        return self.num_timesteps <= self.training_env.num_envs * steps


class UntilSolved(BaseCallback):
    """Evaluates every few thousand steps and ends the run when it is solved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._next, self.score = seed, EVALUATION_EVERY, 0.0

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._next:
            self._next += EVALUATION_EVERY
            self.score = evaluate_cartpole(self._act, self._seed + self.num_timesteps)

    def _on_step(self) -> bool:
        return self.score < SOLVED

    def _act(self, observation: Any) -> Any:
        return self.model.predict(observation, deterministic=True)[0]


def make_env(job: str, backend: str, num: int, seed: int) -> VecEnv:
    if job == "pong":
        return EnvPoolPong(num, seed)
    return NativeCartPole(num, seed) if backend == "native" else make_vec_env("CartPole-v1", num, seed=seed)


def make_model(job: str, env: VecEnv, s: PPOSettings, seed: int) -> Any:
    falling = (lambda top: lambda left: top * left) if s.linear else (lambda top: top)
    make: Any = PPO
    policy: dict[str, Any] = {"policy": "CnnPolicy" if job == "pong" else "MlpPolicy"}  # separate 64-64 tanh trunks
    if s.lstm:  # an LSTM each for policy and value, then the same trunks
        from sb3_contrib import RecurrentPPO

        make, policy = RecurrentPPO, {"policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_hidden_size": s.lstm}}
    model = make(
        **policy,
        env=env,
        learning_rate=falling(s.learning_rate),
        n_steps=s.rollout,
        batch_size=s.environments * s.rollout // s.minibatches,
        n_epochs=s.epochs,
        gamma=s.gamma,
        gae_lambda=s.gae_lambda,
        clip_range=falling(s.clip),
        ent_coef=s.entropy,
        vf_coef=s.value,
        max_grad_norm=s.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    model.set_logger(configure(tempfile.mkdtemp(prefix="sb3-"), ["json", "tensorboard"]))
    return model


def run(args: Namespace) -> None:
    torch.set_num_threads(args.threads)
    settings = JOBS[args.job]
    env = make_env(args.job, args.backend, settings.environments, args.seed)
    model = make_model(args.job, env, settings, args.seed)
    common = {"side": "sb3", "job": args.job, "threads": args.threads, "backend": args.backend, "seed": args.seed}
    if args.first_update:
        model.learn(settings.steps, callback=FirstUpdate())
        emit(**common, seconds=time.time() - args.started)
    elif args.job == "solve":
        until = UntilSolved(args.seed)
        model.learn(settings.steps, callback=until)
        if until.score < SOLVED:  # the last evaluation falls on the end of the run
            until.score = evaluate_cartpole(until._act, args.seed)
        seconds = time.time() - args.started
        emit(**common, seconds=seconds, step=model.num_timesteps, score=until.score, solved=until.score >= SOLVED)
    else:
        meter = Meter(args.warm_up, args.seconds)
        model.learn(settings.steps, callback=Watch(meter))
        emit(**common, rate=meter.rate)


def main() -> None:
    parser = arguments("One round of Stable-Baselines3.")
    parser.add_argument("--backend", choices=["native", "dummy"], default="native", help="CartPole: vector environment")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
