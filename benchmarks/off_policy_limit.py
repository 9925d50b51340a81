"""The speed limit of off-policy learning on this machine: bare code, each part timed separately.

Steps per second are ``1 / (t_env + t_forward + (t_draw + t_update) / train_every)``. Both critics are one batched
multiplication, the actor's loss goes through critics that need no gradient, parameters lie in one vector per network
under a fused Adam, and the target follows in one call; compiled, an update is one function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.limit import flatten, seconds_per_call
from benchmarks.off_policy_jobs import OffPolicySettings

Apply = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, ...]  # observation, action, reward, discount, next observation, noise, more noise
LOG_2, LOG_ROOT_2PI = math.log(2), 0.5 * math.log(2 * math.pi)


class Stack(nn.Module):
    """Linear layers with relu between; with members, that many side by side in one multiplication."""

    def __init__(self, sizes: tuple[int, ...], members: int = 0) -> None:
        super().__init__()
        lead = (members,) if members else ()
        self.weights = nn.ParameterList(torch.randn(*lead, a, b) / a**0.5 for a, b in itertools.pairwise(sizes))
        self.biases = nn.ParameterList(torch.zeros(*lead, 1, b) for b in sizes[1:])
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        add = torch.addmm
        if self.members:
            x, add = x.expand(self.members, *x.shape), torch.baddbmm
        *rest, last = zip(self.weights, self.biases, strict=True)
        for w, b in rest:
            x = torch.relu(add(b, x, w))
        return add(last[1], x, last[0])


def squash(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A tanh-Gaussian action and its log-density."""
    mean, log_std = outputs.chunk(2, -1)
    log_std = log_std.clamp(-20, 2)
    raw = mean + log_std.exp() * noise
    density = -0.5 * noise.square() - log_std - LOG_ROOT_2PI - 2 * (LOG_2 - raw - F.softplus(-2 * raw))
    return torch.tanh(raw), density.sum(-1)


def dqn_loss(q: Apply, target: Apply, batch: Batch) -> Tensor:
    observation, action, reward, discount, following, *_ = batch
    with torch.no_grad():
        goal = reward + discount * target(following).amax(-1)
    return F.smooth_l1_loss(q(observation).gather(-1, action[:, None]).squeeze(-1), goal)


def critic_loss(critic: Apply, goal: Tensor, batch: Batch) -> Tensor:
    q = critic(torch.cat([batch[0], batch[1]], -1)).squeeze(-1)  # [2, N]
    return (q - goal).square().mean(-1).sum()


def goal_of(kind: str, actor: Apply, target: Apply, log_alpha: Tensor, batch: Batch, s: OffPolicySettings) -> Tensor:
    """Return the target of both critics; for TD3 with the target actor."""
    _, _, reward, discount, following, noise, _ = batch
    with torch.no_grad():
        if kind == "sac":
            action, density = squash(actor(following), noise)
            bonus = log_alpha.exp() * density
        else:
            smoothing = (noise * s.target_noise).clamp(-s.noise_clip, s.noise_clip)
            action, bonus = (torch.tanh(actor(following)) + smoothing).clamp(-1, 1), torch.zeros(())
        value = target(torch.cat([following, action], -1)).squeeze(-1).amin(0)
        return reward + discount * (value - bonus)


def actor_loss(kind: str, actor: Apply, critic: Apply, log_alpha: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and the mean log-density for the temperature."""
    observation, *_, noise = batch
    if kind == "sac":
        action, density = squash(actor(observation), noise)
        value = critic(torch.cat([observation, action], -1)).squeeze(-1).amin(0)
        return (log_alpha.detach().exp() * density - value).mean(), density.detach().mean()
    value = critic(torch.cat([observation, torch.tanh(actor(observation))], -1)).squeeze(-1)
    return -value[0].mean(), torch.zeros(())


class Learned:
    """A network on one vector, its Adam, and a twin on the same numbers that needs no gradient."""

    def __init__(self, network: Stack, s: OffPolicySettings) -> None:
        self.network = network
        self.twin = deepcopy(network).requires_grad_(False)
        self.flat = flatten(network)
        for mine, theirs in zip(self.twin.parameters(), network.parameters(), strict=True):
            mine.data = theirs.data
        self.adam = torch.optim.Adam([self.flat], lr=s.learning_rate, fused=True)

    def step(self, loss: Tensor, max_norm: float = 0.0) -> None:
        assert self.flat.grad is not None
        self.flat.grad.zero_()
        torch.autograd.backward(loss)
        if max_norm:
            self.flat.grad.mul_((max_norm / (self.flat.grad.norm() + 1e-6)).clamp(max=1.0))
        self.adam.step()


class Moments:
    """The same for a compiled update: vector, Adam's moments and count, all changed in place."""

    def __init__(self, network: Stack) -> None:
        self.network = network
        self.shapes = {name: p.shape for name, p in network.named_parameters()}
        self.flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
        self.state = (self.flat, torch.zeros_like(self.flat), torch.zeros_like(self.flat), torch.zeros(()))

    def at(self, flat: Tensor) -> Apply:
        """The network with the parameters of ``flat``."""
        parts = torch.split_with_sizes(flat, [shape.numel() for shape in self.shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        return lambda x: torch.func.functional_call(self.network, named, x)  # type: ignore[no-any-return]


def adam_(state: tuple[Tensor, ...], gradient: Tensor, rate: float) -> None:
    flat, m, v, t = state
    t.add_(1)
    m.lerp_(gradient, 0.1)
    v.lerp_(gradient.square(), 0.001)
    flat.sub_(rate / (1 - 0.9**t) * m / ((v / (1 - 0.999**t)).sqrt() + 1e-8))


def networks(s: OffPolicySettings, env: Any) -> dict[str, Stack]:
    inputs = env.observation_space.shape[0]
    if s.agent == "dqn":
        return {"q": Stack((inputs, *s.hidden, int(env.action_space.n)))}
    actions = env.action_space.shape[0]
    outputs = 2 * actions if s.agent == "sac" else actions
    return {
        "actor": Stack((inputs, *s.hidden, outputs)),
        "critic": Stack((inputs + actions, *s.hidden, 1), members=2),
    }


def batch_of(s: OffPolicySettings, env: Any) -> Batch:
    n, seen = s.batch, env.observation_space.shape
    if s.agent == "dqn":
        action, noise = torch.randint(0, int(env.action_space.n), (n,)), torch.zeros(())
    else:
        action, noise = torch.rand(n, env.action_space.shape[0]) * 2 - 1, torch.randn(n, env.action_space.shape[0])
    return torch.randn(n, *seen), action, torch.randn(n), torch.full((n,), s.gamma), torch.randn(n, *seen), noise, noise


def eager_update(s: OffPolicySettings, env: Any) -> Callable[[], None]:
    """One update of DQN or SAC; of TD3 as many as one of its actor needs."""
    batch, made = batch_of(s, env), {name: Learned(network, s) for name, network in networks(s, env).items()}
    if s.agent == "dqn":
        q, target = made["q"], Stack((batch[0].shape[1], *s.hidden, int(env.action_space.n))).requires_grad_(False)
        return lambda: q.step(dqn_loss(q.network, target, batch), s.max_grad_norm)
    actor, critic = made["actor"], made["critic"]
    actor_target, target = (Learned(network, s) for network in networks(s, env).values())
    log_alpha = torch.zeros((), requires_grad=True)
    temperature = torch.optim.Adam([log_alpha], lr=s.learning_rate, fused=True)
    ahead = actor if s.agent == "sac" else actor_target

    def learn_values() -> None:
        goal = goal_of(s.agent, ahead.twin, target.twin, log_alpha, batch, s)
        critic.step(critic_loss(critic.network, goal, batch))

    def update() -> None:
        for _ in range(delay(s)):
            learn_values()
        loss, density = actor_loss(s.agent, actor.network, critic.twin, log_alpha, batch)
        actor.step(loss)
        with torch.no_grad():
            target.flat.lerp_(critic.flat, s.tau)
            if s.agent == "td3":
                actor_target.flat.lerp_(actor.flat, s.tau)
                return
            log_alpha.grad = -(density - batch[1].shape[1]) * log_alpha.exp()
        temperature.step()

    return update


def compiled_update(s: OffPolicySettings, env: Any) -> Callable[[], None]:
    """The same as one compiled function."""
    batch, made = batch_of(s, env), {name: Moments(network) for name, network in networks(s, env).items()}
    old = {name: part.flat.clone() for name, part in made.items()}
    alpha = tuple(torch.zeros(()) for _ in range(4))
    states = {name: part.state for name, part in made.items()}

    def update(states: Any, old: Any, alpha: Any, batch: Batch) -> None:
        at, rate = {name: part.at for name, part in made.items()}, s.learning_rate
        if s.agent == "dqn":
            goal_net = at["q"](old["q"])
            gradient = torch.func.grad(lambda p: dqn_loss(at["q"](p), goal_net, batch))(states["q"][0])
            gradient = gradient * (s.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
            adam_(states["q"], gradient, rate)
            return
        for _ in range(delay(s)):
            ahead = at["actor"](states["actor"][0] if s.agent == "sac" else old["actor"])
            goal = goal_of(s.agent, ahead, at["critic"](old["critic"]), alpha[0], batch, s)
            adam_(
                states["critic"],
                torch.func.grad(lambda p, goal: critic_loss(at["critic"](p), goal, batch))(states["critic"][0], goal),
                rate,
            )
        critic = at["critic"](states["critic"][0])
        gradient, density = torch.func.grad(
            lambda p: actor_loss(s.agent, at["actor"](p), critic, alpha[0], batch), has_aux=True
        )(states["actor"][0])
        adam_(states["actor"], gradient, rate)
        old["critic"].lerp_(states["critic"][0], s.tau)
        if s.agent == "td3":
            old["actor"].lerp_(states["actor"][0], s.tau)
        else:
            adam_(alpha, -(density - batch[1].shape[1]) * alpha[0].exp(), rate)

    compiled = torch.compile(update, dynamic=False)
    return lambda: compiled(states, old, alpha, batch)


def delay(s: OffPolicySettings) -> int:
    """Updates of the critics per update of the actor."""
    return s.policy_delay if s.agent == "td3" else 1


def env_step(s: OffPolicySettings, env: Any) -> Callable[[], None]:
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(512)]
    at = iter(range(10**12))

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(actions[next(at) % 512])
        if terminated or truncated:
            env.reset()

    return step


def torch_forward(s: OffPolicySettings, env: Any) -> Callable[[], Any]:
    network = next(iter(networks(s, env).values())).requires_grad_(False)
    x, noise = torch.randn(1, *env.observation_space.shape), batch_of(s, env)[5][:1] if s.agent != "dqn" else None

    @torch.inference_mode()
    def forward() -> Any:
        outputs = network(x)
        if noise is None:
            return outputs.argmax(-1)
        return squash(outputs, noise)[0] if s.agent == "sac" else (torch.tanh(outputs) + noise).clamp(-1, 1)

    return forward


def numpy_forward(s: OffPolicySettings, env: Any) -> Callable[[], Any]:
    """The same in numpy, on views of the parameters."""
    network = next(iter(networks(s, env).values()))
    pairs = [(w.detach().numpy(), b.detach().numpy()) for w, b in zip(network.weights, network.biases, strict=True)]
    (*rest, (w_last, b_last)), first = pairs, np.random.default_rng(0).normal(size=(1, *env.observation_space.shape))
    x0 = first.astype(np.float32)

    def forward() -> Any:
        x = x0
        for w, b in rest:
            x = np.maximum(x @ w + b, 0)
        x = x @ w_last + b_last
        if s.agent == "dqn":
            return x.argmax(-1)
        half = x.shape[1] // 2
        raw = x[:, :half] + np.exp(x[:, half:]) * x0[:, :half] if s.agent == "sac" else x
        return np.tanh(raw)

    return forward


def draw(s: OffPolicySettings, env: Any) -> Callable[[], Any]:
    """Gather a batch from a ring of ten thousand transitions in torch."""
    size = 10_000
    fields = [x.expand(size, *x.shape[1:]).clone() for x in (part[:1] for part in batch_of(s, env)[:5])]

    def gather() -> list[Tensor]:
        rows = torch.randint(size, (s.batch,))
        return [field.index_select(0, rows) for field in fields]

    return gather


def pieces(s: OffPolicySettings, compiled: bool) -> dict[str, float]:
    """Return the seconds of each part."""
    torch.manual_seed(0)
    env: Any = gymnasium.make(s.environment, disable_env_checker=True)
    found = {
        "environment": seconds_per_call(env_step(s, env), 0.5),
        "forward, torch": seconds_per_call(torch_forward(s, env), 0.5),
        "forward, numpy": seconds_per_call(numpy_forward(s, env), 0.5),
        "draw": seconds_per_call(draw(s, env), 0.5),
        "update, eager": seconds_per_call(eager_update(s, env)) / delay(s),
    }
    if compiled:
        found["update, compiled"] = seconds_per_call(compiled_update(s, env)) / delay(s)
    return found


def limit(found: dict[str, float], s: OffPolicySettings, update: str) -> float:
    """Return steps per second of all parts, with the fastest forward pass and the given update."""
    forward = min(seconds for name, seconds in found.items() if name.startswith("forward"))
    return 1 / (found["environment"] + forward + (found["draw"] + found[update]) / s.train_every)
