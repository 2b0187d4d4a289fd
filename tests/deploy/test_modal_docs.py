"""docs/deploy.md says what is there: its Modal commands, its messages, and its sizes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from glint.checkpoint.plan import MemoryPlan, plan_memory
from glint.checkpoint.table import open_checkpoint
from glint.config import DEFAULT_PAGE_TOKENS
from tests.deploy.conftest import ROOT
from tests.pure.checkpoint_files import GLM_47, make_specs, quantization, write_folder

DOCUMENT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SOURCE_FOLDERS = ("glint", "native", "deploy")
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".cu"}
VARIABLES = {"GLINT_MODEL_ID", "GLINT_GPU", "GLINT_EXPERT_LAYOUT", "GLINT_SERVE_FLAGS"}
UTILIZATION = 0.9
SET_ASIDE_GIB = 3.0
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Command:
    """A Modal command line of the document: variables in front, the words after `modal`."""

    text: str
    variables: dict[str, str]
    words: tuple[str, ...]


def read_commands(document: str) -> list[Command]:
    """Every Modal command line, in indented text, in fences and in backticks."""
    lines = re.findall(r"^ *((?:[A-Z_]+=\S+ )*modal [a-z].*)$", document, re.MULTILINE)
    spans = re.findall(r"(?<!`)`((?:[A-Z_]+=\S+ )*modal [a-z]+ [^`\n]+)`(?!`)", document)
    commands = []
    for text in [*lines, *spans]:
        words = shlex.split(text)
        place = words.index("modal")
        variables = dict(word.split("=", 1) for word in words[:place])
        commands.append(Command(text, variables, tuple(words[place + 1 :])))
    return commands


COMMANDS = read_commands(DOCUMENT)
RUNS = [command for command in COMMANDS if command.words[0] in ("run", "deploy")]
OTHERS = [command for command in COMMANDS if command.words[0] not in ("run", "deploy")]


@cache
def modal_help(*words: str) -> tuple[int, str]:
    """The exit code and the text of a Modal command with --help, which asks no server."""
    command = [sys.executable, "-m", "modal", *words, "--help"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GLINT_")}
    environment = kept | {"COLUMNS": "200"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


def flags_in(words: tuple[str, ...]) -> list[str]:
    """The flags among words."""
    return [word.split("=")[0] for word in words if word.startswith("--")]


def test_the_document_has_every_kind_of_command() -> None:
    targets = {word.partition("::")[2] for command in RUNS for word in command.words if "::" in word}
    assert targets == {"download_model", "smoke", "bench"}
    assert any(command.words[0] == "deploy" for command in RUNS)
    assert [command.words[:2] for command in OTHERS] == [("setup",), ("secret", "create")]


@pytest.mark.parametrize("command", RUNS, ids=lambda command: command.text)
def test_run_and_deploy_name_files_functions_and_flags_that_exist(command: Command) -> None:
    verb, *rest = command.words
    (target,) = [word for word in rest if ".py" in word]
    file, _, function = target.partition("::")
    assert (ROOT / file).is_file()
    assert set(command.variables) <= VARIABLES
    place = rest.index(target)
    code, text = modal_help(verb)
    assert code == 0, text
    assert all(re.search(rf"{flag}\b", text) for flag in flags_in(tuple(rest[:place])))
    if verb == "run":
        code, text = modal_help("run", target)
        assert code == 0, text
        assert function
        assert all(re.search(rf"^ *{flag} ", text, re.MULTILINE) for flag in flags_in(tuple(rest[place + 1 :])))


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.text)
def test_other_modal_commands_exist(command: Command) -> None:
    code, text = modal_help(*command.words[: 1 if command.words[0] == "setup" else 2])
    assert code == 0, text
    assert "Usage:" in text


def test_a_function_or_flag_that_is_not_there_is_found() -> None:
    assert modal_help("run", "deploy/modal_app.py::serve_it")[0] != 0
    _, text = modal_help("run", "deploy/modal_app.py::bench")
    assert "--concurrency" in text and "--requests" not in text


def messages_of(document: str) -> list[str]:
    """The messages of glint that the first table of troubleshooting quotes."""
    section = document.split("\n## Troubleshooting\n", 1)[1].split("\nMessages of the programs around it", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@cache
def sources() -> str:
    """The text of everything that prints messages."""
    paths = [path for folder in SOURCE_FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.suffix in SOURCE_SUFFIXES)


@pytest.mark.parametrize("message", messages_of(DOCUMENT))
def test_every_quoted_message_is_one_of_the_source(message: str) -> None:
    assert message in sources()


def test_the_table_of_messages_is_read() -> None:
    assert len(messages_of(DOCUMENT)) > 10
    assert messages_of("\n## Troubleshooting\n\n| `a b: ` | why |\n") == ["a b: "]
    assert "this message is in no source" not in sources()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, MemoryPlan]:
    """What `glint check` plans for a folder of the true layout, by the number of ranks."""
    document = GLM_47 | {"quantization_config": quantization("channel")}
    folder = tmp_path_factory.mktemp("glm") / "GLM-4.7-FP8"
    checkpoint = open_checkpoint(write_folder(folder, document, make_specs(document, has_mtp=True), num_shards=93))
    return {ranks: plan_memory(checkpoint.config, checkpoint.tensors, ranks, "tp") for ranks in (4, 8)}


def token_bytes_of(plan: MemoryPlan, has_fp8_pages: bool) -> int:
    """The bytes of a token on a rank; with FP8 pages half of BF16, and one layer in BF16 on top."""
    layers = int(GLM_47["num_hidden_layers"])
    if not has_fp8_pages:
        return plan.kv_bytes_per_token
    return plan.kv_bytes_per_token // 2 + plan.kv_bytes_per_token // layers


def test_the_sizing_table_is_the_arithmetic_of_glint_check(plans: dict[int, MemoryPlan]) -> None:
    rows = re.findall(
        r"^\| (\d)x ([^|]+) \| (\d+) \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|$", DOCUMENT, re.MULTILINE
    )
    assert len([name for _, name, *_ in rows if "FP8 pages" in name]) >= 4 and len(rows) >= 9
    for count, name, memory, weights, token_bytes, thousands in rows:
        plan = plans[int(count)]
        bytes_of_token = token_bytes_of(plan, "FP8 pages" in name)
        assert float(weights) == pytest.approx(plan.weight_bytes / GIB, abs=0.006)
        assert int(token_bytes.replace(",", "")) == bytes_of_token
        room = (UTILIZATION * int(memory) - SET_ASIDE_GIB) * GIB - plan.weight_bytes
        assert int(thousands.replace(",", "")) == int(room // bytes_of_token // 1000)


def test_pages_are_as_large_as_the_engine_said_on_a_gpu(plans: dict[int, MemoryPlan]) -> None:
    results = (ROOT / "docs" / "gpu-results.md").read_text(encoding="utf-8")
    for text in (results, DOCUMENT):
        (measured,) = re.findall(r"takes (\d\.\d\d) MiB (?:on one of eight ranks )?instead of (\d\.\d\d)", text)
        pages = [DEFAULT_PAGE_TOKENS["cuda"] * token_bytes_of(plans[8], has_fp8) / MIB for has_fp8 in (True, False)]
        assert tuple(f"{page:.2f}" for page in pages) == measured


def test_measured_figures_are_those_of_the_results() -> None:
    results = (ROOT / "docs" / "gpu-results.md").read_text(encoding="utf-8")
    for figure in ("12.73", "3.30", "88.7", "3,808", "609", "20,259"):
        assert figure in DOCUMENT
        assert figure in results


def test_every_path_that_the_document_names_exists() -> None:
    named = {name.rstrip(".") for name in re.findall(r"(?<![\w/.-])(?:deploy|docs|scripts|tests)/[\w./-]+", DOCUMENT)}
    assert len(named) > 10
    assert not [name for name in named if not Path(ROOT / name).exists()]
