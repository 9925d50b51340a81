"""A finished run to damage, and the one way in which every mistake has to be told."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from faults_setup import TINY, digest

import ludus
from ludus.cli.main import main
from ludus.core.errors import UserError


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder ``runs`` with one run of CartPole in it."""
    torch.set_num_threads(1)
    runs = tmp_path_factory.mktemp("finished") / "runs"
    ludus.train("CartPole-v1", preset="none", settings=TINY | {"runs": str(runs), "agent.minibatches": 2})
    return runs


@pytest.fixture
def here(finished, tmp_path, monkeypatch):
    """A folder of its own with a copy of the finished run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    shutil.copytree(finished, tmp_path / "runs")
    return tmp_path


@pytest.fixture
def run(here):
    """That copy."""
    (config,) = here.glob("runs/*/*/config.toml")
    return config.parent


@pytest.fixture
def refused(here, capsys):
    """``refused(argv, *said)``: one line on stderr with all of ``said``, exit code 2, and no file touched or added.

    Where the environment's own code raised, its stack is above that line, without a line of Ludus in it.
    """

    def check(argv, *said, adds=False):
        before = digest(here)
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        assert code == 2, (out, err)
        *stack, sentence = err.splitlines()
        assert sentence.startswith("ludus: ")
        assert not stack or " raised " in sentence, err
        assert not any(str(Path(ludus.__file__).parent) in line for line in stack), err
        assert "Traceback" not in out
        for words in said:
            assert words in err
        after = digest(here)
        assert {path: after.get(path) for path in before} == before
        assert adds or after == before, set(after) - set(before)
        return err

    return check


@pytest.fixture
def refused_by_train(here):
    """The same for ``ludus.train``: a UserError of one line, and no file touched or added."""

    def check(environment, said, adds=False, **settings):
        before = digest(here)
        with pytest.raises(UserError) as caught:
            ludus.train(environment, preset="none", settings=TINY | {"agent.minibatches": 2} | settings)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        after = digest(here)
        assert {path: after.get(path) for path in before} == before
        assert adds or after == before

    return check


@pytest.fixture
def ground():
    """A folder to work in; in memory where possible, as a disk takes long to sync and to delete."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
