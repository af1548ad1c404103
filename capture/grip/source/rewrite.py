"""Source text with small changes in it: what must change does, by its place in the syntax tree, and nothing else."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping

from opgrip.capture.grip.source.files import SourceFile, first_line
from opgrip.capture.grip.source.items import Item, Link, Piece
from opgrip.capture.grip.source.names import Annotation
from opgrip.capture.grip.source.scopes import FunctionNode

_F_STRINGS_HAVE_PLACES = sys.version_info >= (3, 12)


class Edits:
    """Changes of one file's text.

    Parameters
    ----------
    file : whose text stays as it is
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._changes: dict[tuple[int, int], str] = {}

    def replace(self, begin: int, end: int, text: str) -> None:
        """Put text in the place of what lies between two offsets."""
        self._changes[begin, end] = text

    def replace_node(self, node: ast.AST, text: str) -> None:
        """Put text in the place of a node."""
        self.replace(*self.file.span(node), text)

    def remove_lines(self, first: int, last: int) -> None:
        """Leave lines out."""
        self.replace(self.file.line_start(first), self.file.line_start(last + 1), "")

    def indent(self, first: int, last: int, before: int, after: int) -> None:
        """Move lines from one indentation to another; lines that begin inside a string stay."""
        for line in range(first, last + 1):
            text = self.file.lines[line - 1]
            if line in self.file.string_lines or not text.strip():
                continue
            blank = len(text) - len(text.lstrip(" \t"))
            begin = self.file.line_start(line)
            self.replace(begin, begin + min(blank, before), " " * after)

    def apply(self, begin: int, end: int) -> str:
        """The text between two offsets, with the changes that lie in it."""
        pieces, at = [], begin
        for (start, stop), text in sorted(self._changes.items(), key=lambda change: (change[0][0], -change[0][1])):
            # a change within one that was made already is gone with it
            if start < at or stop > end:
                continue
            pieces += [self.file.text[at:start], text]
            at = stop
        return "".join([*pieces, self.file.text[at:end]])


def edits_of(piece: Piece, names: Mapping[Item, str], keeps: Callable[[Annotation], bool]) -> Edits:
    """The changes that a piece of source needs in a sample, its indentation and own name aside.

    Parameters
    ----------
    names : of the items in the sample
    keeps : whether a type annotation stays
    """
    edits = Edits(piece.file)
    _rename(edits, piece.links, names)
    for decorator in piece.dropped:
        edits.remove_lines(decorator.lineno, decorator.end_lineno or decorator.lineno)
    for annotation, _ in piece.hints:
        if not keeps(annotation):
            _remove_annotation(edits, annotation)
    called = {link.use.name: names[link.item] for link in piece.links}
    for statement, outer in piece.names.outer:
        inner = [name for name in statement.names if name not in outer]
        outside = [called.get(name, name) for name in statement.names if name in outer]
        parts = [f"nonlocal {', '.join(inner)}"] * bool(inner) + [f"global {', '.join(outside)}"]
        edits.replace_node(statement, "; ".join(parts))
    for imported, bound in piece.local_imports:
        renamed = [f"{name} = {names[item]}" for name, item in bound if names[item] != name]
        _replace_statement(edits, imported, "; ".join(renamed))
    return edits


def _rename(edits: Edits, links: Iterable[Link], names: Mapping[Item, str]) -> None:
    in_strings: dict[ast.AST, list[tuple[ast.expr, str]]] = {}
    for link in links:
        if not link.use.nodes:
            continue
        name = names[link.item]
        node = link.use.nodes[link.attribute_count]
        if not link.attribute_count and name == link.use.name:
            continue
        string = None if _F_STRINGS_HAVE_PLACES else _string_around(edits.file, node)
        if string is None:
            edits.replace_node(node, name)
        else:
            in_strings.setdefault(string, []).append((node, name))
    for string, renamed in in_strings.items():
        edits.replace_node(string, _unparse_with_names(string, renamed))


def _string_around(file: SourceFile, node: ast.AST) -> ast.AST | None:
    """The outermost f-string around a node."""
    outermost, around = None, file.parents.get(node)
    while around is not None and not isinstance(around, ast.stmt):
        outermost = around if isinstance(around, ast.JoinedStr) else outermost
        around = file.parents.get(around)
    return outermost


def _unparse_with_names(string: ast.AST, renamed: Iterable[tuple[ast.expr, str]]) -> str:
    """An f-string written anew: before Python 3.12, what is inside one has no place of its own."""
    changed = copy.deepcopy(string)
    copies = {id(old): new for old, new in zip(ast.walk(string), ast.walk(changed), strict=True)}
    for node, name in renamed:
        new = copies[id(node)]
        new.__class__ = ast.Name
        new.__dict__.clear()
        new.__dict__.update(id=name, ctx=ast.Load())
    return ast.unparse(changed)


def _replace_statement(edits: Edits, statement: ast.stmt, text: str) -> None:
    """Put another statement in the place of one, or none where that leaves others beside it."""
    begin, end = edits.file.span(statement)
    around = edits.file.parents[statement]
    bodies = [getattr(around, name, []) for name in ("body", "orelse", "finalbody")]
    is_alone = any(body == [statement] for body in bodies)
    line = "".join(edits.file.lines[statement.lineno - 1 : statement.end_lineno])
    if text or is_alone or line.strip() != edits.file.text[begin:end]:
        edits.replace(begin, end, text or "pass")
    else:
        edits.remove_lines(statement.lineno, statement.end_lineno or statement.lineno)


def _remove_annotation(edits: Edits, annotation: Annotation) -> None:
    holder, text = annotation.holder, edits.file.text
    if isinstance(holder, ast.arg):
        begin, end = edits.file.span(holder)
        spaces = re.compile(r"\s*=\s*").match(text, end)
        # no spaces around the = of a parameter without annotation
        edits.replace(begin, spaces.end() if spaces else end, holder.arg + ("=" if spaces else ""))
    elif isinstance(holder, ast.AnnAssign):
        _remove_from_variable(edits, holder, annotation)
    else:
        begin, end = edits.file.span(annotation.expression)
        arrow = text.rindex("->", 0, begin)
        # brackets around the annotation are no part of its node
        for _ in range(text.count("(", arrow, begin)):
            end = text.index(")", end) + 1
        # a backslash may join the line before it
        edits.replace(len(text[:arrow].rstrip(" \t\r\n\\")), end, "")


def _remove_from_variable(edits: Edits, holder: ast.AnnAssign, annotation: Annotation) -> None:
    in_class = isinstance(edits.file.parents.get(holder), ast.ClassDef)
    if in_class:
        # fields of dataclasses are told by their annotations
        outer = [use.name for use in annotation.uses if use.name in ("ClassVar", "InitVar")]
        edits.replace_node(annotation.expression, f"{outer[0]}[Any]" if outer else "Any")
    elif holder.value is None:
        edits.replace_node(holder, "pass")
    else:
        end = edits.file.span(holder.target)[1]
        equals = edits.file.text.index("=", edits.file.span(annotation.expression)[1])
        edits.replace(end, equals, " ")


def rename_definition(edits: Edits, node: FunctionNode | ast.ClassDef, name: str) -> None:
    """Give a function or class another name where it is defined."""
    begin = edits.file.span(node)[0]
    name_match = re.compile(r"(?:async\s+)?(?:def|class)\s+(\w+)").match(edits.file.text, begin)
    assert name_match is not None
    edits.replace(name_match.start(1), name_match.end(1), name)


def with_comments(file: SourceFile, node: ast.stmt) -> int:
    """The first line of a statement, the comments right above it included."""
    first = first_line(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else node.lineno
    line, column = first, node.col_offset
    while line > 1 and re.match(rf"\s{{{column}}}#", file.lines[line - 2]):
        line -= 1
    # a file begins with its licence
    return first if line == 1 or "Copyright" in "".join(file.lines[line - 1 : first]) else line


def statement_text(file: SourceFile, node: ast.stmt, edits: Edits, column: int) -> str:
    """A statement with its comments, moved to a column, without a newline at its end."""
    first, last = with_comments(file, node), node.end_lineno or node.lineno
    edits.indent(first, last, node.col_offset, column)
    end = file.span(node)[1]
    rest = file.text[end : file.line_start(last + 1)]
    if re.fullmatch(r"\s*#.*\n?", rest):
        end += len(rest.rstrip("\n"))
    return edits.apply(file.line_start(first), end)
