"""glint: an inference engine for the GLM-4.x MoE models.

`LLM` and `SamplingParams` are loaded when they are first used, so that `import glint` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glint.engine.share import Share
    from glint.errors import CheckpointError, EngineError, GlintError, RankFailed, RequestError, TextError
    from glint.llm import LLM, Choice, Completion
    from glint.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "Choice",
    "Completion",
    "EngineError",
    "GlintError",
    "RankFailed",
    "RequestError",
    "SamplingParams",
    "Share",
    "TextError",
]

_MODULES = {
    "LLM": "glint.llm",
    "Choice": "glint.llm",
    "Completion": "glint.llm",
    "SamplingParams": "glint.sampling",
    "Share": "glint.engine.share",
    "CheckpointError": "glint.errors",
    "EngineError": "glint.errors",
    "GlintError": "glint.errors",
    "RankFailed": "glint.errors",
    "RequestError": "glint.errors",
    "TextError": "glint.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'glint' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
