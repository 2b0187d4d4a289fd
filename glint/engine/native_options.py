"""The settings of an engine as the native engine takes them, and its refusals in the words of the command line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import pointer
from typing import Any, get_args

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.shards import CheckpointFile
from glint.engine.args import FLAGS, Kernels
from glint.engine.settings import EngineSettings
from glint.errors import EngineError
from glint.native import abi

KV_DTYPES = {"auto": 0, "bf16": abi.DTYPE_BF16, "fp8": abi.DTYPE_F8_E4M3}
_MODEL_FIELDS = tuple(field[0] for field in abi.Model._fields_ if field[0] != "struct_bytes")
_OPTION_FIELDS = frozenset(field[0] for field in abi.EngineOptions._fields_)
_RENAMED = {name: flag.native for name, flag in FLAGS.items() if flag.native is not None}
_PUBLIC_NAMES = {flag.native or name: flag.spellings.split()[0] for name, flag in FLAGS.items()}
_NATIVE_NAME = re.compile(r"\boptions\.(\w+)|\b([a-z]+_[a-z_]+)\b")


def kernels_name(number: int) -> str:
    """The name of a kernel set by its number in the ABI."""
    return str(next(name for name in get_args(Kernels) if _encode("kernels", name) == number))


def native_options(settings: EngineSettings, model: ModelConfig, files: Sequence[CheckpointFile]) -> abi.EngineOptions:
    """The options of a native engine; the struct keeps what it points to.

    A request that ended keeps its entry until the step it is part of is collected, so there are entries for one step
    more than may run. Every draft that is verified counts as an item.
    """
    native_model = abi.sized(abi.Model, **{name: getattr(model, name) for name in _MODEL_FIELDS})
    native_files = (abi.File * len(files))(
        *(abi.sized(abi.File, path=bytes(file.path), byte_count=file.byte_count) for file in files)
    )
    values = {
        native: _encode(native, value)
        for name, value in vars(settings).items()
        if (native := _RENAMED.get(name, name)) in _OPTION_FIELDS
    }
    values["max_requests"] += settings.max_num_seqs
    values["max_step_items"] += settings.max_step_drafts
    return abi.sized(
        abi.EngineOptions, **values, file_count=len(files), model=pointer(native_model), files=native_files
    )


def _encode(field: str, value: Any) -> int:
    """An option as the ABI has it: a number, or the constant that bears the names of field and value."""
    if field == "kv_dtype":
        return KV_DTYPES[value]
    return int(getattr(abi, f"{field}_{value}".upper()) if isinstance(value, str) else value)


@contextmanager
def refusing_in_public_words() -> Iterator[None]:
    """Turn the ABI fields that a refusal names into the flags that set them, or into options of `LLM`."""
    try:
        yield
    except EngineError as refusal:
        refusal.args = tuple(_NATIVE_NAME.sub(_public_name, text) for text in refusal.args)
        raise


def _public_name(found: re.Match[str]) -> str:
    name = found[1] or found[2]
    return _PUBLIC_NAMES.get(name, name)
