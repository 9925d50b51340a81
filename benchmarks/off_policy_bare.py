"""Off-policy learning without a library: a plain loop in CleanRL's style, in one file and eager torch.

From the algorithms alone (Mnih et al. 2015; Haarnoja et al. 2018; Fujimoto et al. 2018): modules, one Adam per network,
a ring of numpy arrays, TensorBoard every hundred steps.
"""

from __future__ import annotations

import itertools
import tempfile
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from benchmarks.off_policy_jobs import OffPolicySettings, SettledMeter

LOG_EVERY = 100
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # observation, action, reward, next observation, terminated


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    """Linear layers with relu between them."""
    sizes = (inputs, *hidden)
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*pairs), nn.Linear(sizes[-1], outputs))


class Ring:
    """The last transitions, sampled uniformly."""

    def __init__(self, size: int, env: Any, seed: int) -> None:
        seen, done = env.observation_space, env.action_space
        self._size, self._count = size, 0
        self._fields = (
            np.zeros((size, *seen.shape), np.float32),
            np.zeros((size, *done.shape), np.int64 if done.shape == () else np.float32),
            np.zeros(size, np.float32),
            np.zeros((size, *seen.shape), np.float32),
            np.zeros(size, np.float32),
        )
        self._random = np.random.default_rng(seed)

    def add(self, *transition: Any) -> None:
        at = self._count % self._size
        for field, value in zip(self._fields, transition, strict=True):
            field[at] = value
        self._count += 1

    def draw(self, n: int) -> Batch:
        rows = self._random.integers(0, min(self._count, self._size), n)
        observation, action, reward, following, terminated = (torch.from_numpy(x[rows]) for x in self._fields)
        return observation, action, reward, following, terminated


class DQN:
    """Q-learning with a target network that is copied periodically."""

    def __init__(self, env: Any, s: OffPolicySettings) -> None:
        self.s, self.env = s, env
        self.q = mlp(env.observation_space.shape[0], s.hidden, int(env.action_space.n))
        self.target = deepcopy(self.q)
        self.adam = torch.optim.Adam(self.q.parameters(), lr=s.learning_rate)
        self.random = np.random.default_rng(0)

    def act(self, observation: Any) -> Any:
        if self.random.random() < self.s.epsilon[1]:
            return self.env.action_space.sample()
        with torch.no_grad():
            return int(self.q(torch.from_numpy(observation)).argmax())

    def learn(self, batch: Batch, step: int) -> dict[str, Tensor]:
        observation, action, reward, following, terminated = batch
        with torch.no_grad():
            goal = reward + self.s.gamma * (1 - terminated) * self.target(following).max(1).values
        q = self.q(observation).gather(1, action[:, None]).squeeze(1)
        loss = F.mse_loss(q, goal)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        if step % self.s.target_every < self.s.train_every:
            self.target.load_state_dict(self.q.state_dict())
        return {"loss": loss, "q": q.mean()}


class ActorCritic:
    """Shared by SAC and TD3: two critics, their targets and the mean squared error."""

    def __init__(self, env: Any, s: OffPolicySettings, outputs: int) -> None:
        self.s, self.actions = s, env.action_space.shape[0]
        inputs = env.observation_space.shape[0]
        self.scale = float(env.action_space.high[0])  # the same both ways and for all, as HalfCheetah's
        self.actor = mlp(inputs, s.hidden, outputs * self.actions)
        self.critics = nn.ModuleList(mlp(inputs + self.actions, s.hidden, 1) for _ in range(2))
        self.targets = deepcopy(self.critics)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr=s.learning_rate)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), lr=s.learning_rate)

    @staticmethod
    def values(critics: nn.ModuleList, observation: Tensor, action: Tensor) -> list[Tensor]:
        together = torch.cat([observation, action], 1)
        return [critic(together).squeeze(1) for critic in critics]

    def learn_values(self, observation: Tensor, action: Tensor, goal: Tensor) -> Tensor:
        loss = sum(F.mse_loss(q, goal) for q in self.values(self.critics, observation, action))
        assert isinstance(loss, Tensor)
        self.critic_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.critic_adam.step()
        return loss

    def learn_policy(self, loss: Tensor) -> None:
        self.actor_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.actor_adam.step()

    @torch.no_grad()
    def follow(self, networks: nn.Module, targets: nn.Module) -> None:
        for parameter, target in zip(networks.parameters(), targets.parameters(), strict=True):
            target.copy_(self.s.tau * parameter + (1 - self.s.tau) * target)


class SAC(ActorCritic):
    """Soft actor-critic with a learned temperature."""

    def __init__(self, env: Any, s: OffPolicySettings) -> None:
        super().__init__(env, s, outputs=2)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=s.learning_rate)

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        log_prob = (normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).sum(-1)
        return action, log_prob

    def act(self, observation: Any) -> Any:
        with torch.no_grad():
            action, _ = self.sample(torch.from_numpy(observation).float()[None])
        return action[0].numpy() * self.scale

    def learn(self, batch: Batch, step: int) -> dict[str, Tensor]:
        observation, action, reward, following, terminated = batch
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, log_prob = self.sample(following)
            value = torch.minimum(*self.values(self.targets, following, next_action)) - alpha * log_prob
            goal = reward + self.s.gamma * (1 - terminated) * value
        critic_loss = self.learn_values(observation, action / self.scale, goal)
        chosen, log_prob = self.sample(observation)
        actor_loss = (alpha * log_prob - torch.minimum(*self.values(self.critics, observation, chosen))).mean()
        self.learn_policy(actor_loss)
        alpha_loss = -(self.log_alpha.exp() * (log_prob.detach() - self.actions)).mean()
        self.alpha_adam.zero_grad()
        alpha_loss.backward()  # type: ignore[no-untyped-call]
        self.alpha_adam.step()
        self.follow(self.critics, self.targets)
        return {"critic": critic_loss, "actor": actor_loss, "alpha": alpha}


class TD3(ActorCritic):
    """Twin delayed deterministic policy gradient."""

    def __init__(self, env: Any, s: OffPolicySettings) -> None:
        super().__init__(env, s, outputs=1)
        self.actor_target = deepcopy(self.actor)
        self.actor_loss = torch.zeros(())

    def act(self, observation: Any) -> Any:
        with torch.no_grad():
            action = torch.tanh(self.actor(torch.from_numpy(observation).float()))
            action += torch.randn_like(action) * self.s.exploration_noise
        return action.clamp(-1, 1).numpy() * self.scale

    def learn(self, batch: Batch, step: int) -> dict[str, Tensor]:
        observation, action, reward, following, terminated = batch
        with torch.no_grad():
            noise = (torch.randn_like(action) * self.s.target_noise).clamp(-self.s.noise_clip, self.s.noise_clip)
            next_action = (torch.tanh(self.actor_target(following)) + noise).clamp(-1, 1)
            value = torch.minimum(*self.values(self.targets, following, next_action))
            goal = reward + self.s.gamma * (1 - terminated) * value
        critic_loss = self.learn_values(observation, action / self.scale, goal)
        if step % self.s.policy_delay == 0:
            chosen = torch.tanh(self.actor(observation))
            self.actor_loss = -self.critics[0](torch.cat([observation, chosen], 1)).mean()
            self.learn_policy(self.actor_loss)
            self.follow(self.critics, self.targets)
            self.follow(self.actor, self.actor_target)
        return {"critic": critic_loss, "actor": self.actor_loss}


LEARNERS: dict[str, Any] = {"dqn": DQN, "sac": SAC, "td3": TD3}


def cleanrl(s: OffPolicySettings, backend: str, seed: int, meter: SettledMeter) -> float:
    """Return the steps per second of the plain loop."""
    torch.manual_seed(seed)
    env = gymnasium.make(s.environment, disable_env_checker=True)
    learner, ring = LEARNERS[s.agent](env, s), Ring(s.replay, env, seed)
    writer = SummaryWriter(tempfile.mkdtemp(prefix="bare-"))
    observation, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    for step in itertools.count(1):
        action = env.action_space.sample() if step <= s.learning_starts else learner.act(observation)
        following, reward, terminated, truncated, _ = env.step(action)
        ring.add(observation, action, reward, following, terminated)
        observation = following
        if terminated or truncated:
            observation, _ = env.reset()
        if step > s.learning_starts and step % s.train_every == 0:
            told = learner.learn(ring.draw(s.batch), step)
            if step % LOG_EVERY == 0:
                for name, x in told.items():
                    writer.add_scalar(name, x.item(), step)
        if meter.update(step):
            break
    return meter.rate
