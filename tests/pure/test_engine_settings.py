"""EngineSettings: complete after resolve, filled from the machine and the model, refusing what does not fit."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.quantisation import ScaleKind
from glint.engine import settings as config
from glint.engine.args import FLAGS, EngineArgs
from glint.engine.native_options import native_options, refusing_in_public_words
from glint.engine.scheduler import Scheduler
from glint.engine.settings import EngineSettings, token_cache_bytes
from glint.errors import EngineError
from glint.native import abi

SAMPLE = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_dense_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    dense_width=1536,
    expert_width=192,
    shared_width=192,
    num_experts=7,
    experts_per_token=7,
    max_positions=8192,
    has_qk_norm=False,
    has_attention_bias=False,
    normalise_weights=True,
    weight_scale_kind=ScaleKind.CHANNEL,
    input_group_size=0,
    mtp_vocab_size=49152,
    routed_scaling=7.0,
    norm_epsilon=1e-5,
    rope_theta=1e5,
    eos_token_ids=(2,),
    pad_token_id=None,
    dtype="bfloat16",
    mtp_layers=0,
    tied_embeddings=True,
    architecture="Glm4MoeForCausalLM",
    scale_suffix="weight_scale",
)
TOKEN_BYTES = 2 * 30 * 3 * 64 * 2
GIGABYTE = 2**30


@pytest.fixture(autouse=True)
def no_kernels_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLINT_KERNELS", raising=False)


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(config, "read_free_memory", lambda: 8 * GIGABYTE)
    return 8 * GIGABYTE


def resolve(**options: Any) -> EngineSettings:
    return EngineSettings.resolve("folder", SAMPLE, EngineArgs(**options))


def test_defaults_fit_the_model_and_stay_small(free_memory: int) -> None:
    settings = resolve()
    assert settings.model_dir == Path("folder")
    assert settings.threads <= len(os.sched_getaffinity(0))
    assert (settings.page_tokens, settings.max_model_len, settings.row_slices) == (16, 8192, 1)
    assert 256 * 2**20 < settings.num_pages * 16 * TOKEN_BYTES <= 384 * 2**20
    assert all(getattr(settings, field.name) is not None for field in dataclasses.fields(settings))


def test_the_cache_holds_the_longest_request(free_memory: int) -> None:
    for positions, num_pages in ((40_000, 2500), (40_001, 2501), (40_016, 2501)):
        settings = EngineSettings.resolve("folder", dataclasses.replace(SAMPLE, max_positions=positions), EngineArgs())
        assert (settings.num_pages, settings.max_model_len) == (num_pages, positions)


def test_a_context_that_does_not_fit_is_cut_unless_it_was_asked_for(free_memory: int) -> None:
    longer = dataclasses.replace(SAMPLE, max_positions=10**6)
    settings = EngineSettings.resolve("folder", longer, EngineArgs())
    assert settings.max_model_len == settings.num_pages * 16 < 10**6
    assert settings.num_pages == free_memory // 4 // (16 * TOKEN_BYTES)
    with pytest.raises(EngineError, match=rf"1000000 tokens needs .* \({free_memory} bytes\)"):
        EngineSettings.resolve("folder", longer, EngineArgs(max_model_len=10**6))


def test_bytes_become_pages(free_memory: int) -> None:
    page_bytes = 16 * TOKEN_BYTES
    assert resolve(kv_cache_bytes=10 * page_bytes + 1).num_pages == 10
    assert resolve(kv_cache_bytes=10 * page_bytes + 1).max_model_len == 160
    with pytest.raises(EngineError, match="less than one page"):
        resolve(kv_cache_bytes=page_bytes - 1)
    with pytest.raises(EngineError, match="ask for less"):
        resolve(kv_cache_bytes=free_memory + 1)


def test_pages_have_the_mtp_layer_and_its_hidden_row_where_requests_draft(free_memory: int) -> None:
    page_bytes = 16 * TOKEN_BYTES * 31 // 30 + 4 * 576
    drafting = {"num_speculative_tokens": 2}
    assert resolve(kv_cache_bytes=10 * page_bytes, **drafting).num_pages == 10
    assert resolve(kv_cache_bytes=10 * page_bytes - 1, **drafting).num_pages == 9
    of_ranks = 16 * TOKEN_BYTES * 31 // 30 + 3 * 4 * 576
    assert resolve(kv_cache_bytes=10 * of_ranks, tp=3, **drafting).num_pages == 10
    assert resolve(kv_cache_bytes=10 * of_ranks - 1, tp=3, **drafting).num_pages == 9


def test_groups_of_activations_are_refused_on_cuda() -> None:
    grouped = dataclasses.replace(SAMPLE, weight_scale_kind=ScaleKind.TILE, input_group_size=128)
    message = r"activations in groups of 128.*run it with --device cpu, or use .* such as GLM-4\.7-FP8"
    with pytest.raises(EngineError, match=message):
        EngineSettings.resolve("folder", grouped, EngineArgs(device="cuda", num_pages=64))
    tiled = dataclasses.replace(grouped, input_group_size=0)
    assert EngineSettings.resolve("folder", tiled, EngineArgs(device="cuda", num_pages=64)).device == "cuda"
    assert EngineSettings.resolve("folder", grouped, EngineArgs()).device == "cpu"


@pytest.mark.parametrize("row_slices", [2, 3])
def test_slices_that_cut_groups_are_refused(row_slices: int) -> None:
    """Widths 576 and 1536 in slices; 192 in two slices of 96 and three of 64."""
    grouped = dataclasses.replace(SAMPLE, weight_scale_kind=ScaleKind.TILE, input_group_size=128)
    with pytest.raises(EngineError) as refusal:
        EngineSettings.resolve("folder", grouped, EngineArgs(row_slices=row_slices))
    assert f"192 in {row_slices} slices makes slices of {192 // row_slices}, which cut through" in str(refusal.value)
    assert "groups of 128 inputs that share a scale; choose another --row-slices" in str(refusal.value)
    assert "intermediate_size 1536" not in str(refusal.value)
    tiled = dataclasses.replace(grouped, input_group_size=0)
    assert EngineSettings.resolve("folder", tiled, EngineArgs(row_slices=row_slices)).row_slices == row_slices


def test_a_bf16_checkpoint_keeps_fp32_on_the_cpu_alone() -> None:
    plain = dataclasses.replace(SAMPLE, weight_scale_kind=ScaleKind.NONE)
    assert token_cache_bytes(SAMPLE, "cpu") == token_cache_bytes(plain, "cuda") == TOKEN_BYTES
    assert token_cache_bytes(plain, "cpu") == 2 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 65}, "tp is 65; it must be an integer from 1 to 64"),
        ({"tp": 0}, "tp is 0"),
        ({"row_slices": 96}, "row_slices is 96"),
        ({"tp": 3, "row_slices": 4}, "row_slices is 4 and tp is 3; every rank holds 1, 2, 4 .* choose 3, 6 or 12"),
        ({"tp": 3, "row_slices": 9}, "row_slices is 9 and tp is 3"),
        ({"tp": 3, "row_slices": 1}, "row_slices is 1 and tp is 3"),
        ({"sequence_parallel": "none"}, "sequence_parallel is 'none'; choose one of auto, off, on"),
        ({"all_reduce": "ring"}, "all_reduce is 'ring'; choose one of auto, nccl, custom"),
        ({"all_reduce": "nccl"}, "all_reduce is 'nccl', but the ranks of device 'cpu' share their memory; leave --all"),
        (
            {"device": "cuda"},
            r"num_pages is not given; on device 'cuda' glint\.engine\.memory_plan\.size_engine finds it",
        ),
        (
            {"kernels": "hopper"},
            "kernels is 'hopper', which device 'cuda' has and 'cpu' has not; choose one of auto, exact",
        ),
        ({"device": "tpu"}, "device is 'tpu'; choose one of cpu, cuda"),
        ({"kernels": "sse"}, "kernels is 'sse'"),
        ({"expert_layout": "dp"}, "expert_layout is 'dp'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": 2**31}, "num_pages is 2147483648"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"max_step_tokens": "64"}, "max_step_tokens is '64'; it must be an integer from 1"),
        ({"max_requests": 1}, "max_requests is 1, less than max_num_seqs 64"),
        ({"max_model_len": 8193}, "the model knows 8192 positions"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 1}, "max_model_len is 1; .* at least 2"),
        ({"page_tokens": 24}, "page_tokens is 24; it must be a power of two up to 1024"),
        ({"page_tokens": 2048}, "page_tokens is 2048"),
        ({"max_model_len": 33, "num_pages": 2}, "2 pages of 16 tokens hold 32"),
        ({"kv_cache_bytes": GIGABYTE, "num_pages": 2}, "both given"),
    ],
)
@pytest.mark.parametrize("has_mtp", [False, True])
def test_what_cannot_be_is_refused(free_memory: int, options: dict[str, Any], message: str, has_mtp: bool) -> None:
    with pytest.raises(EngineError, match=message):
        EngineSettings.resolve("folder", SAMPLE, EngineArgs(**options), has_mtp=has_mtp)


def resolve_cuda(**options: Any) -> EngineSettings:
    return resolve(device="cuda", **({"num_pages": 200} | options))


def test_defaults_of_a_gpu() -> None:
    settings = resolve_cuda()
    assert (settings.page_tokens, settings.max_step_tokens, settings.max_num_seqs) == (64, 4096, 256)
    assert (settings.max_requests, settings.max_model_len, settings.kernels) == (256, 8192, "auto")
    assert resolve_cuda(num_pages=10).max_model_len == 640


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernels": "exact"},
            "kernels is 'exact', which device 'cpu' has and 'cuda' has not; .* auto, portable, hopper",
        ),
        ({"kernels": "neon"}, r"--kernels or \$GLINT_KERNELS, or device 'cpu'"),
        ({"page_tokens": 16}, "page_tokens is 16; the CUDA kernels have pages of 64 tokens"),
        ({"row_slices": 8}, "row_slices is 8 and tp is 1; on device 'cuda' they are equal"),
        ({"tp": 3, "row_slices": 6}, "row_slices is 6 and tp is 3; on device 'cuda' they are equal"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        resolve_cuda(**options)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (
            {"tp": 2},
            (
                "num_attention_heads 9 cannot be split over 2 ranks; choose another --tp",
                "num_key_value_heads 3 can neither be split over 2 ranks nor be duplicated evenly; choose another --tp",
            ),
        ),
        (
            {"tp": 3, "expert_layout": "ep"},
            ("n_routed_experts 7 cannot be split over 3 ranks; choose another --tp or --expert-layout tp",),
        ),
        (
            {"row_slices": 5},
            tuple(
                f"{size} cannot be cut into 5 slices; choose another --row-slices"
                for size in (
                    "num_attention_heads * head_dim 576",
                    "intermediate_size 1536",
                    "shared expert width 192",
                    "moe_intermediate_size 192",
                )
            ),
        ),
        (
            {"row_slices": 2, "expert_layout": "ep"},
            ("n_routed_experts 7 cannot be cut into 2 slices; choose another --row-slices",),
        ),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused_with_every_reason(
    options: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    with pytest.raises(EngineError) as refused:
        resolve(**options)
    asked = f"tp {options.get('tp', 1)} and row_slices {options.get('row_slices', options.get('tp', 1))}"
    assert str(refused.value).splitlines() == [f"{asked} do not go with this model:", *(f"  {one}" for one in reasons)]


def test_ranks_share_the_threads_and_the_bytes_of_the_cache(free_memory: int) -> None:
    settings = resolve(tp=3, threads=1, sequence_parallel="on", kv_cache_bytes=30 * 16 * TOKEN_BYTES)
    assert (settings.tp, settings.row_slices, settings.threads, settings.sequence_parallel) == (3, 3, 1, "on")
    assert settings.num_pages == 30
    assert resolve(tp=3, row_slices=12).row_slices == 12
    assert resolve(row_slices=3).row_slices == 3


def test_more_ranks_than_heads_keep_copies(free_memory: int) -> None:
    assert [token_cache_bytes(SAMPLE, "cpu", tp) // TOKEN_BYTES for tp in (1, 3, 6, 9)] == [1, 1, 2, 3]
    wide = dataclasses.replace(SAMPLE, num_heads=12, vocab_size=49152)
    cache_bytes = 30 * 16 * TOKEN_BYTES
    asked = [EngineArgs(tp=tp, kv_cache_bytes=cache_bytes) for tp in (3, 6)]
    assert [EngineSettings.resolve("folder", wide, args).num_pages for args in asked] == [30, 15]


def test_native_options_carry_how_ranks_share(free_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = native_options(resolve(tp=3, row_slices=6, sequence_parallel="off"), SAMPLE, ())
    assert (options.num_ranks, options.row_slices, options.sequence_parallel) == (3, 6, abi.SEQUENCE_PARALLEL_OFF)
    assert (options.all_reduce, options.kv_dtype, options.shares_devices) == (abi.ALL_REDUCE_AUTO, 0, 0)
    monkeypatch.setenv("GLINT_SHARED_DEVICES", "1")
    options = native_options(resolve_cuda(tp=3, all_reduce="custom", sequence_parallel="on"), SAMPLE, ())
    assert (options.all_reduce, options.sequence_parallel) == (abi.ALL_REDUCE_CUSTOM, abi.SEQUENCE_PARALLEL_ON)
    assert options.shares_devices == 1


def test_the_environment_chooses_kernels_where_nobody_else_does(
    free_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLINT_KERNELS", "portable")
    assert resolve_cuda().kernels == "portable"
    assert resolve_cuda(kernels="hopper").kernels == "hopper"
    with pytest.raises(EngineError, match=r"kernels is 'portable'.*GLINT_KERNELS"):
        resolve()
    monkeypatch.setenv("GLINT_KERNELS", "plain")
    assert resolve().kernels == "plain"


def test_a_native_refusal_names_the_flag() -> None:
    native = "glint_init_engine: options.num_ranks is 65 and max_step_items 7, kv_dtype 9, options.num_pages is 0"
    with pytest.raises(EngineError) as refused, refusing_in_public_words():
        raise EngineError(native)
    public = "glint_init_engine: --tp is 65 and --max-num-seqs 7, --kv-cache-dtype 9, num_pages is 0"
    assert str(refused.value) == public


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_num_seqs": 4000, "num_speculative_tokens": 4},
            "--max-num-seqs 4000 with --num-speculative-tokens 4 makes 20000 rows to sample in a step, at most 16384 "
            "fit; lower --max-num-seqs to 3276 or less, or lower --num-speculative-tokens",
        ),
        (
            {"max_num_seqs": 16384, "num_speculative_tokens": 1},
            "--max-num-seqs 16384 with --num-speculative-tokens 1 makes 32768 rows to sample in a step, at most 16384 "
            "fit; lower --max-num-seqs to 8192 or less, or lower --num-speculative-tokens",
        ),
        (
            {"max_step_tokens": 4, "num_speculative_tokens": 4},
            "--num-speculative-tokens 4 with --max-num-batched-tokens 4: a request verifies its drafts and one token "
            "in one step; lower --num-speculative-tokens to 3 or less, or raise --max-num-batched-tokens",
        ),
    ],
)
def test_drafts_that_no_step_has_room_for_are_refused_with_their_flags(
    free_memory: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError) as refused:
        resolve(**options)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("options", "num_drafts"),
    [
        ({"max_num_seqs": 3276}, 4),
        ({"max_num_seqs": 4000}, 3),
        ({"max_num_seqs": 8192}, 1),
        ({"max_num_seqs": 8193}, 0),
        ({"max_step_tokens": 2 * 64 * 5}, 4),
        ({"max_step_tokens": 2 * 64 * 5 - 2}, 3),
        ({"max_step_tokens": 16 + 64 * 2 - 1}, 0),
        ({"max_step_tokens": 1}, 0),
        ({"max_step_tokens": 8 + 3 * 2, "max_num_seqs": 3, "page_tokens": 8}, 1),
    ],
)
def test_auto_drafts_as_many_as_a_step_has_room_for(free_memory: int, options: dict[str, int], num_drafts: int) -> None:
    settings = EngineSettings.resolve("folder", SAMPLE, EngineArgs(**options), has_mtp=True)
    assert (settings.num_speculative_tokens, settings.adapts_drafts) == (num_drafts, True)
    most_items = native_options(settings, SAMPLE, ()).max_step_items
    assert most_items == settings.max_num_seqs * (1 + num_drafts) <= 2**14


@pytest.mark.parametrize(
    ("options", "num_drafts", "step_drafts"),
    [
        ({}, 4, 128),
        ({"max_num_seqs": 20}, 4, 80),
        ({"num_speculative_tokens": 3}, 3, 768),
        ({"num_speculative_tokens": 0}, 0, 0),
        ({"max_step_tokens": 512}, 0, 0),
        ({"max_step_tokens": 768}, 4, 128),
        ({"max_step_tokens": 766}, 0, 0),
        ({"max_step_tokens": 64 + 3 * 20 + 4, "max_num_seqs": 20}, 2, 40),
    ],
)
def test_drafts_of_a_step_on_a_gpu(options: dict[str, Any], num_drafts: int, step_drafts: int) -> None:
    args = EngineArgs(device="cuda", num_pages=200, **options)
    settings = EngineSettings.resolve("folder", SAMPLE, args, has_mtp=True)
    assert (settings.num_speculative_tokens, settings.max_step_drafts) == (num_drafts, step_drafts)
    assert native_options(settings, SAMPLE, ()).max_step_items == settings.max_num_seqs + step_drafts
    if "max_step_tokens" in options:
        return
    assert settings.max_step_tokens == 4096 + step_drafts
    sizes = settings.max_step_tokens, settings.max_num_seqs, settings.page_tokens
    drafting = Scheduler(*sizes, settings.num_speculative_tokens, settings.max_step_drafts)
    plain = Scheduler(4096, *sizes[1:])
    assert (drafting.max_running, drafting.chunk_tokens) == (plain.max_running, plain.chunk_tokens)


@pytest.mark.parametrize("max_step_tokens", [80, 143, 144, 200, 300, 512])
def test_auto_drafts_leave_every_request_its_place(free_memory: int, max_step_tokens: int) -> None:
    args = EngineArgs(max_step_tokens=max_step_tokens)
    settings = EngineSettings.resolve("folder", SAMPLE, args, has_mtp=True)
    sizes = settings.max_step_tokens, settings.max_num_seqs, settings.page_tokens
    plain, drafting = Scheduler(*sizes), Scheduler(*sizes, settings.num_speculative_tokens)
    assert drafting.max_running == plain.max_running == 64
    assert drafting.chunk_tokens >= min(plain.chunk_tokens, max_step_tokens // 2 - settings.page_tokens)


def test_every_native_option_is_set_or_of_the_bench_alone() -> None:
    passed = {flag.native or name for name, flag in FLAGS.items()} | {"num_pages", "max_requests", "shares_devices"}
    of_the_bench = {"local_experts", "emulated_ranks", "synthetic_seed"}
    table = {"struct_bytes", "file_count", "model", "files"}
    fields = {field[0] for field in abi.EngineOptions._fields_}
    assert fields == (passed & fields) | of_the_bench | table
    assert passed - fields == {"device", "gpu_memory_utilization", "kv_cache_bytes"}
