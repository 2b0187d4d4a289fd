"""Unix sockets of a server: their mode, what is replaced, and what is refused and kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from glint.errors import EngineError, RequestError
from glint.server.http.listener import listen_unix, listening


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_a_unix_socket_has_its_mode_and_is_removed_at_the_end(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "socket"
    with listening("127.0.0.1", 1, path, mode) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert listener.getsockname() == str(path)
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen_unix(path, 0o600).close()
    assert path.is_socket()
    with (
        listening("", 0, path, 0o600),
        pytest.raises(EngineError, match="is in use by another process"),
        listening("", 0, path, 0o600),
    ):
        raise AssertionError("two servers share a socket")
    assert not path.exists()


def test_a_path_that_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    for path in (file, tmp_path):
        with pytest.raises(RequestError, match="is there and is no socket"):
            listen_unix(path, 0o600)
    assert file.read_text() == "kept"
    for path in (tmp_path / "absent" / "socket", tmp_path / ("long" * 40)):
        with pytest.raises(EngineError, match=r"cannot listen on --uds .*at most 107 bytes"):
            listen_unix(path, 0o600)


def test_a_socket_that_another_server_made_since_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening("", 0, path, 0o600):
        path.unlink()
        listen_unix(path, 0o600).close()
    assert path.exists()
