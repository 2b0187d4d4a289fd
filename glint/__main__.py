"""Runs the command line: `python -m glint`."""

import sys

from glint.cli import command

sys.exit(command())
