#!/usr/bin/env python3
"""Tries a real server hard and says what held: `scripts/reliability.py --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def start() -> int:
    """Run the command with the checkout in the path of modules."""
    sys.path[0] = str(ROOT)
    from tests.reliability.command import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
