"""The `glint` command whose engine process of one number alone sees GLINT_FAULT.

`glint serve` starts its engine as a child with the environment that it has at that moment. $GLINT_FAULT_CHILD says for
which child, counted from 1, the fault is there; a process without children has it where that number is 1.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from glint.cli import command
from tests.reliability.target import child_pids

FAULT = "GLINT_FAULT"
CHILD = "GLINT_FAULT_CHILD"
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


if __name__ == "__main__":
    number, fault = int(os.environ.pop(CHILD, "0")), os.environ.pop(FAULT, "")
    if number == 1:
        os.environ[FAULT] = fault
    if number:
        threading.Thread(target=show_fault_to, args=(number, fault), daemon=True).start()
    elif fault:
        os.environ[FAULT] = fault
    sys.exit(command())
