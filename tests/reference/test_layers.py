"""The NumPy sentences against the patched parts of transformers, one by one and layer by layer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference import numpy_ops as ops
from tests.reference import rounded_parts, sums
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint, make_prompts
from tests.reference.numpy_model import Backend, NumpyModel


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "backend"), [*((weights, "cpu") for weights in WEIGHTS), ("bf16", "cuda")])
def test_each_layer_from_the_same_hidden_state(
    tmp_path: Path, family: Family, weights: Weights, backend: Backend
) -> None:
    folder = make_checkpoint(tmp_path, family, weights)
    model = reference.Reference(folder, rounds_like=backend)
    prompt = make_prompts(model.config.vocab_size)[2]
    states = model.hidden_states(prompt)
    numpy_model = NumpyModel(folder, backend)
    for index in range(model.config.num_hidden_layers):
        result = numpy_model.layer(states[index], index)
        np.testing.assert_allclose(result, states[index + 1], rtol=1e-6, atol=1e-6)
        assert np.mean(result == states[index + 1]) > 0.999
    np.testing.assert_array_equal(numpy_model.embed(prompt), states[0])
    logits = numpy_model.head(states[-1])
    np.testing.assert_allclose(logits, model.logits(prompt), rtol=1e-6, atol=1e-6)


def test_the_numpy_model_answers_as_the_reference(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "air", "fp8_block")
    model, numpy_model = reference.Reference(folder), NumpyModel(folder)
    prompt = make_prompts(numpy_model.vocab_size)[1]
    tokens, gaps = model.greedy(prompt, 5)
    numpy_tokens, numpy_gaps = numpy_model.greedy(prompt, 5)
    assert numpy_tokens == tokens
    np.testing.assert_allclose(numpy_gaps, gaps, rtol=0, atol=1e-5)
    np.testing.assert_allclose(numpy_model.hidden_states(prompt), model.hidden_states(prompt), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "cols"), [(320, 192), (130, 257), (16, 192), (192, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["channel", "tensor", "tile"])
def test_fp8_gemms(rows: int, cols: int, has_bias: bool, kind: ops.ScaleKind) -> None:
    source = np.random.default_rng(rows + cols)
    inputs = source.standard_normal((5, cols)).astype(np.float32)
    fp8 = ops.encode_e4m3(source.standard_normal((rows, cols)) * 100)
    shapes = {"channel": (rows, 1), "tensor": (1,), "tile": (-(-rows // 128), -(-cols // 128))}
    scale = source.uniform(1e-3, 1e-2, size=shapes[kind]).astype(np.float32)
    bias = source.standard_normal(rows).astype(np.float32) if has_bias else None
    matrix = torch.from_numpy(fp8).view(torch.float8_e4m3fn).double()
    matrix = matrix * reference.expand_scale(torch.from_numpy(scale).double(), matrix.shape)
    weight = rounded_parts.Weight(matrix, "e4m3", sums.Float64Sums())
    torch_bias = None if bias is None else torch.from_numpy(bias).double()
    expected = torch.nn.functional.linear(torch.from_numpy(inputs), weight, torch_bias)
    result = ops.gemm_fp8(ops.quantise(inputs), fp8, scale, kind, bias)
    assert expected.dtype == torch.float32
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize(("rows", "cols"), [(320, 192), (130, 257), (192, 16)])
def test_gemms_of_groups(rows: int, cols: int) -> None:
    source = np.random.default_rng(rows + cols)
    inputs = (source.standard_normal((5, cols)) * 2.0 ** source.integers(-5, 5, size=(5, cols))).astype(np.float32)
    fp8 = ops.encode_e4m3(source.standard_normal((rows, cols)) * 100)
    scale = source.uniform(1e-3, 1e-2, size=(-(-rows // 128), -(-cols // 128))).astype(np.float32)
    matrix = torch.from_numpy(fp8).view(torch.float8_e4m3fn).double()
    matrix = matrix * reference.expand_scale(torch.from_numpy(scale).double(), matrix.shape)
    weight = rounded_parts.Weight(matrix, "e4m3_groups", sums.Float64Sums())
    expected = torch.nn.functional.linear(torch.from_numpy(inputs), weight)
    result = ops.gemm_groups(ops.quantise_groups(inputs), fp8, scale, "tile")
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-7, atol=1e-9)


def test_sliced_gemms_reduce_by_a_tree() -> None:
    parts = [np.array([value], dtype=np.float32) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    assert ops.reduce_slices(parts)[0] == np.float32(1.0 + 2.0**-23)
    assert ops.reduce_slices(parts[:3])[0] == np.float32(1.0)
    source = np.random.default_rng(0)
    inputs = source.standard_normal((4, 64)).astype(np.float32)
    fp8 = ops.encode_e4m3(source.standard_normal((24, 64)) * 100)
    scale = np.full((24, 1), 0.01, dtype=np.float32)
    quantised = ops.quantise(inputs, row_slices=4)
    whole = quantised.values() @ (ops.decode_e4m3(fp8) * np.float64(np.float32(0.01))).T
    result = ops.gemm_fp8(quantised, fp8, scale, "channel")
    np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-5)


def test_the_bias_chooses_experts_and_does_not_weigh_them() -> None:
    rule = ops.RouterRule(2, has_normalised_weights=True, routed_scaling=2.0)
    bias = np.array([0.0, 0.0, 0.9, -0.9], dtype=np.float32)
    routing = ops.route(np.zeros((1, 3), np.float32), np.zeros((4, 3), np.float32), bias, rule)
    assert routing.experts.tolist() == [[2, 0]]
    assert routing.weights.tolist() == [[1.0, 1.0]]
