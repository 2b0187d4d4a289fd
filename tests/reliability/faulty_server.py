"""The `glint` command whose engine process of one number alone sees GLINT_FAULT.

`glint serve` starts its engine as a child with the environment that it has at that moment. $GLINT_FAULT_CHILD says for
which child, counted from 1, the fault is there; a process without children has it where that number is 1. With
$GLINT_FAULT_SHARES_GPU all ranks compute on one GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Any

from glint.cli import command
from glint.native import abi
from tests.reliability.target import child_pids

FAULT = "GLINT_FAULT"
CHILD = "GLINT_FAULT_CHILD"
SHARES_GPU = "GLINT_FAULT_SHARES_GPU"
POLL_SECONDS = 0.02


def show_fault_to(number: int, fault: str) -> None:
    """Set the variable before the child of this number starts and remove it after that."""
    seen: set[int] = set()
    while True:
        seen.update(child_pids(os.getpid()))
        if len(seen) == number - 1:
            os.environ[FAULT] = fault
        elif len(seen) >= number:
            os.environ.pop(FAULT, None)
            return
        time.sleep(POLL_SECONDS)


def share_one_gpu() -> None:
    """Let every engine of this process put its ranks on one GPU, for which no command has a flag."""
    make = abi.sized

    def sized(kind: type[ctypes.Structure], **values: Any) -> Any:
        return make(kind, **values | ({"shares_devices": 1} if kind is abi.EngineOptions else {}))

    abi.sized = sized


if __name__ == "__main__":
    if os.environ.get(SHARES_GPU):
        share_one_gpu()
    number, fault = int(os.environ.pop(CHILD, "0")), os.environ.pop(FAULT, "")
    if number == 1:
        os.environ[FAULT] = fault
    if number:
        threading.Thread(target=show_fault_to, args=(number, fault), daemon=True).start()
    elif fault:
        os.environ[FAULT] = fault
    sys.exit(command())
