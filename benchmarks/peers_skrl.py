"""skrl's PPO_RNN on the job ``recurrent`` of ``protocol.py``: ``python -m benchmarks.peers_skrl recurrent``."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from skrl import logger
from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from torch import Tensor, nn

from benchmarks.protocol import JOBS, Meter, PPOSettings, arguments, emit

HIDDEN = 64


class Enough(Exception):
    """Raised after an update to end a run."""


class Recurrent(Model):  # type: ignore[misc]
    """An LSTM, two tanh layers of 64 and a linear one: the network of both other libraries."""

    def __init__(self, env: Any, outputs: int, s: PPOSettings) -> None:
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        self._environments, self._size, self._steps = s.environments, s.lstm, s.rollout
        self.lstm = nn.LSTM(self.num_observations, s.lstm, batch_first=True)
        sizes = (s.lstm, HIDDEN, HIDDEN)
        layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(HIDDEN, outputs))

    def get_specification(self) -> dict[str, Any]:
        """Declare the hidden state, h and c, and the length of sequences."""
        return {"rnn": {"sequence_length": self._steps, "sizes": [(1, self._environments, self._size)] * 2}}

    def compute(self, inputs: dict[str, Any], role: str) -> tuple[Tensor, dict[str, Any]]:
        """Run one step, or whole sequences in parts between the steps at which an episode of any row ended."""
        x, (h, c) = inputs["observations"], inputs["rnn"]
        if "terminated" not in inputs:  # acting
            y, (h, c) = self.lstm(x.unsqueeze(1), (h.contiguous(), c.contiguous()))
            return self.layers(y.squeeze(1)), {"rnn": [h, c]}
        x = x.view(-1, self._steps, x.shape[-1])
        h, c = (z.view(1, -1, self._steps, self._size)[:, :, 0].contiguous() for z in (h, c))
        ended = inputs["terminated"] | inputs["truncated"]
        ended = ended.view(-1, self._steps)
        cuts = [0, *((ended[:, :-1].any(0)).nonzero().flatten() + 1).tolist(), self._steps]
        parts = []
        for start, stop in pairwise(cuts):
            y, (h, c) = self.lstm(x[:, start:stop], (h, c))
            keep = ~ended[:, stop - 1].view(1, -1, 1)
            h, c = h * keep, c * keep
            parts.append(y)
        return self.layers(torch.cat(parts, 1).flatten(0, 1)), {"rnn": [h, c]}


class Policy(CategoricalMixin, Recurrent):  # type: ignore[misc]
    """Logits of the actions."""

    def __init__(self, env: Any, s: PPOSettings) -> None:
        Recurrent.__init__(self, env, int(env.action_space.n), s)
        CategoricalMixin.__init__(self)


class Value(DeterministicMixin, Recurrent):  # type: ignore[misc]
    """The value of an observation."""

    def __init__(self, env: Any, s: PPOSettings) -> None:
        Recurrent.__init__(self, env, 1, s)
        DeterministicMixin.__init__(self)


class CountSteps(gymnasium.vector.VectorWrapper):
    """Counts steps of environments without the resets after an episode's end."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count, self._ended = 0, np.zeros(self.num_envs, bool)

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.count += self.num_envs - int(np.count_nonzero(self._ended))
        self._ended = result[2] | result[3]
        return result


def run(args: Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    logger.setLevel("ERROR")  # the last line of the output is the result
    s = JOBS[args.job]
    counter = CountSteps(
        gymnasium.make_vec("CartPole-v1", num_envs=s.environments, vectorization_mode="vector_entry_point")
    )
    env = wrap_env(counter, wrapper="gymnasium", verbose=False)
    cfg = PPO_CFG(
        rollouts=s.rollout,
        learning_epochs=s.epochs,
        mini_batches=s.minibatches,
        discount_factor=s.gamma,
        gae_lambda=s.gae_lambda,
        learning_rate=s.learning_rate,
        grad_norm_clip=s.max_grad_norm,
        ratio_clip=s.clip,
        value_clip=0.0,
        entropy_loss_scale=s.entropy,
        value_loss_scale=s.value,
    )
    cfg.experiment.directory = tempfile.mkdtemp(prefix="skrl-")
    cfg.experiment.write_interval, cfg.experiment.checkpoint_interval = s.rollout, 0
    agent = PPO_RNN(
        models={"policy": Policy(env, s), "value": Value(env, s)},
        memory=RandomMemory(memory_size=s.rollout, num_envs=s.environments, device="cpu"),
        observation_space=env.observation_space,
        action_space=env.action_space,
        device="cpu",
        cfg=cfg,
    )
    meter, update = Meter(args.warm_up, args.seconds), agent.update

    def watch(**more: Any) -> None:
        update(**more)
        if meter.update(counter.count):
            raise Enough

    agent.update = watch
    trainer = SequentialTrainer(
        env=env, agents=agent, cfg={"timesteps": s.steps, "disable_progressbar": True, "headless": True}
    )
    try:
        trainer.train()
    except Enough:
        emit(side="skrl", job=args.job, threads=args.threads, seed=args.seed, rate=meter.rate)


if __name__ == "__main__":
    run(arguments("One round of skrl.").parse_args())
