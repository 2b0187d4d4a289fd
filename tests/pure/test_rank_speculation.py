"""`glint bench rank --speculative`: what it refuses, and the arithmetic of its table by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from glint.bench.rank import rank_options, rank_settings
from glint.bench.rank_shapes import GLM_47, shape_rank
from glint.bench.rank_speculation import (
    STEP_COLUMNS,
    Speculation,
    SpeculationRow,
    check_speculation,
    show_speculation,
    speculation_cells,
    speculation_json,
)
from glint.cli import main, make_parser
from glint.errors import RequestError

TP = shape_rank(GLM_47, 8, "tp")
ROWS = (
    SpeculationRow(1, 512, 4, 5.1, 5.0, 5.3, 60, 1.0, plain_ms=4.0),
    SpeculationRow(8, 512, 32, 10.2, 10.0, 10.4, 60, 0.5, plain_ms=6.0),
)
GIVEN = Speculation(3, (0.7, 0.5, 0.35), ROWS)


def rank_flags(*flags: str) -> Any:
    """The command line of the bench."""
    return make_parser().parse_args(["bench", "rank", *flags])


def test_flags_are_read() -> None:
    chosen = rank_flags("--speculative", "3", "--acceptance", "0.7, 0.5,0.5")
    assert (chosen.speculative, chosen.acceptance) == (3, (0.7, 0.5, 0.5))
    assert (rank_flags().speculative, rank_flags().acceptance) == (0, ())
    assert rank_flags("--acceptance", "1,0").acceptance == (1.0, 0.0)


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--speculative", "0", "'0' is not a whole number from 1 to 8"),
        ("--speculative", "9", "'9' is not a whole number from 1 to 8"),
        ("--speculative", "auto", "'auto' is not a whole number from 1 to 8"),
        ("--acceptance", "0.5,0.7", "'0.5,0.7' rises from 0.5 to 0.7"),
        ("--acceptance", "1.1", "'1.1' is not a chance from 0 to 1; give such as 0.7,0.5,0.35"),
        ("--acceptance", "0.5,nan", "'nan' is not a chance from 0 to 1"),
        ("--acceptance", "0.5,,0.2", "'' is not a chance from 0 to 1"),
        ("--acceptance", "70%", "'70%' is not a chance from 0 to 1"),
    ],
)
def test_bad_values_are_refused(flag: str, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rank_flags(flag, text)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("drafts", "words"), [((), "is 0"), (("--speculative", "3"), "is 3")])
def test_every_draft_has_its_chance(drafts: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rank", *drafts, "--acceptance", "0.7,0.5"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"--acceptance 0.7,0.5 has 2 chances and --speculative {words}; give one chance for each draft" in said


def test_a_model_without_an_mtp_layer_is_refused() -> None:
    bare = replace(TP, model=replace(TP.model, mtp_layers=0))
    with pytest.raises(RequestError, match="--speculative is 2, but --model some/folder has no MTP layer"):
        check_speculation(2, (), bare, "some/folder")
    check_speculation(0, (), bare, "some/folder")
    check_speculation(2, (), TP, "glm-4.7")


def test_the_engine_has_room_for_drafts_that_are_all_right() -> None:
    chosen = rank_flags("--speculative", "3", "--steps", "10", "--warm-up", "2", "--kernels", "hopper")
    settings = rank_settings(chosen, TP, [(1, 512), (2000, 512)])
    assert (settings.max_model_len, settings.num_speculative_tokens) == (4097, 3)
    assert settings.num_pages == 2000 * (-(-(512 + 4 * 15) // 64) + 1)
    assert settings.max_step_tokens == 8000
    options = rank_options(TP, settings)
    assert (options.max_draft_tokens, options.max_step_items) == (3, 8000)
    assert rank_options(TP, replace(settings, num_speculative_tokens=0)).max_draft_tokens == 0


def test_the_arithmetic_of_the_table() -> None:
    assert GIVEN.tokens_per_step == pytest.approx(2.55)
    assert list(speculation_cells(GIVEN)) == [
        ("1 at 512", "4", "5.10", "5.00", "5.30", "100%", "4.00", "2.55", "2.00", "2.00x"),
        ("8 at 512", "32", "10.20", "10.00", "10.40", "50%", "6.00", "2.55", "4.00", "1.50x"),
    ]


def test_acceptance_is_said_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    show_speculation(GIVEN)
    printed = capsys.readouterr().out
    assert "acceptance: given, not measured: 0.7, 0.5, 0.35 that the first 1 to 3 are all right" in printed
    assert "each request verifies 3 drafts" in printed and "gain" in printed


def test_without_acceptance_there_are_steps_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bare = replace(GIVEN, acceptance=())
    assert bare.tokens_per_step is None
    assert all(len(cells) == len(STEP_COLUMNS) for cells in speculation_cells(bare))
    show_speculation(bare)
    printed = capsys.readouterr().out
    assert "acceptance: not given and not measured" in printed and "5.10" in printed
    assert "gain" not in printed and "ms/token" not in printed
    found = speculation_json(bare)
    assert found["given_acceptance"] is None and found["rows"][0]["gain_by_given_acceptance"] is None


def test_the_rows_as_json() -> None:
    found = json.loads(json.dumps(speculation_json(GIVEN)))
    assert (found["drafts"], found["given_acceptance"]) == (3, [0.7, 0.5, 0.35])
    assert found["tokens_per_step_by_given_acceptance"] == pytest.approx(2.55)
    row = found["rows"][1]
    assert (row["batch"], row["rows_verified"], row["median_ms"], row["plain_ms"]) == (8, 32, 10.2, 6.0)
    assert row["ms_per_token_by_given_acceptance"] == pytest.approx(4.0)
    assert row["gain_by_given_acceptance"] == pytest.approx(1.5)
