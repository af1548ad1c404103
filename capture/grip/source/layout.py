"""The text of a sample's module."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from opgrip.capture.grip.source.classes import NO_BASES, is_taken
from opgrip.capture.grip.source.collect import Collector
from opgrip.capture.grip.source.files import docstring_of
from opgrip.capture.grip.source.imports import Import, render
from opgrip.capture.grip.source.items import (
    BuiltinItem,
    ClassItem,
    FunctionItem,
    ImportItem,
    Item,
    PartItem,
    Piece,
    ValueItem,
    unit,
)
from opgrip.capture.grip.source.names import Annotation
from opgrip.capture.grip.source.rewrite import Edits, edits_of, rename_definition, statement_text
from opgrip.capture.grip.source.values import express, express_class

_FUTURE = "from __future__ import annotations"


class Layout:
    """Writes the items of one sample.

    Parameters
    ----------
    root : the function or method that it is for
    items : what it has
    names : theirs
    annotations : type annotations that stay
    """

    def __init__(
        self,
        collector: Collector,
        root: Item,
        items: Iterable[Item],
        names: Mapping[Item, str],
        annotations: frozenset[Annotation],
    ) -> None:
        self._collector = collector
        self._owner = unit(root)
        self._items = list(items)
        self._has = frozenset(self._items)
        self._names = names
        self._annotations = annotations

    def module(self, docstring: str, ordered: Iterable[Item]) -> str:
        """The whole text.

        Parameters
        ----------
        ordered : the items that are defined at the top level, in their order
        """
        imports = {self._statement(item) for item in self._items if isinstance(item, ImportItem)}
        head = [f'"""{docstring}"""', _FUTURE, *([render(imports)] if imports else [])]
        definitions = [item for item in ordered if isinstance(item, ValueItem | FunctionItem | ClassItem)]
        constants = [item for item in definitions if self._is_constant(item)]
        text = "\n\n".join(head) + "\n"
        if constants:
            text += "\n" + "\n".join(self.text(item) for item in constants) + "\n"
        for item in definitions:
            if item not in constants:
                text += "\n\n" + self.text(item) + "\n"
        return text

    def text(self, item: Item) -> str:
        """The definition of one item."""
        if isinstance(item, ClassItem):
            return self._class(item)
        if isinstance(item, FunctionItem):
            return self._function(item)
        assert isinstance(item, ValueItem)
        name = self._names[item]
        if item.piece is None:
            value = express_class(item.value, self._refer) if item.is_class else self._value(item.value, len(name) + 3)
            return f"{name} = {value}"
        node = item.piece.node
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        edits = self._edits(item.piece)
        edits.replace_node(node.target if isinstance(node, ast.AnnAssign) else node.targets[0], name)
        return statement_text(item.piece.file, node, edits, 0)

    def _is_constant(self, item: Item) -> bool:
        """Whether it stands at the top, since it needs nothing but what is imported."""
        early = [one for one in item.early if not isinstance(one, BuiltinItem | ImportItem)]
        return isinstance(item, ValueItem) and not early

    def _statement(self, item: ImportItem) -> Import:
        name, statement = self._names[item], item.statement
        return statement if statement.name == name else Import(statement.module, statement.attribute, name)

    def _refer(self, thing: Any) -> str:
        item = self._collector.find_item(thing)
        assert item is not None
        return self._names[item]

    def _value(self, value: Any, column: int = 0) -> str:
        return express(value, self._refer, column)

    def _edits(self, piece: Piece) -> Edits:
        edits = edits_of(piece, self._names, self._annotations.__contains__)
        for expression, value in piece.defaults:
            edits.replace_node(expression, self._value(value))
        return edits

    # functions

    def _function(self, item: FunctionItem) -> str:
        piece, name = item.piece, self._names[item]
        assert piece is not None
        edits = self._edits(piece)
        if isinstance(piece.node, ast.Lambda):
            text = self._lambda(piece.node, edits, name)
        else:
            assert isinstance(piece.node, ast.FunctionDef | ast.AsyncFunctionDef)
            if piece.node.name != name:
                rename_definition(edits, piece.node, name)
            text = statement_text(piece.file, piece.node, edits, 0)
        attributes = [f"{name}.{one} = {self._value(value)}" for one, value in item.attributes.items()]
        return text + ("\n\n\n" + "\n".join(attributes) if attributes else "")

    @staticmethod
    def _lambda(node: ast.Lambda, edits: Edits, name: str) -> str:
        """A lambda as the function that it is."""
        file = edits.file
        begin, end = file.span(node)
        begin += len("lambda")
        inside = [*ast.walk(node.args)]
        after = max((file.span(part)[1] for part in inside if isinstance(part, ast.expr | ast.arg)), default=begin)
        colon = file.text.index(":", after)
        first = file.lines[node.lineno - 1]
        edits.indent(node.lineno + 1, node.end_lineno or node.lineno, len(first) - len(first.lstrip()), 4)
        body = edits.apply(colon + 1, end).strip()
        if not _is_whole(body):
            body = f"({body})"
        return f"def {name}({edits.apply(begin, colon).strip()}):\n    return {body}"

    # classes

    def _class(self, item: ClassItem) -> str:
        name = self._names[item]
        if item.whole is not None:
            edits = self._edits(item.whole)
            if item.node.name != name:
                rename_definition(edits, item.node, name)
            return statement_text(item.file, item.node, edits, 0)
        decorators = [f"@{self._edits(one).apply(*one.file.span(one.node))}\n" for one in item.decorators]
        bases = self._bases(item)
        inherits = f"({', '.join(bases)})" if bases else ""
        head = f"{''.join(decorators)}class {name}{inherits}:"
        return "\n".join([head, *self._body(item)])

    def _bases(self, item: ClassItem) -> list[str]:
        """What a class inherits from, past the classes that the sample does without."""
        texts_by_base: dict[type, str] = {}
        queue = list(item.cls.__bases__)
        for base in queue:
            base_item = self._collector.find_item(base)
            if base_item in self._has and not isinstance(base_item, BuiltinItem | ImportItem):
                texts_by_base[base] = self._names[base_item]
            elif is_taken(base):
                queue += base.__bases__
            elif item.has_bases and base not in NO_BASES:
                piece = item.bases.get(base)
                text = self._refer(base) if piece is None else self._edits(piece).apply(*piece.file.span(piece.node))
                texts_by_base[base] = text
        needed = [
            base
            for base in texts_by_base
            if not any(base in other.__mro__ for other in texts_by_base if other is not base)
        ]
        needed.sort(key=item.cls.__mro__.index)
        meta = self._collector.find_item(type(item.cls))
        keywords = [f"metaclass={self._names[meta]}"] if isinstance(meta, ClassItem) and meta in self._has else []
        return [texts_by_base[base] for base in needed] + keywords

    def _body(self, item: ClassItem) -> list[str]:
        """The lines of a class's body."""
        members: list[tuple[int, bool, str]] = []
        for part in item.parts.values():
            if part in self._has:
                members += self._members(part)
        members.sort(key=lambda member: member[0])
        lines: list[str] = []
        doc = docstring_of(item.node)
        if doc is not None:
            lines.append(self._class_docstring(item, item.node.body[0]))
        for index, (_, is_block, text) in enumerate(members):
            first_after_doc = not index and doc is not None
            if first_after_doc or (index and (is_block or members[index - 1][1])):
                lines.append("")
            lines.append(text)
        return lines or ["    pass"]

    def _class_docstring(self, item: ClassItem, node: ast.stmt) -> str:
        """The docstring of a class, of which only the summary where it says much of what the sample does without."""
        edits = Edits(item.file)
        summary, paragraph, rest = item.file.segment(node).partition("\n\n")
        quotes = summary.lstrip("rRbBuU")[:3]
        if paragraph and item is not self._owner and quotes == rest[-3:]:
            edits.replace_node(node, summary.rstrip() + quotes)
        return statement_text(item.file, node, edits, 4)

    def _members(self, part: PartItem) -> list[tuple[int, bool, str]]:
        """The statements that make an attribute of a class: their line, whether they are a block, their text."""
        if not part.pieces:
            return [(10**9, False, f"    {part.name} = {self._value(part.value, len(part.name) + 7)}")]
        members = []
        for piece in part.pieces:
            assert isinstance(piece.node, ast.stmt)
            is_block = hasattr(piece.node, "body")
            members.append((piece.node.lineno, is_block, statement_text(piece.file, piece.node, self._edits(piece), 4)))
        return members


def _is_whole(expression: str) -> bool:
    """Whether an expression needs no brackets to stand in several lines."""
    try:
        ast.parse(f"_ = {expression}")
    except SyntaxError:
        return False
    return True
