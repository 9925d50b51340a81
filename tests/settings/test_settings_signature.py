"""Signatures of settings files and the private key."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludus.settings.signature import NoKeyError, key_path, sign, signature_problem

TEXT = b"seed = 1  # flag\n"


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_changed_files_and_other_keys_are_detected(monkeypatch, tmp_path):
    assert signature_problem(TEXT) == "it has no signature"
    signed = sign(TEXT)
    assert signed.startswith(TEXT)
    assert signature_problem(signed) == ""
    assert sign(signed) == signed
    for changed in (
        b" " + signed,
        signed.replace(b"1", b"2", 1),
        signed + b"\n",
        signed[:-2],
        signed.replace(b"\n#", b"#"),
    ):
        assert signature_problem(changed)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert "another user or machine" in signature_problem(signed)  # without a key
    sign(TEXT)
    assert "another user or machine" in signature_problem(signed)  # with another


def test_the_key_must_be_private():
    signed = sign(TEXT)
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path().parent.stat().st_mode) == 0o700
    key_path().chmod(0o640)
    assert "chmod 600" in signature_problem(signed)
    with pytest.raises(NoKeyError, match="chmod 600"):
        sign(TEXT)
    key_path().chmod(0o600)
    key_path().write_bytes(b"short")
    with pytest.raises(NoKeyError, match="is not a key"):
        sign(TEXT)
    key_path().rename(key_path().with_name("elsewhere"))
    key_path().symlink_to("elsewhere")
    with pytest.raises(NoKeyError, match="cannot be read"):
        sign(TEXT)


def test_concurrent_processes_share_one_key():
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(sign, [TEXT] * 32))) == 1


def test_a_relative_state_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_path() == tmp_path / ".local" / "state" / "ludus" / "key"


def test_a_full_disk_leaves_no_empty_key(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "write", full)
        with pytest.raises(NoKeyError, match=r"cannot be created \(No space left"):
            sign(TEXT)
    assert not key_path().exists()
    assert sign(TEXT)
