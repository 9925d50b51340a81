"""Signatures: only the content that this user wrote, with a key that only this user reads."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludus.settings.signature import NoKey, key_path, sign, why_unsigned

TEXT = b"seed = 1  # flag\n"


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_what_was_signed_is_known_and_what_was_changed_is_not(monkeypatch, tmp_path):
    assert why_unsigned(TEXT) == "it has no signature"
    signed = sign(TEXT)
    assert signed.startswith(TEXT)
    assert why_unsigned(signed) == ""
    assert sign(signed) == signed
    for changed in (
        b" " + signed,
        signed.replace(b"1", b"2", 1),
        signed + b"\n",
        signed[:-2],
        signed.replace(b"\n#", b"#"),
    ):
        assert why_unsigned(changed)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert "another user or machine" in why_unsigned(signed)  # without a key
    sign(TEXT)
    assert "another user or machine" in why_unsigned(signed)  # with another
    assert not list(tmp_path.rglob(".tmp-*"))


def test_the_key_is_for_its_owner_alone():
    signed = sign(TEXT)
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert stat.S_IMODE(key_path().parent.stat().st_mode) == 0o700
    key_path().chmod(0o640)
    assert "chmod 600" in why_unsigned(signed)
    with pytest.raises(NoKey, match="chmod 600"):
        sign(TEXT)
    key_path().chmod(0o600)
    key_path().write_bytes(b"short")
    with pytest.raises(NoKey, match="is not a key"):
        sign(TEXT)
    key_path().rename(key_path().with_name("elsewhere"))
    key_path().symlink_to("elsewhere")
    with pytest.raises(NoKey, match="cannot be read"):
        sign(TEXT)


def test_many_at_once_make_one_key():
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(sign, [TEXT] * 32))) == 1


def test_many_at_once_make_one_key_where_there_are_no_hard_links(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(sign, [TEXT] * 32))) == 1
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert [path.name for path in key_path().parent.iterdir()] == ["key"]


def test_a_key_made_meanwhile_is_kept_where_there_are_no_hard_links(monkeypatch):
    def refuse(_, path):
        path.write_bytes(bytes(32))
        path.chmod(0o600)
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    signed = sign(TEXT)
    assert key_path().read_bytes() == bytes(32)
    assert why_unsigned(signed) == ""


def test_a_relative_folder_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_path() == tmp_path / ".local" / "state" / "ludus" / "key"
