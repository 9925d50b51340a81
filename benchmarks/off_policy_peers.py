"""Stable-Baselines3 and Tianshou on the jobs of ``off_policy_jobs.py``; each is imported when it is used.

Tianshou 0.5 runs in another interpreter, named by ``LUDUS_TIANSHOU_PYTHON``: what is imported at the top here
must be there too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import gymnasium
import torch

from benchmarks.off_policy_jobs import OffPolicySettings, SettledMeter


def sb3_environment(s: OffPolicySettings, backend: str, seed: int) -> Any:
    """Make one environment without extra wrappers, or Gymnasium's native vector environment."""
    from stable_baselines3.common.env_util import make_vec_env

    from benchmarks.peers import NativeCartPole

    if backend == "vector":
        return NativeCartPole(1, seed)
    if ":" in s.environment:
        from benchmarks.off_policy_minatar import Breakout

        return make_vec_env(Breakout, 1, seed=seed)
    plain = {"disable_env_checker": True, "render_mode": None}
    return make_vec_env(s.environment, 1, seed=seed, env_kwargs=plain)


def sb3_model(s: OffPolicySettings, env: Any, seed: int) -> Any:
    """The algorithm with the job's settings, logging to JSON and TensorBoard."""
    import numpy as np
    from stable_baselines3 import DQN, SAC, TD3
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.noise import NormalActionNoise

    kinds: dict[str, Any] = {"dqn": DQN, "sac": SAC, "td3": TD3}
    policy: dict[str, Any] = {"net_arch": list(s.hidden), "activation_fn": torch.nn.ReLU}
    if s.agent == "dqn":
        more: dict[str, Any] = {
            "target_update_interval": s.target_every,
            "max_grad_norm": s.max_grad_norm,
            "exploration_initial_eps": s.epsilon[0],
            "exploration_final_eps": s.epsilon[1],
            "exploration_fraction": s.explore / s.steps,
        }
    else:
        more = {"tau": s.tau}
    if s.agent == "td3":
        dim = env.action_space.shape[0]
        more |= {
            "policy_delay": s.policy_delay,
            "target_policy_noise": s.target_noise,
            "target_noise_clip": s.noise_clip,
            "action_noise": NormalActionNoise(np.zeros(dim), np.full(dim, s.exploration_noise)),
        }
    if image := len(env.observation_space.shape) == 3:
        from benchmarks.off_policy_minatar import sb3_policy

        policy = sb3_policy()
    model = kinds[s.agent](
        "CnnPolicy" if image else "MlpPolicy",
        env,
        learning_rate=s.learning_rate,
        buffer_size=s.replay,
        learning_starts=s.learning_starts,
        batch_size=s.batch,
        gamma=s.gamma,
        train_freq=s.train_every,
        gradient_steps=1,
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
        **more,
    )
    model.set_logger(configure(tempfile.mkdtemp(prefix="sb3-"), ["json", "tensorboard"]))
    return model


def sb3(s: OffPolicySettings, backend: str, seed: int, meter: SettledMeter) -> float:
    """Return the steps per second of Stable-Baselines3."""
    from benchmarks.peers import Watch

    model = sb3_model(s, sb3_environment(s, backend, seed), seed)
    model.learn(s.steps, callback=Watch(meter))  # type: ignore[arg-type]
    return meter.rate


def tianshou(s: OffPolicySettings, backend: str, seed: int, meter: SettledMeter) -> float:
    """Return the steps per second of Tianshou 0.5; its trainer calls ``train_fn`` between updates."""
    import numpy as np
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffpolicyTrainer
    from tianshou.utils import TensorboardLogger
    from torch.utils.tensorboard import SummaryWriter

    np.random.seed(seed)
    torch.manual_seed(seed)
    env = DummyVectorEnv([lambda: gymnasium.make(s.environment, disable_env_checker=True)])
    env.seed(seed)
    policy = TIANSHOU[s.agent](s, env.observation_space[0].shape, env.action_space[0])
    collector = Collector(policy, env, VectorReplayBuffer(s.replay, 1), exploration_noise=s.agent != "sac")
    collector.collect(n_step=s.learning_starts, random=True)
    logger = TensorboardLogger(SummaryWriter(tempfile.mkdtemp(prefix="tianshou-")), s.log_every, 1, s.log_every)

    def watch(epoch: int, step: int) -> None:
        if meter.update(s.learning_starts + step):
            raise StopIteration

    trainer = OffpolicyTrainer(
        policy=policy,
        train_collector=collector,
        test_collector=None,
        max_epoch=1,
        step_per_epoch=s.steps,
        step_per_collect=s.train_every,
        episode_per_test=1,
        batch_size=s.batch,
        update_per_step=1 / s.train_every,
        train_fn=watch,
        logger=logger,
        verbose=False,
        show_progress=False,
    )
    trainer.run()  # it iterates over itself, so that a StopIteration ends it
    return meter.rate


def _adam(module: torch.nn.Module, s: OffPolicySettings) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=s.learning_rate)


def tianshou_dqn(s: OffPolicySettings, observation: Any, action: Any) -> Any:
    """DQN; it counts target copies in updates and cannot clip gradients."""
    from tianshou.policy import DQNPolicy
    from tianshou.utils.net.common import Net

    network = Net(observation, int(action.n), hidden_sizes=s.hidden)
    policy = DQNPolicy(
        network,
        _adam(network, s),
        discount_factor=s.gamma,
        target_update_freq=s.target_every // s.train_every,
        is_double=False,
        clip_loss_grad=True,
        action_space=action,
    )
    policy.max_action_num = int(action.n)
    policy.set_eps(s.epsilon[1])
    return policy


def _critics(s: OffPolicySettings, observation: Any, action: Any) -> dict[str, Any]:
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import Critic

    first, second = (Critic(Net(observation, action.shape, s.hidden, concat=True)) for _ in range(2))
    return {
        "critic1": first,
        "critic1_optim": _adam(first, s),
        "critic2": second,
        "critic2_optim": _adam(second, s),
        "tau": s.tau,
        "gamma": s.gamma,
        "action_space": action,
    }


def tianshou_sac(s: OffPolicySettings, observation: Any, action: Any) -> Any:
    """SAC with a learned temperature."""
    from tianshou.policy import SACPolicy
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ActorProb

    actor = ActorProb(Net(observation, hidden_sizes=s.hidden), action.shape, unbounded=True, conditioned_sigma=True)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha = (-float(action.shape[0]), log_alpha, torch.optim.Adam([log_alpha], lr=s.learning_rate))
    return SACPolicy(actor, _adam(actor, s), alpha=alpha, **_critics(s, observation, action))


def tianshou_td3(s: OffPolicySettings, observation: Any, action: Any) -> Any:
    """TD3."""
    from tianshou.exploration import GaussianNoise
    from tianshou.policy import TD3Policy
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import Actor

    actor = Actor(Net(observation, hidden_sizes=s.hidden), action.shape)
    return TD3Policy(
        actor,
        _adam(actor, s),
        policy_noise=s.target_noise,
        noise_clip=s.noise_clip,
        update_actor_freq=s.policy_delay,
        exploration_noise=GaussianNoise(sigma=s.exploration_noise),
        **_critics(s, observation, action),
    )


TIANSHOU: dict[str, Callable[[OffPolicySettings, Any, Any], Any]] = {
    "dqn": tianshou_dqn,
    "sac": tianshou_sac,
    "td3": tianshou_td3,
}


def sb3_curve(s: OffPolicySettings, seed: int, every: int, evaluate: Callable[[Any, int], float]) -> list[Any]:
    """Train for ``s.steps`` and evaluate every few steps and at the end; return steps and mean returns."""
    model, curve = sb3_model(s, sb3_environment(s, "simple", seed), seed), []

    def watch(local: dict[str, Any], world: dict[str, Any]) -> bool:
        if model.num_timesteps % every == 0 and model.num_timesteps < s.steps:
            curve.append((model.num_timesteps, evaluate(model, len(curve))))
        return True

    model.learn(s.steps, callback=watch)
    return [*curve, (model.num_timesteps, evaluate(model, len(curve)))]
