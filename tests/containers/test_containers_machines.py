"""What the machines of a cluster must have in common; no Ray is needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ludus.containers.machines import (
    AUTH_MODE,
    TOKEN,
    TOKEN_FILE,
    TOKEN_PATH,
    code_folders,
    is_loopback,
    refuse_other_versions,
    refuse_without_token,
    use_code_folders,
    use_environment,
    versions,
)
from ludus.core import imports
from ludus.core.errors import UserError


@pytest.mark.parametrize("name", ["ludus", "torch", "Python"])
def test_other_versions_are_refused_by_name(name: str) -> None:
    refuse_other_versions(versions(), "10.0.0.2", "the host")
    with pytest.raises(UserError, match=rf"^10\.0\.0\.2 has {name} .*, and the host has 0\.1; install the same"):
        refuse_other_versions(versions() | {name: "0.1"}, "10.0.0.2", "the host")


def test_folders_of_the_host_are_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    given = code_folders()
    assert given["path"][0] == os.getcwd()
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    folders = imports.search_folders()
    use_code_folders({"path": [str(tmp_path), *before], "folders": folders})
    assert sys.path == [*before, str(tmp_path)]
    assert imports.search_folders() == folders


@pytest.mark.parametrize("keeps_gpus", [False, True])
def test_the_environment_of_the_command_is_used(keeps_gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RAY_JOB": "1", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "1", "SAME": "x"}
    monkeypatch.setattr(os, "environ", dict(own))
    use_environment({"SAME": "x", "NEW": "y", "RAY_JOB": "2", "CUDA_VISIBLE_DEVICES": "0"}, keeps_gpus)
    assert os.environ == {
        "RAY_JOB": "1",
        "CUDA_VISIBLE_DEVICES": "3" if keeps_gpus else "0",
        "SAME": "x",
        "NEW": "y",
    }


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False)]
)
def test_loopback_addresses_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_cluster_that_others_reach_needs_a_token_and_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (AUTH_MODE, TOKEN, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    refuse_without_token("127.0.0.1:6379", "127.0.0.1")
    with pytest.raises(UserError, match=r"The cluster 10\.0\.0\.1:6379 can be reached .* and there is no token"):
        refuse_without_token("10.0.0.1:6379", "10.0.0.1")
    (tmp_path / TOKEN_FILE).parent.mkdir()
    (tmp_path / TOKEN_FILE).write_text("secret")
    with pytest.raises(UserError, match="RAY_AUTH_MODE is not token"):
        refuse_without_token("10.0.0.1:6379", "10.0.0.1")
    monkeypatch.setenv(AUTH_MODE, "token")
    refuse_without_token("10.0.0.1:6379", "10.0.0.1")
