"""The settings of an engine as the native engine takes them."""

from collections.abc import Sequence
from ctypes import pointer
from typing import get_args

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.shards import CheckpointFile
from glint.engine.settings import EngineSettings, Kernels, KvCacheDtype
from glint.native import abi

KV_DTYPES: dict[KvCacheDtype, int] = {"auto": 0, "bf16": abi.DTYPE_BF16, "fp8": abi.DTYPE_F8_E4M3}
_MODEL_FIELDS = tuple(field[0] for field in abi.Model._fields_ if field[0] != "struct_bytes")


def abi_kernels(name: str) -> int:
    """The number of a kernel set in the ABI."""
    return int(getattr(abi, f"KERNELS_{name.upper()}"))


def kernels_name(number: int) -> str:
    """The name of a kernel set by its number in the ABI."""
    return str(next(name for name in get_args(Kernels) if abi_kernels(name) == number))


def native_options(settings: EngineSettings, model: ModelConfig, files: Sequence[CheckpointFile]) -> abi.EngineOptions:
    """The options of a native engine; the struct keeps what it points to.

    A request that ended keeps its place until the step it is part of is collected, so there are places for one step
    more than may run.
    """
    native_model = abi.sized(abi.Model, **{name: getattr(model, name) for name in _MODEL_FIELDS})
    native_files = (abi.File * len(files))(
        *(abi.sized(abi.File, path=bytes(file.path), byte_count=file.byte_count) for file in files)
    )
    return abi.sized(
        abi.EngineOptions,
        kernels=abi_kernels(settings.kernels),
        num_threads=settings.threads,
        num_ranks=settings.tp,
        row_slices=settings.row_slices,
        expert_layout=getattr(abi, f"EXPERT_LAYOUT_{settings.expert_layout.upper()}"),
        exchange=getattr(abi, f"EXCHANGE_{settings.exchange.upper()}"),
        all_reduce=getattr(abi, f"ALL_REDUCE_{settings.all_reduce.upper()}"),
        kv_dtype=KV_DTYPES[settings.kv_cache_dtype],
        shares_devices=settings.shares_devices,
        page_tokens=settings.page_tokens,
        num_pages=settings.num_pages,
        max_step_tokens=settings.max_step_tokens,
        max_step_items=settings.max_step_items,
        max_requests=settings.max_requests + settings.max_step_items,
        max_context_tokens=settings.max_model_len,
        file_count=len(files),
        model=pointer(native_model),
        files=native_files,
    )
