"""Run folders made by an enemy: no command runs, nothing is imported, nothing outside is written or deleted."""

import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from faults_setup import TINY, digest, flags

import ludus
import ludus.environments
from ludus.cli.main import main
from ludus.core.errors import UserError
from ludus.environments.gym import GymAdapter
from ludus.environments.multiagent import JointEnv
from ludus.runs.checkpoint import load, save
from ludus.settings.signature import key_path, sign
from ludus.settings.trust import find_imports

TRAIN = ["--preset", "none", *flags(TINY | {"agent.minibatches": 2})]
ROOT = Path(__file__).parents[2]
EVIL = """
import pathlib
pathlib.Path("imported").touch()
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv as Env
from ludus.agents.ppo import PPO as Agent
from ludus.networks.net1d.mlp import MLP as Piece
from gymnasium.wrappers import TransformReward as Wrapper
gymnasium.register("Evil-v0", "gymnasium.envs.classic_control:CartPoleEnv")
"""
SHELL = r'options = ["args=\"touch ran\"", "shell=true"]'
HOSTILE = {  # what is replaced in config.toml, and what the sentence has to name
    "a command": [('"CartPole-v1"', '"subprocess:run"'), ("options = []", SHELL), ("import subprocess:run (env.id)",)],
    "an environment": [('"CartPole-v1"', '"evil:Env"'), ("import evil:Env (env.id)",)],
    "a module of ids": [('"CartPole-v1"', '"evil:Evil-v0"'), ("import evil:Evil-v0 (env.id)",)],
    "an option": [
        ('"CartPole-v1"', '"GymV26Environment-v0"'),
        ("options = []", r'options = ["env_id=\"evil:Evil-v0\""]'),
        ("import evil:Evil-v0 (env.options)",),
    ],
    "an option with nothing behind the colon": [
        ('"CartPole-v1"', '"GymV26Environment-v0"'),
        ("options = []", r'options = ["env_id=\"evil:\""]'),
        ("import evil: (env.options)",),
    ],
    "a wrapper": [("wrappers = []", 'wrappers = ["evil:Wrapper"]'), ("import evil:Wrapper (env.wrappers)",)],
    "a function as wrapper": [("wrappers = []", 'wrappers = ["os:remove"]'), ("import os:remove (env.wrappers)",)],
    "a wrapper that writes": [
        ("wrappers = []", r'wrappers = ["gymnasium.wrappers:RecordVideo(video_folder=\"outside\")"]'),
        ("import gymnasium.wrappers:RecordVideo (env.wrappers)",),
    ],
    "a wrapper that needs a package": [
        ("wrappers = []", 'wrappers = ["gymnasium.wrappers:ArrayConversion"]'),
        ("import gymnasium.wrappers:ArrayConversion (env.wrappers)",),
    ],
    "a piece of one network": [
        ("[network]\n", '[network]\ncritic.net1d = "evil:Piece"\n'),
        ("import evil:Piece (network.critic.net1d)",),
    ],
    "an agent": [('name = "ppo"', 'name = "evil:Agent"'), ("import evil:Agent (agent.name)",)],
    "a noise": [("[agent]\n", '[agent]\nnoise = "evil:Noise(size=1)"\n'), ("import evil:Noise (agent.noise)",)],
    "a schedule": [("clip = 0.2", 'clip = "evil:Schedule(0: 1)"'), ("import evil:Schedule (agent.clip)",)],
    "a network": [('name = "modular"', 'name = "evil:Piece"'), ("import evil:Piece (network.name)",)],
    "a piece": [('net1d = "mlp"', 'net1d = "evil:Piece"'), ("import evil:Piece (network.net1d)",)],
    "the source of an observation": [
        ("sources = []", 'sources = ["observation=evil:Piece"]'),
        ("import evil:Piece (network.sources)",),
    ],
    "a body": [('body = "auto"', 'body = "evil:Piece"'), ("import evil:Piece (network.body)",)],
    "two at once": [
        ('name = "ppo"', 'name = "evil:Agent"'),
        ('head1d = "identity1d"', 'head1d = "evil:Piece"'),
        ("import evil:Agent (agent.name) and import evil:Piece (network.head1d)",),
    ],
}
RUNS = [
    ["evaluate", "RUN", "--episodes", "1"],
    ["play", "RUN", "--out", "film.gif"],
    ["resume", "RUN", "--nb-step", "200"],
    ["diagnose", "RUN"],
    ["check", "--config", "RUN/config.toml"],
    ["train", "CartPole-v1", *TRAIN, "--init-from", "RUN"],
    ["train", "CartPole-v1", "--agent", "bc", "--data", "RUN", "--nb-step", "10"],
    ["train", *TRAIN, "--config", "RUN/config.toml"],
]
MAKES_NO_ENVIRONMENT = ("diagnose", "--init-from")  # so these may go on where only the environment is hostile


@pytest.fixture
def alone(here, monkeypatch):
    """A current folder with a hostile module in it, which is not on the import path yet."""
    (here / "evil.py").write_text(EVIL)
    (here / "outside").mkdir()
    (here / "outside" / "precious").write_text("mine")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(here))])
    sys.modules.pop("evil", None)
    yield here
    sys.modules.pop("evil", None)


@pytest.fixture
def unharmed(alone):
    """Call to see that nothing was run, imported, or written outside of the run."""

    def check():
        assert not (alone / "ran").exists()
        assert not (alone / "imported").exists()
        assert "evil" not in sys.modules
        assert "" not in sys.path
        assert digest(alone / "outside") == {str(alone / "outside" / "precious"): digest_of("mine")}

    return check


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()


def edit(run, *changes):
    path = run / "config.toml"
    text = path.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)


def dump(run):
    """Something where the dump is looked for."""
    shutil.copytree(run / "best", run / "failure")


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_that_a_run_names_is_imported_by_any_command(run, unharmed, capsys, kind):
    *changes, (said,) = HOSTILE[kind]
    edit(run, *changes)
    dump(run)
    for words in RUNS:
        capsys.readouterr()
        code = main([str(run) if word == "RUN" else word.replace("RUN", str(run)) for word in words])
        err = capsys.readouterr().err
        unharmed()
        if "(env." in said and any(word in words for word in MAKES_NO_ENVIRONMENT):
            continue
        assert code == 2, words
        assert err.startswith("ludus: ")
        assert err.count("\n") == 1
        assert said in err
        assert "its config.toml was changed" in err
        assert "add --trust" in err
    for call in (ludus.load, ludus.resume, lambda run: ludus.train("CartPole-v1", config=run / "config.toml")):
        with pytest.raises(UserError, match="trust=True"):
            call(run)
        unharmed()


def test_checks_of_networks_need_trust_to_train_and_are_not_imported_otherwise(run, unharmed, capsys):
    edit(
        run,
        ("[network_check]\nevery = 0", "[network_check]\nevery = 8"),
        ("functions = []", 'functions = ["evil:check"]'),
    )
    for words in RUNS:
        capsys.readouterr()
        code = main([str(run) if word == "RUN" else word.replace("RUN", str(run)) for word in words])
        err = capsys.readouterr().err
        unharmed()
        if words[0] == "resume" or "--config" in words:
            assert code == 2, words
            assert "import evil:check (network_check.functions)" in err
            assert "add --trust" in err
    for call in (ludus.resume, lambda run: ludus.train("CartPole-v1", config=run / "config.toml")):
        with pytest.raises(UserError, match="trust=True"):
            call(run)
        unharmed()
    ludus.load(run)
    unharmed()


def test_a_signature_of_another_user_counts_for_nothing(run, unharmed, monkeypatch, tmp_path):
    edit(run, ('name = "ppo"', 'name = "evil:Agent"'))
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "enemy"))
        config = run / "config.toml"
        config.write_bytes(sign(config.read_bytes()))
    with pytest.raises(UserError, match="another user or machine made it"):
        ludus.load(run)
    lines = config.read_text().splitlines()
    config.write_text("\n".join([*lines[:-1], "# signature: " + "0" * 64, ""]))
    with pytest.raises(UserError, match="another user or machine made it"):
        ludus.load(run)
    config.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(UserError, match="it has no signature"):
        ludus.load(run)
    unharmed()


def test_a_key_inside_of_the_run_counts_for_nothing(run, unharmed):
    edit(run, ('name = "ppo"', 'name = "evil:Agent"'))
    (run / "ludus").mkdir()
    (run / "ludus" / "key").write_bytes(bytes(32))
    with pytest.raises(UserError, match="trust=True"):
        ludus.load(run)
    unharmed()


def test_a_folder_to_write_to_needs_trust_for_a_resume(here, alone, capsys):
    settings = TINY | {"agent.warmup": 16, "agent.replay": 1000, "agent.batch_size": 8, "runs": "dqn"}
    settings.pop("agent.rollout")
    run = ludus.train("CartPole-v1", "dqn", preset="none", settings=settings).run
    edit(run, ('replay_folder = ""', 'replay_folder = "outside/deep"'))
    assert main(["resume", str(run), "--nb-step", "200"]) == 2
    assert 'write to the folder "outside/deep" (agent.replay_folder)' in capsys.readouterr().err
    assert not (alone / "outside" / "deep").exists()
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0  # which writes nothing there


def test_a_cluster_to_exchange_data_with_needs_trust_for_a_resume(run, capsys):
    edit(run, ('cluster = ""', 'cluster = "10.9.9.9:6379"'))
    assert main(["resume", str(run), "--nb-step", "200"]) == 2
    assert "exchange data with the Ray cluster 10.9.9.9:6379 (impala.cluster)" in capsys.readouterr().err


def test_trust_allows_it_and_a_resume_signs_it(run, alone, capsys):
    edit(run, ('name = "ppo"', 'name = "evil:Agent"'))
    assert main(["evaluate", str(run), "--episodes", "1", "--trust"]) == 0
    assert (alone / "imported").exists()
    assert main(["evaluate", str(run), "--episodes", "1"]) == 2
    assert main(["resume", str(run), "--nb-step", "128", "--trust"]) == 0
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    ludus.load(run)


def test_an_environment_given_in_python_does_not_make_the_name_in_the_run_trusted(run, unharmed):
    from gymnasium.envs.classic_control import CartPoleEnv

    edit(run, ('"CartPole-v1"', '"evil:Env"'), ("max_episode_steps = 0", "max_episode_steps = 50"))
    assert ludus.load(run, environment=CartPoleEnv).act([0.0] * 4) in (0, 1)
    ludus.resume(run, nb_step=200, environment=CartPoleEnv)
    with pytest.raises(UserError, match="evil:Env"):
        ludus.load(run)
    unharmed()


def test_runs_of_strangers_with_known_names_need_no_trust(run, unharmed, capsys):
    config = run / "config.toml"
    wrapped = 'wrappers = ["gymnasium.wrappers:TimeAwareObservation(normalize_time=true)"]'
    edit(run, ("wrappers = []", 'wrappers = ["gymnasium.wrappers:ClipReward(max_reward=5.0)"]'))
    assert "# signature" in config.read_text()
    config.write_text(config.read_text().rpartition("# signature")[0])
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert main(["resume", str(run), "--nb-step", "128"]) == 0
    edit(run, ('wrappers = ["gymnasium.wrappers:ClipReward(max_reward=5.0)"]', wrapped))
    assert main(["evaluate", str(run), "--episodes", "1"]) == 2  # another network, but nothing to trust
    assert "another network" in capsys.readouterr().err
    unharmed()


@pytest.mark.parametrize("key", ["observation", "reward", "action"])
@pytest.mark.parametrize("op", ["evil:Op", "evil.Op", "observation: evil.Op(path=1)", "evil:Wrapper(x=1)"])
def test_preprocessing_names_no_code(run, unharmed, op, key):
    text = (run / "config.toml").read_text()
    table = text.index("[preprocess]")
    (run / "config.toml").write_text(text[:table] + text[table:].replace(f"{key} = []", f'{key} = ["{op}"]', 1))
    with pytest.raises(UserError, match=rf"preprocess.{key} has .*(no op|which is not a name)"):
        ludus.load(run, trust=True)
    unharmed()


def test_environments_of_ludus_need_no_trust(here, alone):
    path = "ludus.environments.toy:CountingEnv"
    run = ludus.train(path, preset="none", settings=TINY | {"runs": "toys", "agent.minibatches": 2}).run
    edit(run, ("# signature", "# was"))
    ludus.load(run)
    edit(run, (path, "ludus.cli.main:main"))
    with pytest.raises(UserError, match=r"ludus\.cli\.main:main"):
        ludus.load(run)


def test_every_environment_of_ludus_is_known():
    for info in pkgutil.iter_modules(ludus.environments.__path__, "ludus.environments."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if isinstance(kind, type) and issubclass(kind, gymnasium.Env) and kind.__module__ == info.name:
                known = not dict(find_imports({"env.id": f"{info.name}:{name}"}))
                assert known or issubclass(kind, GymAdapter | JointEnv | gymnasium.Wrapper), (
                    kind
                )  # which are no environments by themselves


@pytest.mark.parametrize("text", ["evil:X Y", "evil:", "evil:@", "evil.sub:é", "évil:X", " evil:X", "evil:X:Y"])
def test_an_option_may_name_a_module_whatever_follows_the_colon(text):
    assert dict(find_imports({"env.options": (f"env_id={json.dumps(text)}",)})) == {"env.options": [text]}


def test_an_option_without_a_module_is_no_import():
    assert not dict(find_imports({"env.options": ('size="3:4"', 'path="/a:b"', 'name="plain"', 'text=":x"')}))


def test_a_run_of_ones_own_is_trusted_wherever_it_is_moved(here, alone, monkeypatch):
    settings = flags(TINY | {"agent.minibatches": 2, "evaluation.episodes": 1})
    assert main(["train", "evil:Env", "--env.max-episode-steps", "20", "--preset", "none", *settings]) == 0
    (run,) = here.glob("runs/evil-Env/*")
    shutil.move(run, here / "moved")
    shutil.copytree(here / "moved", here / "copied")
    for folder in ("moved", "copied"):
        assert main(["evaluate", folder, "--episodes", "1"]) == 0
        assert main(["resume", folder, "--nb-step", "128"]) == 0
    assert main(["train", "--config", "moved/config.toml", "--quiet"]) == 0
    os.chdir(here / "outside")  # where there is no such module: it is imported from where it was at training
    sys.modules.pop("evil")
    ludus.load(here / "moved")
    assert sys.path[0] not in ("", str(here))
    sys.modules.pop("evil")
    (here / "evil.py").rename(here / "away.py")
    with pytest.raises(UserError, match=r"names the module evil, which was imported from .* at training"):
        ludus.load(here / "moved")


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_a_signed_run_does_not_import_from_the_current_folder(here, alone, capsys, monkeypatch, backend):
    settings = flags(TINY | {"agent.minibatches": 2, "evaluation.episodes": 1, "env.backend": backend})
    train = ["train", "evil:Env", "--env.max-episode-steps", "20", "--preset", "none", *settings]
    assert main(train) == 0
    (run,) = here.glob("runs/evil-Env/*")
    archive = here / "archive"
    shutil.copytree(run, archive / "runs" / "evil-Env" / run.name)
    planted = archive / "planted"
    (archive / "evil.py").write_text(EVIL.replace('"imported"', repr(str(planted))))
    monkeypatch.chdir(archive)
    more = {"evaluate": ["--episodes", "1"], "play": ["--out", "film.gif"], "resume": ["--nb-step", "128"]}

    def forget():
        sys.modules.pop("evil", None)
        sys.path[:] = [path for path in sys.path if path not in ("", str(here))]

    for command, words in more.items():
        forget()
        assert main([command, "latest", *words]) == 0, capsys.readouterr().err
        assert not planted.exists()
    (here / "evil.py").unlink()
    for command, words in (more | {"resume": ["--nb-step", "256"]}).items():
        forget()
        capsys.readouterr()
        assert main([command, "latest", *words]) == 2
        assert f"which was imported from {here} at training" in capsys.readouterr().err
        assert not planted.exists()
    forget()
    assert main(["evaluate", "latest", "--episodes", "1", "--trust"]) == 0
    assert planted.exists()


def test_a_settings_file_is_trusted_no_more_than_a_run(here, unharmed, capsys):
    Path("tuned.toml").write_text('[env]\nid = "subprocess:run"\n' + SHELL + "\n")
    assert main(["train", "--config", "tuned.toml"]) == 2
    said = capsys.readouterr().err
    assert 'The settings file "tuned.toml" is not trusted' in said
    assert main(["train", "CartPole-v1", "--config", "tuned.toml", "--help"]) == 2
    Path("tuned.toml").write_text('trust = true\n[agent]\nname = "evil:Agent"\n')
    assert main(["train", "CartPole-v1", "--config", "tuned.toml"]) == 2
    assert main(["train", "CartPole-v1", "--config", "tuned.toml", "--trust", "--no-trust"]) == 2
    unharmed()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["subprocess:Popen", "--env.options", 'args="touch ran"', "shell=true"], "is a class without reset and step"),
        (["subprocess:Popen", "--env.backend", "tensor"], "is a class without reset and step"),
        (["CartPole-v1", "--env.wrappers", 'subprocess:Popen(args="touch ran", shell=true)'], "not a wrapper"),
        (["CartPole-v1", "--env.wrappers", "gymnasium.wrappers:ArrayConversion"], "needs array_api_compat"),
        (["CartPole-v1", "--agent", "subprocess:Popen"], "not a subclass of ludus.core.agent.Agent"),
        (["CartPole-v1", "--agent", "subprocess:run"], "not a subclass of ludus.core.agent.Agent"),
        (["CartPole-v1", "--network", "subprocess:Popen"], "not a class of torch modules"),
        (["CartPole-v1", "--network.net1d", "subprocess:Popen"], "not a piece of a network"),
        (["CartPole-v1", "--network.body", "subprocess:run"], "not a piece of a network"),
    ],
)
def test_what_is_typed_is_checked_before_it_is_called(refused, alone, words, said):
    refused(["train", *words, "--preset", "none"], said)
    assert not (alone / "ran").exists()


def test_the_installed_command_does_not_look_into_the_current_folder(run, alone):
    for name in ("ale_py", "PIL", "imageio_ffmpeg", "pygame", "moviepy"):
        (alone / f"{name}.py").write_text(EVIL)
    command = Path(sys.executable).with_name("ludus")
    start = [str(command)] if command.exists() else [sys.executable, "-P", "-m", "ludus.cli.main"]
    environment = {key: value for key, value in os.environ.items() if key != "DISPLAY"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*start, "play", str(run), "--out", "film.gif"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (alone / "imported").exists()
    assert (alone / "film.gif").exists()


LINKS = {  # what a link stands for, and the commands that would write or delete there
    "checkpoints": ["resume", "evaluate --checkpoint latest"],
    "checkpoints/step_96": ["resume", "evaluate --checkpoint latest"],
    "tensorboard": ["resume"],
    "videos": ["play"],
    "best": ["evaluate", "play"],
    "best/state.json": ["evaluate", "play"],
    "best/tensors.safetensors": ["evaluate"],
    "config.toml": ["evaluate", "play", "resume", "diagnose"],
    "metrics.jsonl": ["resume"],
    "log.txt": ["resume"],
    ".lock": ["resume"],
}


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link"])
@pytest.mark.parametrize("name", LINKS)
def test_links_inside_of_a_run_are_not_followed(run, alone, capsys, name, kind):
    if name == "checkpoints/step_96":
        (step,) = (run / "checkpoints").iterdir()
        name = f"checkpoints/{step.name}"
    place, target = run / name, alone / "outside" / "target"
    if kind == "hard link" and (place.is_dir() or name not in ("metrics.jsonl", "log.txt", ".lock")):
        pytest.skip("only what is appended to can be written elsewhere by a hard link")
    if name == "videos":
        place.mkdir()
    dump(run)
    place.rename(target)
    if kind == "hard link":
        os.link(target, place)
    else:
        place.symlink_to(target if kind == "link" else alone / "outside" / "nothing")
    before = digest(alone / "outside")
    for words in LINKS.get(name, LINKS["checkpoints/step_96"]):
        command, *rest = words.split()
        more = {"resume": ["--nb-step", "200"], "evaluate": ["--episodes", "1"]}.get(command, [])
        capsys.readouterr()
        code = main([command, str(run), *rest, *more])
        err = capsys.readouterr().err
        assert digest(alone / "outside") == before
        assert not (alone / "outside" / "nothing").exists()
        if kind == "dangling link" and name == "config.toml":
            assert code == 2
            continue
        assert code == 2, (words, err)
        assert "a link" in err
        assert err.count("\n") == 1


def test_names_of_temporary_files_cannot_be_guessed(run, alone):
    for name in (".tmp-config.toml", ".tmp-best", f".tmp-best-{os.getpid()}", "checkpoints/.tmp-step_200"):
        (run / name).symlink_to(alone / "outside" / "precious")
    (run / "checkpoints" / ".old-step_200").symlink_to(alone / "outside")
    before = digest(alone / "outside")
    assert main(["resume", str(run), "--nb-step", "200"]) == 0
    assert digest(alone / "outside") == before


def test_a_run_behind_links_of_the_users_own_works(run, here, capsys):
    (here / "elsewhere").symlink_to(here / "runs")
    (here / "mine").symlink_to(run)
    for path in (f"elsewhere/{run.parent.name}/{run.name}", "mine"):
        assert main(["evaluate", path, "--episodes", "1"]) == 0
        assert main(["play", path]) == 0
    assert main(["resume", "mine", "--nb-step", "200"]) == 0
    assert main(["evaluate", "latest", "--runs", "elsewhere", "--episodes", "1"]) == 0
    assert main(["train", "CartPole-v1", *TRAIN, "--runs", "elsewhere", "--init-from", "mine"]) == 0
    assert list(run.glob("videos/*"))


ESCAPE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
RAISES = f"""
import sys
from gymnasium.envs.classic_control import CartPoleEnv
class Env(CartPoleEnv):
    def step(self, action):
        print({ESCAPE!r}, file=sys.stderr)
        raise ValueError({ESCAPE!r})
"""


def harmless(*texts):
    for text in texts:
        assert not [c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e"], text


@pytest.mark.parametrize("backend", ["simple", "subproc"])
def test_what_an_environment_says_cannot_command_the_terminal(here, alone, capsys, backend):
    talks = backend == "subproc"  # in this process, what it prints goes to the terminal without Ludus
    (alone / "evil.py").write_text(RAISES if talks else RAISES.replace("print(", "dict(x=").replace("file=", "y="))
    restarts = ["--env.max-restarts", "1"] if backend == "subproc" else []
    words = ["train", "evil:Env", "--env.backend", backend, *restarts, *TRAIN]
    words.remove("--quiet")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in err
    harmless(out, err, *(path.read_text() for path in here.glob("runs/evil*/*/log.txt")))


def test_names_and_paths_cannot_command_the_terminal(run, here, capsys):
    evil = here / f"a{ESCAPE}b"
    run.rename(evil)
    assert main(["evaluate", str(evil), "--episodes", "1"]) == 0
    assert main(["play", str(evil)]) == 0
    assert main(["diagnose", str(evil)]) == 2
    edit(evil, ("quiet = true", "quiet = false"))
    assert main(["resume", str(evil), "--nb-step", "160"]) == 0
    edit(evil, ('"CartPole-v1"', '"Cart\\u001b[2JPole-v1"'))
    assert main(["evaluate", str(evil), "--episodes", "1"]) == 2
    assert main(["evaluate", str(here / f"none{ESCAPE}")]) == 2
    assert main(["check", f"none{ESCAPE}-v1"]) == 2
    assert main(["list", "runs", "--runs", f"none{ESCAPE}"]) == 0
    assert main(["train", "CartPole-v1", f"--no{ESCAPE}"]) == 2
    out, err = capsys.readouterr()
    assert "\\x1b[2J" in out
    assert "\\x1b[2J" in err
    harmless(out, err, (evil / "log.txt").read_text())


def test_a_live_terminal_obeys_only_what_ludus_draws(capsys):
    from io import StringIO

    from ludus.logging.console import Console

    stream = StringIO()
    with Console(stream, live=True) as console:
        console.start({"run": f"x{ESCAPE}"}, 10)
        console.note(f"note {ESCAPE}")
        console.finish()
    assert stream.getvalue().count("owned") == 2
    assert "\x1b]0" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


def rewrite(folder, change):
    """Change the state of a checkpoint, with a manifest that fits."""
    state, meta = load(folder)
    change(state)
    shutil.rmtree(folder)
    save(folder, state, meta)


def hollow(folder, size):
    """Add a tensor of ``size`` bytes that takes no place on the disk, with a manifest that fits."""
    path = folder / "tensors.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["hollow"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(body), len(body) + size]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)
        file.truncate(8 + len(text) + len(body) + size)
    state = folder / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"more": {"$tensor": "hollow"}}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256")
    for changed in (path, state):
        with changed.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        manifest["files"][changed.name] = {"bytes": changed.stat().st_size, "sha256": digest}
    body = json.dumps(manifest, indent=1).encode()
    whole = manifest | {"sha256": hashlib.sha256(body).hexdigest()}
    (folder / "manifest.json").write_bytes(json.dumps(whole, indent=1).encode())


PEAK = """
import json, resource, sys
from ludus.cli.main import main
import ludus.runs.train, ludus.runs.policy, ludus.managers.vector, ludus.agents.ppo, ludus.networks.build
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
codes = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024]))
"""


def measure(*commands):
    """Run commands in one process of their own; return their exit codes, the megabytes that they took, and stderr."""
    words = [sys.executable, "-c", PEAK, json.dumps(commands)]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_checkpoint_takes_no_more_memory_than_its_networks_need(run, here):
    edit(run, ("# signature", "# was"))  # a run of others
    hollow(run / "best", 300 << 20)
    (step,) = (run / "checkpoints").iterdir()
    hollow(step, 300 << 20)
    codes, megabytes, err = measure(
        ["evaluate", str(run), "--episodes", "1"],  # reads the agent alone
        ["evaluate", str(run), "--checkpoint", "latest", "--episodes", "1"],
        ["resume", str(run), "--nb-step", "128"],
    )
    assert codes == [0, 0, 2], err
    assert "but the settings of its run need at most" in err
    assert megabytes < 150


def test_huge_json_of_a_checkpoint_is_not_read(run, here):
    commands = []
    for name in ("manifest.json", "state.json"):
        huge = shutil.copytree(run, here / "huge" / name)
        for folder in (huge / "best", *(huge / "checkpoints").iterdir()):
            os.truncate(folder / name, 4 << 30)
        commands += [["evaluate", str(huge), "--episodes", "1"], ["resume", str(huge), "--nb-step", "128"]]
    codes, megabytes, err = measure(*commands)
    assert (codes, megabytes < 150) == ([2] * 4, True), err


@pytest.mark.parametrize("change", ["hidden = [12000, 12000]", "hidden = [2000000, 2000000]", "hidden = [64]"])
def test_networks_of_another_size_than_the_checkpoints_are_not_built(run, capsys, monkeypatch, change):
    built = []
    monkeypatch.setattr("torch.nn.init.orthogonal_", lambda x, gain=1.0: built.append(x.device.type))
    edit(run, ("hidden = [64, 64]", change))
    dump(run)
    for words in (["evaluate", str(run)], ["play", str(run)], ["resume", str(run), "--nb-step", "200"]):
        assert main(words) == 2
        assert "another network" in capsys.readouterr().err
    assert main(["diagnose", str(run)]) == 2
    assert set(built) <= {"meta"}


def test_networks_that_do_not_fit_into_memory_are_refused_before_they_are_built(run, capsys, monkeypatch):
    monkeypatch.setattr("ludus.containers.build.free_memory", lambda: 10_000)
    assert main(["evaluate", str(run)]) == 2
    assert "The networks need 0.00 GB of memory" in capsys.readouterr().err


COUNTERS = {
    "step": [-5, "many", 2**80, None, 1.5, True],
    "updates": [-1, None],
    "evaluated_at": ["x"],
    "evaluation": [[], [[1.0], []], [["a"], ["b"]], "ab", [[1.0], [2], [3]]],
    "best": ["x"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in COUNTERS.items() for value in values])
def test_counters_that_no_run_has_are_a_sentence(run, refused, name, value):
    (step,) = (run / "checkpoints").iterdir()
    rewrite(step, lambda state: state["counters"].update({name: value}))
    refused(["resume", str(run), "--nb-step", "200"], "does not hold the state of a run", adds=True)


@pytest.mark.parametrize("part", ["counters", "metrics", "agent", "evaluator", "manager", "updater", "cache"])
def test_a_checkpoint_without_a_part_is_a_sentence(run, refused, part):
    (step,) = (run / "checkpoints").iterdir()
    rewrite(step, lambda state: state.pop(part))
    refused(["resume", str(run), "--nb-step", "200"], "checkpoint", adds=True)


def test_a_best_checkpoint_without_an_agent_is_a_sentence(run, refused):
    for change in (lambda state: state.pop("agent"), lambda state: state.update(agent=[1, 2])):
        rewrite(run / "best", change)
        refused(["evaluate", str(run)], "holds no agent")
        refused(["play", str(run), "--out", "film.gif"], "holds no agent")
        refused(["train", "CartPole-v1", *TRAIN, "--init-from", str(run)], "holds no agent")


def test_a_run_that_takes_no_video_is_a_sentence(run, refused):
    (run / "videos").write_text("in the way")
    refused(["play", str(run)], "cannot be written (File exists): choose another path with --out FILE")


def test_too_few_file_descriptors_are_a_sentence(here):
    words = ["train", "CartPole-v1", "--env.backend", "subproc", "--env.workers", "2", *TRAIN]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)); from ludus.cli.main import main; "
    )
    code += "sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ludus: This process cannot open more files")
    assert done.stderr.count("\n") == 1


def test_without_a_key_training_goes_on_unsigned(here, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # no folder can be made there
    settings = TINY | {"agent.minibatches": 2, "runs": "unsigned"}
    result = ludus.train("ludus.environments.toy:CountingEnv", preset="none", settings=settings)
    assert "# signature" not in (result.run / "config.toml").read_text()
    log = (result.run / "log.txt").read_text()
    assert "The run is not signed (the key" in log
    assert "cannot be read (Not a directory)" in log
    assert result.load().act([0.0] * 2) is not None


def test_a_key_that_others_can_read_is_no_key(run, alone, capsys):
    key_path().chmod(0o644)
    try:
        edit(run, ('name = "ppo"', 'name = "evil:Agent"'))
        assert main(["evaluate", str(run)]) == 2
        assert "must belong to you and be readable by you alone (chmod 600)" in capsys.readouterr().err
        assert not (alone / "imported").exists()
    finally:
        key_path().chmod(0o600)
