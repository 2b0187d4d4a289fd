"""config.json and generation_config.json: both spellings, nothing guessed, everything else refused."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from glint.checkpoint import document
from glint.checkpoint.config import ModelConfig, parse_config, parse_generation, read_config, read_generation
from glint.checkpoint.document import Defect, FormatError
from glint.checkpoint.quantisation import ScaleKind
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import GLM_47, SMALL, fp8_method, quantization, write_json

NEEDED = [
    "architectures",
    "attention_bias",
    "eos_token_id",
    "first_k_dense_replace",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_theta",
    "routed_scaling_factor",
    "tie_word_embeddings",
    "topk_group",
    "torch_dtype",
    "use_qk_norm",
    "vocab_size",
]


def problems_of(document: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as refusal:
        parse_config(document)
    return refusal.value.problems


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(document)
    *parents, last = path.split(".")
    section = result
    for name in parents:
        section = section[name]
    section[last] = value
    return result


def test_glm_47_is_read_as_published() -> None:
    config = parse_config(GLM_47 | {"quantization_config": quantization("channel")})
    assert config == ModelConfig(
        vocab_size=151552,
        hidden_size=5120,
        num_layers=92,
        num_dense_layers=3,
        num_heads=96,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=64,
        dense_width=12288,
        expert_width=1536,
        shared_width=1536,
        num_experts=160,
        experts_per_token=8,
        max_positions=202752,
        has_qk_norm=True,
        has_attention_bias=True,
        normalise_weights=True,
        weight_scale_kind=ScaleKind.CHANNEL,
        input_group_size=0,
        mtp_vocab_size=151552,
        routed_scaling=2.5,
        norm_epsilon=1e-5,
        rope_theta=1e6,
        eos_token_ids=(151329, 151336, 151338),
        pad_token_id=151329,
        dtype="bfloat16",
        mtp_layers=1,
        tied_embeddings=False,
        architecture="Glm4MoeForCausalLM",
        scale_suffix="weight_scale",
    )
    assert type(config.rope_theta) is float


def test_the_model_fields_are_those_of_the_c_header() -> None:
    text = (Path(__file__).parents[2] / "native/include/glint.h").read_text()
    body = re.search(r"typedef struct glint_model \{(.*?)\}", text, re.DOTALL)
    assert body is not None
    names = re.findall(r"\w+ (\w+);", body[1])
    assert names[0] == "struct_bytes"
    assert list(ModelConfig.__dataclass_fields__)[: len(names) - 1] == names[1:]
    kinds = {name: int(number) for name, number in re.findall(r"#define GLINT_SCALE_(\w+) (\d+)", text)}
    assert kinds == {kind.name: kind.value for kind in ScaleKind}


@pytest.mark.parametrize("field", NEEDED)
def test_a_needed_field_is_never_guessed(field: str) -> None:
    document = {name: value for name, value in GLM_47.items() if name != field}
    name = "dtype" if field == "torch_dtype" else field
    assert [problem for problem in problems_of(document) if name in problem]


def test_only_the_needed_fields_are_needed() -> None:
    document = {name: GLM_47[name] for name in NEEDED}
    config = parse_config(document)
    assert config.mtp_layers == 0
    assert config.pad_token_id is None
    assert config.weight_scale_kind is ScaleKind.NONE


@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_both_spellings_give_the_same_config(section: str) -> None:
    newer = {name: value for name, value in GLM_47.items() if not name.startswith(("rope", "partial", "torch"))}
    newer["dtype"] = "bfloat16"
    newer[section] = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
    assert parse_config(newer) == parse_config(GLM_47)
    newer["num_local_experts"] = newer.pop("n_routed_experts")
    newer["num_mtp_layers"] = newer.pop("num_nextn_predict_layers")
    assert parse_config(newer) == parse_config(GLM_47)


def test_two_spellings_that_disagree_are_refused() -> None:
    document = GLM_47 | {"rope_parameters": {"rope_theta": 10000.0}}
    assert "different values: [1000000, 10000.0]" in problems_of(document)[0]
    assert "dtype" in problems_of(GLM_47 | {"dtype": "float16"})[0]


REFUSED = [
    ("model_type", "glm4_moe_lite", "GLM-4.7-Flash"),
    ("model_type", "llama", "glm4_moe"),
    ("architectures", ["LlamaForCausalLM"], "Glm4MoeForCausalLM"),
    ("hidden_act", "gelu", "'gelu'"),
    ("scoring_func", "softmax", "'softmax'"),
    ("topk_method", "greedy", "'greedy'"),
    ("moe_router_dtype", "bfloat16", "moe_router_dtype"),
    ("torch_dtype", "float16", "'float16'"),
    ("rope_scaling", {"type": "yarn", "factor": 4.0}, "'yarn'"),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
    ("rope_scaling", "yarn", "'yarn'"),
    ("attention_bias", "true", "'true'"),
    ("use_qk_norm", 1, "use_qk_norm is 1"),
    ("hidden_size", "5120", "'5120'"),
    ("hidden_size", 5120.0, "5120.0"),
    ("hidden_size", True, "True"),
    ("hidden_size", 0, "hidden_size is 0"),
    ("hidden_size", -1, "hidden_size is -1"),
    ("hidden_size", 2**40, "between"),
    ("vocab_size", 2**31, "between"),
    ("rope_theta", float("inf"), "inf"),
    ("rope_theta", float("nan"), "nan"),
    ("rope_theta", -1.0, "-1.0"),
    ("rope_theta", "1e6", "'1e6'"),
    ("rms_norm_eps", 0.0, "0.0"),
    ("routed_scaling_factor", -2.5, "-2.5"),
    ("partial_rotary_factor", 1.5, "1.5"),
    ("partial_rotary_factor", 0.0234375, "even whole number"),
    ("partial_rotary_factor", 0.501, "even whole number"),
    ("num_key_value_heads", 7, "not a multiple"),
    ("first_k_dense_replace", 93, "more than num_hidden_layers"),
    *(
        (name, value, f"{name} is {value!r}, 1 is needed")
        for name in ("n_group", "topk_group")
        for value in (0, 2, 8, -1, 1.0, True, "1")
    ),
    ("num_experts_per_tok", 161, "num_experts_per_tok 161 is more than n_routed_experts 160"),
    ("n_shared_experts", 0, "n_shared_experts is 0"),
    ("num_nextn_predict_layers", -1, "num_nextn_predict_layers is -1"),
    ("num_nextn_predict_layers", 1.0, "num_nextn_predict_layers is 1.0"),
    *(("mtp_vocab_size", value, f"mtp_vocab_size is {value}, it must lie between 1 and 151552") for value in (0, -1)),
    ("mtp_vocab_size", 151553, "mtp_vocab_size is 151553, it must lie between 1 and 151552"),
    ("mtp_vocab_size", 8192.0, "mtp_vocab_size is 8192.0, an integer is needed"),
    ("mtp_vocab_size", True, "mtp_vocab_size is True, an integer is needed"),
    ("eos_token_id", 151552, "outside of vocab_size"),
    ("eos_token_id", ["1"], "eos_token_id"),
    ("pad_token_id", -1, "pad_token_id"),
]


@pytest.mark.parametrize(("given", "expected"), [(None, 151552), (1, 1), (16384, 16384), (151552, 151552)])
def test_the_mtp_layer_drafts_among_the_first_tokens_or_all(given: int | None, expected: int) -> None:
    assert parse_config(GLM_47 | {"mtp_vocab_size": given}).mtp_vocab_size == expected


@pytest.mark.parametrize(("field", "value", "text"), REFUSED)
def test_what_the_engine_cannot_compute_is_refused(field: str, value: Any, text: str) -> None:
    problems = problems_of(GLM_47 | {field: value})
    assert any(field.removeprefix("torch_") in problem and text in problem for problem in problems)


def test_groups_of_experts_are_refused_with_the_reason_and_the_way_out() -> None:
    assert problems_of(GLM_47 | {"n_group": 8, "topk_group": 4}) == tuple(
        f"config.json: {name} is {value}, 1 is needed: this engine does not choose experts in groups, and no GLM-4.5, "
        "4.6 or 4.7 does; take the model's own config.json"
        for name, value in (("n_group", 8), ("topk_group", 4))
    )


def test_a_token_may_go_to_every_expert() -> None:
    assert parse_config(GLM_47 | {"num_experts_per_tok": 160}).experts_per_token == 160


def test_a_model_beyond_all_bounds_is_refused_before_its_tensors_are_listed() -> None:
    document = GLM_47 | {"num_hidden_layers": 4096, "n_routed_experts": 65536}
    assert "beyond any model" in problems_of(document)[0]


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(GLM_47 | {"hidden_act": "gelu", "hidden_size": None, "n_group": 3, "use_qk_norm": "no"})
    assert len(problems) == 4
    assert all(problem.startswith("config.json: ") for problem in problems)


def test_shared_experts_are_one_expert_as_wide_as_all_of_them() -> None:
    for count in (1, 2, 3):
        config = parse_config(GLM_47 | {"n_shared_experts": count})
        assert (config.expert_width, config.shared_width) == (1536, 1536 * count)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("channel", ScaleKind.CHANNEL), ("tensor", ScaleKind.TENSOR), ("block", ScaleKind.TILE)],
)
def test_the_three_kinds_of_scales_are_read(strategy: str, kind: ScaleKind) -> None:
    config = parse_config(GLM_47 | {"quantization_config": quantization(strategy)})
    assert config.weight_scale_kind is kind
    assert config.scale_suffix == "weight_scale"
    assert config.input_group_size == 0


def test_the_fp8_method_and_grouped_activations_are_read() -> None:
    config = parse_config(GLM_47 | {"quantization_config": fp8_method()})
    assert config.weight_scale_kind is ScaleKind.TILE
    assert config.scale_suffix == "weight_scale_inv"
    assert config.input_group_size == 128
    section = changed(quantization("block"), f"{GROUP}.input_activations.strategy", "group")
    section = changed(section, f"{GROUP}.input_activations.group_size", 128)
    config = parse_config(GLM_47 | {"quantization_config": section})
    assert config.weight_scale_kind is ScaleKind.TILE
    assert config.input_group_size == 128


def test_a_group_of_another_size_is_refused() -> None:
    section = changed(quantization("block"), f"{GROUP}.input_activations.strategy", "group")
    for size in (64, None):
        section = changed(section, f"{GROUP}.input_activations.group_size", size)
        problems = problems_of(GLM_47 | {"quantization_config": section})
        assert any(f"input_activations.group_size is {size}, the engine needs 128" in line for line in problems)


GROUP = "config_groups.group_0"
REFUSED_QUANTISATION = [
    ("quant_method", "gptq"),
    ("format", "pack-quantized"),
    ("kv_cache_scheme", {"num_bits": 8}),
    ("sparsity_config", {"format": "sparse-24"}),
    ("transform_config", {"config_groups": {"u": 1}}),
    ("config_groups", {}),
    ("config_groups", {"group_0": 1}),
    (f"{GROUP}.format", "int-quantized"),
    (f"{GROUP}.output_activations", {"num_bits": 8}),
    (f"{GROUP}.weights", None),
    (f"{GROUP}.weights.num_bits", 4),
    (f"{GROUP}.weights.type", "int"),
    (f"{GROUP}.weights.num_bits", 8.0),
    (f"{GROUP}.weights.symmetric", False),
    (f"{GROUP}.weights.symmetric", 1),
    (f"{GROUP}.weights.dynamic", True),
    (f"{GROUP}.weights.strategy", "group"),
    (f"{GROUP}.weights.strategy", ["channel"]),
    (f"{GROUP}.weights.group_size", 128),
    (f"{GROUP}.weights.block_structure", [128, 128]),
    (f"{GROUP}.weights.actorder", "weight"),
    (f"{GROUP}.input_activations", None),
    (f"{GROUP}.input_activations.dynamic", False),
    (f"{GROUP}.input_activations.num_bits", 16),
    (f"{GROUP}.input_activations.strategy", "tensor"),
    (f"{GROUP}.input_activations.strategy", "group"),
]


@pytest.mark.parametrize(("path", "value"), REFUSED_QUANTISATION)
def test_other_quantisation_is_refused_by_name(path: str, value: Any) -> None:
    problems = problems_of(GLM_47 | {"quantization_config": changed(quantization("channel"), path, value)})
    assert any(f"quantization_config.{path}" in problem for problem in problems)
    assert any("use such a checkpoint" in problem for problem in problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight_block_size", [64, 128]),
        ("weight_block_size", None),
        ("activation_scheme", "static"),
        ("fmt", "e5m2"),
        ("scale_fmt", "ue8m0"),
        ("expert_dtype", "fp4"),
    ],
)
def test_other_forms_of_the_fp8_method_are_refused(field: str, value: Any) -> None:
    problems = problems_of(GLM_47 | {"quantization_config": fp8_method() | {field: value}})
    assert any(f"quantization_config.{field} is {value!r}" in problem for problem in problems)


def test_a_config_that_transformers_writes_is_read(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SMALL.items() if not name.startswith(("rope", "partial", "torch", "tr"))}
    rotary = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    written = transformers.Glm4MoeConfig(**sizes, rope_parameters=rotary, dtype="bfloat16")
    written.save_pretrained(tmp_path)
    assert read_config(tmp_path) == parse_config(SMALL)
    written.quantization_config = transformers.FineGrainedFP8Config()
    written.save_pretrained(tmp_path)
    assert read_config(tmp_path).weight_scale_kind is ScaleKind.TILE
    assert read_config(tmp_path).input_group_size == 128


def test_transformers_reads_our_old_spelling_as_we_do(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", SMALL)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == ours.rope_theta
    assert ours.rotary_dim == int(theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"])
    assert (theirs.num_hidden_layers, theirs.n_routed_experts) == (ours.num_layers, ours.num_experts)


def test_config_json_is_strict_json(tmp_path: Path) -> None:
    text = json.dumps(GLM_47)
    cases = {
        text[:-1] + ', "hidden_size": 4096}': Defect.DUPLICATE_KEY,
        text[:-1] + ', "x": NaN}': Defect.NOT_JSON,
        text[:-1]: Defect.NOT_JSON,
        "[]": Defect.NOT_AN_OBJECT,
        '{"a":' * 100_000: Defect.NOT_JSON,
    }
    for content, defect in cases.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(FormatError) as refusal:
            read_config(tmp_path)
        assert refusal.value.defect is defect


def test_a_document_of_the_largest_size_is_read_and_no_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(GLM_47)
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", len(text))
    assert read_config(tmp_path) == parse_config(GLM_47)
    (tmp_path / "config.json").write_text(text + " ")
    with pytest.raises(FormatError) as refusal:
        read_config(tmp_path)
    assert refusal.value.defect is Defect.TOO_LARGE


def test_generation_config_is_read_and_never_invented(tmp_path: Path) -> None:
    nothing = read_generation(tmp_path)
    assert nothing == parse_generation({})
    assert nothing.eos_token_ids is None and nothing.temperature is None and nothing.top_k is None
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 2, "temperature": 1, "top_p": 0.95, "top_k": 40})
    found = read_generation(tmp_path)
    assert (found.eos_token_ids, found.temperature, found.top_p, found.top_k) == ((2,), 1.0, 0.95, 40)
    assert found.repetition_penalty is None


def test_generation_without_sampling_is_greedy() -> None:
    assert parse_generation({"do_sample": False, "temperature": 0.7, "min_p": 0.1}).temperature == 0.0
    assert parse_generation({"do_sample": True, "temperature": 0.7, "min_p": 0.1}).temperature == 0.7
    assert parse_generation({"do_sample": True}).temperature is None
    assert parse_generation({"min_p": 0.1}).min_p == 0.1


def test_generation_settings_that_transformers_writes_by_itself_are_known(tmp_path: Path) -> None:
    transformers.GenerationConfig(temperature=0.5, do_sample=True, min_p=0.1, eos_token_id=2).save_pretrained(tmp_path)
    found = read_generation(tmp_path)
    assert (found.temperature, found.min_p, found.eos_token_ids, found.unused) == (0.5, 0.1, (2,), ())
    transformers.GenerationConfig(do_sample=True, typical_p=0.5).save_pretrained(tmp_path)
    assert read_generation(tmp_path).unused == ("typical_p",)


def test_bad_generation_settings_are_refused_together() -> None:
    document = {"temperature": -1, "top_p": 1.5, "top_k": 1.5, "repetition_penalty": 0, "eos_token_id": "x"}
    with pytest.raises(CheckpointError) as refusal:
        parse_generation(document | {"min_p": 2, "do_sample": "no"})
    assert len(refusal.value.problems) == 7
