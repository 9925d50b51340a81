"""``ludus play RUN``: watch a trained policy in a window, or write a video if there is no screen."""

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
from ludus.cli.output import by_agent, say
from ludus.core.errors import UserError
from ludus.core.rows import Rows
from ludus.logging.video import Frame, write_video
from ludus.runs.folder import RunDirectory, check_checkpoint_name
from ludus.settings.settings import check_maximum, check_minimum

if TYPE_CHECKING:  # it imports torch, and `--help` should not
    from ludus.runs.policy import Player


FPS = 30.0  # frames per second if the environment has no render_fps


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Watch a trained policy in a window, or write a video if there is no screen."""

    # folder of a run, folder with several runs (the latest is used), or latest
    run: Annotated[str, "RUN"]
    episodes: int = 1  # number of episodes
    # write a video (.mp4 or .gif) to this file instead of opening a window
    out: Annotated[str, "FILE"] = ""
    # frames per second; none: render_fps of the environment, else 30
    fps: float | None = None
    checkpoint: str = "best"  # best, latest, or a step such as step_50000
    stochastic: bool = False  # sample actions as in training, instead of the most likely one
    seed: int = 0  # seed of the environment
    # import the classes that the run's config.toml names, even if you did not create it on this machine
    trust: bool = False
    runs: Annotated[str, "FOLDER"] = "runs"  # folder in which to look for latest


def run(argv: list[str]) -> int:
    """Play in a window or write a video."""
    arguments = parse(Arguments, argv, "play")
    check_minimum("--episodes", arguments.episodes, 1)
    check_minimum("--seed", arguments.seed, 0)
    if arguments.fps is not None:
        check_minimum("--fps", arguments.fps, 0.1)
        check_maximum("--fps", arguments.fps, 1000)
    if arguments.out and Path(arguments.out).suffix not in (".mp4", ".gif"):
        raise UserError(f'--out is "{arguments.out}", but must end in .mp4 or .gif.')
    check_checkpoint_name(arguments.checkpoint)
    directory = RunDirectory.open(arguments.run, arguments.runs)
    screen = not sys.platform.startswith("linux") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    windowed = not arguments.out and screen
    if not windowed:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no screen then
    from ludus.runs.policy import load

    checkpoint = directory.resolve_checkpoint(arguments.checkpoint)
    player = load(directory.path, checkpoint, arguments.runs, trust=arguments.trust)
    player.use_threads()
    manager: Any = player.environment("rgb_array")
    images, fps = frames(player, manager, arguments), arguments.fps or manager.render_fps or FPS
    if windowed:
        show_window(images, fps, f"ludus play {arguments.run}")
        return 0
    path = (
        Path(arguments.out)
        if arguments.out
        else directory.videos / f"{time.strftime('%Y%m%d-%H%M%S')}-{checkpoint}.mp4"
    )
    say(f"Video: {write_video(images, path, fps, follows=bool(arguments.out))}")
    return 0


def frames(player: Player, manager: Any, arguments: Arguments) -> Iterator[Frame]:
    """Play the episodes, yield a frame of every step and print the result of every episode."""
    import torch

    from ludus.containers.evaluate import LONGEST
    from ludus.managers.roles import agents_of

    agents = agents_of(player.observation)
    noise = (
        player.agent.make_noise(Rows.all(1), torch.Generator(player.device).manual_seed(arguments.seed))
        if arguments.stochastic
        else None
    )
    try:
        step, state, played = manager.reset(arguments.seed).to(player.device), player.agent.initial_state(1), 0
        for _ in range(LONGEST * arguments.episodes):
            if played == arguments.episodes:
                break
            yield to_frame(manager.render(), player.settings.env.id)
            agent_step = player.agent.act(step, state, noise.next() if noise else None)
            step, state = manager.step(agent_step.action).to(player.device), agent_step.state
            for episode in manager.episodes():
                played += 1
                each = by_agent({agent: episode.infos[f"return/{agent}"] for agent in agents})
                say(f"Episode {played}: return {episode.reward:.2f}{each}, {episode.length} steps")
        yield to_frame(manager.render(), player.settings.env.id)
    finally:
        manager.close()


def to_frame(rendered: Any, name: str) -> Frame:
    """Return one frame ``[H, W, 3]``, given alone or as a batch of one."""
    if rendered is None:
        raise UserError(f'Environment "{name}" renders nothing in render_mode rgb_array: return a frame from render.')
    array = np.asarray(rendered)
    return array[0] if array.ndim == 4 else array


def show_window(frames: Iterable[Frame], fps: float, title: str) -> None:
    """Show frames in a window until they end or the window is closed."""
    try:
        import pygame
    except ImportError as error:
        raise UserError("A window needs pygame: `pip install pygame-ce`, or use --out FILE.mp4.") from error
    try:
        pygame.display.init()
        if pygame.display.get_driver() == "offscreen":  # SDL's fallback if no display responds
            raise pygame.error("no display responds")
        pygame.display.set_caption(title)
        clock, window = pygame.time.Clock(), None
        for image in frames:
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
