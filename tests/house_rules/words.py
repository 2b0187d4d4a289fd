"""The words that source files do without, found as whole words and as parts of snake_case and CamelCase names."""

from __future__ import annotations

import re

from tests.house_rules.sources import Finding, line_at

FORBIDDEN_WORDS = frozenset(
    head + tail
    for head, tail in [
        ("to", "do"),
        ("fix", "me"),
        ("st", "ub"),
        ("place", "holder"),
        ("dum", "my"),
        ("mo", "ck"),
        ("simu", "lated"),
        ("exam", "ple"),
        ("de", "mo"),
    ]
)
ANY_WORD = re.compile("|".join(FORBIDDEN_WORDS), re.IGNORECASE)
LETTERS = re.compile(r"[A-Za-z]+")
CAMEL_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

FOREIGN_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.}/])/(?:" + "|".join(["work", "opt", "home", "root"]) + r")/\w"),
    "the host of a package registry": re.compile("|".join(["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\."])),
}


def find_words(text: str) -> list[Finding]:
    """Every forbidden word, in whatever case and inside whatever name."""
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        for run in LETTERS.findall(line) if ANY_WORD.search(line) else ():
            parts = {run.lower(), *(part.lower() for part in CAMEL_PART.findall(run))}
            findings += [Finding(number, f"word '{word}'") for word in sorted(parts & FORBIDDEN_WORDS)]
    return findings


def find_foreign_text(text: str) -> list[Finding]:
    """Every path or host that exists only where the text was written."""
    return [
        Finding(line_at(text, match.start()), f"{what}: {match[0]}")
        for what, pattern in FOREIGN_TEXT.items()
        for match in pattern.finditer(text)
    ]
