"""``ludus play RUN``: watch a trained policy, in a window where there is a screen, else as a video file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from ludus.cli.arguments import parse
from ludus.cli.output import say
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.logging.video import Frame, write_video
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.settings import check_maximum, check_minimum

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.runs.policy import Player


FPS = 30.0  # pictures per second where the environment does not say


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Watch a trained policy: in a window, or as a video where there is no screen."""

    # The folder of a run, a folder of runs (its latest is taken), or latest.
    run: Annotated[str, "RUN"]
    episodes: int = 1  # how many to play
    # Write a video (.mp4 or .gif) to this file instead of opening a window.
    out: Annotated[str, "FILE"] = ""
    # Pictures per second; more is faster. By default the environment's own (render_fps in its metadata), else 30.
    fps: float | None = None
    checkpoint: str = "best"  # which of the run's policies: best, latest, or one of its checkpoints such as step_50000
    stochastic: bool = False  # sample actions as in training, instead of taking the likeliest
    seed: int = 0  # of the environment; another seed gives other episodes
    trust: bool = False  # import what the run's config.toml names, though you did not make it on this machine
    runs: Annotated[str, "FOLDER"] = "runs"  # where latest is looked for


def run(argv: list[str]) -> int:
    """Play, and say where the video is."""
    given = parse(Arguments, argv, "play")
    check_minimum("--episodes", given.episodes, 1)
    check_minimum("--seed", given.seed, 0)
    if given.fps is not None:
        check_minimum("--fps", given.fps, 0.1)
        check_maximum("--fps", given.fps, 1000)
    if given.out and Path(given.out).suffix not in (".mp4", ".gif"):
        raise UserError(f'--out is "{given.out}", but a video ends in .mp4 or .gif.')
    check_checkpoint_name(given.checkpoint)
    directory = RunDirectory.open(given.run, given.runs)
    windowed = not given.out and has_screen()
    if not windowed:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # environments that draw with pygame look for a screen else
    from ludus.runs.policy import load

    checkpoint = directory.resolve_checkpoint(given.checkpoint)
    player = load(directory.path, checkpoint, given.runs, trust=given.trust)
    player.use_threads()
    manager: Any = player.environment("rgb_array")
    pictures, fps = frames(player, manager, given), given.fps or manager.render_fps or FPS
    if windowed:
        show(pictures, fps, f"ludus play {given.run}")
        return 0
    path = Path(given.out) if given.out else directory.videos / f"{time.strftime('%Y%m%d-%H%M%S')}-{checkpoint}.mp4"
    say(f"Video: {write_video(pictures, path, fps, follows=bool(given.out))}")
    return 0


def frames(player: Player, manager: Any, given: Arguments) -> Iterator[Frame]:
    """Play the episodes, giving a picture of every step and a line on every ending."""
    import torch

    from ludus.containers.evaluate import LONGEST

    noise = (
        player.agent.make_noise(Rows.all(1), torch.Generator(player.device).manual_seed(given.seed))
        if given.stochastic
        else None
    )
    try:
        step, state, played = manager.reset(given.seed).to(player.device), player.agent.initial_state(1), 0
        for _ in range(LONGEST * given.episodes):
            if played == given.episodes:
                break
            yield picture(manager.render(), player.settings.env.id)
            said = player.agent.act(step, state, noise.next() if noise else None)
            step, state = manager.step(said.action).to(player.device), said.state
            for episode in manager.episodes():
                played += 1
                print(f"Episode {played}: return {episode.reward:.2f}, {episode.length} steps")
        yield picture(manager.render(), player.settings.env.id)
    finally:
        manager.close()


def picture(rendered: Any, name: str) -> Frame:
    """One picture ``[H, W, 3]``, whether the environment gave it alone or in a batch of one."""
    if rendered is None:
        raise UserError(f'Environment "{name}" renders nothing in render_mode rgb_array; return a picture from render.')
    array = np.asarray(rendered)
    return array[0] if array.ndim == 4 else array


def has_screen() -> bool:
    """Whether a window can be opened."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show(pictures: Iterable[Frame], fps: float, title: str) -> None:
    """Show pictures in a window until they end or the window is closed."""
    try:
        import pygame
    except ImportError as error:
        raise UserError("A window needs one more package: `pip install pygame`, or use --out FILE.mp4.") from error
    try:
        pygame.display.init()
        if pygame.display.get_driver() == "offscreen":  # what SDL falls back to where nothing answers at DISPLAY
            raise pygame.error("no screen answers")
        pygame.display.set_caption(title)
        clock, window = pygame.time.Clock(), None
        for image in pictures:
            if any(event.type == pygame.QUIT for event in pygame.event.get()):
                return
            window = window or pygame.display.set_mode(image.shape[1::-1])
            window.blit(pygame.surfarray.make_surface(image.swapaxes(0, 1)), (0, 0))
            pygame.display.flip()
            clock.tick(fps)
    except pygame.error as error:
        raise UserError(f"No window can be opened ({error}); use --out FILE.mp4.") from error
    finally:
        pygame.display.quit()
