"""The reference: transformers' own answer with other roundings, and able to show each known mistake."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference import rounded_parts
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint, make_prompts
from tests.reference.expected import GAP_BOUND
from tests.reference.recorded_cases import BREAK_CASES


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Family, Weights], Path]:
    """Every family in every kind of weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        (family, weights): make_checkpoint(root / f"{family}-{weights}", family, weights)
        for family in FAMILIES
        for weights in WEIGHTS
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_close_to_plain_transformers(checkpoints: dict[tuple[Family, Weights], Path], family: Family) -> None:
    model = reference.Reference(checkpoints[family, "bf16"])
    prompt = make_prompts(model.config.vocab_size)[-1]
    patched, plain = model.logits(prompt), model.plain_logits(prompt)
    assert patched.std() > 2.5
    assert np.abs(patched - plain).max() < 1e-3


@pytest.mark.parametrize(("weights", "is_whole_model"), [("bf16", True), ("fp8_channel", False)])
def test_cuda_rounds_inputs_of_bf16_weights(
    checkpoints: dict[tuple[Family, Weights], Path], weights: Weights, is_whole_model: bool
) -> None:
    on_cpu, on_cuda = (reference.Reference(checkpoints["air", weights], rounds_like=like) for like in ("cpu", "cuda"))
    prompt = make_prompts(on_cpu.config.vocab_size)[2]
    assert np.array_equal(on_cpu.hidden_states(prompt), on_cuda.hidden_states(prompt)) != is_whole_model
    assert 0 < np.median(np.abs(on_cpu.logits(prompt) - on_cuda.logits(prompt))) < 0.05
    normed = on_cuda.model.model.norm(torch.from_numpy(on_cuda.hidden_states(prompt)[-1]))
    rounded = normed.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(on_cuda.model.lm_head(normed), on_cpu.model.lm_head(rounded))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", WEIGHTS[1:])
def test_fp8_goes_with_plain_transformers(
    checkpoints: dict[tuple[Family, Weights], Path], family: Family, weights: Weights
) -> None:
    model = reference.Reference(checkpoints[family, weights])
    prompt = make_prompts(model.config.vocab_size)[-1]
    patched, plain = model.logits(prompt), model.plain_logits(prompt)
    assert np.corrcoef(patched.ravel(), plain.ravel())[0, 1] > 0.9
    assert np.abs(patched - plain).max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_places_experts_as_named(checkpoints: dict[tuple[Family, Weights], Path], family: Family) -> None:
    stored = reference.read_checkpoint(checkpoints[family, "fp8_block"])
    model = reference.Reference(checkpoints[family, "fp8_block"]).model
    last = stored.config.num_hidden_layers - 1
    experts = model.model.layers[last].mlp.experts
    for index in range(stored.config.n_routed_experts):
        prefix = f"model.layers.{last}.mlp.experts.{index}"
        gate, up, down = (stored.values[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj.matrices[index], torch.cat((gate, up)))
        assert torch.equal(experts.down_proj.matrices[index], down)


@pytest.mark.parametrize(("family", "weights"), [("glm47", "fp8_tensor"), ("air", "bf16")])
def test_greedy_with_the_cache_is_a_full_forward(
    checkpoints: dict[tuple[Family, Weights], Path], family: Family, weights: Weights
) -> None:
    model = reference.Reference(checkpoints[family, weights])
    prompt = make_prompts(model.config.vocab_size)[2]
    tokens, gaps = model.greedy(prompt, 12)
    rows = model.logits(prompt + tokens)[len(prompt) - 1 : -1]
    ordered = np.sort(rows, axis=1)
    assert rows.argmax(axis=1).tolist() == tokens
    np.testing.assert_allclose(ordered[:, -1] - ordered[:, -2], gaps, atol=1e-5)
    assert np.mean(np.array(gaps) > GAP_BOUND) > 0.7


def test_hidden_states_begin_with_the_embedding_and_end_in_the_logits(
    checkpoints: dict[tuple[Family, Weights], Path],
) -> None:
    model = reference.Reference(checkpoints["glm47", "fp8_channel"])
    prompt = make_prompts(model.config.vocab_size)[1]
    states = model.hidden_states(prompt)
    assert states.dtype == np.float32
    assert states.shape == (model.config.num_hidden_layers + 1, len(prompt), model.config.hidden_size)
    embedding = model.plain_model.model.embed_tokens.weight.detach()[prompt].numpy()
    np.testing.assert_array_equal(states[0], embedding)
    with torch.no_grad():
        logits = model.model.lm_head(model.model.model.norm(torch.from_numpy(states[-1])))
    np.testing.assert_array_equal(logits.double().numpy(), model.logits(prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_router_chooses_as_transformers_does(
    checkpoints: dict[tuple[Family, Weights], Path], family: Family
) -> None:
    model = reference.Reference(checkpoints[family, "bf16"])
    last = model.config.num_hidden_layers - 1
    rows = torch.randn(300, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    ours, theirs = (whole.model.layers[last].mlp.gate for whole in (model.model, model.plain_model))
    with torch.no_grad():
        _, our_weights, our_experts = ours(rows)
        _, their_weights, their_experts = theirs(rows)
    our_order, their_order = our_experts.argsort(-1), their_experts.argsort(-1)
    assert torch.equal(our_experts.gather(1, our_order), their_experts.gather(1, their_order))
    torch.testing.assert_close(
        our_weights.gather(1, our_order), their_weights.gather(1, their_order).double(), rtol=1e-5, atol=1e-6
    )
    without_bias = torch.sigmoid(rows @ theirs.weight.detach().float().T).topk(ours.top_k).indices.sort(-1).values
    assert not torch.equal(without_bias, our_experts.sort(-1).values)


def test_equal_scores_go_to_the_lower_index() -> None:
    assert rounded_parts.largest(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), 3).tolist() == [[1, 2, 4]]


@pytest.mark.parametrize("break_", BREAK_CASES)
def test_each_mistake_shows_in_the_tokens(checkpoints: dict[tuple[Family, Weights], Path], break_: str) -> None:
    folder = checkpoints[BREAK_CASES[break_]]
    whole, broken = reference.Reference(folder), reference.Reference(folder, break_=break_)
    clear = 0
    for prompt in make_prompts(whole.config.vocab_size):
        expected, gaps = whole.greedy(prompt, 12)
        got, _ = broken.greedy(prompt, 12)
        first = next((index for index in range(12) if expected[index] != got[index]), None)
        clear += first is not None and gaps[first] > GAP_BOUND
    assert clear >= 3


@pytest.mark.parametrize(
    ("break_", "family", "weights"),
    [
        ("scaling_twice", "air", "bf16"),
        ("qk_norm_skipped", "tied", "bf16"),
        ("scale_row_shifted", "glm47", "fp8_tensor"),
        ("scale_row_shifted", "glm47", "bf16"),
        ("groups_ignored", "glm47", "fp8_block"),
    ],
)
def test_a_mistake_without_effect_is_refused(
    checkpoints: dict[tuple[Family, Weights], Path], break_: str, family: Family, weights: Weights
) -> None:
    with pytest.raises(ValueError, match=break_):
        reference.Reference(checkpoints[family, weights], break_=break_)


def test_every_mistake_has_a_case() -> None:
    assert set(BREAK_CASES) == set(reference.BREAKAGES)


def test_a_context_over_one_split_is_refused(checkpoints: dict[tuple[Family, Weights], Path]) -> None:
    model = reference.Reference(checkpoints["tied", "bf16"])
    with pytest.raises(ValueError, match="1025 positions"):
        model.logits([1] * 1025)


def test_order_of_sums_matters_little_in_bf16_and_more_in_fp8(
    checkpoints: dict[tuple[Family, Weights], Path],
) -> None:
    source = np.random.default_rng(0)
    prompts = [source.integers(0, 1000, size=64).tolist() for _ in range(2)]
    orders = (0, 1)
    bf16 = reference.Reference(checkpoints["air", "bf16"]).kl_between_orders(*prompts, orders=orders)
    fp8 = reference.Reference(checkpoints["air", "fp8_channel"]).kl_between_orders(*prompts, orders=orders)
    assert 0 < bf16 < 1e-8
    assert bf16 < fp8 < 1.0
    logits = reference.Reference(checkpoints["air", "bf16"]).logits(prompts[0])
    in_order = reference.Reference(checkpoints["air", "bf16"], float32_order=2).logits(prompts[0])
    assert 0 < np.abs(logits - in_order).max() < 1e-2


def test_mean_kl_is_torchs() -> None:
    source = np.random.default_rng(1)
    left, right = source.standard_normal((2, 6, 40))
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(torch.from_numpy(right), -1),
        torch.log_softmax(torch.from_numpy(left), -1),
        reduction="batchmean",
        log_target=True,
    )
    assert reference.mean_kl(left, right) == pytest.approx(float(expected))
