"""The certificate and the key of a server that speaks TLS itself."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from glint.errors import RequestError

HANDSHAKE_SECONDS = 10.0
MISMATCH = "KEY_VALUES_MISMATCH"


@dataclass(frozen=True)
class TlsFiles:
    """A certificate, with the chain behind it, and its key; without a key file the certificate's file holds both."""

    certfile: Path
    keyfile: Path | None = None

    def make_context(self) -> ssl.SSLContext:
        """TLS 1.2 or newer with this certificate; raises `RequestError` with the file at fault."""
        for flag, file in (("--ssl-certfile", self.certfile), ("--ssl-keyfile", self.keyfile)):
            if file is not None:
                _check_readable(flag, file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certfile, self.keyfile, self._refuse_password)
        except ssl.SSLError as problem:
            raise RequestError(self._describe(problem)) from problem
        return context

    @property
    def _key_source(self) -> str:
        return f"--ssl-certfile {self.certfile}" if self.keyfile is None else f"--ssl-keyfile {self.keyfile}"

    def _refuse_password(self) -> str:
        raise RequestError(f"the key of {self._key_source} has a password; give a key without one")

    def _describe(self, problem: ssl.SSLError) -> str:
        if problem.reason == MISMATCH:
            return f"{self._key_source} is not the key of --ssl-certfile {self.certfile}; give the one it was made with"
        reason = problem.reason or "no certificate or key was found"
        way_out = "give PEM files" if self.keyfile is not None else "give a PEM file with both, or also --ssl-keyfile"
        return f"--ssl-certfile {self.certfile} and its key cannot be used ({reason}); {way_out}"


def tls_files(certfile: Path | None, keyfile: Path | None) -> TlsFiles | None:
    """The files of the command line, if any; a key without a certificate is refused."""
    if certfile is None and keyfile is not None:
        raise RequestError(f"--ssl-keyfile {keyfile} is given without a certificate; add --ssl-certfile")
    return None if certfile is None else TlsFiles(certfile, keyfile)


def _check_readable(flag: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as problem:
        raise RequestError(f"{flag} {file} cannot be read: {problem.strerror}; give a PEM file") from problem
