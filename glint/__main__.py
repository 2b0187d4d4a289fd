"""Runs the command line: `python -m glint`."""

import sys

from glint.cli import main

sys.exit(main())
