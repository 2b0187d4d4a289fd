"""Finds comments, and code that is one in disguise: by tokens in Python, C and scripts, by lines in the rest."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.house_rules.sources import Finding, Kind, line_at, parsed

C_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
    |(?P<string>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |\.?\d(?:[eEpP][+-]|'\w|[\w.])*
    |[A-Za-z_]\w*
    |\s+|.
    """,
    re.DOTALL | re.VERBOSE,
)
SCRIPT_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)
    |(?<=[(,=:!&|?\[{;])[ ]?/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/
    |[A-Za-z_]\w*
    |\s+|.
    """,
    re.DOTALL | re.VERBOSE,
)
COMMENT_IN_MARKUP = re.compile("<!-" + "-")
DEAD_CODE_IN_C = re.compile(r"^[ \t]*\#[ \t]*if[ \t]+(?:0|false)\b|\bif(?:\s+constexpr)?\s*\(\s*(?:0|false)\s*\)", re.M)
COMMENT_SIGN = re.compile(r"(?:^|\s)\#|^\s*(?:/\*|;(?!;))", re.M)
ELLIPSIS = re.compile(r"\.{3}|\N{HORIZONTAL ELLIPSIS}")


def shown(text: str) -> str:
    """The first line of a piece of source, cut to a readable length."""
    return text.strip().split("\n", 1)[0][:60]


def python_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a Python text."""
    return tokenize.generate_tokens(io.StringIO(text).readline)


def comments_in_python(text: str) -> Iterator[Finding]:
    """The comments of a Python file; a shebang on line 1 is allowed."""
    for token in python_tokens(text) if "#" in text else ():
        if token.type == tokenize.COMMENT and not (token.start[0] == 1 and token.string.startswith("#!")):
            yield Finding(token.start[0], f"comment: {shown(token.string)}")


def disguises_in_python(text: str) -> Iterator[Finding]:
    """Bare strings that are no docstrings, and the ellipsis outside brackets."""
    tree = parsed(text)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, owners) and node.body}
    in_brackets = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.JoinedStr | ast.Constant):
            is_text = isinstance(node.value, ast.JoinedStr) or isinstance(node.value.value, str | bytes)
            if is_text and id(node) not in docstrings:
                yield Finding(node.lineno, "bare string that is not a docstring")
        if isinstance(node, ast.Constant) and node.value is Ellipsis and id(node) not in in_brackets:
            yield Finding(node.lineno, "ellipsis outside square brackets")


def comments_in_c(text: str) -> Iterator[Finding]:
    """The comments of a C or C++ file, and conditions that are false by construction."""
    for match in C_TOKEN.finditer(text):
        if match["comment"]:
            yield Finding(line_at(text, match.start()), f"comment: {shown(match[0])}")
    code = C_TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]) if match["string"] else match[0], text)
    for match in DEAD_CODE_IN_C.finditer(code):
        yield Finding(line_at(code, match.end()), f"dead code: {shown(match[0])}")


def comments_in_script(text: str) -> Iterator[Finding]:
    """The comments of a JavaScript or CSS file."""
    for match in SCRIPT_TOKEN.finditer(text):
        if match["comment"]:
            yield Finding(line_at(text, match.start()), f"comment: {shown(match[0])}")


def comments_in_markup(text: str) -> Iterator[Finding]:
    """The comments of an HTML file."""
    for match in COMMENT_IN_MARKUP.finditer(text):
        yield Finding(line_at(text, match.start()), "comment")


def comments_in_lines(text: str) -> Iterator[Finding]:
    """Comment signs at the start of a line or after white space; a shebang on line 1 is allowed."""
    for match in COMMENT_SIGN.finditer(text):
        if match.start() > 0 or not text.startswith("#!"):
            yield Finding(line_at(text, match.end() - 1), "comment")


def find_comments(text: str, kind: Kind) -> list[Finding]:
    """Every comment of a source file, and every piece of code that is one in disguise."""
    if kind is Kind.PYTHON:
        return [*comments_in_python(text), *disguises_in_python(text)]
    finders = {Kind.C: comments_in_c, Kind.SCRIPT: comments_in_script, Kind.MARKUP: comments_in_markup}
    return list(finders.get(kind, comments_in_lines)(text))


def strings_of(text: str, kind: Kind) -> Iterator[tuple[int, str]]:
    """What a Python, C or script file has between quotes, with its lines; of other kinds the whole text."""
    if kind is Kind.PYTHON:
        tokens = python_tokens(text)
        yield from ((token.start[0], token.string) for token in tokens if token.type != tokenize.OP)
    elif kind in (Kind.C, Kind.SCRIPT):
        token = C_TOKEN if kind is Kind.C else SCRIPT_TOKEN
        yield from ((line_at(text, match.start()), match[0]) for match in token.finditer(text) if match["string"])
    else:
        yield 1, text


def find_ellipses(text: str, kind: Kind) -> list[Finding]:
    """Every ellipsis written in a string; as syntax it belongs to the language."""
    if not ELLIPSIS.search(text):
        return []
    return [
        Finding(first_line + line_at(literal, match.start()) - 1, "ellipsis in a string")
        for first_line, literal in strings_of(text, kind)
        for match in ELLIPSIS.finditer(literal)
    ]
