"""The sample model in the clothes of GLM: its tokens for thinking and calls, and its chat layouts."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pure.text_folder import GLM_TEMPLATE

RENAMED = {
    "<repo_name>": "[gMASK]",
    "<reponame>": "<sop>",
    "<file_sep>": "<|system|>",
    "<filename>": "<|user|>",
    "<gh_stars>": "<|assistant|>",
    "<issue_start>": "<|observation|>",
    "<issue_comment>": "<think>",
    "<issue_closed>": "</think>",
    "<jupyter_start>": "<tool_call>",
    "<jupyter_text>": "</tool_call>",
    "<jupyter_code>": "<arg_key>",
    "<jupyter_output>": "</arg_key>",
    "<jupyter_script>": "<arg_value>",
    "<empty_output>": "</arg_value>",
}
ENDS = ("<|user|>", "<|observation|>")

GLM_45_TEMPLATE = """[gMASK]<sop>
{%- for m in messages -%}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
<think>{{ m.reasoning_content or '' }}</think>
{%- if m.content.strip() -%}{{- '\\n' + m.content.strip() -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>' + call.function.name }}
{% for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor -%}
</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
{{- '\\n<tool_response>' }}
{{ m.content }}
</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' -}}
{%- endif -%}
"""
TEMPLATES = {"glm47": GLM_TEMPLATE, "glm45": GLM_45_TEMPLATE}


def write_glm_folder(sample_model: Path, folder: Path, layout: str) -> Path:
    """Write a folder with the sample model's weights and GLM's tokens and chat layout, "glm45" or "glm47"."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(sample_model / name)
    tokenizer = json.loads((sample_model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        name = RENAMED.get(token["content"], token["content"])
        token["content"], token["special"] = name, name.startswith("<|") or name in ("[gMASK]", "<sop>")
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {RENAMED.get(token, token): index for token, index in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((sample_model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATES[layout])
    generation = json.loads((sample_model / "generation_config.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    generation["eos_token_id"] += [ids[token] for token in ENDS]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
