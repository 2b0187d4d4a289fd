"""The `glint` command with a signal that only tests send: SIGUSR1 is answered with a line that tells memory in use.

Python collects cyclic garbage when enough objects are there, and malloc keeps what was freed, in pieces: both change
the resident memory of a server by megabytes at times that say nothing about it. So garbage is collected first, and what
is told are the bytes that malloc has handed out and not been given back; Python's own memory is of malloc as well.
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
ENVIRONMENT = {"PYTHONMALLOC": "malloc"}


class MallocState(ctypes.Structure):
    """What mallinfo2 of glibc tells, over all its arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def bytes_in_use() -> int:
    """Bytes of malloc that are in use, those of whole mappings among them."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocState
    state = mallinfo2()
    return int(state.uordblks + state.hblkhd)


def answer(sig: int, frame: FrameType | None) -> None:
    """Collect garbage and tell on standard error what is left."""
    gc.collect()
    os.write(sys.stderr.fileno(), f"{ANSWER}{bytes_in_use()}\n".encode())


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, answer)
    sys.exit(command())
