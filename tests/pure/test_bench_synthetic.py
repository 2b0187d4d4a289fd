"""The bench of a server on random weights: its tokenizer, its flags, its wiring and the share that it reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from glint.bench import serving
from glint.bench.engine_alone import fits
from glint.bench.rank import StepLoad
from glint.bench.rank_shapes import GLM_45_AIR
from glint.bench.serving_flags import add_flags, fill_defaults
from glint.bench.synthetic import SYNTHETIC_SEED, synthetic_checkpoint, write_tokenizer
from glint.checkpoint.table import open_checkpoint
from glint.cli import make_parser
from glint.engine.args import EngineArgs
from glint.engine.settings import EngineSettings
from glint.errors import RequestError
from glint.text.tokenizer import Tokenizer
from tests.pure.checkpoint_files import small_folder
from tests.pure.openai_endpoint import Script
from tests.pure.openai_endpoint import serving as scripted

VOCAB_SIZE = 6000


def parse(*arguments: str) -> argparse.Namespace:
    """The command line of the bench."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(arguments)


def test_every_token_of_the_tokenizer_is_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert all(tokenizer.token_bytes(token) for token in range(VOCAB_SIZE))
    assert tokenizer.decode([VOCAB_SIZE - 1]) == f" {VOCAB_SIZE - 1}"
    text = "The value of the expression is evaluated."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="255 has no room for the 256 bytes"):
        write_tokenizer(tmp_path, 255)


def test_random_weights_have_a_seed_and_no_files(tmp_path: Path) -> None:
    made = synthetic_checkpoint(GLM_45_AIR, tmp_path)
    assert (made.synthetic_seed, made.files, len(made.tensor_array())) == (SYNTHETIC_SEED, (), 0)
    assert made.eos_token_ids == GLM_45_AIR.eos_token_ids
    assert open_checkpoint(small_folder(tmp_path)).synthetic_seed == 0


def test_no_flag_of_serve_asks_for_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--synthetic", "glm-4.5-air"])
    assert "unrecognized arguments: --synthetic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--synthetic glm-4.5-air", "--device cpu: random weights are made on a GPU only"),
        ("--synthetic glm-4.5-air --device cuda --tp 2", "--tp 2: random weights are made for one rank"),
        ("--synthetic glm-4.5-air --device cuda --model folder", "--model folder are both given"),
        ("--synthetic glm-4.5-air --base-url http://x", "not of --base-url http://x"),
        ("--engine-alone --base-url http://x", "--engine-alone is of a server that the bench starts"),
        ("--synthetic glm-5 --device cuda", "--synthetic glm-5 is neither a known model"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        serving.run(parse(*flags.split()))


def loads(*flags: str) -> list[tuple[int, float | None, int | None]]:
    """The concurrency, duration and number of prompts of every load."""
    chosen = parse(*flags)
    fill_defaults(chosen)
    turns = serving.turns(serving.settings_of(chosen, "http://own"), chosen)
    return [(load.concurrency, load.duration_seconds, load.num_prompts) for load in turns]


def test_the_load_of_random_weights_is_the_one_of_the_user() -> None:
    synthetic = ("--synthetic", "glm-4.5-air")
    assert loads("--device", "cuda") == [(64, 60.0, None)]
    assert loads(*synthetic) == [(count, None, 4 * count) for count in (1, 8, 64, 128, 256)]
    assert loads(*synthetic, "--concurrency", "2", "--duration", "5") == [(2, 5.0, None)]
    assert loads(*synthetic, "--concurrency", "2", "--num-prompts", "3") == [(2, None, 3)]


def test_the_bench_starts_its_own_entry_on_a_tokenizer_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    alone = {64: StepLoad(64, 256, 256, 1.0, 7.0, 255)}

    def measured(checkpoint: Any, args: EngineArgs, *rest: Any) -> dict[int, StepLoad]:
        started.append((checkpoint.config, checkpoint.synthetic_seed, args.max_num_seqs, rest))
        return alone

    @contextmanager
    def server(flags: Sequence[str], entry: Sequence[str]) -> Iterator[str]:
        folder = Path(flags[flags.index("--model") + 1])
        tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        started.append((tuple(entry), len(tokens), list(flags)))
        yield "http://own"

    monkeypatch.setattr(serving, "measure_engine", measured)
    monkeypatch.setattr(serving, "own_server", server)
    monkeypatch.setattr(serving, "measure", lambda *given: started.append(given) or 0)
    chosen = parse("--synthetic", "zai-org/GLM-4.5-Air", "--device", "cuda", "--kernels", "portable")
    assert serving.run(chosen) == 0
    first, second, third = started
    assert first == (GLM_45_AIR, SYNTHETIC_SEED, 256, (None, (1, 8, 64, 128, 256), 256, 256))
    entry, num_tokens, flags = second
    assert entry == ("glint.synthetic_server", "zai-org/GLM-4.5-Air") and num_tokens == 151552
    assert flags[flags.index("--served-model-name") + 1] == "synthetic-GLM-4.5-Air"
    for name, value in (("--device", "cuda"), ("--kernels", "portable"), ("--max-num-seqs", "256")):
        assert flags[flags.index(name) + 1] == value
    assert third == (chosen, "http://own", alone)


def test_the_share_of_the_engine_alone_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    alone = {2: StepLoad(2, 12, 6, prefill_seconds=0.02, decode_seconds=0.05, decode_steps=5)}
    assert alone[2].tokens_per_second == pytest.approx(12 / 0.07)
    assert alone[2].decode_ms == pytest.approx(10.0)
    flags = "--synthetic x --concurrency 1,2 --num-prompts 4 --prompt-len 12 --gen-len 6 --warmup 0"
    with scripted(Script(gap=0.01)) as server:
        assert serving.measure(parse(*flags.split(), "--json", str(out)), server.url, alone) == 0
    one, two = json.loads(out.read_text())["runs"]
    assert one["engine_alone"] is None and one["weights"] == two["weights"] == "synthetic"
    share = two["output_throughput"] / alone[2].tokens_per_second
    assert two["share_of_engine_alone"] == pytest.approx(share)
    assert two["engine_alone"]["decode_ms_per_step"] == pytest.approx(10.0)
    table = capsys.readouterr().out.split("the server beside its engine alone, all measured\n")[1].splitlines()
    assert table[1].split()[:4][2:] == ["n/a", "n/a"]
    assert table[2].split()[2:4] == ["171", f"{share:.1%}"]


def test_a_load_that_does_not_fit_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = EngineArgs(device="cuda", num_pages=64, max_num_seqs=8, max_model_len=1024)
    settings = EngineSettings.resolve(Path("air"), GLM_45_AIR, args)
    assert fits(settings, 8, 512) and fits(settings, 4, 1024)
    assert not fits(settings, 8, 513)
    assert "8 requests of 513 tokens need 72 pages" in capsys.readouterr().err
    assert not fits(settings, 9, 64) and not fits(settings, 1, 1025)
