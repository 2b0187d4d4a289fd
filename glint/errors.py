"""Errors that glint raises for its users.

Every message names the thing, the value and the way out.
"""


class GlintError(Exception):
    """Any failure that glint reports to its user."""


class CheckpointError(GlintError):
    """A model folder cannot be used.

    Holds every problem that was found, not only the first; the text has one problem per line.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems: tuple[str, ...] = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class EngineError(GlintError):
    """The native engine refused a call or failed."""


class InternalFailure(EngineError):
    """Something inside the library or the driver went wrong."""


class RankFailed(EngineError):
    """A rank failed and the others cannot go on without it: the engine takes no further step and is made anew."""


class TextError(GlintError):
    """A tokenizer, a chat template or a text cannot be used."""


class RequestError(GlintError):
    """A request that cannot be served; `field` names the field at fault, where it is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
