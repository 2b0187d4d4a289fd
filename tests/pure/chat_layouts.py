"""Chat layouts with the habits of real ones: they strip, split, test and repeat what messages say."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from tests.e2e.glm_folder import GLM_45_TEMPLATE
from tests.pure.text_folder import GLM_TEMPLATE, build_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM_46 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
</tool_call>
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking and not m.content.endswith('/nothink') else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set thought = m.reasoning_content or '' -%}
{%- set content = m.content -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '\\n<think>' + thought.strip() + '</think>' -}}
{{- '\\n' + content.strip() if content.strip() else '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>' + call.function.name }}
{% for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- elif m.role == 'system' -%}<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
NAMED = "{% for m in messages %}<|user|>{{ m.name }}{{ m.content.strip() }}{{ m.tool_call_id }}{% endfor %}"
LAYOUTS = {"chatml": CHATML, "glm45": GLM_45_TEMPLATE, "glm46": GLM_46, "glm47": GLM_TEMPLATE, "named": NAMED}
MORE_TOKENS = (
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<arg_key>", normalized=False),
    AddedToken("</arg_key>", normalized=False),
    AddedToken("<arg_value>", normalized=False),
    AddedToken("</arg_value>", normalized=False),
    AddedToken("<tool_response>", normalized=True),
    AddedToken("</tool_response>", normalized=True),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<word>", single_word=True, normalized=False),
    AddedToken("<<inner>", normalized=False),
    AddedToken("/nothink", normalized=False),
)


def write_layout(folder: Path, layout: str) -> Path:
    """Writes a tokenizer folder with this chat layout and many kinds of added tokens; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(MORE_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(LAYOUTS[layout])
    return folder
