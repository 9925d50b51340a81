"""``ludus record RUN``: write episodes of a trained policy, or the replay buffer of a run, to a dataset."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ludus.cli.arguments import parse
from ludus.cli.output import by_agent, say
from ludus.core.errors import UserError
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.settings import check_minimum

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.core.dataset import RecordedEpisode
    from ludus.runs.policy import Player


OF_EPISODES = ("episodes", "checkpoint", "stochastic", "seed")  # flags about playing, of no use with --replay


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Record episodes of a trained policy as a dataset."""

    # folder of a run, folder with several runs (the latest is used), or latest
    run: Annotated[str, "RUN"]
    episodes: int = 10  # number of episodes
    # write an .npz file; without it and --minari a new one in the folder of the run, such as episodes-1.npz
    out: Annotated[str, "FILE"] = ""
    minari: Annotated[str, "ID"] = ""  # write a local Minari dataset, such as cartpole/ppo-v0
    # write what is in the replay buffer of the run's newest checkpoint, instead of playing episodes
    replay: bool = False
    checkpoint: str = "best"  # best, latest, or a step such as step_50000
    stochastic: bool = False  # sample actions as in training, instead of the most likely one
    seed: int = 0  # seed of the environments
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    runs: Annotated[str, "FOLDER"] = "runs"  # folder in which to look for latest


def run(argv: list[str]) -> int:
    """Record, write and say what to do with it."""
    arguments = parse(Arguments, argv, "record")
    check(arguments)
    directory = RunDirectory.open(arguments.run, arguments.runs)  # before torch is imported
    from ludus.runs.policy import load

    checkpoint = directory.resolve_checkpoint(arguments.checkpoint)
    player = load(directory.path, checkpoint, arguments.runs, trust=arguments.trust)
    player.use_threads()
    try:
        episodes = record(player, directory, arguments)
        write(player, episodes, directory, arguments)
    finally:
        player.close()
    return 0


def check(arguments: Arguments) -> None:
    """Refuse arguments that cannot be used."""
    check_minimum("--episodes", arguments.episodes, 1)
    check_minimum("--seed", arguments.seed, 0)
    check_checkpoint_name(arguments.checkpoint)
    changed = [name for name in OF_EPISODES if getattr(arguments, name) != getattr(Arguments, name)]
    if arguments.replay and changed:
        raise UserError(
            f"--replay writes all that is in the replay buffer of the newest checkpoint, so --{changed[0]} has no "
            "effect; leave it out."
        )
    if arguments.out and not arguments.out.endswith(".npz"):
        raise UserError(f'--out is "{arguments.out}", but must end in .npz.')
    if arguments.out and not Path(arguments.out).absolute().parent.is_dir():
        raise UserError(f'--out is "{arguments.out}", but its folder does not exist; create it.')
    if arguments.minari:
        from ludus.data.minari import check_new

        check_new(arguments.minari)


def record(player: Player, directory: RunDirectory, arguments: Arguments) -> list[RecordedEpisode]:
    """Return the episodes."""
    from ludus.runs.record import record_episodes, record_replay

    if arguments.replay:
        return record_replay(player, directory)
    bar = sys.stderr.isatty()

    def on_done(done: int, total: int) -> None:
        if bar:
            print(f"\r{done} of {total} episodes", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return record_episodes(player, arguments.episodes, arguments.seed, not arguments.stochastic, on_done)


def write(player: Player, episodes: list[RecordedEpisode], directory: RunDirectory, arguments: Arguments) -> None:
    """Write the dataset and print its figures."""
    from ludus.data.npz import save_npz, save_numbered
    from ludus.environments.multiagent import REWARD
    from ludus.managers.roles import agents_of
    from ludus.runs.record import recorded_rows

    settings, names, rows = player.settings, [], recorded_rows(player, arguments.replay)
    if not arguments.out and not arguments.minari:
        names.append(str(save_numbered(directory.path, "replay" if arguments.replay else "episodes", episodes)))
    if arguments.out:
        save_npz(arguments.out, episodes)
        names.append(arguments.out)
    if arguments.minari:
        from ludus.data.minari import save_minari

        save_minari(arguments.minari, episodes, rows.observation, rows.action, settings.env.id, settings.agent_names)
        names.append(f"minari:{arguments.minari}")
    returns = [float(episode.reward.sum()) for episode in episodes]
    steps = sum(episode.length for episode in episodes)
    agents = agents_of(rows.observation)
    own = {a: float(np.mean([x.observation[f"{REWARD}/{a}"][1:].sum() for x in episodes])) for a in agents}
    spread = f"{np.mean(returns):.2f} (std {np.std(returns):.2f})"
    say(f"{len(episodes)} episodes, {steps:,} steps, return {spread}{by_agent(own)}")
    hint = f"Clone it with `ludus train {settings.env.id} --agent bc --data {names[0]}`."
    if arguments.replay:  # of mixed quality
        hint = f"Learn from it with `ludus train {settings.env.id} --agent iql --data {names[0]}`."
    if agents:
        hint = "Each step has all agents: maddpg, vdn or qmix can learn from it (docs/multiagent.md)."
    say(f"Written to {' and '.join(names)}. {hint}")
