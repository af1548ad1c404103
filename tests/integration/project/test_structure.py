"""Rules for the project's files: budget of lines, sizes and names, and texts in plain English."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from programs import ROOT
from project_files import pyproject

PACKAGES = ("opgrip", "capture", "replay", "traces", "tools", "zoo")
BUDGET = pyproject()["tool"]["opgrip"]["budget"]
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_FILES, MOST_LOOSE_FILES, MOST_OF_A_NAME = 800, 80, 14, 4, 3
# a further Python frame would make captures slower
LONG_FUNCTION = "capture/recording/thread_mode.py __torch_dispatch__"
SLACK = 0.03  # share by which a limit may be above the lines that are there
SMALL_SLACK = 10  # the same in lines, for small folders
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """A file of the product; its documentation is docstrings and texts behind statements of modules and classes."""

    path: Path
    lines: int
    documentation: int
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef]
    public_classes: list[str]

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))


@cache
def product_files() -> tuple[Source, ...]:
    return tuple(read_source(path) for package in PACKAGES for path in python_files(package))


def read_source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    # nothing that an expression contains is needed, and expressions are most of a tree
    statements = list(walk_statements(tree))
    expressions = [node for node in statements if isinstance(node, ast.Expr)]
    texts = [node for node in expressions if isinstance(getattr(node.value, "value", None), str)]
    documentation = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in texts)
    functions = [node for node in statements if isinstance(node, FUNCTIONS)]
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return Source(path, len(text.splitlines()), documentation, functions, classes)


def walk_statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.expr):
            yield from walk_statements(child)


def python_files(folder: str) -> Iterator[Path]:
    paths = (ROOT / folder).rglob("*.py")
    return (path for path in paths if not any(part.is_symlink() for part in path.parents))


def lines_by_folder() -> Counter[str]:
    """Return the lines of each second-level folder; files directly in a package count under the package."""
    lines: Counter[str] = Counter()
    for package in (*PACKAGES, "samples", "tests"):
        for path in python_files(package):
            folders = path.relative_to(ROOT).parts[:-1]
            name = "/".join(folders[:2]) if package in PACKAGES else package
            lines[name] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def budget_errors(limits: dict[str, int], lines: dict[str, int]) -> list[str]:
    """Return what contradicts the budget: folders above their limit, limits that must be lowered, missing limits."""
    errors = [f"{folder}: no limit for {lines[folder]} lines" for folder in lines.keys() - limits.keys()]
    for folder, limit in limits.items():
        count = lines.get(folder, 0)
        if count > limit:
            errors.append(f"{folder}: {count} lines, the limit is {limit}: take the lines from something else")
        elif limit > count + max(count * SLACK, SMALL_SLACK):
            errors.append(f"{folder}: {count} lines, the limit is {limit}: lower it")
    return sorted(errors)


def test_folders_keep_their_budget_of_lines() -> None:
    assert budget_errors(BUDGET["lines"], lines_by_folder()) == []


@pytest.mark.slow
def test_documentation_is_a_small_part_of_the_product() -> None:
    documentation = sum(source.documentation for source in product_files())
    assert 100 * documentation / sum(source.lines for source in product_files()) <= BUDGET["documentation_percent"]


@pytest.mark.slow
def test_few_private_functions_have_a_docstring() -> None:
    functions = [node for source in product_files() for node in source.functions]
    private = [node for node in functions if node.name.startswith("_") and not node.name.startswith("__")]
    documented = [node for node in private if ast.get_docstring(node) is not None]
    assert 100 * len(documented) / len(private) <= BUDGET["documented_private_functions_percent"]


@pytest.mark.slow
def test_files_and_folders_are_not_too_large() -> None:
    files = Counter(source.path.parent for source in product_files())
    assert len(product_files()) > 250
    assert [f"{source.name}: {source.lines}" for source in product_files() if source.lines > MOST_LINES] == []
    assert [f"{folder}: {count}" for folder, count in files.items() if count > MOST_FILES] == []


@pytest.mark.slow
def test_no_function_has_more_than_80_lines() -> None:
    long = {
        f"{source.name} {node.name}"
        for source in product_files()
        for node in source.functions
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_FUNCTION
    }
    assert long == {LONG_FUNCTION}


@pytest.mark.slow
def test_packages_have_few_loose_files_and_names_of_files_are_rarely_repeated() -> None:
    modules = [source.path for source in product_files() if not source.path.name.startswith("__")]
    loose = Counter(path.parent.name for path in modules if path.parent.parent == ROOT)
    names = Counter(path.name for path in modules)
    assert {name: count for name, count in loose.items() if count > MOST_LOOSE_FILES} == {}
    assert {name: count for name, count in names.items() if count > MOST_OF_A_NAME} == {}


@pytest.mark.slow
def test_no_two_public_classes_have_the_same_name() -> None:
    classes: dict[str, list[str]] = {}
    for source in product_files():
        for name in source.public_classes:
            classes.setdefault(name, []).append(source.name)
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}


READ_BY_PEOPLE = ("opgrip", "capture", "replay", "traces", "tools", "zoo", "samples", "benchmarks")
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
    for package in READ_BY_PEOPLE:
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
