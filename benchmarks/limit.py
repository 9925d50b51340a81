"""The speed limit of PPO on this machine: environment, forward pass and update in bare PyTorch and numpy.

The limit is ``N·T / (T·(t_env + t_forward) + E·M·t_update)``, each with its fastest known implementation. One thread
count per process: ``python -m benchmarks.limit cartpole --threads 1 --environments 512``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.protocol import JOBS, THREADS, PPOSettings, emit

ACTIONS = {"cartpole": 2, "pong": 6}
Result = dict[str, Any]


def seconds_per_call(function: Callable[[], Any], budget: float = 1.5) -> float:
    """Return the median time of a call after a warm-up."""
    for _ in range(3):
        function()
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Trunks(nn.Module):
    """Separate 64-64 tanh trunks for policy and value."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.policy, self.value = (self._trunk(n) for n in (actions, 1))

    @staticmethod
    def _trunk(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x).squeeze(-1)


class Nature(nn.Module):
    """The Nature CNN with both heads on it."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
        )
        self.policy, self.value = nn.Linear(512, actions), nn.Linear(512, 1)
        for p in self.body.parameters():
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(torch.float32, memory_format=torch.channels_last)
        x = self.body(x * (1 / 255))
        return self.policy(x), self.value(x).squeeze(-1)


def make_network(job: str) -> nn.Module:
    if job == "cartpole":
        return Trunks(ACTIONS[job])
    return Nature(ACTIONS[job])


def observations(job: str, n: int) -> Tensor:
    return torch.randn(n, 4) if job == "cartpole" else torch.randint(0, 255, (n, 4, 84, 84), dtype=torch.uint8)


def loss_of(outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, ...], s: PPOSettings) -> Tensor:
    """The loss of PPO on one minibatch, advantages normalized."""
    (logits, value), (action, old, advantage, target) = outputs, batch
    log_probs = F.log_softmax(logits, -1)
    ratio = (log_probs.gather(-1, action[:, None]).squeeze(-1) - old).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return -gain + s.value * (target - value).square().mean() - s.entropy * entropy


def minibatch(job: str, s: PPOSettings) -> tuple[Tensor, tuple[Tensor, ...]]:
    n = s.environments * s.rollout // s.minibatches
    rest = (torch.randint(0, ACTIONS[job], (n,)), torch.full((n,), -0.7), torch.randn(n), torch.randn(n))
    return observations(job, n), rest


def flatten(network: nn.Module) -> nn.Parameter:
    """One vector under all parameters and one under all gradients; return the first with the second as its gradient."""
    parameters = list(network.parameters())
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for p in parameters:
        p.data = flat.data[start : start + p.numel()].view(p.shape)
        p.grad = flat.grad[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return flat


def eager_update(job: str, s: PPOSettings) -> Callable[[], None]:
    network = make_network(job)
    flat = flatten(network)
    adam = torch.optim.Adam([flat], lr=s.learning_rate, eps=1e-5, fused=True)
    x, rest = minibatch(job, s)

    def update() -> None:
        assert flat.grad is not None
        flat.grad.zero_()
        torch.autograd.backward(loss_of(network(x), rest, s))
        flat.grad.mul_((s.max_grad_norm / (flat.grad.norm() + 1e-6)).clamp(max=1.0))
        adam.step()

    return update


def compiled_update(job: str, s: PPOSettings) -> Callable[[], None]:
    network = make_network(job)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    m, v, t = torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(())
    x, rest = minibatch(job, s)

    def loss(flat: Tensor, x: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        parts = torch.split_with_sizes(flat, [shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return loss_of(torch.func.functional_call(network, named, x), rest, s)

    def update(flat: Tensor, m: Tensor, v: Tensor, t: Tensor, x: Tensor, rest: tuple[Tensor, ...]) -> None:
        gradient = torch.func.grad(loss)(flat, x, rest)
        gradient = gradient * (s.max_grad_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)
        t.add_(1)
        m.lerp_(gradient, 0.1)
        v.lerp_(gradient.square(), 0.001)
        step = s.learning_rate / (1 - 0.9**t)
        flat.sub_(step * m / ((v / (1 - 0.999**t)).sqrt() + 1e-5))

    compiled = torch.compile(update, dynamic=False)
    return lambda: compiled(flat, m, v, t, x, rest)


def torch_forward(job: str, s: PPOSettings) -> Callable[[], None]:
    network, x = make_network(job), observations(job, s.environments)
    noise = torch.rand(s.environments, ACTIONS[job]).log().neg().log().neg()  # Gumbel; drawn per rollout in a real loop

    @torch.inference_mode()
    def forward() -> None:
        logits, _ = network(x)
        action = (logits + noise).argmax(-1, keepdim=True)
        logits.log_softmax(-1).gather(-1, action)

    return forward


def numpy_forward(s: PPOSettings) -> Callable[[], None]:
    """The same for the MLP in numpy, on views of the parameters."""
    network, x = Trunks(2), observations("cartpole", s.environments).numpy()
    weights = [p.detach().numpy().T for p in network.parameters()]  # policy, then value: weight and bias by turns
    trunks = (weights[:6], weights[6:])
    noise, rows = np.random.default_rng(0).gumbel(size=(s.environments, 2)), np.arange(s.environments)

    def forward() -> None:
        logits, _ = (np.tanh(np.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3 for w1, b1, w2, b2, w3, b3 in trunks)
        action = (logits + noise).argmax(-1)
        logits[rows, action] - np.log(np.exp(logits).sum(-1))

    return forward


def env_step(job: str, s: PPOSettings) -> Callable[[], Any]:
    if job == "cartpole":
        env: Any = gymnasium.make_vec("CartPole-v1", num_envs=s.environments, vectorization_mode="vector_entry_point")
    else:
        import envpool

        env = envpool.make("Pong-v5", env_type="gymnasium", num_envs=s.environments)
    env.reset()
    actions = np.random.default_rng(0).integers(0, ACTIONS[job], s.environments)
    return lambda: env.step(actions)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the parts of PPO without a library.")
    parser.add_argument("job", choices=list(ACTIONS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--environments", type=int, default=0, help="0: the job's own number")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    s = settings_of(args.job, args.environments)
    pieces = {
        "environment": seconds_per_call(env_step(args.job, s)),
        "forward, torch": seconds_per_call(torch_forward(args.job, s)),
        "update, eager": seconds_per_call(eager_update(args.job, s)),
        "update, compiled": seconds_per_call(compiled_update(args.job, s)),
    }
    if args.job == "cartpole":
        pieces["forward, numpy"] = seconds_per_call(numpy_forward(s))
    emit(job=args.job, environments=s.environments, threads=args.threads, pieces=pieces)


def settings_of(job: str, environments: int = 0) -> PPOSettings:
    return replace(JOBS[job], environments=environments) if environments else JOBS[job]


def measure_limit(call: Callable[..., Result], job: str, environments: int = 0) -> Result:
    """Measure each bare piece at its best over thread counts, and what all of them would reach together."""
    of = (job, "--environments", str(environments))
    measured = [call("benchmarks.limit", *of, "--threads", str(threads))["pieces"] for threads in THREADS]
    pieces = {name: min(m[name] for m in measured) for name in measured[0]}
    updates = [name for name in pieces if name.startswith("update")]
    s = settings_of(job, environments)
    return {"pieces": pieces, "limit": {name: limit(pieces, s, name) for name in updates}}


def limit(pieces: dict[str, float], s: PPOSettings, update: str) -> float:
    """Agent steps per second of the bare pieces, with the fastest forward and the given update."""
    forward = min(seconds for name, seconds in pieces.items() if name.startswith("forward"))
    rollout = s.rollout * (pieces["environment"] + forward)
    return s.environments * s.rollout / (rollout + s.epochs * s.minibatches * pieces[update])


if __name__ == "__main__":
    main()
