"""The size of files and functions, and names that occur once, so that the code can be found and read."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from programs import ROOT

PACKAGES = ("opgrip", "capture", "replay", "traces", "tools", "zoo")
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_LOOSE_FILES, MOST_OF_A_NAME = 400, 60, 4, 3
# each call of a program passes through it, and a further Python frame would make captures slower
LONG_FUNCTION = "capture/hooks/dispatch.py __torch_dispatch__"


def product_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (
            path for path in (ROOT / package).rglob("*.py") if not any(part.is_symlink() for part in path.parents)
        )


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in product_files()}
    assert len(lengths) > 300
    assert [f"{path}: {count}" for path, count in lengths.items() if count > MOST_LINES] == []


def test_no_function_has_more_than_60_lines() -> None:
    long = set()
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_FUNCTION:
                long.add(f"{path.relative_to(ROOT)} {node.name}")
    assert long == {LONG_FUNCTION}


def test_packages_have_few_loose_files_and_names_of_files_are_rarely_repeated() -> None:
    modules = [path for path in product_files() if not path.name.startswith("__")]
    loose = Counter(path.parent.name for path in modules if path.parent.parent == ROOT)
    names = Counter(path.name for path in modules)
    assert {name: count for name, count in loose.items() if count > MOST_LOOSE_FILES} == {}
    assert {name: count for name, count in names.items() if count > MOST_OF_A_NAME} == {}


def test_no_two_public_classes_have_the_same_name() -> None:
    classes: dict[str, list[str]] = {}
    for path in product_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}
