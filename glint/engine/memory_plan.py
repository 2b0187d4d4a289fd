"""The sizes of an engine: on the CPU from its settings alone, on a GPU from the memory of the GPU."""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.shards import CheckpointFile
from glint.engine.args import EngineArgs
from glint.engine.native_options import native_options, refusing_in_public_words
from glint.engine.settings import DEFAULT_PAGE_TOKENS, MAX_PAGES, EngineSettings
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import open_library, plan_engine
from glint.terminal import plain_table, print_table

DEFAULT_UTILIZATION = 0.9
COLUMNS = ("", "", "")
LEFT_COLUMNS = (0, 2)
COLLECTIVE_BYTES = 2**30
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class GpuPlan:
    """The memory of one GPU and the part that one rank of an engine takes, in bytes unless the name says otherwise.

    All of `tp` ranks take as much, each on a GPU of its own, of which this one has the least free memory; where
    `is_shared`, in tests alone, all are on this one. With several ranks a part is left to the links between them.
    `utilization` is the share of the whole memory that may be in use once the engine is there, by other processes
    too. `wanted_pages` would hold `max_requests` requests of `max_model_len` tokens at once: more is not taken.
    """

    device_name: str
    memory_total: int
    memory_free: int
    utilization: float
    weight_bytes: int
    workspace_bytes: int
    pinned_bytes: int
    bytes_per_page: int
    page_tokens: int
    max_model_len: int
    max_requests: int
    tp: int = 1
    is_shared: bool = False

    @property
    def used_bytes(self) -> int:
        """Memory that other processes use."""
        return self.memory_total - self.memory_free

    @property
    def allowed_bytes(self) -> int:
        """Memory that a rank may take: the share that other processes leave."""
        allowed = int(self.memory_total * self.utilization) - self.used_bytes
        return allowed // self.tp if self.is_shared else allowed

    @property
    def collective_bytes(self) -> int:
        """Memory left to the links between ranks, which NCCL takes by itself."""
        return COLLECTIVE_BYTES if self.tp > 1 else 0

    @property
    def taken_bytes(self) -> int:
        """Memory that a rank takes besides its pages."""
        return self.weight_bytes + self.workspace_bytes + self.collective_bytes

    @property
    def room_bytes(self) -> int:
        """Memory left for pages; negative where not even the weights and the workspace fit."""
        return self.allowed_bytes - self.taken_bytes

    @property
    def fitting_pages(self) -> int:
        """Pages that fit."""
        return max(0, self.room_bytes // self.bytes_per_page)

    @property
    def context_pages(self) -> int:
        """Pages that one request of the longest context holds."""
        return -(-self.max_model_len // self.page_tokens)

    @property
    def wanted_pages(self) -> int:
        """Pages for all requests at once, each of the longest context."""
        return self.context_pages * self.max_requests

    @property
    def num_pages(self) -> int:
        """Pages that are taken."""
        return min(self.fitting_pages, self.wanted_pages, MAX_PAGES)

    def rows(self, num_pages: int, max_model_len: int) -> Iterator[tuple[str, str, str]]:
        """The arithmetic as rows of name, amount and remark, for an engine of so many pages and so long a context."""
        is_one_of_many = self.tp > 1 and not self.is_shared
        among = f", of {self.tp} GPUs the one with the least free" if is_one_of_many else ""
        yield "GPU memory", _gib(self.memory_total), f"{self.device_name}{among}"
        yield "share to use", _gib(int(self.memory_total * self.utilization)), f"{self.utilization:g} of it"
        yield "- in use already", _gib(self.used_bytes), "by other processes and the driver"
        if self.is_shared:
            yield f"/ {self.tp} ranks", _gib(self.allowed_bytes), "that have this GPU in common"
        yield "- weights", _gib(self.weight_bytes), ""
        yield "- workspace", _gib(self.workspace_bytes), ""
        if self.tp > 1:
            yield "- NCCL", _gib(self.collective_bytes), f"links between {self.tp} ranks, an estimate"
        yield "= left for pages", _gib(self.room_bytes), f"{self.fitting_pages:,} pages fit"
        yield "one page", f"{self.bytes_per_page / MIB:,.2f} MiB", f"{self.page_tokens} tokens"
        yield "page cache", _gib(num_pages * self.bytes_per_page), f"{num_pages:,} pages"
        yield "tokens in it", f"{num_pages * self.page_tokens:,} tokens", f"{max_model_len:,} for the longest request"
        yield "pinned host memory", _gib(self.pinned_bytes), "outside the GPU"
        if self.tp > 1:
            taken = self.taken_bytes + num_pages * self.bytes_per_page
            where = "ranks" if self.is_shared else "GPUs"
            yield f"x {self.tp} {where}", _gib(self.tp * taken), f"{_gib(taken)} on each"

    def show(self, settings: EngineSettings) -> None:
        """Print the arithmetic for an engine of these settings on standard error."""
        rows = self.rows(settings.num_pages, settings.max_model_len)
        title = "memory plan" if self.tp == 1 else "memory plan of one rank"
        print_table(title, COLUMNS, rows, sys.stderr, LEFT_COLUMNS)

    def refuse(self, reason: str, *ways: str) -> EngineError:
        """The error for what does not fit, with the arithmetic and the ways out, those that always help among them."""
        ways += (
            f"raise --gpu-memory-utilization ({self.utilization:g})",
            "free memory that other processes use",
            "use a GPU with more memory, or share the model among more of them with --tp",
        )
        table = plain_table(COLUMNS, self.rows(self.fitting_pages, self.max_model_len), LEFT_COLUMNS)
        return EngineError(f"{reason}\n{table}\n{'; '.join(ways)}")


class SizedEngine(NamedTuple):
    """Settings that fit, and on a GPU the plan that they come from."""

    settings: EngineSettings
    plan: GpuPlan | None

    def rows(self, stats: abi.EngineStats) -> list[tuple[str, str, str]]:
        """Where the memory is, as rows of name, amount and remark; without a plan, as the engine counts it."""
        num_pages, page_tokens = self.settings.num_pages, self.settings.page_tokens
        if self.plan is not None:
            return list(self.plan.rows(num_pages, self.settings.max_model_len))
        return [
            ("weights", _gib(stats.weight_bytes_mapped), "mapped from the checkpoint"),
            ("weights in memory", _gib(stats.weight_bytes_copied), "copied and rearranged"),
            ("workspace", _gib(stats.workspace_bytes), ""),
            ("page cache", _gib(stats.page_bytes), f"{num_pages:,} pages of {page_tokens} tokens"),
            (
                "tokens in it",
                f"{num_pages * page_tokens:,} tokens",
                f"{self.settings.max_model_len:,} for the longest request",
            ),
        ]

    def show(self) -> None:
        """Print the plan, where there is one, on standard error."""
        if self.plan is not None:
            self.plan.show(self.settings)


def size_engine(
    model_dir: str | Path,
    model: ModelConfig,
    files: Sequence[CheckpointFile],
    args: EngineArgs,
    library_path: str | Path | None = None,
    has_mtp: bool = False,
) -> SizedEngine:
    """Settle every size before an engine is made, of a checkpoint that has an MTP layer or not.

    On a GPU the page cache takes `num_pages`, else `kv_cache_bytes`, else what weights and workspace leave of the share
    `gpu_memory_utilization` of its memory; with several ranks these are for each of them. Raises `EngineError` with the
    arithmetic where something does not fit.
    """
    utilization = args.gpu_memory_utilization
    if args.device != "cuda":
        if utilization is not None:
            raise EngineError(
                f"gpu_memory_utilization is {utilization}, but device is {args.device!r}; leave it out, "
                "--kv-cache-memory-bytes sizes the page cache there, or use --device cuda"
            )
        return SizedEngine(EngineSettings.resolve(model_dir, model, args, has_mtp), None)
    utilization = DEFAULT_UTILIZATION if utilization is None else utilization
    if not 0.0 < utilization <= 1.0:
        raise EngineError(f"gpu_memory_utilization is {utilization}; it is a share over 0 and up to 1, such as 0.9")
    page_tokens = DEFAULT_PAGE_TOKENS["cuda"]
    longest = max(1, -(-(model.max_positions if args.max_model_len is None else args.max_model_len) // page_tokens))
    draft = EngineSettings.resolve(model_dir, model, replace(args, num_pages=longest, kv_cache_bytes=None), has_mtp)
    library = open_library(args.device, library_path)
    plan = plan_gpu(library, draft, native_options(draft, model, files), utilization)
    chosen = choose_pages(plan, args, has_drafts=draft.num_speculative_tokens > 0)
    fitting_context = min(draft.max_model_len, chosen * page_tokens)
    return SizedEngine(replace(draft, num_pages=chosen, max_model_len=fitting_context), plan)


def plan_gpu(library: ctypes.CDLL, settings: EngineSettings, options: abi.EngineOptions, utilization: float) -> GpuPlan:
    """Ask the library what an engine of these settings takes, pages aside, and what the device has."""
    without_pages = abi.EngineOptions.from_buffer_copy(options)
    without_pages.num_pages = 1
    with refusing_in_public_words():
        found = plan_engine(library, without_pages)
    return GpuPlan(
        device_name=found.device_name.decode(),
        memory_total=found.memory_total,
        memory_free=found.memory_free,
        utilization=utilization,
        weight_bytes=found.weight_bytes,
        workspace_bytes=found.workspace_bytes,
        pinned_bytes=found.pinned_bytes,
        bytes_per_page=found.bytes_per_page,
        page_tokens=settings.page_tokens,
        max_model_len=settings.max_model_len,
        max_requests=settings.max_requests,
        tp=settings.tp,
        is_shared=settings.shares_devices and settings.tp > 1,
    )


def choose_pages(plan: GpuPlan, args: EngineArgs, has_drafts: bool = False) -> int:
    """The pages of the cache: as many as asked for, else as many as the plan takes; refused where they do not fit."""
    num_pages, cache_bytes = args.num_pages, args.kv_cache_bytes
    if num_pages is not None and cache_bytes is not None:
        raise EngineError(f"num_pages {num_pages} and kv_cache_bytes {cache_bytes} are both given; give one")
    if cache_bytes is not None:
        num_pages = cache_bytes // plan.bytes_per_page
        if num_pages < 1:
            raise EngineError(
                f"kv_cache_bytes is {cache_bytes}, less than one page of {plan.bytes_per_page}; ask for more"
            )
    smaller = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, which size the workspace"
    if has_drafts:
        smaller += ", or leave the MTP layer out with --num-speculative-tokens 0"
    if plan.fitting_pages == 0:
        raise plan.refuse("the model does not fit into the memory of the GPU with one page of cache:", smaller)
    if num_pages is not None and num_pages > plan.fitting_pages:
        raise plan.refuse(f"a page cache of {num_pages:,} pages does not fit, only {plan.fitting_pages:,} do:", smaller)
    chosen = plan.num_pages if num_pages is None else num_pages
    if args.max_model_len is not None and chosen < plan.context_pages:
        raise plan.refuse(
            f"a context of {plan.max_model_len:,} tokens needs {plan.context_pages:,} pages, there are {chosen:,}:",
            f"lower --max-model-len to {chosen * plan.page_tokens} or less",
            smaller,
        )
    return chosen


def _gib(byte_count: int) -> str:
    return f"{byte_count / GIB:,.2f} GiB"
