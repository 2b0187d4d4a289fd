"""The server that `glint bench serve --synthetic` measures: `glint serve` with random weights.

    python -m glint.synthetic_server NAME --model DIR [flags of glint serve]

NAME is a model that the bench knows by name, or a folder whose config.json has the shapes. DIR holds a tokenizer.
Flags, processes and code are those of `glint serve`; the checkpoint alone differs. No flag and no variable of
`glint serve` leads here.
"""

import argparse
import sys
from functools import partial

from glint.bench.rank_shapes import find_model
from glint.bench.synthetic import synthetic_checkpoint
from glint.cli import execute, leave_torch_out, make_parser, run_serve


def main(arguments: list[str]) -> int:
    """Serves until a signal; gives the exit code."""
    name, *flags = arguments
    chosen = make_parser().parse_args(["serve", *flags], argparse.Namespace(is_own_command=True))
    chosen.run = partial(run_serve, open_model=partial(synthetic_checkpoint, find_model(name)))
    return execute(chosen)


if __name__ == "__main__":
    leave_torch_out()
    sys.exit(main(sys.argv[1:]))
