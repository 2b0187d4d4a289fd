"""Certificates and keys of a server, made by openssl: what is refused and by which name, and the handshake itself."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import warnings
from pathlib import Path

import pytest

from glint.errors import RequestError
from glint.server.http.listener import listening
from glint.server.http.tls import TlsFiles, tls_files
from glint.server.process.lifecycle import Lifecycle, ReadinessGate
from glint.server.process.not_ready import NotReadyServer


def make_certificate(folder: Path, name: str = "localhost") -> TlsFiles:
    """A certificate that openssl signs with its own key."""
    folder.mkdir(exist_ok=True)
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    files = ["-keyout", str(keyfile), "-out", str(certfile)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return TlsFiles(certfile, keyfile)


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path / "a"), make_certificate(tmp_path / "b")
    assert first.make_context().minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.raises(RequestError, match=r"--ssl-keyfile .*/b/key\.pem is not the key of --ssl-certfile .*/a/cert"):
        TlsFiles(first.certfile, second.keyfile).make_context()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    assert files.keyfile is not None
    with pytest.raises(RequestError, match=r"--ssl-certfile .*absent cannot be read: No such file"):
        TlsFiles(tmp_path / "absent", files.keyfile).make_context()
    with pytest.raises(RequestError, match=r"--ssl-keyfile .*absent cannot be read: No such file"):
        TlsFiles(files.certfile, tmp_path / "absent").make_context()
    with pytest.raises(RequestError, match=r"cert\.pem and its key cannot be used .*also --ssl-keyfile"):
        TlsFiles(files.certfile).make_context()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(RequestError, match=r"text and its key cannot be used .*give PEM files"):
        TlsFiles(tmp_path / "text", files.keyfile).make_context()
    both = tmp_path / "both.pem"
    both.write_bytes(files.certfile.read_bytes() + files.keyfile.read_bytes())
    TlsFiles(both).make_context()
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(files.keyfile), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(RequestError, match=r"the key of --ssl-keyfile .*locked\.pem has a password"):
        TlsFiles(files.certfile, locked).make_context()
    with pytest.raises(RequestError, match="given without a certificate; add --ssl-certfile"):
        tls_files(None, files.keyfile)
    assert tls_files(None, None) is None


def ask(path: Path, client: ssl.SSLContext) -> bytes:
    """What comes back for GET /ready through TLS on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(20)
        plain.connect(str(path))
        with client.wrap_socket(plain, server_hostname="localhost") as wrapped:
            wrapped.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while piece := wrapped.recv(4096):
                received += piece
            return received


def test_a_server_that_is_not_ready_answers_through_tls_and_drops_who_does_not_speak_it(tmp_path: Path) -> None:
    files, path = make_certificate(tmp_path), tmp_path / "socket"
    client = ssl.create_default_context(cafile=str(files.certfile))
    old = ssl.create_default_context(cafile=str(files.certfile))
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1

    async def serve() -> tuple[bytes, bytes]:
        server = NotReadyServer(listener, ReadinessGate(Lifecycle(60.0)), files.make_context())
        server.open()
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(20)
            plain.connect(str(path))
            plain.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            refused = await asyncio.to_thread(plain.recv, 4096)
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(ask, path, old)
        answered = await asyncio.to_thread(ask, path, client)
        server.close()
        await server.wait_closed()
        return refused, answered

    with listening("", 0, path, 0o600) as listener:
        refused, answered = asyncio.run(serve())
    assert b"HTTP/1.1" not in refused
    assert answered.startswith(b"HTTP/1.1 503 ") and b'"phase":"loading"' in answered
