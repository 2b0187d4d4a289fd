"""Reads a Dockerfile and its ignore list, and says what is wrong with them by rules that hadolint does not know."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
COMPILERS = {"g++", "gcc", "build-essential", "cmake", "ninja-build", "python3-dev", "python3-pip", "python3-venv"}


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


def image_problems(stages: dict[str, Stage]) -> list[str]:
    """Images whose version is left open, and stages that are copied from and do not exist."""
    problems = []
    for stage in stages.values():
        tag = stage.image.rpartition(":")[2] if ":" in stage.image else ""
        if stage.image != "scratch" and not re.match(r"\d+\.\d+", tag):
            problems.append(f"{stage.name}: the image {stage.image} has no version")
        sources = [source for one in stage.all("COPY") if (source := one.flag("from"))]
        problems += [f"{stage.name}: no stage {source}" for source in sources if source not in stages]
    return problems


def apt_problems(stages: dict[str, Stage]) -> list[str]:
    """Packages that bring others along, lists that stay in the image, compilers where a server runs."""
    problems = []
    for stage in stages.values():
        for one in stage.all("RUN"):
            if "apt-get install" not in one.text:
                continue
            if "--no-install-recommends" not in one.text or " -y " not in one.text:
                problems.append(f"{stage.name}: apt-get install without -y --no-install-recommends")
            if not re.search(r"rm -rf /var/lib/apt/lists/\*", one.text):
                problems.append(f"{stage.name}: the lists of apt stay in the layer")
        packages = {word for command in stage.commands() for word in command if command[:2] == ["apt-get", "install"]}
        if stage.all("CMD") and packages & COMPILERS:
            problems.append(f"{stage.name}: a server needs no {', '.join(sorted(packages & COMPILERS))}")
    return problems


def server_problems(stage: Stage) -> list[str]:
    """What an image that is started must have: a user that is not root, a health check, and no secret."""
    problems = []
    users = stage.all("USER")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1].text):
        problems.append(f"{stage.name}: the last USER is not a number above 0")
    if not stage.all("HEALTHCHECK") or stage.last("HEALTHCHECK").text == "NONE":
        problems.append(f"{stage.name}: no HEALTHCHECK")
    if not stage.all("ENTRYPOINT") or not stage.last("ENTRYPOINT").text.startswith("["):
        problems.append(f"{stage.name}: ENTRYPOINT is not a list, so signals end at a shell")
    return problems


def secret_problems(stages: dict[str, Stage]) -> list[str]:
    """Variables of the image that look like secrets, and files of the whole repository."""
    problems = []
    for stage in stages.values():
        for one in (*stage.all("ENV"), *stage.all("ARG")):
            names = re.findall(r"(\w+)(?==|$)", one.text)
            problems += [f"{stage.name}: {one.name} {name}" for name in names if SECRET_NAME.search(name)]
        problems += [f"{stage.name}: COPY of everything" for one in stage.all("COPY") if is_everything(one)]
        problems += [f"{stage.name}: ADD" for _ in stage.all("ADD")]
    return problems


def is_everything(copy: Instruction) -> bool:
    """Whether a COPY takes the whole build context."""
    return copy.flag("from") is None and copy.words[0] in (".", "./", "/")


def find_problems(text: str) -> list[str]:
    """Everything that is wrong with a Dockerfile, in sentences."""
    stages = read_stages(text)
    served = [stage for stage in stages.values() if stage.all("CMD")]
    found = [*image_problems(stages), *apt_problems(stages), *secret_problems(stages)]
    return found + [problem for stage in served for problem in server_problems(stage)]
