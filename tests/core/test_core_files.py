import os

import pytest

from ludus.core.errors import UserError
from ludus.core.files import append, delete, open_append, open_regular_file, sync, write_all, write_atomic


def test_write_all_handles_partial_writes():
    class Reluctant:
        got = b""

        def write(self, data):
            self.got += bytes(data[:3])
            return min(len(data), 3)

    file = Reluctant()
    write_all(file, b"0123456789")
    assert file.got == b"0123456789"


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with open_regular_file(tmp_path / "file") as file:
        assert file.read() == b"x"
    for name in ("link", "folder", "pipe", "none"):
        with pytest.raises(OSError):  # noqa: PT011
            open_regular_file(tmp_path / name)
    for name in ("link", "folder", "pipe"):
        with pytest.raises(UserError, match=f"{name}.* (cannot be written|is a link)"):
            open_append(tmp_path / name)
    with open_append(tmp_path / "new") as file:
        append(file, b"one\n")
        append(file, b"two\n")
    assert (tmp_path / "new").read_text() == "one\ntwo\n"


def test_write_atomic_keeps_the_old_file_on_failure(tmp_path, monkeypatch):
    write_atomic(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr("ludus.core.files.write_all", lambda file, data: file.write(b"h") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "old"
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(tmp_path / "none" / "file", b"")


def test_sync_raises_the_error_of_any_path(tmp_path):
    (tmp_path / "file").touch()
    sync(tmp_path / "file", tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "file", tmp_path / "none", tmp_path)


def test_delete_does_not_follow_links(tmp_path):
    (tmp_path / "kept" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").touch()
    for name in ("link", "folder", "file", "none"):
        delete(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "inner").is_dir()
