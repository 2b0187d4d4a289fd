"""One rank of GLM-4.7 in numbers: shapes, bytes, operations and projections against figures worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glint.bench.rank import fit_rows, percentile, rank_settings, target_gpu
from glint.bench.rank_collectives import count_collectives, projected_decode_ms, projected_prefill_ms
from glint.bench.rank_report import DecodeRow, PrefillRow, RankReport, as_json, describe_projection, project, show
from glint.bench.rank_shapes import (
    GLM_45_AIR,
    GLM_47,
    KNOWN_MODELS,
    expected_experts,
    find_model,
    prefill_operations,
    project_load,
    shape_rank,
    step_bytes,
    step_operations,
    swiglu_bytes,
)
from glint.bench.rank_target import TargetGpu, project_target, show_target, target_json
from glint.checkpoint.config import read_config
from glint.cli import main, make_parser
from glint.engine.memory_plan import GpuPlan
from glint.errors import EngineError, RequestError
from tests.pure.checkpoint_files import small_folder

CEILING = 4.55e12
TP = shape_rank(GLM_47, 8, "tp")
EP = shape_rank(GLM_47, 8, "ep")


def report(*decodes: DecodeRow, prefills: tuple[PrefillRow, ...] = ()) -> RankReport:
    """A report with these rows, of a rank whose experts are sliced."""
    return RankReport("glm-4.7", TP, "cuda", "hopper", 44_000_000_000, CEILING, decodes, prefills, 10.0, 300.0)


def decode_row(batch: int, context: int, ms: float) -> DecodeRow:
    """A row in which every step took the same time and read the expected experts."""
    return DecodeRow(batch, context, context, ms, ms, ms, expected_experts(TP, batch), 60, 1.0)


def test_a_rank_of_eight_has_the_widths_of_the_design() -> None:
    model = TP.model
    assert (model.num_heads, model.num_kv_heads, model.vocab_size) == (12, 1, 18944)
    assert model.mtp_vocab_size == model.vocab_size
    assert (model.dense_width, model.expert_width, model.shared_width) == (1536, 192, 192)
    assert (model.num_experts, TP.local_experts, TP.num_moe_layers) == (160, 160, 89)
    assert (EP.model.expert_width, EP.model.shared_width, EP.local_experts) == (1536, 192, 20)
    assert "embedding has 1/8 of its rows" in TP.differences[2]
    assert len(shape_rank(GLM_47, 1, "tp").differences) == 1
    assert shape_rank(GLM_47, 1, "tp").model == GLM_47


@pytest.mark.parametrize(("tp", "layout", "named"), [(7, "tp", "num_attention_heads"), (12, "tp", "key/value heads")])
def test_a_cut_that_does_not_divide_is_refused(tp: int, layout: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        shape_rank(GLM_47, tp, layout)


def test_models_are_found_by_name_and_by_folder(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    assert find_model("glm-4.7") is GLM_47
    assert find_model(str(folder)) == read_config(folder)
    for name in ("glm-4.5-air", "GLM-4.5-Air", "zai-org/GLM-4.5-Air-FP8", "~/models/GLM-4.5-Air/"):
        assert find_model(name) is GLM_45_AIR
    assert find_model("zai-org/GLM-4.6").max_positions == 202752
    assert find_model("GLM-4.5-FP8").max_positions == 131072
    with pytest.raises(RequestError, match=r"--synthetic GLM-4.9 is neither .*glm-4.5, glm-4.5-air, glm-4.6, glm-4.7"):
        find_model("GLM-4.9", "--synthetic")
    with pytest.raises(RequestError, match="neither"):
        find_model(str(tmp_path / "nothing"))


@pytest.mark.parametrize("layout", ["tp", "ep"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_known_model_is_cut_into_ranks(name: str, tp: int, layout: str) -> None:
    whole = find_model(name)
    shape = shape_rank(whole, tp, layout)
    kept = {"tp": (whole.num_experts, whole.expert_width // tp), "ep": (whole.num_experts // tp, whole.expert_width)}
    assert (shape.local_experts, shape.model.expert_width) == kept[layout]
    assert shape.model.num_heads == 96 // tp and shape.model.num_kv_heads == 8 // tp


def test_air_is_the_model_of_its_parameter_counts() -> None:
    shape = shape_rank(GLM_45_AIR, 1, "tp")
    parts = step_bytes(shape, 1, 0, 128)
    scales = 4 * (46 * (14336 + 4096 + 14336) + (2 * 10944 + 4096) + 45 * 129 * (2 * 1408 + 4096))
    assert parts["attention"] + parts["dense layers"] + parts["shared experts"] + parts["routed experts"] == (
        46 * 109_051_904 + 134_479_872 + 45 * 129 * 17_301_504 + scales
    )
    embedding = 2 * 620_756_992
    whole = sum(parts.values()) + embedding
    assert 108.0e9 < whole < 108.5e9
    assert GLM_45_AIR.has_qk_norm is False and GLM_45_AIR.routed_scaling == 1.0


@pytest.mark.parametrize(
    ("tp", "widths", "gigabytes"),
    [(1, (96, 8, 10944, 1408, 1408, 151552), 107.04), (2, (48, 4, 5472, 704, 704, 75776), 53.59)],
)
def test_air_on_one_gpu_and_on_two(tp: int, widths: tuple[int, ...], gigabytes: float) -> None:
    chosen = rank_flags("--model", "glm-4.5-air", "--tp", str(tp))
    shape = shape_rank(find_model(chosen.model), chosen.tp, chosen.expert_layout)
    rank = shape.model
    cut = (rank.num_heads, rank.num_kv_heads, rank.dense_width, rank.expert_width, rank.shared_width, rank.vocab_size)
    assert cut == widths
    assert (rank.num_layers, rank.num_dense_layers, rank.hidden_size, shape.local_experts) == (46, 1, 4096, 128)
    assert sum(step_bytes(shape, 1, 0, 128).values()) / 1e9 == pytest.approx(gigabytes, abs=0.02)


def test_the_help_teaches_air_on_one_gpu_and_on_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rank_flags("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "glm-4.5-air fits into one GPU of 141 GB with --tp 1, into two of 80 GB with --tp 2" in said


def rank_flags(*flags: str) -> Any:
    """The command line of the bench."""
    return make_parser().parse_args(["bench", "rank", *flags])


def gpu_with_pages(pages: int, weight_bytes: int = 108_300_000_000) -> GpuPlan:
    """A GPU that has room for so many pages of Air beside its weights."""
    page_bytes = 64 * 188_416
    taken = weight_bytes + pages * page_bytes
    return GpuPlan("H200", taken, taken, 1.0, weight_bytes, 0, 0, page_bytes, 64, 4179, 256)


def test_rows_that_do_not_fit_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = rank_flags("--model", "glm-4.5-air", "--tp", "1")
    shape = shape_rank(GLM_45_AIR, 1, "tp")
    monkeypatch.setattr("glint.bench.rank.open_library", lambda device, path: None)
    monkeypatch.setattr("glint.bench.rank.plan_gpu", lambda *given: gpu_with_pages(2000))
    rows, left_out = fit_rows(chosen, shape)
    assert rows == [(1, 512), (8, 512), (64, 512), (1, 4096), (8, 4096)]
    assert left_out[0] == "decode of 256 at 512 needs 2,816 pages, 2,000 fit" and len(left_out) == 3
    assert "256 at 4,096 needs 17,152 pages, 2,000 fit: left out" in capsys.readouterr().err
    settings = rank_settings(chosen, shape, rows)
    assert (settings.max_num_seqs, settings.num_pages, settings.max_model_len) == (64, 704, 4179)
    monkeypatch.setattr("glint.bench.rank.plan_gpu", lambda *given: gpu_with_pages(5))
    with pytest.raises(EngineError, match="11 pages of the smallest --batch and --context do not fit"):
        fit_rows(chosen, shape)


@pytest.mark.parametrize(("batch", "experts"), [(1, 8.0), (8, 53.85), (64, 153.996), (256, 159.9997)])
def test_experts_that_uniform_routing_needs(batch: int, experts: float) -> None:
    assert expected_experts(TP, batch) == pytest.approx(experts, rel=1e-4)
    assert expected_experts(EP, batch) == pytest.approx(experts / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("batch", "lowest", "highest"), [(1, 23.5, 24.0), (8, 151, 161), (32, 375, 386), (64, 453, 458), (256, 472, 476)]
)
def test_bytes_of_routed_experts_are_those_of_the_design(batch: int, lowest: float, highest: float) -> None:
    for shape in (TP, EP):
        touched = expected_experts(shape, batch) * swiglu_bytes(shape.model, shape.model.expert_width)
        assert lowest <= touched / 1e6 <= highest


@pytest.mark.parametrize(("batch", "context", "floor_ms"), [(64, 512, 9.7), (1, 512, 0.96), (64, 4096, 12.1)])
def test_floors_of_a_decode_step_are_those_of_the_design(batch: int, context: int, floor_ms: float) -> None:
    touched = sum(step_bytes(TP, batch, context, expected_experts(TP, batch)).values())
    assert touched / CEILING * 1e3 == pytest.approx(floor_ms, rel=0.01)


def test_the_parts_of_a_step() -> None:
    parts = step_bytes(TP, 64, 512, 154.0)
    qkv = 1792 * 5120 + 4 * 1792 + 4 * 1792
    output = 5120 * 1536 + 4 * 5120
    assert parts["attention"] == 92 * (qkv + output)
    assert parts["dense layers"] == 3 * (3 * 1536 * 5120 + 4 * (2 * 1536 + 5120))
    assert parts["shared experts"] == 89 * (3 * 192 * 5120 + 4 * (2 * 192 + 5120))
    assert parts["routed experts"] == 154 * parts["shared experts"]
    assert parts["router"] == 89 * 160 * (2 * 5120 + 4)
    assert parts["lm_head"] == 18944 * 5120 * 2
    assert parts["keys and values"] == 64 * 512 * 2 * 92 * 128 * 2
    assert parts["norms"] == 4 * (185 * 5120 + 2 * 92 * 128)


def test_operations_of_a_prefill() -> None:
    per_token = 92 * 5120 * (1792 + 1536) + 3 * 3 * 5120 * 1536 + 89 * (3 * 5120 * 192 * 9 + 5120 * 160)
    attention = 4 * 1536 * 92
    head = 2 * 18944 * 5120
    assert prefill_operations(TP, 1, 0) == 2 * per_token + attention + head
    assert prefill_operations(TP, 4096, 0) == 2 * 4096 * per_token + attention * 4096 * 4097 // 2 + head
    more = prefill_operations(TP, 4096, 28672) - prefill_operations(TP, 4096, 0)
    assert more == attention * 4096 * 28672
    assert prefill_operations(EP, 4096, 0) == prefill_operations(TP, 4096, 0)


def test_projections_add_the_exchanges() -> None:
    assert projected_decode_ms(TP, 11.0, 64, 10.0) == pytest.approx(11.0 + 186 * 0.010)
    assert projected_decode_ms(shape_rank(GLM_47, 1, "tp"), 11.0, 64, 10.0) == 11.0
    sent = count_collectives(TP, 4096, 1).bytes_sent
    assert projected_prefill_ms(TP, 50.0, 4096, 300.0) == pytest.approx(50.0 + sent / 300e9 * 1e3)
    assert projected_prefill_ms(shape_rank(GLM_47, 1, "tp"), 50.0, 4096, 300.0) == 50.0


def test_the_exchanges_of_a_decode_step() -> None:
    found = count_collectives(TP, 64, 64)
    logits = 64 * 18944 * 4 * 7
    results = 64 * 176 * 7
    assert found.collectives == 2 * 92 + 2
    assert found.bytes_sent == 184 * 7 * 2 * 8 * 5120 * 4 + (logits + results) // 8


@pytest.mark.parametrize(
    ("tp", "tokens", "rows"), [(8, 1, 1), (8, 16, 16), (8, 17, 6), (8, 64, 16), (4, 33, 18), (2, 64, 64)]
)
def test_sums_of_more_than_16_rows_are_shared_between_more_than_two_ranks(tp: int, tokens: int, rows: int) -> None:
    shape = shape_rank(GLM_47, tp, "tp")
    found = count_collectives(shape, tokens, 0)
    assert found.bytes_sent == 184 * (tp - 1) * rows * 5120 * 4


def test_the_exchanges_of_a_prefill_step() -> None:
    found = count_collectives(TP, 4096, 1)
    rows = 512 * 7
    layers = 92 * 2 * (5120 * 4 + 5120 + 4) + 89 * 2 * 8 * 4 + 5120 * 4
    assert found.collectives == 92 * 4 + 89 + 1 + 2
    assert found.bytes_sent == rows * layers + (18944 * 4 * 7 + 176 * 7) // 8
    assert count_collectives(shape_rank(GLM_47, 1, "tp"), 4096, 1).bytes_sent == 0


def test_the_projected_load() -> None:
    found = project_load(64, 256, 256, decode_ms=13.0, prefill_ms=150.0, prefill_tokens=4096)
    assert found.prefill_seconds == pytest.approx(4 * 0.150)
    assert found.decode_seconds == pytest.approx(255 * 0.013)
    assert found.tokens_per_second == pytest.approx(64 * 256 / (0.6 + 3.315))
    assert project_load(3, 100, 1, 13.0, 150.0, 128).prefill_seconds == pytest.approx(3 * 0.150)


def test_the_load_is_projected_from_the_rows_that_hold_it() -> None:
    decodes = (decode_row(64, 4096, 16.0), decode_row(64, 512, 11.0), decode_row(8, 512, 5.0))
    prefills = (PrefillRow(1024, 0, 20.0), PrefillRow(4096, 0, 50.0), PrefillRow(4096, 28672, 300.0))
    whole = report(*decodes, prefills=prefills)
    found = project(whole, 64, 256, 256)
    assert found is not None
    sent = count_collectives(TP, 64, 64).bytes_sent
    assert found.by_count.decode_seconds == pytest.approx(255 * (11.0 + 1.86) * 1e-3)
    assert found.by_bytes.decode_seconds == pytest.approx(255 * (11.0e-3 + sent / 300e9))
    assert found.by_count.prefill_seconds == pytest.approx(4 * whole.prefill_ms(prefills[1]) * 1e-3)
    assert found.by_bytes.prefill_seconds == found.by_count.prefill_seconds
    assert project(whole, 64, 512, 256) is not None and project(whole, 64, 4096, 256) is None
    assert project(whole, 32, 256, 256) is None
    assert project(report(*decodes), 64, 256, 256) is None
    assert "projected load: none" in describe_projection(whole, None)


def test_the_report_names_what_is_projected(capsys: pytest.CaptureFixture[str]) -> None:
    whole = report(decode_row(64, 512, 11.0), prefills=(PrefillRow(4096, 0, 50.0),))
    projection = project(whole, 64, 256, 256)
    show(whole, projection)
    printed = capsys.readouterr().out
    assert "for 8 such GPUs, not measured" in printed and "projected load on 8 such GPUs" in printed
    (line,) = (line for line in printed.splitlines() if "64 at 512" in line)
    cells = line.split("  ")
    assert "11.00" in line and f"{64 / 0.011:,.0f}" in line and f"{64 / 0.01286:,.0f}" in line and "89%" in line, cells
    document = json.loads(json.dumps(as_json(whole, projection)))
    assert document["decode"][0]["share_of_peak"] == pytest.approx(9.784 / 11.0, rel=1e-3)
    assert projection is not None
    assert document["projected"]["load"]["output_tokens_per_second"] == projection.by_count.tokens_per_second
    assert document["projected"]["load_by_bytes"]["output_tokens_per_second"] == projection.by_bytes.tokens_per_second
    assert f"instead of 10 us a collective: {projection.by_bytes.tokens_per_second:,.0f}" in printed
    assert document["prefill"][0]["tflops_per_second"] == pytest.approx(38.11 / 0.050, rel=1e-3)


B200 = TargetGpu("B200", 7.67, 400.0, 10.0, 600.0, measured_product_tflops=600.0)


def portable(*decodes: DecodeRow, prefills: tuple[PrefillRow, ...]) -> RankReport:
    """The same report, of the kernels that a B200 runs."""
    return replace(report(*decodes, prefills=prefills), kernels="portable")


def test_the_target_is_what_the_flags_say() -> None:
    flags = ("--b200-tbs", "7", "--b200-tflops", "500", "--b200-all-reduce-us", "5", "--b200-collective-gbs", "700")
    assert target_gpu(rank_flags(*flags, "--mma-tflops", "800")) == TargetGpu("B200", 7.0, 500.0, 5.0, 700.0, 800.0)
    assert target_gpu(rank_flags()) == TargetGpu("B200", 7.67, 409.0, 10.0, 600.0, 622.0)


def test_a_step_bound_by_its_bytes_goes_with_the_bandwidth() -> None:
    prefill = PrefillRow(4096, 0, prefill_operations(TP, 4096, 0) / 600e12 * 1e3)
    found = project_target(portable(decode_row(1, 512, 2.0), prefills=(prefill,)), B200, 64, 256, 256)
    assert found is not None and found.load is None
    decode, long = found.steps
    assert decode.share_of_bandwidth == pytest.approx(0.96 / 2.0, rel=0.01)
    assert decode.projected_ms_of_one_rank == pytest.approx(2.0 * CEILING / 7.67e12)
    assert decode.projected_ms == pytest.approx(decode.projected_ms_of_one_rank + 1.86)
    assert long.share_of_products == pytest.approx(1.0)
    assert long.projected_ms_of_one_rank == pytest.approx(prefill.median_ms * 600 / 400)
    sent = count_collectives(TP, 4096, 1).bytes_sent
    assert long.projected_ms == pytest.approx(long.projected_ms_of_one_rank + sent / 600e9 * 1e3)


def test_parts_of_a_large_batch_are_bound_by_their_operations() -> None:
    share = 0.5
    prefill = PrefillRow(4096, 0, prefill_operations(TP, 4096, 0) / (600e12 * share) * 1e3)
    row = decode_row(256, 512, 20.0)
    whole = portable(row, prefills=(prefill,))
    found = project_target(whole, B200, 64, 256, 256)
    assert found is not None
    operations = step_operations(TP, 256, 256 * 512, 256)
    parts = whole.bytes_of_parts(row)
    reached = whole.touched_bytes(row) / 0.020 / CEILING * 7.67e12
    by_operations = {part for part, count in operations.items() if count / (400e12 * share) > parts[part] / reached}
    assert by_operations == {"attention", "dense layers", "shared experts", "router", "lm_head"}
    seconds = sum(
        operations[part] / (400e12 * share) if part in by_operations else count / reached
        for part, count in parts.items()
    )
    assert found.steps[0].projected_ms_of_one_rank == pytest.approx(seconds * 1e3)


def test_operations_of_a_decode_step() -> None:
    parts = step_operations(TP, 64, 64 * 512, 64)
    assert parts["attention"] == 2 * 64 * 92 * 5120 * (1792 + 1536)
    assert parts["routed experts"] == 8 * parts["shared experts"] == 2 * 64 * 89 * 3 * 5120 * 192 * 8
    assert parts["lm_head"] == 2 * 64 * 18944 * 5120
    assert parts["keys and values"] == 4 * 1536 * 64 * 512 * 92


def test_the_load_on_the_target_is_called_projected(capsys: pytest.CaptureFixture[str]) -> None:
    whole = portable(decode_row(64, 512, 14.0), prefills=(PrefillRow(4096, 0, 130.0),))
    found = project_target(whole, B200, 64, 256, 256)
    assert found is not None and found.load is not None
    assert found.load.decode_seconds == pytest.approx(255 * found.steps[0].projected_ms * 1e-3)
    assert found.load.prefill_seconds == pytest.approx(4 * found.steps[1].projected_ms * 1e-3)
    show_target(whole, B200, found)
    printed = capsys.readouterr().out
    assert "projected for 8 x B200, not measured: 7.67 TB/s" in printed
    assert (
        f"projected load on 8 x B200, 64 requests of 256 + 256 tokens: {found.load.tokens_per_second:,.0f}" in printed
    )
    document = json.loads(json.dumps(target_json(B200, found)))
    assert document["load"]["output_tokens_per_second"] == found.load.tokens_per_second
    assert document["assumed"]["terabytes_per_second"] == 7.67
    assert [step["step"] for step in document["steps"]] == ["decode 64 at 512", "prefill 4,096 over 0"]


def test_other_kernels_than_those_of_a_b200_are_not_projected_onto_it(capsys: pytest.CaptureFixture[str]) -> None:
    whole = report(decode_row(64, 512, 11.0), prefills=(PrefillRow(4096, 0, 50.0),))
    assert project_target(whole, B200, 64, 256, 256) is None
    assert project_target(replace(whole, kernels="portable", prefills=()), B200, 64, 256, 256) is None
    show_target(whole, B200, None)
    assert "projected for B200: none" in capsys.readouterr().out
    assert target_json(B200, None)["load"] is None


def test_percentiles_are_values_that_were_measured() -> None:
    ordered = [float(value) for value in range(1, 11)]
    assert (percentile(ordered, 0.1), percentile(ordered, 0.9), percentile([3.0], 0.9)) == (2.0, 10.0, 3.0)


def test_a_rank_is_not_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rank", "--device", "cpu"]) == 1
    assert "--device cpu cannot measure a rank" in capsys.readouterr().err
