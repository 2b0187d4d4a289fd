"""Token counts as the interfaces write them."""

from typing import Any

from glint.server.generation.generation import Usage


def openai_usage(usage: Usage) -> dict[str, Any]:
    """The usage of a chat or text completion."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
