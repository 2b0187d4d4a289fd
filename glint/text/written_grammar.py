"""Grammars that clients write: Lark and GBNF, checked and brought to Lark."""

import re
from typing import Final

from glint.errors import TextError
from glint.text.constraint import GrammarLimits
from glint.text.schema_check import check_text

RULE: Final = re.compile(r":[ \t:=]*")
GBNF_RULE: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LIBRARY_SETTINGS: Final = "%llguidance {}\n"
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/')
_FOREIGN: Final = re.compile(r"%(?!ignore\b|import\b)\w*|<[^>\n]*>?|@\w*|[&~]")


def check_written(source: str, limits: GrammarLimits) -> str:
    """The grammar, if it is of allowed size and valid Unicode."""
    size = len(check_text(source, "the grammar").encode())
    if size > limits.max_written_bytes:
        raise TextError(f"the grammar has {size} bytes, {limits.max_written_bytes} are the most")
    rules = len(RULE.findall(_QUOTED.sub(" ", source)))
    if rules > limits.max_written_rules:
        raise TextError(f"the grammar has {rules} rules, {limits.max_written_rules} are the most")
    if not source.strip():
        raise TextError("the grammar is empty; write it in Lark or in GBNF")
    return source


def written_to_lark(source: str) -> str:
    """The grammar in Lark; raises TextError where it is neither Lark nor GBNF, or uses what is not supported."""
    if GBNF_RULE.search(source):
        source = _gbnf_to_lark(source)
    foreign = _FOREIGN.search(_QUOTED.sub(" ", source))
    if foreign:
        raise TextError(f"the grammar uses {foreign[0][:40]!r}; use rules, terminals, %ignore and %import alone")
    return source


def _gbnf_to_lark(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(source)).removeprefix(LIBRARY_SETTINGS)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise TextError(f"the grammar is no GBNF that can be read: {reason[:200]}") from error
