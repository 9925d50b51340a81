"""Record episodes of a trained policy, or the contents of a run's replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ludus.containers.evaluate import LONGEST
from ludus.containers.team import Team
from ludus.core.agent import Actor
from ludus.core.dataset import RecordedEpisode
from ludus.core.errors import UserError
from ludus.core.files import make_folder
from ludus.core.rows import Rows
from ludus.core.spec import Specs
from ludus.core.step import EnvStep
from ludus.core.types import State, Tensors
from ludus.data.episodes import RowSteps, cut_into_episodes
from ludus.data.npz import save_numbered
from ludus.experience.storage import FINAL, FLAGS, PackedFlags
from ludus.preprocess.actions import ActionPreprocessor
from ludus.runs.folder import RunDirectory
from ludus.runs.policy import Player, load, open_by_name

RECORDED = "recorded"  # folder below that of runs
BRANCH = 3  # of the seeds: other episodes than those of training and evaluations
STEP = ("reward", "terminated", "truncated", "first", "real")
Array = NDArray[Any]
Arrays = dict[str, Array]


def record_run(
    run: str,
    episodes: int,
    runs: str,
    device: str,
    environment: Callable[..., Any] | None = None,
    trust: bool = False,
) -> Path:
    """Let the best policy of a run play episodes greedily; return the new file below ``runs`` that holds them."""
    directory = RunDirectory.open(run, runs)
    player = load(directory.path, device=device, environment=environment, trust=trust)
    try:
        recorded = record_episodes(player, episodes)
    finally:
        player.close()
    folder, path = Path(runs).absolute() / RECORDED, directory.path.absolute()
    make_folder(folder)
    return save_numbered(folder, f"{path.parent.name}-{path.name}", recorded)


def record_episodes(
    player: Player,
    episodes: int,
    seed: int = 0,
    greedy: bool = True,
    on_done: Callable[[int, int], object] = lambda done, total: None,
) -> list[RecordedEpisode]:
    """Play whole episodes, in as many environments as in training, and return them with the environment's actions.

    Each environment plays its share of the episodes, so that short ones are not over-represented.
    """
    rows = Rows.all(min(episodes, player.settings.env.num))
    quota = [episodes // rows.size + (row < episodes % rows.size) for row in range(rows.size)]
    manager = player.environments(rows, BRANCH)
    try:
        collected = list(_play(player, manager, rows, list(quota), seed, greedy, on_done))
    finally:
        manager.close()
    observed, acted, steps, finals = zip(*collected, strict=True)
    arrays = [{name: np.stack([x[name] for x in part]) for name in part[0]} for part in (observed, acted, steps)]
    final = None
    if (like := next((x for x in finals if x is not None), None)) is not None:  # a reset has none
        final = {name: np.stack([(x or like)[name] for x in finals]) for name in like}
    found: list[RecordedEpisode] = []
    for row, count in enumerate(quota):
        parts: list[Any] = [{name: x[:, row] for name, x in part.items()} for part in arrays]
        own = None if final is None else {name: x[:, row] for name, x in final.items()}
        row_steps = RowSteps(parts[0], parts[1], **parts[2], final=own)
        found += islice(cut_into_episodes(row_steps), count)
    return found


def _play(
    player: Player,
    manager: Any,
    rows: Rows,
    quota: list[int],
    seed: int,
    greedy: bool,
    on_done: Callable[[int, int], object],
) -> Iterator[tuple[Arrays, Arrays, Arrays, Arrays | None]]:
    """Step until every row has finished its quota of episodes; yield each step and the environment's actions on it."""
    agent, device, total = player.agent, player.device, sum(quota)
    generator = torch.Generator(device).manual_seed(seed)
    noise = None if greedy else agent.make_noise(rows, generator)
    to_environment = ActionPreprocessor(manager.action, agent.action_transform)
    step, state, waited = manager.reset(seed), agent.initial_state(rows.size), 0
    longest = max(LONGEST, player.settings.env.max_episode_steps + 1)  # with the reset between two episodes
    while True:
        acted = agent.act(step.to(device), state, None if noise is None else noise.next())
        state = acted.state
        yield _arrays(step.observation), to_environment(_arrays(acted.action)), *_transition(step)
        if not any(quota):
            return
        step, waited = manager.step(acted.action), waited + 1
        for episode in manager.episodes():
            if quota[episode.row]:
                quota[episode.row] -= 1
                waited = 0
                on_done(total - sum(quota), total)
        if waited >= longest:
            raise UserError(
                f"An episode had no end after {longest:,} steps; set env.max_episode_steps in the run's settings."
            )


def _transition(step: EnvStep) -> tuple[Arrays, Arrays | None]:
    return _arrays({name: getattr(step, name) for name in STEP}), None if step.final is None else _arrays(step.final)


def _arrays(tensors: Tensors) -> Arrays:
    """Copy tensors, since managers reuse their memory."""
    return {name: x.cpu().numpy().copy() for name, x in tensors.items()}


class Recorded(NamedTuple):
    """What the rows of a dataset are."""

    observation: Specs
    action: Specs
    actor: Actor


def recorded_rows(player: Player, replay: bool) -> Recorded:
    """Return the rows of episodes of a policy, or of a ``replay`` buffer: single agents where they share a policy."""
    if replay and isinstance(player.agent, Team) and len(player.agent.parts) == 1:
        ((role, part),) = player.agent.parts.items()
        return Recorded(part.role.observation, part.role.action, player.agent.actor(role))
    return Recorded(player.observation, player.action, player.agent)


def record_replay(player: Player, directory: RunDirectory) -> list[RecordedEpisode]:
    """Return the episodes, or parts of them, in the replay buffer of a run's newest checkpoint."""
    if player.settings.preprocess.reward:
        raise UserError(
            f'The replay buffer of "{directory.path}" has rewards after preprocess.reward, not those of the '
            "environment; record episodes of its policy with --episodes instead."
        )
    with open_by_name(directory, "latest") as found:
        caches = [found.outline.get("cache"), *(rank["cache"] for rank in found.outline.get("ranks", ()))]
        if not all(isinstance(cache, dict) and _is_replay(cache) for cache in caches):
            raise UserError(
                f'The newest checkpoint of "{directory.path}" has no replay buffer of single steps (agents such as dqn '
                "and sac have one, and save it unless agent.save_replay is off); record episodes of its policy with "
                "--episodes instead."
            )
        whole: State = found.read()
    saved = [whole["cache"], *(rank["cache"] for rank in whole.get("ranks", ()))]
    rows = recorded_rows(player, replay=True)
    to_environment = ActionPreprocessor(rows.action, rows.actor.action_transform)
    groups = [group for cache in saved for group in cache["groups"]]
    episodes = [x for group in groups for x in _episodes_of(group, rows.observation, to_environment, directory)]
    if not episodes:
        raise UserError(f'The replay buffer of "{directory.path}" is empty; train the run further, or use --episodes.')
    return episodes


def _is_replay(cache: State) -> bool:
    groups = cache.get("groups")
    return bool(cache.get("whole")) and isinstance(groups, list) and all("steps" in group for group in groups)


def _episodes_of(
    group: State, observation: Specs, to_environment: ActionPreprocessor, directory: RunDirectory
) -> Iterator[RecordedEpisode]:
    """Yield the episodes of the rows of a saved group (``ExperienceReplay.state_dict``)."""
    columns = {name: torch.cat(pieces, 1).contiguous() for name, pieces in group["steps"].items()}  # [rows, steps, …]
    seen = {name: columns[f"observation/{name}"] for name in observation if f"observation/{name}" in columns}
    if stacks := [name for name in observation if name not in seen]:
        raise UserError(
            f'The replay buffer of "{directory.path}" stores the observation "{stacks[0]}" as single frames of a '
            "stack, which are not written; record episodes of its policy with --episodes instead."
        )
    flags = PackedFlags(columns[FLAGS])
    acted = {name.removeprefix("action/"): x for name, x in columns.items() if name.startswith("action/")}
    finals = {name.removeprefix(FINAL): x for name, x in columns.items() if name.startswith(FINAL)}
    for row in range(len(columns[FLAGS])):
        yield from cut_into_episodes(
            RowSteps(
                {name: x[row].numpy() for name, x in seen.items()},
                to_environment({name: x[row].numpy() for name, x in acted.items()}),
                **{name: getattr(flags, name)[row].numpy() for name in STEP},
                final={name: x[row].numpy() for name, x in finals.items()} or None,
            )
        )
