"""The C page: every declaration of the public headers, with its comment as text.

The headers are read through ``build.py``, which hands the same marked regions to cffi: what the Python module calls is
what the page shows. A section for each header, in the order of ``pb_kvcache.h``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from comment_text import to_rst

import build

#: The kinds of a declaration, by what it starts with. The first that matches counts.
KINDS = (
    ("macro", re.compile(r"#define (?P<name>\w+)(?:\s+(?P<value>.*))?")),
    ("enum", re.compile(r"typedef enum (?P<name>\w+) \{(?P<body>.*)\} \w+", re.DOTALL)),
    ("struct", re.compile(r"typedef struct (?P<name>\w+)(?: \{(?P<body>.*)\})? \w+", re.DOTALL)),
    ("var", re.compile(r"extern (?P<shown>[^(]*\b(?P<name>\w+))")),
    ("function", re.compile(r"(?P<shown>[^(]*\b(?P<name>\w+)\(.*)", re.DOTALL)),
)


@dataclass
class Item:
    """A declaration or a comment that stands alone, and what the comments say of it."""

    code: str
    comments: list[str] = field(default_factory=list)


def items(text: str, end: str = ";") -> Iterator[Item]:
    """Yield a text's declarations, which `end` ends, with the comments before them or behind them on their line."""
    pending: list[str] = []
    last: Item | None = None  # the comment that follows on its line is its own
    at = ended = 0
    while at < len(text):
        if text.startswith("/*", at):
            stop = text.index("*/", at) + 2
            if last is not None and "\n" not in text[ended:at]:
                last.comments.append(text[at:stop])
            else:
                pending.append(text[at:stop])
            at = stop
        elif text[at].isspace() or text[at] == end:
            at += 1
        else:
            if last is not None:
                yield last
            stop = _end_of(text, at, end)
            last = Item(text[at:stop].strip(), pending)
            pending, at, ended = [], stop, stop
    if last is not None:
        yield last
    assert not pending, f"a comment that belongs to no declaration: {pending}"


def _end_of(text: str, start: int, end: str) -> int:
    """Return where a declaration ends: at `end` outside of braces, parentheses and comments, or at its line's end."""
    one_line = text.startswith(("#define", "PB_KVCACHE_POLICY"), start)
    depth, at = 0, start
    while at < len(text):
        if text.startswith("/*", at):
            if depth == 0:
                return at
            at = text.index("*/", at) + 2
            continue
        if depth == 0 and (text[at] == end or (one_line and text[at] == "\n")):
            return at
        depth += (text[at] in "{(") - (text[at] in "})")
        at += 1
    return at


def declared(text: str) -> Iterator[tuple[str, re.Match[str], list[str]]]:
    """Yield kind, parts and comments of every declaration of a header's region."""
    for item in items(text):
        codes = [item.code]
        if policy := re.fullmatch(r"PB_KVCACHE_POLICY\((\w+)\)", item.code):
            codes = [code.strip() for code in build.policy_declarations(policy[1]).split(";") if code.strip()]
        for number, code in enumerate(codes):
            code = code.replace("PB_KVCACHE_API ", "")
            kind, found = next((kind, found) for kind, rule in KINDS if (found := rule.fullmatch(code)))
            # A policy's comment says what its check refuses.
            yield kind, found, item.comments if number == len(codes) - 1 else []


def names() -> dict[str, str]:
    """Return every header and declared name with the role that refers to it."""
    known = {}
    for header, region in build.regions():
        known[header.rpartition("/")[2]] = "ref"
        for kind, found, _ in declared(region):
            known[found["name"]] = "c:func" if kind == "function" else f"c:{kind}"
            if kind == "enum":
                known |= {item.code.partition(" ")[0]: "c:enumerator" for item in items(found["body"], ",")}
    return known


def page() -> Iterator[str]:
    """Yield the lines of the page in reStructuredText."""
    known = names()
    # There the library's own name is not the type.
    yield from to_rst(
        _first_comment("pb_kvcache.h"), {name: role for name, role in known.items() if name != "pb_kvcache"}
    )
    for header, region in build.regions():
        short = header.rpartition("/")[2]
        yield from ("", f".. _c-{short.replace('.', '-')}:", "", short, "-" * len(short), "")
        yield from to_rst(_first_comment(header), known)
        for kind, found, comments in declared(region):
            yield from _directive(kind, found, comments, known)


def _first_comment(header: str) -> str:
    text = (build.ROOT / build.INCLUDE / header).read_text(encoding="utf-8")
    return text[: text.index("*/") + 2]


def _directive(kind: str, found: re.Match[str], comments: list[str], known: dict[str, str]) -> Iterator[str]:
    parts = found.groupdict()
    yield from ("", f".. c:{kind}:: {' '.join((parts.get('shown') or found['name']).split())}", "")
    lines = [line for comment in comments for line in [*to_rst(comment, known), ""]]
    if parts.get("value"):
        lines += [f"``{parts['value']}``", ""]
    if parts.get("body"):
        member = "enumerator" if kind == "enum" else "member"
        for item in items(parts["body"], "," if kind == "enum" else ";"):
            lines += ["", f".. c:{member}:: {' '.join(item.code.split())}", ""]
            lines += ["   " + line for comment in item.comments for line in [*to_rst(comment, known), ""]]
    yield from ("   " + line if line.strip() else "" for line in lines)
