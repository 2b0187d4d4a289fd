"""The recorded files against torch: everything is computed again and compared, and an altered file is noticed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glint.text.tokenizer import Tokenizer
from tests.cpu.sampling_rows import SETTINGS_THAT_CUT
from tests.reference.checkpoints import make_checkpoint, make_prompts
from tests.reference.expected import (
    RECORDED,
    STATES_PROMPT,
    BestTokens,
    RecordedModel,
    model_problems,
    read_kept_tokens,
    read_recorded,
    read_yardsticks,
    recorded_name,
)
from tests.reference.kept_by_transformers import kept_by_transformers
from tests.reference.recorded_cases import (
    ANSWER_TOKENS,
    DIVERGENCE_CASES,
    RANKS,
    ROUNDED_CACHE,
    ROUNDED_CACHE_TOKENS,
    SAMPLE,
    SAMPLE_PROMPTS,
    SAMPLE_TOKENS,
    Case,
)
from tests.reference.rounded_cache import rounded_cache_reference
from tests.reference.store import make_divergence_folder, measure_yardstick, recorded_cases, writers
from tests.reference.transformers_reference import Reference

YARDSTICK_TOLERANCE = 0.25
YARDSTICKS = [*(recorded_name(*case) for case in DIVERGENCE_CASES), RANKS]
ALTERED: tuple[Case, str] = (("tied", "bf16"), "tied-bf16")


@pytest.mark.parametrize(("case", "change"), recorded_cases(), ids=lambda part: str(part))
def test_recorded_models_are_the_references(tmp_path: Path, case: Case, change: str | None) -> None:
    folder = make_checkpoint(tmp_path, *case)
    recorded = read_recorded(recorded_name(*case, change))
    recorded.check_folder(folder)
    count = ROUNDED_CACHE_TOKENS if change == ROUNDED_CACHE else ANSWER_TOKENS
    assert [len(answer.greedy) for answer in recorded.answers] == [count] * 5
    if change == ROUNDED_CACHE:
        with rounded_cache_reference(folder) as reference:
            problems = model_problems(recorded, reference)
    else:
        reference = Reference(folder, break_=change)
        problems = model_problems(recorded, reference)
        assert (recorded.logits.size > 0) == (recorded.layer_outputs.size > 0) == (change is None)
    assert recorded.prompts == make_prompts(reference.config.vocab_size)
    assert problems == []


def test_the_recorded_sample_model_is_the_references(sample_model: Path) -> None:
    recorded = read_recorded(SAMPLE)
    recorded.check_folder(sample_model)
    tokenizer = Tokenizer(sample_model)
    assert recorded.prompts == [tokenizer.encode(prompt) for prompt in SAMPLE_PROMPTS]
    assert [len(answer.greedy) for answer in recorded.answers] == [SAMPLE_TOKENS] * len(SAMPLE_PROMPTS)
    assert model_problems(recorded, Reference(sample_model)) == []


@pytest.mark.parametrize("name", YARDSTICKS)
def test_recorded_divergences_are_the_references(tmp_path: Path, name: str) -> None:
    """Sums in FP32 differ between processors, and with them the divergence; it is a mean over 640 positions."""
    recorded = read_yardsticks()[name]
    measured = measure_yardstick(*make_divergence_folder(tmp_path, name))
    assert measured.checkpoint_digest == recorded.checkpoint_digest
    assert measured.between_orders == pytest.approx(recorded.between_orders, rel=YARDSTICK_TOLERANCE)


def test_recorded_kept_tokens_are_those_of_transformers() -> None:
    settings, kept = read_kept_tokens()
    assert all(one in SETTINGS_THAT_CUT for one in settings)
    np.testing.assert_array_equal(kept, np.stack([kept_by_transformers(one) for one in settings]))


def test_nothing_else_is_recorded() -> None:
    assert {path.name for path in RECORDED.iterdir()} == set(writers())
    assert set(read_yardsticks()) == set(YARDSTICKS)
    assert sum(path.stat().st_size for path in RECORDED.iterdir()) < 1_000_000


@pytest.fixture(scope="module")
def altered_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """The checkpoint whose recorded file is altered, and its reference."""
    folder = make_checkpoint(tmp_path_factory.mktemp("altered"), *ALTERED[0])
    return folder, Reference(folder)


def changed_answer(recorded: RecordedModel, tokens: np.ndarray, logprobs: np.ndarray) -> RecordedModel:
    """The recorded model with another third answer."""
    answers = list(recorded.answers)
    answers[2] = BestTokens(tokens, logprobs)
    return replace(recorded, answers=answers)


def alter(recorded: RecordedModel, part: str) -> RecordedModel:
    """The recorded model with one number changed."""
    tokens, logprobs = recorded.answers[2].tokens.copy(), recorded.answers[2].logprobs.copy()
    logits, outputs = recorded.logits.copy(), recorded.layer_outputs.copy()
    if part == "token":
        tokens[5, 0], tokens[5, 1] = tokens[5, 1], tokens[5, 0]
    elif part == "lesser token":
        tokens[7, 6] = (tokens[7, 6] + 1) % len(logits)
    elif part == "logprob":
        logprobs[30, 4] -= 1e-3
    elif part == "logit":
        logits[17] += 1e-3
    elif part == "layer output":
        outputs[1, 3, 40] *= 1.01
    elif part == "prompt":
        return replace(recorded, prompts=[[*prompt[:-1], prompt[-1] ^ 1] for prompt in recorded.prompts])
    return replace(changed_answer(recorded, tokens, logprobs), logits=logits, layer_outputs=outputs)


@pytest.mark.parametrize("part", ["token", "lesser token", "logprob", "logit", "layer output", "prompt"])
def test_an_altered_file_is_noticed(tmp_path: Path, altered_case: tuple[Path, Reference], part: str) -> None:
    recorded = read_recorded(ALTERED[1])
    _, reference = altered_case
    alter(recorded, part).write(tmp_path / f"{ALTERED[1]}.npz")
    assert len(recorded.prompts[STATES_PROMPT]) == 7
    assert model_problems(read_recorded(ALTERED[1], tmp_path), reference) != []


def test_a_file_comes_back_as_it_was_written(tmp_path: Path, altered_case: tuple[Path, Reference]) -> None:
    path = read_recorded(ALTERED[1]).write(tmp_path / f"{ALTERED[1]}.npz")
    assert path.read_bytes() == (RECORDED / path.name).read_bytes()


def test_another_checkpoint_is_refused(tmp_path: Path, altered_case: tuple[Path, Reference]) -> None:
    folder, _ = altered_case
    recorded = read_recorded(ALTERED[1])
    recorded.check_folder(folder)
    with pytest.raises(ValueError, match="digest"):
        recorded.check_folder(make_checkpoint(tmp_path, *ALTERED[0], seed=1))
