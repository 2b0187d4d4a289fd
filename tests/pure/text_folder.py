"""A small byte-level tokenizer folder with the special tokens and the prompt layout of GLM-4.7, for text tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ("the quick brown fox jumps over the lazy dog", "die Häuser und Bäume", "hello world, hello tokens 123")
ROLE_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "two words", "▁low", "über")

GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set kept = (clear_thinking is defined and not clear_thinking) or loop.index0 > last.user -%}
{%- if m.reasoning_content and kept -%}<think>{{ m.reasoning_content }}</think>{%- else -%}</think>{%- endif -%}
{{- m.content.strip() -}}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE of 400 tokens over all 256 bytes and adds the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ROLE_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, template: str | None = None, **settings: object) -> Path:
    """Writes tokenizer.json, tokenizer_config.json and, if given, chat_template.jinja; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    chosen = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(chosen))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
