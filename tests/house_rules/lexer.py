"""Small lexers that find comments, and code that is one in disguise, without being fooled by strings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.house_rules.sources import Finding, Kind

C_TOKEN = re.compile(
    r"""
    (?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))
    |(?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<char>'(?:\\.|[^'\\\n])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)
SHELL_TOKEN = re.compile(
    r"""
    (?P<heredoc><<-?\s*(?P<quote>['"]?)(?P<mark>\w+)(?P=quote)[^\n]*\n(?P<body>.*?)^\s*(?P=mark)$)
    |(?P<escape>\\.)
    |(?P<ansi>\$'(?:\\.|[^'\\])*')
    |(?P<single>'[^']*')
    |(?P<string>"(?:\\.|[^"\\])*")
    |(?P<comment>(?:^|(?<=[\s;&|()]))\#[^\n]*)
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)
CMAKE_TOKEN = re.compile(
    r"""
    (?P<comment>\#(?:\[(?P<level>=*)\[.*?\](?P=level)\]|[^\n]*))
    |(?P<bracket>\[(?P<depth>=*)\[.*?\](?P=depth)\])
    |(?P<string>"(?:\\.|[^"\\])*")
    |(?P<escape>\\.)
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)
TOML_TOKEN = re.compile(
    r"""
    (?P<long>\"{3}(?:\\.|[^\\])*?\"{3}|'{3}.*?'{3})
    |(?P<string>"(?:\\.|[^"\\\n])*"|'[^'\n]*')
    |(?P<comment>\#[^\n]*)
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)
YAML_TOKEN = re.compile(
    r"""
    (?P<string>(?<!\w)(?:"(?:\\.|[^"\\])*"|'[^']*'))
    |(?P<comment>(?:^|(?<=\s))\#[^\n]*)
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE | re.MULTILINE,
)
NIX_TOKEN = re.compile(
    r"""
    (?P<long>\'\'.*?\'\')
    |(?P<string>"(?:\\.|[^"\\])*")
    |(?P<comment>\#[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<other>.)
    """,
    re.DOTALL | re.VERBOSE,
)
IGNORE_TOKEN = re.compile(r"(?P<comment>^\#[^\n]*)|(?P<other>.)", re.DOTALL | re.VERBOSE | re.MULTILINE)
TOKENS = {
    Kind.C: C_TOKEN,
    Kind.SHELL: SHELL_TOKEN,
    Kind.CMAKE: CMAKE_TOKEN,
    Kind.TOML: TOML_TOKEN,
    Kind.YAML: YAML_TOKEN,
    Kind.NIX: NIX_TOKEN,
    Kind.IGNORE: IGNORE_TOKEN,
}
DEAD_CODE_IN_C = re.compile(r"^[ \t]*\#[ \t]*if[ \t]+(?:0|false)\b|\bif(?:\s+constexpr)?\s*\(\s*(?:0|false)\s*\)", re.M)
HASH_LINE = re.compile(r"^\s*\#", re.M)
ELLIPSES = ("." * 3, "\N{HORIZONTAL ELLIPSIS}")


def line_at(text: str, offset: int) -> int:
    """The number, from 1, of the line that holds an offset."""
    return text.count("\n", 0, offset) + 1


def shown(text: str) -> str:
    """The first line of a piece of source, cut to a readable length."""
    return text.strip().split("\n", 1)[0][:60]


def blank(text: str) -> str:
    """The text with every character but line ends replaced by a space, so that offsets stay."""
    return re.sub(r"[^\n]", " ", text)


def comments_by_pattern(text: str, kind: Kind) -> Iterator[Finding]:
    """The comments of a file that is not Python; a shebang on line 1 is allowed."""
    for match in TOKENS[kind].finditer(text):
        if match["comment"]:
            if match.start() > 0 or not match[0].startswith("#!"):
                yield Finding(line_at(text, match.start()), f"comment: {shown(match[0])}")
        elif match.groupdict().get("heredoc"):
            for inner in HASH_LINE.finditer(match["body"]):
                yield Finding(line_at(text, match.start("body") + inner.end()), "comment in a here-document")


def dead_code_in_c(text: str) -> Iterator[Finding]:
    """Conditions that are false by construction, which hide text from the compiler."""
    code = C_TOKEN.sub(lambda match: blank(match[0]) if match["string"] or match["raw"] else match[0], text)
    for match in DEAD_CODE_IN_C.finditer(code):
        yield Finding(line_at(code, match.end()), f"dead code: {shown(match[0])}")


def comments_in_python(text: str) -> Iterator[Finding]:
    """The comments of a Python file, by its own tokenizer."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not (token.start[0] == 1 and token.string.startswith("#!")):
            yield Finding(token.start[0], f"comment: {shown(token.string)}")


def docstring_ids(tree: ast.Module) -> set[int]:
    """The identities of the expression statements that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {id(node.body[0]) for node in ast.walk(tree) if isinstance(node, owners) and node.body}


def disguises_in_python(text: str) -> Iterator[Finding]:
    """Bare strings that are no docstrings, conditions false by construction, the ellipsis outside brackets."""
    tree = ast.parse(text)
    docstrings = docstring_ids(tree)
    in_brackets = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.JoinedStr | ast.Constant):
            is_text = isinstance(node.value, ast.JoinedStr) or isinstance(node.value.value, str | bytes)
            if is_text and id(node) not in docstrings:
                yield Finding(node.lineno, "bare string that is not a docstring")
        if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Constant) and not node.test.value:
            yield Finding(node.lineno, "dead code: a condition that is never true")
        if isinstance(node, ast.Constant) and node.value is Ellipsis and id(node) not in in_brackets:
            yield Finding(node.lineno, "ellipsis outside square brackets")


def find_comments(text: str, kind: Kind) -> list[Finding]:
    """Every comment of a source file, and every piece of code that is one in disguise."""
    if kind is Kind.PYTHON:
        return [*comments_in_python(text), *disguises_in_python(text)]
    found = list(comments_by_pattern(text, kind))
    return [*found, *dead_code_in_c(text)] if kind is Kind.C else found


def strings_of(text: str, kind: Kind) -> Iterator[tuple[int, str]]:
    """The string literals of a Python or C file with their lines; for other kinds the whole text."""
    if kind is Kind.PYTHON:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.OP, tokenize.NUMBER):
                yield token.start[0], token.string
    elif kind is Kind.C:
        for match in C_TOKEN.finditer(text):
            if match["string"] or match["raw"] or match["char"]:
                yield line_at(text, match.start()), match[0]
    else:
        yield 1, text


def find_ellipses(text: str, kind: Kind) -> list[Finding]:
    """Every ellipsis written in a string; as syntax it belongs to the language."""
    findings = []
    for first_line, literal in strings_of(text, kind):
        for mark in ELLIPSES:
            for match in re.finditer(re.escape(mark), literal):
                findings.append(Finding(first_line + literal.count("\n", 0, match.start()), "ellipsis in a string"))
    return findings
