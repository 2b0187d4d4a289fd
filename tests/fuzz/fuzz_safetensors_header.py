"""Mutates safetensors headers and compares glint's reader with the official one.

Run it from the root of the repository: `python -m tests.fuzz.fuzz_safetensors_header --seconds 60 --seed 1`.
The reader must return or raise FormatError, whatever the bytes. What it accepts the official library must accept and
read alike. What it refuses the official library must refuse too, unless the header breaks a stricter rule of glint, and
those are looked for here apart from the reader.
"""

import argparse
import copy
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, deserialize

from glint.checkpoint.document import Defect, FormatError
from glint.checkpoint.safetensors import DTYPE_BITS, read_header

ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    8,
    2**31,
    2**63,
    2**64 - 1,
    2**64,
    1.0,
    1e300,
    "",
    "F32",
    "a",
    [],
    [0],
    {},
    [[1]],
]
ODD_TEXTS = [
    b"NaN",
    b"-0",
    b"1e5",
    b"Infinity",
    b"\\u0041",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\0",
    b" ",
    b"\n",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"true",
    b"null",
    b"00",
    b"[" * 2000,
    b"9" * 400,
]
Members = dict[str, Any]


def make_members(random_source: random.Random) -> tuple[Members, int]:
    """Give a valid header with a few tensors, and the length of its data area."""
    members: Members = {}
    if random_source.random() < 0.5:
        members["__metadata__"] = {"format": "pt"}
    position = 0
    for number in range(random_source.randrange(5)):
        dtype = random_source.choice(list(DTYPE_BITS))
        shape = [random_source.choice([0, 1, 2, 3, 8]) for _ in range(random_source.randrange(4))]
        elements = 1
        for size in shape:
            elements *= size
        if elements * DTYPE_BITS[dtype] % 8:
            shape.append(8)
            elements *= 8
        end = position + elements * DTYPE_BITS[dtype] // 8
        members[f"tensor.{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    if random_source.random() < 0.5:
        members = dict(random_source.sample(list(members.items()), len(members)))
    return members, position


def mutate_structure(members: Members, random_source: random.Random) -> None:
    """Change one value or add one, somewhere in the header."""
    odd_value = copy.deepcopy(random_source.choice(ODD_VALUES))
    holder: Any = members
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = random_source.choice(keys)
        if isinstance(holder[key], dict | list) and random_source.random() < 0.8:
            holder = holder[key]
            continue
        if isinstance(holder[key], int) and random_source.random() < 0.5:
            holder[key] += random_source.choice([-4, -1, 1, 4])
        else:
            holder[key] = odd_value
        return
    if isinstance(holder, dict):
        holder["added"] = odd_value
    else:
        holder.append(odd_value)


def mutate_bytes(header: bytes, random_source: random.Random) -> bytes:
    """Insert, replace, remove or repeat bytes."""
    data = bytearray(header)
    first = random_source.randrange(len(data) + 1)
    last = min(len(data), first + random_source.choice([0, 1, 1, 2, 8, 40]))
    piece = random_source.choice(
        [random_source.choice(ODD_TEXTS), random_source.randbytes(1), bytes(data[first:last]) * 2, b""]
    )
    data[first:last] = piece
    return bytes(data)


def break_strict_rule(header: bytes, random_source: random.Random) -> bytes:
    """Put a space before a header, give a tensor a field more, or give every member twice."""
    return random_source.choice(
        [b" " + header, header.replace(b'"dtype"', b'"more":1,"dtype"', 1), header[:-1] + b"," + header[1:]]
    )


def make_file(random_source: random.Random) -> bytes:
    """Give the bytes of a safetensors file that is valid or nearly so."""
    members, data_bytes = make_members(random_source)
    for _ in range(random_source.choice([0, 0, 1, 1, 2])):
        mutate_structure(members, random_source)
    header = json.dumps(members, separators=(",", ":")).encode()
    if random_source.random() < 0.1:
        header = break_strict_rule(header, random_source)
    header += b" " * random_source.choice([0, 0, -len(header) % 8])
    for _ in range(random_source.choice([0, 0, 0, 1, 1, 3])):
        header = mutate_bytes(header, random_source)
    length = len(header)
    if random_source.random() < 0.05:
        length = max(0, length + random_source.choice([-1, 1, -8, 8, 100_000_001, 2**62]))
    if random_source.random() < 0.05:
        data_bytes = max(0, data_bytes + random_source.choice([-1, 1]))
    file = length.to_bytes(8, "little") + header + b"\0" * data_bytes
    return file[: random_source.randrange(len(file) + 1)] if random_source.random() < 0.03 else file


def read_officially(content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    """Give name -> (dtype, shape, bytes) as the official library reads it; None when it refuses."""
    try:
        tensors = deserialize(content)
    except SafetensorError:
        return None
    return {name: (info["dtype"], tuple(info["shape"]), len(info["data"])) for name, info in tensors}


def find_strict_defects(content: bytes) -> set[Defect]:
    """Give what glint refuses in a header that the official library accepts, found without glint's reader.

    The rules: the header begins with a brace; no object has a key twice; a tensor has its three fields and no other;
    the metadata, where there is any, is an object.
    """
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    defects = set() if header.startswith(b"{") else {Defect.HEADER_START}

    def read_pairs(pairs: list[tuple[str, Any]]) -> Members:
        if len(dict(pairs)) < len(pairs):
            defects.add(Defect.DUPLICATE_KEY)
        return dict(pairs)

    for name, fields in json.loads(header, object_pairs_hook=read_pairs).items():
        is_metadata = name == "__metadata__"
        if fields is None if is_metadata else fields.keys() - {"dtype", "shape", "data_offsets"}:
            defects.add(Defect.HEADER_SCHEMA)
    return defects


def check_file(path: Path, content: bytes) -> str:
    """Compare both readers on one file; give the verdict's name, raise AssertionError when they disagree."""
    path.write_bytes(content)
    official = read_officially(content)
    try:
        found = read_header(path)
    except FormatError as error:
        if official is None:
            return error.defect.value
        assert error.defect in find_strict_defects(content), f"glint alone refuses {content!r}: {error}"
        return f"only{error.defect.value}"
    assert official is not None, f"only glint accepts {content!r}"
    ours = {name: (info.dtype, info.shape, info.end - info.begin) for name, info in found.tensors.items()}
    assert ours == official, f"both accept, but read differently: {content!r}"
    return "accepted"


def run(seconds: float, seed: int, max_files: int | None = None) -> Counter[str]:
    """Fuzz for a while, or until so many files were read; give how often each verdict occurred."""
    random_source = random.Random(seed)
    verdicts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.safetensors"
        while verdicts.total() != max_files and (max_files is not None or time.monotonic() < deadline):
            verdicts[check_file(path, make_file(random_source))] += 1
    return verdicts


def main() -> None:
    """Run from the command line and print the verdicts."""
    parser = argparse.ArgumentParser(description="fuzz glint's safetensors header reader against the official one")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--files", type=int, default=None, help="read so many files, however long it takes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    verdicts = run(arguments.seconds, arguments.seed, arguments.files)
    print(f"{verdicts.total()} files, seed {arguments.seed}")
    for verdict, count in verdicts.most_common():
        print(f"{count:8} {verdict}")


if __name__ == "__main__":
    main()
