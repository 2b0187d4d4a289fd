"""A C program builds a tensor table by hand and generates; Python gives the same answer on the same model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glint import LLM, SamplingParams
from glint.native import abi
from tests.cpu.c_programs import compile_program, run_program, start_program
from tests.reference.checkpoints import Tensor, write_json, write_safetensors
from tests.reference.shapes import Layout, Shape, Weights, config_of, generation_config_of

pytestmark = pytest.mark.sanitize

NEW_TOKENS = 24
PROMPTS = [[1], [3, 1, 4, 1, 5, 9, 2, 6], list(range(7, 60))]
TINY = Shape(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    vocab_size=64,
    routed_scaling_factor=1.5,
    use_qk_norm=True,
    rope_theta=10000.0,
    max_position_embeddings=256,
)
LAYOUT = Layout(num_shards=1, has_rope_parameters=False, dtype_field="torch_dtype")
SCALE_KINDS: dict[Weights, int] = {"bf16": abi.SCALE_NONE, "fp8_channel": abi.SCALE_CHANNEL}


def hashes(tensor: int, count: int) -> NDArray[np.int64]:
    """The numbers from 0 to 255 that the elements of a tensor are made of, as tiny_model.c computes them."""
    mixed = (np.uint32(tensor << 20) ^ np.arange(count, dtype=np.uint32)) * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return ((mixed ^ (mixed >> np.uint32(13))) >> np.uint32(24)).astype(np.int64)


def names_and_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors in the order of the program, scales aside."""
    hidden, head_dim, width = TINY.hidden_size, TINY.head_dim, TINY.num_attention_heads * TINY.head_dim
    yield "model.embed_tokens.weight", (TINY.vocab_size, hidden)
    for layer in range(TINY.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", width), ("k", head_dim), ("v", head_dim)):
            yield f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden)
            yield f"{prefix}.self_attn.{part}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, width)
        yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        if layer < TINY.first_k_dense_replace:
            yield from mlp_shapes(f"{prefix}.mlp", TINY.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", (TINY.n_routed_experts, hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (TINY.n_routed_experts,)
        for expert in range(TINY.n_routed_experts):
            yield from mlp_shapes(f"{prefix}.mlp.experts.{expert}", TINY.moe_intermediate_size)
        yield from mlp_shapes(f"{prefix}.mlp.shared_experts", TINY.moe_intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (TINY.vocab_size, hidden)


def mlp_shapes(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Gate, up and down."""
    yield f"{prefix}.gate_proj.weight", (width, TINY.hidden_size)
    yield f"{prefix}.up_proj.weight", (width, TINY.hidden_size)
    yield f"{prefix}.down_proj.weight", (TINY.hidden_size, width)


def tiny_tensors(weights: Weights) -> list[Tensor]:
    """The tensors of the program's model, made from the same numbers."""
    tensors: list[Tensor] = []
    for name, shape in names_and_shapes():
        numbers = hashes(len(tensors), int(np.prod(shape)))
        if name.endswith("_proj.weight") and weights != "bf16":
            fp8 = (numbers & 0x80 | numbers % 0x38).astype(np.uint8)
            tensors.append(Tensor(name, "F8_E4M3", shape, fp8.tobytes()))
            scales = np.full((shape[0], 1), 0.5, "<f4")
            tensors.append(Tensor(f"{name}_scale", "F32", scales.shape, scales.tobytes()))
            continue
        values = (64 + numbers // 2) / 128 if "norm" in name else (numbers - 128) / 256
        floats = values.astype("<f4")
        if name.endswith("e_score_correction_bias"):
            tensors.append(Tensor(name, "F32", shape, floats.tobytes()))
        else:
            tensors.append(Tensor(name, "BF16", shape, (floats.view("<u4") >> 16).astype("<u2").tobytes()))
    return tensors


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("generate", tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("weights", SCALE_KINDS)
def test_c_program_and_python_generate_the_same(program: Path, weights: Weights, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_of(TINY, LAYOUT, weights))
    write_json(tmp_path / "generation_config.json", generation_config_of(TINY))
    write_safetensors(tmp_path / "model.safetensors", tiny_tensors(weights))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True)
    with LLM(tmp_path, threads=1, kernels="exact", skip_tokenizer=True, num_pages=64) as llm:
        expected = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    for prompt, completion in zip(PROMPTS, expected, strict=True):
        lines = run_program(program, tmp_path / "raw.bin", SCALE_KINDS[weights], NEW_TOKENS, *prompt)
        assert [int(token) for token, _ in lines] == completion.token_ids
        assert completion.logprobs is not None
        assert [float.fromhex(value) for _, value in lines] == [
            entry[token] for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        assert len(set(completion.token_ids)) > 3


def test_c_program_reports_what_the_library_says(program: Path, tmp_path: Path) -> None:
    done = start_program(program, tmp_path / "raw.bin", abi.SCALE_NONE, 4, TINY.vocab_size)
    assert done.returncode == 1
    assert "glint_add_request: status 1: request.prompt_tokens[0] is 64" in done.stderr


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_left_unfinished_is_given_back(num_threads: int, tmp_path: Path) -> None:
    """Engines that do not open, and one freed with requests and a step in flight: the leak sanitizer finds nothing."""
    program = compile_program("left_unfinished", tmp_path)
    lines = run_program(program, tmp_path / "raw.bin", abi.SCALE_CHANNEL, num_threads)
    parts = [
        ["missing_tensor", str(abi.STATUS_INVALID_ARGUMENT)],
        ["short_file", str(abi.STATUS_FILE)],
        ["unknown_token", str(abi.STATUS_INVALID_ARGUMENT)],
        ["freed_with_a_step_in_flight", str(abi.STATUS_OK)],
    ]
    assert lines == parts * 3
