"""Importing glint is cheap: its names load what they need when they are first used."""

import subprocess
import sys
from pathlib import Path

import glint

ROOT = Path(__file__).parents[2]

HEAVY = ("numpy", "transformers", "torch", "rich", "jinja2")


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(ended.stdout.split())


def test_importing_glint_loads_nothing_heavy() -> None:
    assert not modules_after("import glint").intersection(HEAVY)


def test_sampling_params_load_nothing_heavy() -> None:
    assert not modules_after("from glint import SamplingParams").intersection(HEAVY)


def test_the_llm_loads_no_tokenizer_library_before_a_model_does() -> None:
    assert not modules_after("from glint import LLM").intersection(("transformers", "torch", "rich"))


def test_every_public_name_is_there() -> None:
    assert all(getattr(glint, name) is not None for name in glint.__all__)
    assert set(glint.__all__) <= set(dir(glint))
