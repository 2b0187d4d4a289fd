"""Prints, for a small and a large vocabulary, the workspace that ranks count and the memory that the process maps.

    python -m tests.cpu.held_ranks LAYOUT NUM_RANKS

A process of its own, since memory that earlier tests left free would be taken again unseen.
"""

import sys
from pathlib import Path

from glint.checkpoint.table import Checkpoint
from tests.cpu.rank_engine import LAYOUTS, rank_model
from tests.cpu.small_engine import open_engine

VOCABULARIES = (264, 264 * 64)


def mapped_bytes() -> int:
    """Memory of this process that can be written and is of no file."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, file, *_ = line.split()
        if file == "0" and access.startswith("rw"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            total += last - first
    return total


def held_by(checkpoint: Checkpoint, **changes: int) -> tuple[int, int]:
    """Workspace that an engine counts, and what the process has mapped with it and not before."""
    before = mapped_bytes()
    with open_engine(checkpoint, **changes) as engine:
        return engine.stats().workspace_bytes, mapped_bytes() - before


if __name__ == "__main__":
    layout, num_ranks = sys.argv[1], int(sys.argv[2])
    options = {"max_step_items": 512, "num_ranks": num_ranks, "row_slices": 8, "expert_layout": LAYOUTS[layout]}
    for vocab_size in VOCABULARIES:
        model = rank_model(vocab_size=vocab_size)
        held_by(model, **options)
        print(*held_by(model, **options))
