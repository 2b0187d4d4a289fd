"""The serving bench's figures, table, JSON, plot and command line, from answers whose times are known."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as PeerTokenizer

from glint.bench import serving
from glint.bench.plot import Axis, draw
from glint.bench.prompts import OPENING, PromptMaker, encode_locally
from glint.bench.report import LoadReport, Measurement, ServerCounters, summarise
from glint.bench.serving_flags import KEY_VARIABLE, add_flags, fill_defaults
from glint.bench.stream import StreamedAnswer
from glint.bench.table import as_json, compare, render, render_comparison
from glint.checkpoint.hub import ModelSource
from glint.errors import RequestError
from tests.pure.openai_endpoint import Script
from tests.pure.openai_endpoint import serving as scripted

SVG = "{http://www.w3.org/2000/svg}"
ROWS_OF_VLLM = """\
============ Serving Benchmark Result ============
Successful requests:
Failed requests:
Maximum request concurrency:
Request rate configured (RPS):
Benchmark duration (s):
Total input tokens:
Total generated tokens:
Request throughput (req/s):
Request goodput (req/s):
Output token throughput (tok/s):
Peak output token throughput (tok/s):
Peak concurrent requests:
Total token throughput (tok/s):
---------------Time to First Token----------------
Mean TTFT (ms):
Median TTFT (ms):
P99 TTFT (ms):
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):
Median TPOT (ms):
P99 TPOT (ms):
---------------Inter-token Latency----------------
Mean ITL (ms):
Median ITL (ms):
P99 ITL (ms):
----------------End-to-end Latency----------------
Mean E2EL (ms):
Median E2EL (ms):
P99 E2EL (ms):
""".splitlines()


def answer(start: float, first: float, gaps: list[float], tokens: int | None, finished: bool = True) -> StreamedAnswer:
    times = [start + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return StreamedAnswer(start, times, times[-1], 10 if tokens else None, tokens, finished)


def measurement(*answers: StreamedAnswer, url: str = "http://first", concurrency: int = 2) -> Measurement:
    return Measurement(
        base_url=url,
        model="sample <&>",
        endpoint="completions",
        prompts="random",
        concurrency=concurrency,
        request_rate=3.0,
        prompt_tokens=10,
        output_tokens=4,
        start=100.0,
        seconds=4.0,
        answers=answers,
        has_given_up=False,
        client_cpu_seconds=0.001,
        server=None,
    )


def three_answers() -> tuple[StreamedAnswer, ...]:
    failed = StreamedAnswer(100.0, failure="HTTP 500: broken")
    return (
        answer(100.0, 0.5, [0.1, 0.2, 0.3], 4),
        answer(101.25, 0.25, [0.5], 4),
        answer(103.0, 0.5, [0.25], None, finished=False),
        failed,
    )


def report(**changes: Any) -> LoadReport:
    return summarise(replace(measurement(*three_answers()), **changes), (99.0,), [("ttft", 300.0), ("tpot", 400.0)])


def test_definitions_by_hand() -> None:
    found = report()
    assert (found.completed, found.failed, found.cut) == (2, 1, 1)
    values = {name: found.latencies[name] for name in ("ttft", "tpot", "itl", "e2el")}
    exact = {
        "ttft": [250.0, 500.0],
        "tpot": [500.0 / 3, 200.0],
        "itl": [100.0, 200.0, 300.0, 500.0],
        "e2el": [750.0, 1100.0],
    }
    for name, numbers in exact.items():
        distribution = values[name]
        assert distribution is not None
        assert distribution.values == pytest.approx(numbers)
        assert distribution.mean == pytest.approx(statistics.mean(numbers))
        assert distribution.median == pytest.approx(statistics.median(numbers))
        assert distribution.std == pytest.approx(statistics.pstdev(numbers))
        last = statistics.quantiles(numbers, n=100, method="inclusive")[98]
        assert distribution.percentiles == ((99.0, pytest.approx(last)),)
    per_chunk = 8 / 6
    assert found.output_tokens_of_cut == pytest.approx(2 * per_chunk)
    assert found.output_throughput == pytest.approx((8 + 2 * per_chunk) / 4)
    assert found.input_tokens == 30
    assert found.total_throughput == pytest.approx((38 + 2 * per_chunk) / 4)
    assert found.request_throughput == 0.5 and found.goodput == 0.25
    assert found.output_per_second == pytest.approx((3.0, 3.0, 2.0, 2 * per_chunk))
    assert found.peak_output == pytest.approx(3.0)
    assert found.peak_concurrent == 2
    assert found.errors == (("HTTP 500: broken", 1),)


def test_one_token_has_no_time_per_token_and_text_may_be_missing() -> None:
    single, silent = answer(100.0, 0.5, [], 1), StreamedAnswer(100.0, [], 101.0, 10, 3, True)
    found = summarise(measurement(single, silent), (50.0,), ())
    tpot, ttft = found.latencies["tpot"], found.latencies["ttft"]
    assert tpot is not None and tpot.values == (0.0,)
    assert ttft is not None and ttft.values == pytest.approx((500.0, 1000.0))
    assert found.output_tokens == 4


def test_the_table_has_the_rows_of_vllm_in_their_order() -> None:
    lines = render(report()).splitlines()
    for line, expected in zip(lines, ROWS_OF_VLLM, strict=False):
        assert line.startswith(expected)
        if expected.endswith(":"):
            assert line[:41] == f"{expected:<41}" and len(line) == 51 and float(line[41:]) >= 0.0
        else:
            assert len(line) == 50
    assert lines[-1] == "=" * 50
    assert "1 x HTTP 500: broken" in lines


def test_a_load_without_a_complete_request_is_not_measured() -> None:
    found = summarise(measurement(answer(100.0, 0.5, [0.1], None, finished=False)), (50.0, 99.0), ())
    assert found.output_tokens == 2
    assert "Median TTFT (ms):                        n/a" in render(found)
    assert as_json(found)["median_ttft_ms"] is None
    assert "Request goodput" not in render(found)
    ElementTree.fromstring(draw([found]))


def test_json_has_the_keys_of_vllm() -> None:
    found = json.loads(json.dumps(as_json(report())))
    for name in ("ttft", "tpot", "itl", "e2el"):
        for key in ("mean", "median", "std", "p99"):
            assert found[f"{key}_{name}_ms"] > 0.0
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == pytest.approx(2 + 2 / 3)
    assert found["total_token_throughput"] > found["output_throughput"]
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 4.0)
    assert found["requests_off_output_length"] == 0
    assert found["errors"] == [{"message": "HTTP 500: broken", "count": 1}]


def test_server_figures_are_printed_where_the_server_tells_them() -> None:
    counters = ServerCounters(20.0, 5.0, 60.0, None, {"loop": 0.0004, "engine": 0.0002})
    found = report(server=counters)
    text = render(found)
    assert "Server CPU per streamed token (us):      30.00" in text
    assert "  thread loop (us):                      20.00" in text
    assert "Mean tokens per step:                    12.00" in text
    assert "Mean requests per step" not in text
    assert "Mean generated tokens per step:          4.00" in text
    assert as_json(found)["server_cpu_us_per_token"] == pytest.approx(30.0)
    assert "Server CPU" not in render(report())
    plain = {"generated_tokens": 7, "steps": 2, "step_tokens": {"count": 2, "sum": 9.0}, "cpu_seconds": {"loop": 1}}
    assert ServerCounters.read(plain) == ServerCounters(7.0, 2.0, 9.0, None, {"loop": 1.0})
    assert ServerCounters.read({"steps": True}) is None and ServerCounters.read([]) is None


def test_drafts_are_printed_where_the_server_made_some() -> None:
    found = report(server=ServerCounters(20.0, 5.0, 60.0, None, {"loop": 0.1}, 10.0, 4.0))
    text = render(found)
    assert "Mean drafts per step:                    2.00" in text
    assert "Share of drafts that were right (%):     40.00" in text
    assert as_json(found)["server_share_of_drafts_right"] == pytest.approx(0.4)
    silent = report(server=ServerCounters(20.0, 5.0, 60.0, None, {"loop": 0.1}, 0.0, 0.0))
    assert "drafts" not in render(silent)
    counted = {"steps": 2, "draft_tokens": 6, "accepted_draft_tokens": 3}
    read = ServerCounters.read(counted)
    assert read is not None and (read.draft_tokens, read.accepted_draft_tokens) == (6.0, 3.0)


def test_peers_are_compared_by_medians_over_rounds() -> None:
    def run(url: str, concurrency: int, speed: float) -> LoadReport:
        found = answer(100.0, 0.5 / speed, [0.1 / speed] * int(3 * speed), int(3 * speed) + 1)
        return summarise(measurement(found, url=url, concurrency=concurrency), (50.0,), ())

    runs = [run("http://a", 1, speed) for speed in (2.0, 4.0, 6.0)] + [run("http://b", 1, 2.0), run("http://a", 8, 1.0)]
    rows = compare([*runs, run("http://b", 8, 4.0)])
    assert [(row["concurrency"], row["peer_url"]) for row in rows] == [(1, "http://b"), (8, "http://b")]
    first, second = (row["ratio"] for row in rows)
    assert first["output_throughput"] == pytest.approx(13 / 7)
    assert first["median_ttft_ms"] == pytest.approx(2.0) and first["median_tpot_ms"] == pytest.approx(2.0)
    assert second["median_tpot_ms"] == pytest.approx(0.25)
    assert compare([run("http://a", 1, 1.0)]) == []
    assert "1.86" in render_comparison("http://a", rows)


def test_the_plot_is_svg_with_a_panel_for_each_figure() -> None:
    def panels(runs: list[LoadReport]) -> list[str]:
        root = ElementTree.fromstring(draw(runs))
        assert root.tag == SVG + "svg"
        groups = root.findall(SVG + "g")
        assert all(group.find(SVG + "polyline") is not None for group in groups)
        return [str(group.findtext(SVG + "text")) for group in groups]

    one, more = report(), report(concurrency=16)
    titles = panels([one])
    assert [title.split()[0] for title in titles] == ["Output", "Time", "Inter-token"]
    assert panels([one, more])[-1].startswith("Throughput against speed per user")
    points = ElementTree.fromstring(draw([one])).findall(f".//{SVG}polyline")[0].attrib["points"].split()
    assert len(points) == 4


@pytest.mark.parametrize("values", [[0.0], [5.0], [1e-6, 3e4], [0.0, 999.0], []])
@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_an_axis_holds_its_values_and_has_ticks(values: list[float], is_logarithmic: bool) -> None:
    axis = Axis.over(values, is_logarithmic)
    assert axis.ticks()
    assert all(-1e-9 <= axis.share(value) <= 1.0 + 1e-9 for value in [*values, *axis.ticks()])


@pytest.mark.parametrize("kind", ["random", "text"])
def test_prompts_have_the_length_that_the_tokenizers_library_counts(kind: Any, sample_model: Path) -> None:
    peer = PeerTokenizer.from_file(str(sample_model / "tokenizer.json"))
    maker = asyncio.run(PromptMaker.prepare(kind, 3, encode_locally(sample_model), needs_words=True))
    opening = len(peer.encode(OPENING, add_special_tokens=False).ids)
    for index, length in enumerate((1, 2, 17, 100, 256, 700)):
        text = maker.text(str(index), length)
        assert len(peer.encode(text, add_special_tokens=False).ids) == opening + length
        ids = maker.token_ids(str(index), length)
        assert len(ids) == length
        assert max(ids) < peer.get_vocab_size()
    firsts = {tuple(maker.token_ids(str(index), 64)[:16]) for index in range(200)}
    assert len(firsts) > 195


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("flags", "load"),
    [
        ("", ((4,), 64, 64, 30.0)),
        ("--gen-len 8 --concurrency 2", ((2,), 64, 8, 30.0)),
        ("--device cuda", ((64,), 256, 256, 60.0)),
        ("--base-url http://127.0.0.1:1", ((64,), 256, 256, 60.0)),
        ("--synthetic glm-4.5-air --device cuda", ((1, 8, 64, 128, 256), 256, 256, None)),
        ("--synthetic glm-4.5-air --device cuda --duration 5", ((1, 8, 64, 128, 256), 256, 256, 5.0)),
        ("--num-prompts 3", ((4,), 64, 64, None)),
    ],
)
def test_a_load_is_sized_by_the_device(flags: str, load: tuple[Any, ...]) -> None:
    chosen = parse(*flags.split())
    fill_defaults(chosen)
    assert (chosen.concurrency, chosen.prompt_len, chosen.gen_len, chosen.duration) == load


def test_the_key_comes_from_the_environment_and_peers_never_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    chosen = parse("--peer-url", "http://peer", "--concurrency", "1,8", "--rounds", "2", "--served-model-name", "own")
    fill_defaults(chosen)
    loads = list(serving.turns(serving.settings_of(chosen, "http://own"), chosen))
    assert [load.base_url for load in loads] == ["http://own", "http://peer"] * 4
    assert [load.concurrency for load in loads] == [1, 1, 1, 1, 8, 8, 8, 8]
    assert [load.api_key for load in loads] == ["secret", None] * 4
    assert [load.model for load in loads] == ["own", None] * 4
    assert len({load.label for load in loads}) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,,2"],
        ["--duration", "-1"],
        ["--duration", "nan"],
        ["--percentiles", "101"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--prompt-len", "x"],
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"x\.png is no SVG file"):
        serving.run(parse("--plot", "x.png"))
    with pytest.raises(RequestError, match="cannot be written"):
        serving.run(parse("--json", str(tmp_path / "missing" / "x.json")))


def test_the_command_measures_two_servers_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    with scripted(Script(gap=0.01)) as own, scripted(Script(gap=0.04)) as peer:
        flags = f"--base-url {own.url} --peer-url {peer.url} --concurrency 1,2 --num-prompts 3 --prompt-len 12"
        files = ["--json", str(out), "--plot", str(plot)]
        assert serving.run(parse(*flags.split(), "--gen-len", "6", "--warmup", "0", *files)) == 0
        own_prompts, peer_prompts = ([one.body["prompt"] for one in server.seen] for server in (own, peer))
    assert sorted(own_prompts) == sorted(peer_prompts) and len(own_prompts) == 6
    text = capsys.readouterr().out
    assert text.count("Serving Benchmark Result") == 4 and "ratio" in text
    document = json.loads(out.read_text())
    assert [run["completed"] for run in document["runs"]] == [3, 3, 3, 3]
    assert [row["concurrency"] for row in document["comparison"]] == [1, 2]
    assert all(row["ratio"]["output_throughput"] > 1 for row in document["comparison"])
    assert len(ElementTree.parse(plot).getroot().findall(SVG + "g")) == 4


def test_a_load_that_only_fails_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(Script(status=429)) as server:
        flags = f"--base-url {server.url} --num-prompts 2 --concurrency 1 --prompt-len 4 --gen-len 2 --warmup 1"
        assert serving.run(parse(*flags.split())) == 1
    captured = capsys.readouterr()
    assert "2 x HTTP 429: the queue is full" in captured.out
    assert "1 warm-up requests failed: HTTP 429" in captured.err
    assert "without one complete answer" in captured.err and "--duration" in captured.err


def test_the_same_server_without_drafts_is_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    @contextmanager
    def start(flags: list[str]) -> Iterator[str]:
        started.append(flags)
        yield f"http://server/{len(started)}"

    measured: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(serving, "own_server", start)
    monkeypatch.setattr(serving, "model_source", lambda chosen: ModelSource(tmp_path))
    monkeypatch.setattr(serving, "measure", lambda chosen, url, alone: measured.append((url, chosen.peer_url)) or 0)
    assert serving.run(parse("--without-speculation", "--num-speculative-tokens", "2")) == 0
    assert serving.run(parse()) == 0
    assert measured == [("http://server/1", ["http://server/2"]), ("http://server/3", [])]
    first, plain, alone = ([word for flag, word in pairwise(flags) if "speculative" in flag] for flags in started)
    assert (first, plain, alone) == (["2"], ["2", "0"], ["auto"])


@pytest.mark.parametrize(
    "other", [("--base-url", "http://127.0.0.1:1"), ("--synthetic", "glm-4.7", "--device", "cuda")]
)
def test_servers_of_others_have_no_twin_without_drafts(other: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match=f"leave it out beside {other[0]}"):
        serving.run(parse("--without-speculation", *other))
