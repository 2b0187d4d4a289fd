"""A model whose weights are random: its checkpoint without files, and a tokenizer of its vocabulary.

The CUDA library makes the weights from a seed, in the true shapes, so that speed is that of the model and text means
nothing.
"""

import json
from pathlib import Path

from glint.bench.prompts import read_sentences
from glint.checkpoint.config import GenerationConfig, ModelConfig
from glint.checkpoint.table import SETTINGS_NAME, TOKENIZER_NAME, Checkpoint
from glint.errors import RequestError

SYNTHETIC_SEED = 1
LEARNED_TOKENS = 8192


def synthetic_checkpoint(model: ModelConfig, folder: Path) -> Checkpoint:
    """A checkpoint of these shapes whose weights no file holds; `folder` has the tokenizer."""
    return Checkpoint(folder, model, GenerationConfig(), (), (), (), (), SYNTHETIC_SEED)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer in which every token of the model is some text.

    It learns pieces of English words. The other tokens are never read from text and are written as their number.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(letters):
        raise RequestError(f"a vocabulary of {vocab_size} has no room for the {len(letters)} bytes of text; use more")
    most = min(LEARNED_TOKENS, vocab_size)
    trainer = trainers.BpeTrainer(vocab_size=most, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(read_sentences(), trainer)
    document = json.loads(tokenizer.to_str())
    learned = len(document["model"]["vocab"])
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
    document["model"]["vocab"] |= {f"{space}{token}": token for token in range(learned, vocab_size)}
    (folder / TOKENIZER_NAME).write_text(json.dumps(document), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / SETTINGS_NAME).write_text(json.dumps(settings), encoding="utf-8")
