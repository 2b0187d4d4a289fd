"""The `glint` command with a signal that only tests send: SIGUSR1 is answered with a line that tells memory in use.

Python collects cyclic garbage when enough objects are there, and malloc keeps what was freed, in pieces: both change
the resident memory of a server by megabytes at times that say nothing about it. So garbage is collected first, and what
is told are the bytes that malloc has handed out and not been given back. Python's own memory is of malloc as well, and
malloc keeps no caches of threads, which it would count as in use.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from types import FrameType

from glint.cli import command

ANSWER = "bytes in use: "
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


class MallocState(ctypes.Structure):
    """What mallinfo2 of glibc tells, over all its arenas."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("free_chunks", ctypes.c_size_t),
        ("fast_chunks", ctypes.c_size_t),
        ("mappings", ctypes.c_size_t),
        ("mapped_bytes", ctypes.c_size_t),
        ("always_zero", ctypes.c_size_t),
        ("fast_bytes", ctypes.c_size_t),
        ("used_bytes", ctypes.c_size_t),
        ("free_bytes", ctypes.c_size_t),
        ("top_bytes", ctypes.c_size_t),
    )


def bytes_in_use() -> int:
    """Bytes of malloc that are in use, those of whole mappings among them."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocState
    state = mallinfo2()
    return int(state.used_bytes + state.mapped_bytes)


def answer(sig: int, frame: FrameType | None) -> None:
    """Collect garbage and tell on standard error what is left."""
    gc.collect()
    os.write(sys.stderr.fileno(), f"{ANSWER}{bytes_in_use()}\n".encode())


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, answer)
    sys.exit(command())
