"""A model folder as the checked table of tensors that the native engine takes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glint.checkpoint.config import GENERATION_NAME, GenerationConfig, ModelConfig, read_config, read_generation
from glint.checkpoint.document import read_object
from glint.checkpoint.layout import (
    EMBEDDING_NAME,
    LM_HEAD_NAME,
    Dtype,
    ExpectedTensor,
    Part,
    Role,
    expected_mtp_tensors,
    expected_tensors,
)
from glint.checkpoint.shards import CheckpointFile, PlacedTensor, ProblemList, ShardSet, read_shards
from glint.errors import CheckpointError

NATIVE_TENSOR = np.dtype(
    [
        ("struct_bytes", np.uint32),
        ("role", np.int32),
        ("part", np.int32),
        ("layer", np.int32),
        ("expert", np.int32),
        ("dtype", np.int32),
        ("rows", np.int64),
        ("cols", np.int64),
        ("file_index", np.int32),
        ("reserved", np.int32),
        ("file_offset", np.uint64),
        ("byte_count", np.uint64),
    ],
    align=True,
)
TOKENIZER_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
_ABSENT = -1
_ELEMENT_BYTES = {Dtype.F32: 4, Dtype.BF16: 2, Dtype.F8_E4M3: 1}
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.")
_KV_SCALE_NAME = re.compile(_LAYER_NAME.pattern + r"self_attn\.(?:[kv]_scale|[kv]_proj\.(?:[kv]|output)_scale)")


class TableEntry(NamedTuple):
    """One tensor that the engine uses; the fields are those of `glint_tensor`.

    `layer` and `expert` are None where they do not apply; `file_offset` counts from the start of the file.
    """

    role: Role
    part: Part
    layer: int | None
    expert: int | None
    dtype: Dtype
    rows: int
    cols: int
    file_index: int
    file_offset: int
    byte_count: int


class SkippedTensor(NamedTuple):
    """A tensor that the engine deliberately does not use."""

    name: str
    reason: str
    byte_count: int


@dataclass(frozen=True)
class Inspection:
    """All that is known about a model folder, good or bad.

    `config` is None when config.json cannot be used; `num_tensors` and `tensor_bytes` count everything in the files.
    `mtp_tensors` are those of the MTP layer, none where the files do not have it.
    """

    folder: Path
    config: ModelConfig | None
    generation: GenerationConfig | None
    files: tuple[CheckpointFile, ...]
    tensors: tuple[TableEntry, ...]
    skipped: tuple[SkippedTensor, ...]
    num_tensors: int
    tensor_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    mtp_tensors: tuple[TableEntry, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A model folder without problems: every tensor is in `tensors`, in `mtp_tensors` or in `skipped`.

    `mtp_tensors` are those of the MTP layer, none where the files do not have it.

    With `synthetic_seed` other than 0 no file holds the weights: the CUDA library makes them at random, for benches.
    """

    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    files: tuple[CheckpointFile, ...]
    tensors: tuple[TableEntry, ...]
    skipped: tuple[SkippedTensor, ...]
    notes: tuple[str, ...]
    synthetic_seed: int = 0
    mtp_tensors: tuple[TableEntry, ...] = ()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of generation_config.json where it names some, else of config.json."""
        chosen = self.generation.eos_token_ids
        return self.config.eos_token_ids if chosen is None else chosen

    def tensor_array(self, has_mtp: bool = False) -> npt.NDArray[np.void]:
        """Give the table as an array of `glint_tensor`, in the exact C layout; absent layers and experts are -1.

        The MTP layer is part of it where asked for.
        """
        tensors = (*self.tensors, *self.mtp_tensors) if has_mtp else self.tensors
        table = np.zeros(len(tensors), NATIVE_TENSOR)
        if tensors:
            for name, column in zip(TableEntry._fields, zip(*tensors, strict=True), strict=True):
                table[name] = [_ABSENT if value is None else value for value in column]
        table["struct_bytes"] = NATIVE_TENSOR.itemsize
        return table


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder; raise CheckpointError with all problems at once when it cannot be used."""
    found = inspect_checkpoint(folder)
    if found.problems or found.config is None or found.generation is None:
        raise CheckpointError(*found.problems)
    return Checkpoint(
        folder=found.folder,
        config=found.config,
        generation=found.generation,
        files=found.files,
        tensors=found.tensors,
        skipped=found.skipped,
        notes=found.notes,
        mtp_tensors=found.mtp_tensors,
    )


def inspect_checkpoint(folder: Path) -> Inspection:
    """Read everything of a model folder but the weights, and list every problem.

    Never raises for bad content: what could not be read is absent from the result and named in `problems`.
    """
    problems = ProblemList()
    notes: list[str] = []
    if not folder.is_dir():
        problems.add("folder", f"{folder} is not a folder; give the folder that holds the model's config.json")
        return Inspection(folder, None, None, (), (), (), 0, 0, problems.lines(), ())
    config: ModelConfig | None = None
    generation: GenerationConfig | None = None
    try:
        config = read_config(folder)
    except CheckpointError as error:
        problems.extend(error)
    try:
        generation = read_generation(folder)
    except CheckpointError as error:
        problems.extend(error)
    _check_stop_tokens(config, generation, problems, notes)
    shards = read_shards(folder, problems, notes)
    tensors: tuple[TableEntry, ...] = ()
    mtp_tensors: tuple[TableEntry, ...] = ()
    skipped: tuple[SkippedTensor, ...] = ()
    if config is not None and shards.is_readable:
        mtp = _expected_mtp(config, shards)
        tensors = _match_tensors([*expected_tensors(config)], shards, problems)
        if config.tied_embeddings:
            tensors += tuple(entry._replace(role=Role.LM_HEAD) for entry in tensors[:1] if entry.role is Role.EMBEDDING)
        mtp_tensors = _match_mtp(mtp, shards, notes)
        known = {tensor.name for tensor in mtp} if mtp_tensors else set()
        skipped = _sort_remaining(config, known, shards, problems, notes)
        _note_unaligned(tensors + mtp_tensors, notes)
    if generation is not None:
        notes.extend(f"{GENERATION_NAME}: {name} is not used" for name in generation.unused)
    _note_text_files(folder, notes)
    return Inspection(
        folder=folder,
        config=config,
        generation=generation,
        files=shards.files,
        tensors=tensors,
        skipped=skipped,
        num_tensors=len(shards.tensors),
        tensor_bytes=sum(placed.byte_count for placed in shards.tensors.values()),
        problems=problems.lines(),
        notes=tuple(notes),
        mtp_tensors=mtp_tensors,
    )


def _check_stop_tokens(
    config: ModelConfig | None, generation: GenerationConfig | None, problems: ProblemList, notes: list[str]
) -> None:
    if config is None or generation is None:
        return
    outside = [token for token in generation.eos_token_ids or () if token >= config.vocab_size]
    if outside:
        text = f"generation_config.json: eos_token_id holds {outside}, outside of vocab_size {config.vocab_size}"
        problems.add("stop tokens", text)
    if not config.eos_token_ids and not generation.eos_token_ids:
        notes.append("no eos_token_id is given: answers end only at their token limit or at a stop string")


def _note_text_files(folder: Path, notes: list[str]) -> None:
    """Note what keeps a model that can be loaded from reading texts or conversations."""
    settings: dict[str, Any] = {}
    if (folder / SETTINGS_NAME).exists():
        try:
            settings = read_object(folder / SETTINGS_NAME)
        except CheckpointError as error:
            notes.extend(error.problems)
    for name in (TOKENIZER_NAME, SETTINGS_NAME):
        if not (folder / name).exists():
            notes.append(f"{name} is missing: only token ids can be used; copy the model's own file")
    if settings.get("auto_map"):
        notes.append(f"{SETTINGS_NAME}: auto_map asks to run code, which glint never does; remove it to use texts")
    if not settings.get("chat_template") and not (folder / TEMPLATE_NAME).exists():
        notes.append(f"{TEMPLATE_NAME} is missing: conversations cannot be rendered; copy the model's own file")


def _expected_mtp(config: ModelConfig, shards: ShardSet) -> list[ExpectedTensor]:
    """The tensors of the MTP layer; none where the files hold nothing of it, or where config.json does not name it."""
    dtypes = {name: placed.dtype for name, placed in shards.tensors.items()}
    expected = [*expected_mtp_tensors(config, dtypes)] if config.mtp_layers else []
    return expected if any(tensor.name in dtypes for tensor in expected) else []


def _match_mtp(tensors: list[ExpectedTensor], shards: ShardSet, notes: list[str]) -> tuple[TableEntry, ...]:
    """The tensors of the MTP layer; none, with a note, where one is missing or not as config.json implies."""
    problems = ProblemList()
    entries = _match_tensors(tensors, shards, problems)
    if not problems.lines():
        return entries
    notes.append(f"the MTP layer is left out, so nothing is drafted: {problems.lines()[0]}")
    return ()


def _match_tensors(tensors: list[ExpectedTensor], shards: ShardSet, problems: ProblemList) -> tuple[TableEntry, ...]:
    entries: list[TableEntry] = []
    for expected in tensors:
        placed = shards.tensors.get(expected.name)
        if placed is not None:
            entry = _check_tensor(expected, placed, problems)
            if entry is not None:
                entries.append(entry)
        elif expected.name not in shards.reported_names:
            shape = list(expected.shapes[0])
            text = f"{expected.name} is missing; config.json implies it with shape {shape}; check the download"
            problems.add("missing tensors", text)
    return tuple(entries)


def _check_tensor(expected: ExpectedTensor, placed: PlacedTensor, problems: ProblemList) -> TableEntry | None:
    for dtype in expected.dtypes:
        if dtype.name == placed.dtype:
            break
    else:
        wanted = " or ".join(dtype.name for dtype in expected.dtypes)
        text = f"{expected.name} is {placed.dtype}, the engine needs {wanted} here; use a checkpoint of that form"
        problems.add("tensors of another dtype", text)
        return None
    if placed.shape not in expected.shapes:
        wanted = " or ".join(str(list(shape)) for shape in expected.shapes)
        text = (
            f"{expected.name} has shape {list(placed.shape)}, config.json implies {wanted}; they must belong together"
        )
        problems.add("tensors of another shape", text)
        return None
    _, role, part, layer, expert, _, _, rows, cols = expected
    return TableEntry(role, part, layer, expert, dtype, rows, cols, *placed[2:])


def _sort_remaining(
    config: ModelConfig, mtp_names: set[str], shards: ShardSet, problems: ProblemList, notes: list[str]
) -> tuple[SkippedTensor, ...]:
    expected = {tensor.name for tensor in expected_tensors(config)} | mtp_names
    skipped: list[SkippedTensor] = []
    for name, placed in shards.tensors.items():
        if name in expected:
            continue
        reason = _skip_reason(config, name, bool(mtp_names))
        if reason is None:
            text = f"{name} is unexpected: {placed.dtype} {list(placed.shape)} has no place in the model of config.json"
            problems.add("unexpected tensors", text)
        else:
            skipped.append(SkippedTensor(name, reason, placed.byte_count))
    if any(tensor.name == LM_HEAD_NAME for tensor in skipped):
        notes.append(f"{LM_HEAD_NAME} is skipped: tie_word_embeddings is true, {EMBEDDING_NAME} is used instead")
    return tuple(skipped)


def _skip_reason(config: ModelConfig, name: str, has_mtp: bool) -> str | None:
    if name == LM_HEAD_NAME and config.tied_embeddings:
        return "tied embeddings"
    layer = _LAYER_NAME.match(name)
    if layer and config.num_layers + has_mtp <= int(layer[1]) < config.num_layers + config.mtp_layers:
        return "MTP layer left out" if int(layer[1]) == config.num_layers else "further MTP layer"
    if _KV_SCALE_NAME.fullmatch(name):
        return "KV scale"
    return None


def _note_unaligned(tensors: tuple[TableEntry, ...], notes: list[str]) -> None:
    count = sum(entry.file_offset % _ELEMENT_BYTES[entry.dtype] != 0 for entry in tensors)
    if count:
        notes.append(
            f"{count} tensors do not start at a multiple of their element size; safetensors' writer aligns them"
        )
