"""Text of a whole engine whose steps overlap: what comes after a stop string is never seen."""

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from glint.text.tokenizer import Tokenizer
from tests.cpu.small_engine import small_model
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the small model's 257 tokens: one per byte, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_what_comes_after_a_stop_string_is_dropped(tokenizer: Tokenizer, num_drafts: int) -> None:
    prompt = tokenizer.encode("hello")
    checkpoint = small_model("fp8_channel", "with copies")
    with make_engine(tokenizer, checkpoint=checkpoint, num_speculative_tokens=num_drafts) as engine:
        (free_id,) = engine.submit(prompt, greedy(30))
        free = gather(engine, {})[free_id]
        tokens = [token for output in free for token in output.token_ids]
        text = "".join(output.text for output in free if output.text)
        stop = text[6:8]
        assert len(stop) == 2
        (company_id,) = engine.submit(prompt_of(5, 9), greedy(30))
        (stopped_id,) = engine.submit(prompt, greedy(30, stop=stop))
        outputs = gather(engine, {})
        stopped = outputs[stopped_id]
        kept = [token for output in stopped for token in output.token_ids]
        assert "".join(output.text for output in stopped) == text[: text.index(stop)]
        assert (kept, stopped[-1].finish_reason) == (tokens[: len(kept)], "stop")
        assert len(kept) < len(tokens)
        assert [t for output in outputs[company_id] for t in output.token_ids] == alone(prompt_of(5, 9), 30)
        assert_idle(engine)


def test_a_stop_string_among_drafts_cuts_tokens_and_log_probabilities(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("f")
    params = greedy(40, logit_bias={letter: 100.0}, stop=["ffffff"], logprobs=1)
    with make_engine(
        tokenizer, checkpoint=small_model("fp8_channel", "with copies"), num_speculative_tokens=3
    ) as engine:
        (request_id,) = engine.submit(tokenizer.encode("hello"), params)
        outputs = gather(engine, {})[request_id]
        assert_idle(engine)
    assert [len(output.token_ids) for output in outputs] == [1, 4, 1]
    assert [len(output.logprobs or ()) for output in outputs] == [1, 4, 1]
    assert outputs[-1].stop_reason == "ffffff" and "".join(output.text or "" for output in outputs) == ""
