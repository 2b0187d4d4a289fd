"""Reads a Dockerfile and its ignore list."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals and everything after it on one line."""

    name: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words after flags such as --from, of the JSON form or of the plain one."""
        bare = re.sub(r"^(?:--[\w-]+=\S+\s+)*", "", self.text)
        return tuple(json.loads(bare)) if bare.startswith("[") else tuple(shlex.split(bare))

    def flag(self, name: str) -> str | None:
        """The value of a flag such as --from before the words."""
        match = re.search(rf"(?:^|\s)--{name}=(\S+)", self.text)
        return match[1] if match else None


@dataclass(frozen=True)
class Stage:
    """One FROM with what follows it."""

    image: str
    name: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        """The instructions of a name, in order."""
        return [one for one in self.instructions if one.name == name]

    def last(self, name: str) -> Instruction:
        """The instruction of a name that holds."""
        found = self.all(name)
        assert found, f"stage {self.name} has no {name}"
        return found[-1]

    def commands(self) -> list[list[str]]:
        """The commands of all RUN instructions, cut at `&&`."""
        lines = [part for one in self.all("RUN") for part in one.text.split("&&")]
        return [shlex.split(line) for line in lines]


def read_stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; every stage must have one."""
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        if name.upper() == "FROM":
            image, keyword, stage = rest.split()
            assert keyword.upper() == "AS", line
            stages[stage] = Stage(image, stage, ())
        else:
            current = list(stages.values())[-1]
            made = (*current.instructions, Instruction(name.upper(), rest.strip()))
            stages[current.name] = Stage(current.image, current.name, made)
    return stages


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether an ignore list leaves a path out of the build context: the last pattern that matches it decides."""
    places = [path, *map(str, PurePosixPath(path).parents)]
    ignored = False
    for pattern in patterns:
        bare = pattern.removeprefix("!").removeprefix("**/")
        names = [part for place in places for part in ([place, *place.split("/")] if "**/" in pattern else [place])]
        if any(fnmatch.fnmatchcase(name, bare) for name in names if name != "."):
            ignored = not pattern.startswith("!")
    return ignored
