"""Test that docstrings, messages, documents and test names are plain English, by wordings that readers stumble over."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from programs import ROOT

PACKAGES = ("opgrip", "capture", "replay", "traces", "tools", "zoo", "samples", "benchmarks")
PLAIN_WORDS = {
    r"\bbeside\b(?!=| :)": "next to, compared with, in addition to",
    r"\b(?:is|are) said\b": "is reported",
    r"\btells? (?:of|apart|whether|how|what)\b": "reports, shows, distinguishes",
    r"\banew\b": "again",
    r"\bwhole numbers?\b": "integers",
    r"\bfor want of\b": "for lack of",
    r"\bof (?:its|their|one's) own\b": "own, separate",
    r"\ball the same\b": "anyway",
    r"\bgoes on\b": "continues",
    r"\bheld against\b": "compared with",
    r"\b(?:stands|stood|stand) (?:for|in|there|beside)\b": "represents, is",
    r"\b(?:a|one) (?:line|row|file|process) (?:a|an|each) \w": "one X per Y",
    r"\bstrangers?\b": "third parties",
    r"\bas often as (?:it|there|they)\b": "the number of times",
    r"\bis not there\b": "does not exist, is not installed",
    r"\bwhere (?:it|there|nothing|none) (?:is|are|has)\b": "if",
    r"\bthe house\b": "the organization",
}
# all of these wordings, which a search finds much faster: each begins at a boundary of words
ANY = re.compile(rf"\b(?:{'|'.join(pattern[2:] for pattern in PLAIN_WORDS)})", re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# first words of docstrings that cannot be understood without the body
FRAGMENT = re.compile(r"(?:Of|As of|That of|Those|What|Where|Whether|Until|Its)\b")
LEAST_WORDS = 3  # words of a text that is a message and not a name or a key
# parts of test names that cannot be understood without the body: a name needs a subject, a verb and an outcome
RIDDLE = re.compile(
    r"^test_(?:it|of|what|whatever|where|which|who)_|_(?:is|are)_no_|_of_(?:its|their|ones)_own(?:_|$)|_(?:goes|gone)_on(?:_|$)"
    r"|_(?:anew|beside|said|strangers?|tells?|told|whatever)(?:_|$)|_(?:stands?|stood)_(?:for|in|there)(?:_|$)|_there_(?:is|are)(?:_|$)"
)


def texts_of_module(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and text of each docstring and message, and whether it is a docstring."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    documented = (node for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None)
    docstrings = {id(node.body[0].value) for node in documented}  # type: ignore[attr-defined]
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) in docstrings or node.value.count(" ") >= LEAST_WORDS - 1:
            yield node.lineno, node.value, id(node) in docstrings


def texts_of_document(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each line outside blocks of code, without quoted code."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "", line)


def texts() -> Iterator[tuple[str, int, str, bool]]:
    """Yield file, line and text of everything that users and developers read, and whether it is a docstring."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            # links in opgrip/ lead to the other packages
            if not any(parent.is_symlink() for parent in path.parents) and "build" not in path.parts:
                for line, text, is_docstring in texts_of_module(path):
                    yield str(path.relative_to(ROOT)), line, text, is_docstring
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        if path.name == "coverage.md":
            # it quotes errors of other programs
            continue
        for line, text in texts_of_document(path):
            yield str(path.relative_to(ROOT)), line, text, False


def names_of_tests() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and name of every test."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if definition := re.match(r"\s*(?:async )?def (test_\w+)\(", line):
                yield str(path.relative_to(ROOT)), number, definition[1]


def wordings(text: str) -> Iterator[tuple[str, str]]:
    """Yield each wording of a text that readers stumble over, and what to write instead."""
    for pattern, hint in PLAIN_WORDS.items() if ANY.search(text) else ():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            yield found[0], hint


def test_texts_contain_no_confusing_wordings_or_fragments() -> None:
    problems = []
    for file, line, text, is_docstring in texts():
        problems += [f"{file}:{line}: {found!r}: write {hint}" for found, hint in wordings(text)]
        if is_docstring and FRAGMENT.match(text.lstrip()):
            problems.append(f"{file}:{line}: a fragment: {text.lstrip().splitlines()[0]}")
    assert not problems, "\n".join(problems)


def test_names_of_tests_have_a_subject_and_no_confusing_wording() -> None:
    names = list(names_of_tests())
    assert len(names) > 1000
    problems = [f"{file}:{line}: {name}: {found[0]!r}" for file, line, name in names if (found := RIDDLE.search(name))]
    assert not problems, "\n".join(problems)
