"""Train and use a policy from Python: ``python train_in_python.py`` in this folder."""

from __future__ import annotations

from collections.abc import Mapping

from my_environment import Docking

import ludus


def main(nb_step: int = 50_000) -> None:
    """Train, load the best policy and play one episode."""
    best = float("-inf")

    def on_update(metrics: Mapping[str, float]) -> None:  # called after every update
        nonlocal best
        best = max(best, metrics.get("return", best))

    settings = {"env.num": 16, "agent.entropy_coef": 0.01, "evaluation.every": 10_000}
    result = ludus.train(Docking, nb_step=nb_step, settings=settings, on_update=on_update)
    print(f"{result.steps} steps, best mean return in training {best:.2f}, run in {result.run}")

    player = ludus.load(result.run)
    env = Docking()
    observation, _ = env.reset(seed=1)
    total, done, first = 0.0, False, True
    while not done:
        action = player.act(observation, first=first)  # one observation, or a batch of them
        observation, reward, terminated, truncated, _ = env.step(action)
        total, done, first = total + reward, terminated or truncated, False
    print(f"One episode: return {total:.2f}")


if __name__ == "__main__":
    main()
