import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ludus.cli.main import main
from ludus.cli.play import show_window
from ludus.core.errors import UserError

ROOT = Path(__file__).parents[2]
SHORT_RUN = ["--compile", "off", "--env.num", "2", "--agent.rollout", "16", "--evaluation.episodes", "2", "--quiet"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


def in_own_process(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


LIGHT = [[], ["--help"], ["list"], ["list", "environments"], ["check", "--help"], ["play", "--help"]]


def test_light_commands_never_import_torch() -> None:
    code = "import sys\nfrom ludus.cli.main import main\n"
    said = in_own_process(f"{code}print([(main(argv), 'torch' in sys.modules) for argv in {LIGHT!r}])")
    assert said.splitlines()[-1] == str([(0, False)] * len(LIGHT))


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for command in ("train", "evaluate", "play", "list", "check"):
        assert f"ludus {command}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ludus 0.")


@pytest.mark.parametrize("command", ["train", "evaluate", "play", "list", "check"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: ludus {command}" in capsys.readouterr().out


def test_help_shows_the_defaults_of_preset_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", "--agent.gamma", "0.123", "--help"]) == 0
    out = capsys.readouterr().out
    assert "cartpole/ppo" in out
    assert "0.123" in out  # the flag
    assert "0.8" in out  # gae_lambda of the preset
    assert "--agent.clip" in out
    main(["train", "CartPole-v1", "--agent", "a2c", "--help"])
    assert "--agent.clip" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train"], "ludus train CartPole-v1"),
        (["train", "CartPol-v1"], 'Did you mean "CartPole-v1"?'),
        (["train", "CartPole-v1", "--agent", "pppo"], 'Unknown agent "pppo". Did you mean "ppo"?'),
        (["train", "Pendulum-v1", "crossq", "--agent.warmup", "100"], '"crossq" is an agent: write --agent crossq.'),
        (["train", "--agent.warmup", "100", "Pendulum-v1", "crossq"], '"crossq" is an agent: write --agent crossq.'),
        (["train", "Pendulum-v1", "--agent.warmup", "100", "crossq"], '"crossq" is an agent: write --agent crossq.'),
        (["train", "Pendulum-v1", "crosq", "--agent.warmup", "100"], 'but got "Pendulum-v1" and "crosq".'),
        (["train", "Pendulum-v1", "--env.wrapers", "a", "b"], 'Did you mean "--env.wrappers"?'),
        (["train", "CartPole-v1", "--network", "modulr"], 'Did you mean "modular"?'),
        (["train", "CartPole-v1", "--preset", "cartpole"], 'Did you mean "cartpole/'),
        (["train", "CartPole-v1", "--agent.lerning-rate", "1"], 'Did you mean "--agent.learning-rate"?'),
        (["train", "CartPole-v1", "--lr", "1"], 'Did you mean "--agent.learning-rate"?'),
        (["train", "CartPole-v1", "--agent.lr", "1"], 'Did you mean "--agent.learning-rate"?'),
        (
            ["train", "CartPole-v1", "--agent.hindsight", "1"],
            "ppo has no such setting; dqn, ",
        ),
        (["train", "CartPole-v1", "--agent.no-prioritized"], "Unknown flag --agent.no-prioritized: ppo has no such"),
        (["train", "Pendulum-v1", "--agent", "sac", "--agent.clip", "1"], "sac has no such setting; ppo, "),
        (["train", "CartPole-v1", "--agent.distribution", "beta"], "no continuous actions"),
        (["train", "CartPole-v1", "--network.lstm-size", "32"], "no piece of the network is an lstm"),
        (["train", "CartPole-v1", "--network.net3d", "identity3d"], "no image observation"),
        (["train", "CartPole-v1", "-x"], "-x"),
        (["train", "CartPole-v1", "--agent.gamma"], "--agent.gamma needs a value"),
        (["train", "CartPole-v1", "--agent.gamma", "--quiet"], "--agent.gamma needs a value"),
        (["train", "CartPole-v1", "--agent.gamma", "high"], 'agent.gamma is "high"'),
        (["train", "CartPole-v1", "--quiet=yes"], "--quiet takes no value"),
        (["train", "CartPole-v1", "Acrobot-v1"], "Acrobot-v1"),
        (["train", "CartPole-v1", "--env.id", "Acrobot-v1"], "Two environments"),
        (["train", "CartPole-v1", "--config", "nowhere.toml"], "nowhere.toml"),
        (["train", "CartPole-v1", "--nb-step", "0"], "nb_step is 0"),
        (["train", "CartPole-v1", "--env.num", "-3"], "env.num is -3"),
        (["train", "CartPole-v1", "--agent.minibatches", "1000"], "agent.minibatches is 1000"),
        (["train", "CartPole-v1", "--device", "warp"], 'device is "warp"'),
        (["train", "CartPole-v1", "--init-from", "nowhere"], "nowhere"),
        (
            ["resume", "latest", "--agent.learning-rate", "1"],
            "--init-from RUN --agent.learning-rate ...",
        ),
        (["resume", "latest", "--seed=1"], "Unknown flag --seed: a resume can only change"),
        (["resume", "latest", "--evaluation.stop-at", "1"], 'Did you mean "--stop-at"?'),
        (["resume", "latest", "--nbstep", "1"], 'Did you mean "--nb-step"?'),
        (["evaluate"], "needs a run"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate", "latest"], "no run"),
        (["evaluate", "latest", "--episodes", "0"], "--episodes is 0"),
        (["evaluate", "latest", "--checkpoint", "bst"], 'Did you mean "best"?'),
        (["play", "."], "not a run folder"),
        (["play", "latest", "--out", "film.avi"], "film.avi"),
        (["list", "agent"], 'Did you mean "agents"?'),
        (["check"], "No environment was given"),
        (["check", "CartPole-v1", "--num", "3"], "--num"),
    ],
)
def test_bad_input_is_one_sentence_on_stderr_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("ludus: ")
    assert err.count("\n") == 1
    assert out == ""
    assert not Path("runs").exists()


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    for what, named in {
        "agents": ["ppo", "a2c"],
        "networks": ["modular", "lstm"],
        "presets": ["cartpole/ppo", "100,000"],
        "environments": ["CartPole-v1", "Pendulum-v1"],
    }.items():
        assert main(["list", what]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in named)
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "ppo" in out
    assert "Pendulum-v1 " in out  # by its preset
    assert "MountainCar" not in out


def test_check_says_what_is_wrong_and_what_to_type_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "CartPole-v1"]) == 0
    assert "`ludus train CartPole-v1`" in capsys.readouterr().out
    (tmp_path / "broken_env_for_cli.py").write_text(
        "import gymnasium, numpy\n"
        "class Broken(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,), numpy.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return numpy.full(2, numpy.nan, numpy.float32), {}\n"
        "    def step(self, action): return numpy.zeros(3, numpy.float32), 0.0, False, False, {}\n"
    )
    assert main(["check", "broken_env_for_cli:Broken"]) == 2
    out = capsys.readouterr().out
    assert out.count("error  ") >= 2
    assert out.count("fix: ") >= 2
    assert main(["check", "CartPol-v1"]) == 2
    assert '"CartPole-v1"' in capsys.readouterr().out


def test_check_uses_the_backend_that_training_would(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("envpool")
    assert main(["check", "Pong-v5"]) == 0  # its preset says envpool
    assert "`ludus train Pong-v5`" in capsys.readouterr().out
    assert main(["check", "Breakout-v5"]) == 2
    assert "Add --env.backend envpool." in capsys.readouterr().out
    assert main(["check", "Breakout-v5", "--env.backend", "envpool"]) == 0
    assert main(["check", "Pong-v5", "--env.options", "no_such=1"]) == 2
    out = capsys.readouterr().out
    assert "no_such" in out
    assert "Do what the message says" not in out


def test_train_evaluate_and_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPole-v1", "--nb-step", "64", *SHORT_RUN]) == 0
    (config,) = tmp_path.glob("runs/CartPole-v1/*/config.toml")
    assert capsys.readouterr().out == f"{config.parent.relative_to(tmp_path)}\n"  # quiet: the run's path alone
    assert "rollout = 16  # flag" in config.read_text()
    assert "gamma = 0.98  # preset cartpole/ppo" in config.read_text()
    assert main(["evaluate", "latest", "--episodes", "3", "--stochastic"]) == 0
    out = capsys.readouterr().out
    assert "episodes  3" in out
    assert "95% confidence interval" in out
    assert main(["play", str(config.parent), "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "Episode 2: return" in out
    (video,) = config.parent.glob("videos/*")
    assert str(video.relative_to(tmp_path)) in out or str(video) in out
    assert main(["play", "latest", "--out", "film.gif"]) == 0
    assert Path("film.gif").stat().st_size > 0
    assert main(["evaluate", "runs/CartPole-v1", "--episodes", "1"]) == 0  # a folder of runs: its latest
    assert str(config.parent.relative_to(tmp_path)) in capsys.readouterr().out
    assert main(["train", "CartPole-v1", "--nb-step", "32", "--init-from", "runs/CartPole-v1", *SHORT_RUN]) == 0
    assert (
        main(["train", "--config", str(config), "--nb-step", "32", "--quiet"]) == 0
    )  # a run's file is a settings file


def test_closing_hints_name_the_run_as_it_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loud = [word for word in SHORT_RUN if word != "--quiet"]
    assert main(["train", "CartPole-v1", "--nb-step", "64", *loud]) == 0
    (run,) = (path.relative_to(tmp_path) for path in tmp_path.glob("runs/CartPole-v1/*"))
    hints = capsys.readouterr().out.splitlines()[-3:]
    assert [hint.split()[-2:] for hint in hints] == [["play", str(run)], ["evaluate", str(run)], ["--logdir", "runs"]]
    away = Path("my runs") / "mine"
    away.parent.mkdir()
    run.rename(away)
    assert main(["resume", str(away)]) == 0
    complete, *hints = capsys.readouterr().out.splitlines()
    assert re.match(rf'The run "{away}" is complete: it has done \d+ steps and nb_step is 64; ', complete)
    assert [hint.partition(" '")[2] for hint in hints] == ["my runs/mine'"] * 3
    for hint in hints[:2]:
        assert main([*shlex.split(hint)[2:], "--episodes", "1"]) == 0


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_play_is_not_suggested_for_an_environment_that_cannot_draw(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = [word for word in SHORT_RUN if word != "--quiet"] + ["--env.backend", backend, "--nb-step", "64"]
    assert main(["train", "ludus.environments.toy:CountingEnv", *loud]) == 0
    out = capsys.readouterr().out
    assert "Evaluate:" in out
    assert "Watch:" not in out
    assert main(["resume", "latest", "--nb-step", "96"]) == 0
    assert "Watch:" not in capsys.readouterr().out


def test_a_video_has_the_speed_that_the_environment_names(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, fps in (("Slow", 8), ("Odd", 0)):
        Path(f"{name.lower()}_world.py").write_text(
            "from gymnasium.envs.classic_control import CartPoleEnv\n"
            f"class {name}(CartPoleEnv):\n    metadata = CartPoleEnv.metadata | {{'render_fps': {fps}}}\n"
        )
        world = f"{name.lower()}_world:{name}"
        limit = ["--env.max-episode-steps", "20", "--preset", "none"]
        assert main(["train", world, "--nb-step", "64", *SHORT_RUN, *limit]) == 0
        assert main(["play", "latest", "--out", f"{name}.gif"]) == 0
    assert main(["play", "latest", "--out", "fast.gif", "--fps", "40"]) == 0
    for name, milliseconds in (("Slow", 120), ("Odd", 30), ("fast", 20)):  # 8, 30 and 40 a second, in hundredths
        with image.open(f"{name}.gif") as film:
            durations = []  # two pictures that are equal become one of twice the time
            for number in range(film.n_frames):
                film.seek(number)
                durations.append(film.info["duration"])
            assert min(durations) == milliseconds


def test_ctrl_c_saves_and_exits_with_130(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ludus.cli.main",
        "train",
        "CartPole-v1",
        "--nb-step",
        "100_000_000",
        "--compile",
        "off",
        *SHORT_RUN,
    ]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, preexec_fn=heed
    )
    try:
        while process.poll() is None and not any(f.stat().st_size for f in tmp_path.glob("runs/*/*/metrics.jsonl")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    (run,) = tmp_path.glob("runs/*/*")
    assert out == f"{run.relative_to(tmp_path)}\n"
    assert main(["evaluate", "latest", "--checkpoint", "latest", "--episodes", "1"]) == 0


def test_a_window_shows_every_picture_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown = []
    flip = pygame.display.flip
    monkeypatch.setattr(pygame.display, "flip", lambda: (shown.append(pygame.display.get_surface().get_size()), flip()))
    show_window((np.full((20, 30, 3), value, np.uint8) for value in range(4)), fps=1000, title="test")
    assert shown == [(30, 20)] * 4
    assert not pygame.display.get_init()


def test_a_screen_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "offscreen")
    with pytest.raises(UserError, match="--out"):
        show_window(iter([np.zeros((2, 2, 3), np.uint8)]), fps=30, title="test")


def test_atari_games_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ale_py")
    assert main(["list", "environments"]) == 0
    out = capsys.readouterr().out
    assert "ALE/Pong-v5" in out
    assert "atari/ppo" in out
    assert max(map(len, out.splitlines()[:-3])) <= 100
