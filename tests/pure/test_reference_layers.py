"""The NumPy sentences against the patched parts of transformers, one by one and layer by layer."""

from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from numpy.typing import NDArray

from tests.reference import numpy_ops as ops
from tests.reference import rounded_parts, sums
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint, make_prompts
from tests.reference.shapes import SCALE_KINDS


class NumpyModel:
    """One decoder layer at a time, as NumPy sentences over the tensors of a folder."""

    def __init__(
        self, folder: Path, weights: Weights, config: reference.Glm4MoeConfig, backend: rounded_parts.Backend
    ) -> None:
        self.config = config
        self.weights = weights
        self.has_fp8 = weights != "bf16"
        self.has_bf16_inputs = weights == "bf16" and backend == "cuda"
        self.tensors: dict[str, NDArray] = {}
        for path in folder.glob("*.safetensors"):
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = file.get_tensor(name)
                    is_code = tensor.dtype == torch.float8_e4m3fn
                    self.tensors[name] = tensor.view(torch.uint8).numpy() if is_code else tensor.float().numpy()

    def product(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """The named projection of the rows."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        if not self.has_fp8:
            return ops.product_bf16(ops.round_bf16(rows) if self.has_bf16_inputs else rows, weight, bias)
        scale, kind = self.tensors[f"{name}.weight_scale"], SCALE_KINDS[self.weights]
        return ops.product_fp8(ops.quantise(rows), weight, scale, kind, bias)

    def mlp(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """SwiGLU of the rows by the named matrices."""
        gate, up = (self.product(rows, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.product(ops.swiglu(gate, up), f"{name}.down_proj")

    def attention(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """Attention of the rows among themselves."""
        config, positions = self.config, np.arange(len(rows))
        is_bf16 = self.has_fp8 or self.has_bf16_inputs
        rope = config.rope_parameters
        heads = {}
        for part in ("q", "k", "v"):
            values = self.product(rows, f"{name}.{part}_proj").reshape(len(rows), -1, config.head_dim)
            if part != "v":
                if config.use_qk_norm:
                    values = ops.rms_norm(values, self.tensors[f"{name}.{part}_norm.weight"], config.rms_norm_eps)
                rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
                values = ops.rotary(values, positions, rotary_dim, rope["rope_theta"])
            heads[part] = ops.round_bf16(values) if is_bf16 else values
        mixed = ops.attention(heads["q"], heads["k"], heads["v"], positions, is_bf16)
        return self.product(mixed.reshape(len(rows), -1), f"{name}.o_proj")

    def experts(self, rows: ops.FloatArray, name: str) -> ops.FloatArray:
        """Routed and shared experts of the rows."""
        config = self.config
        rule = ops.RouterRule(
            experts_per_token=config.num_experts_per_tok,
            num_groups=config.n_group,
            groups_per_token=config.topk_group,
            has_normalised_weights=config.norm_topk_prob,
            routed_scaling=config.routed_scaling_factor,
        )
        bias = self.tensors[f"{name}.gate.e_score_correction_bias"]
        routing = ops.route(rows, self.tensors[f"{name}.gate.weight"], bias, rule)
        outputs = [
            np.concatenate([self.mlp(rows[token : token + 1], f"{name}.experts.{expert}") for expert in chosen])
            for token, chosen in enumerate(routing.experts)
        ]
        return ops.combine(np.stack(outputs), routing.weights, self.mlp(rows, f"{name}.shared_experts"))

    def layer(self, hidden: ops.FloatArray, index: int) -> ops.FloatArray:
        """Output of one decoder layer."""
        prefix, epsilon = f"model.layers.{index}", self.config.rms_norm_eps
        normed = ops.rms_norm(hidden, self.tensors[f"{prefix}.input_layernorm.weight"], epsilon)
        hidden = ops.add_residual(hidden, self.attention(normed, f"{prefix}.self_attn"))
        normed = ops.rms_norm(hidden, self.tensors[f"{prefix}.post_attention_layernorm.weight"], epsilon)
        is_dense = index < self.config.first_k_dense_replace
        update = self.mlp(normed, f"{prefix}.mlp") if is_dense else self.experts(normed, f"{prefix}.mlp")
        return ops.add_residual(hidden, update)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "backend"), [*((weights, "cpu") for weights in WEIGHTS), ("bf16", "cuda")])
def test_each_layer_from_the_same_hidden_state(
    tmp_path: Path, family: Family, weights: Weights, backend: rounded_parts.Backend
) -> None:
    folder = make_checkpoint(tmp_path, family, weights)
    model = reference.Reference(folder, rounds_like=backend)
    prompt = make_prompts(model.config.vocab_size)[2]
    states = model.hidden_states(prompt)
    numpy_model = NumpyModel(folder, weights, model.config, backend)
    for index in range(model.config.num_hidden_layers):
        result = numpy_model.layer(states[index], index)
        np.testing.assert_allclose(result, states[index + 1], rtol=1e-6, atol=1e-6)
        assert np.mean(result == states[index + 1]) > 0.999


@pytest.mark.parametrize(("rows", "cols"), [(320, 192), (130, 257), (16, 192), (192, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["channel", "tensor", "tile"])
def test_fp8_products(rows: int, cols: int, has_bias: bool, kind: ops.ScaleKind) -> None:
    source = np.random.default_rng(rows + cols)
    inputs = source.standard_normal((5, cols)).astype(np.float32)
    codes = ops.encode_e4m3(source.standard_normal((rows, cols)) * 100)
    shapes = {"channel": (rows, 1), "tensor": (1,), "tile": (-(-rows // 128), -(-cols // 128))}
    scale = source.uniform(1e-3, 1e-2, size=shapes[kind]).astype(np.float32)
    bias = source.standard_normal(rows).astype(np.float32) if has_bias else None
    matrix = torch.from_numpy(codes).view(torch.float8_e4m3fn).double()
    matrix = matrix * reference.expand_scale(torch.from_numpy(scale).double(), matrix.shape)
    weight = rounded_parts.Weight(matrix, "e4m3", sums.Float64Sums())
    torch_bias = None if bias is None else torch.from_numpy(bias).double()
    expected = torch.nn.functional.linear(torch.from_numpy(inputs), weight, torch_bias)
    result = ops.product_fp8(ops.quantise(inputs), codes, scale, kind, bias)
    assert expected.dtype == torch.float32
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-7, atol=1e-9)


def test_sliced_products_join_by_a_tree() -> None:
    parts = [np.array([value], dtype=np.float32) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    assert ops.join_slices(parts)[0] == np.float32(1.0 + 2.0**-23)
    assert ops.join_slices(parts[:3])[0] == np.float32(1.0)
    source = np.random.default_rng(0)
    inputs = source.standard_normal((4, 64)).astype(np.float32)
    codes = ops.encode_e4m3(source.standard_normal((24, 64)) * 100)
    scale = np.full((24, 1), 0.01, dtype=np.float32)
    quantised = ops.quantise(inputs, row_slices=4)
    whole = quantised.values() @ (ops.decode_e4m3(codes) * np.float64(np.float32(0.01))).T
    result = ops.product_fp8(quantised, codes, scale, "channel")
    np.testing.assert_allclose(result, whole, rtol=1e-5, atol=1e-5)


def test_group_choice_masks_the_other_groups() -> None:
    rule = ops.RouterRule(2, num_groups=2, groups_per_token=1, has_normalised_weights=True, routed_scaling=2.0)
    bias = np.array([0.0, 0.0, 0.9, -0.9], dtype=np.float32)
    routing = ops.route(np.zeros((1, 3), np.float32), np.zeros((4, 3), np.float32), bias, rule)
    assert routing.experts.tolist() == [[0, 1]]
    assert routing.weights.tolist() == [[1.0, 1.0]]
