"""Tables on a terminal and in plain text, and lines of progress."""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

LEFT_COLUMNS = frozenset({0})


def say(text: str) -> None:
    """One line of progress on standard error."""
    print(f"glint: {text}", file=sys.stderr, flush=True)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    stream: TextIO | None = None,
    left: Collection[int] = LEFT_COLUMNS,
) -> None:
    """Prints a table with a frame on a terminal and as aligned text elsewhere, on standard output by default.

    The columns of `left` are aligned to the left, the others to the right.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(f"{title}\n{plain_table(columns, rows, left)}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in left else "right")
    for row in rows:
        table.add_row(*row)
    Console(file=stream).print(table)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = LEFT_COLUMNS) -> str:
    """A table as lines of text, indented by two; columns without any title have no line of titles."""
    lines = [list(row) for row in rows]
    if any(columns):
        lines.insert(0, list(columns))
    widths = [max((len(line[index]) for line in lines), default=0) for index in range(len(columns))]
    written = []
    for line in lines:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        written.append("  " + "  ".join(cells).rstrip())
    return "\n".join(written)
