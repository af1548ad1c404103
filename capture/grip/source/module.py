"""Conversion of a gripped function to a self-contained module."""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from keyword import iskeyword
from types import MethodType
from typing import Any

from opgrip.capture.grip.gripped import Gripped
from opgrip.capture.grip.source.free_names import Annotation, FunctionNode, Role, Use
from opgrip.capture.grip.source.items import (
    NO_BASES,
    BuiltinItem,
    ClassItem,
    Collector,
    FunctionItem,
    ImportItem,
    Link,
    PartItem,
    Piece,
    SampleItem,
    ValueItem,
    is_taken,
    pieces_of,
    reachable,
    refusals,
    unit,
)
from opgrip.capture.grip.source.live_objects import (
    Everything,
    Import,
    Meaning,
    SourceFile,
    Treatment,
    docstring_of,
    first_line,
    is_imported,
    is_of_python,
    named_in,
    top_level,
    words_in,
)
from opgrip.capture.grip.source.values import express, express_class
from opgrip.errors import UserError

_F_STRINGS_HAVE_PLACES = sys.version_info >= (3, 12)


class Edits:
    """Changes to the text of a source file, each with its position."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._changes: dict[tuple[int, int], str] = {}

    def replace(self, begin: int, end: int, text: str) -> None:
        self._changes[begin, end] = text

    def replace_node(self, node: ast.AST, text: str) -> None:
        self.replace(*self.file.span(node), text)

    def remove_lines(self, first: int, last: int) -> None:
        self.replace(self.file.line_start(first), self.file.line_start(last + 1), "")

    def indent(self, first: int, last: int, before: int, after: int) -> None:
        """Change the indentation of lines from `before` to `after` spaces, except lines that begin inside a string."""
        for line in range(first, last + 1):
            text = self.file.lines[line - 1]
            if line in self.file.string_lines or not text.strip():
                continue
            blank = len(text) - len(text.lstrip(" \t"))
            begin = self.file.line_start(line)
            self.replace(begin, begin + min(blank, before), " " * after)

    def apply(self, begin: int, end: int) -> str:
        pieces, at = [], begin
        for (start, stop), text in sorted(self._changes.items(), key=lambda change: (change[0][0], -change[0][1])):
            # skip changes inside a range that was already replaced
            if start < at or stop > end:
                continue
            pieces += [self.file.text[at:start], text]
            at = stop
        return "".join([*pieces, self.file.text[at:end]])


def edits_of(piece: Piece, names: Mapping[SampleItem, str], keeps: Callable[[Annotation], bool]) -> Edits:
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


def _rename(edits: Edits, links: Iterable[Link], names: Mapping[SampleItem, str]) -> None:
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
    outermost, around = None, file.parents.get(node)
    while around is not None and not isinstance(around, ast.stmt):
        outermost = around if isinstance(around, ast.JoinedStr) else outermost
        around = file.parents.get(around)
    return outermost


def _unparse_with_names(string: ast.AST, renamed: Iterable[tuple[ast.expr, str]]) -> str:
    # before Python 3.12 the nodes inside an f-string have no positions
    changed = copy.deepcopy(string)
    copies = {id(old): new for old, new in zip(ast.walk(string), ast.walk(changed), strict=True)}
    for node, name in renamed:
        new = copies[id(node)]
        new.__class__ = ast.Name
        new.__dict__.clear()
        new.__dict__.update(id=name, ctx=ast.Load())
    return ast.unparse(changed)


def _replace_statement(edits: Edits, statement: ast.stmt, text: str) -> None:
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
        # the node of an annotation does not include its parentheses
        for _ in range(text.count("(", arrow, begin)):
            end = text.index(")", end) + 1
        # a backslash may join the preceding line
        edits.replace(len(text[:arrow].rstrip(" \t\r\n\\")), end, "")


def _remove_from_variable(edits: Edits, holder: ast.AnnAssign, annotation: Annotation) -> None:
    in_class = isinstance(edits.file.parents.get(holder), ast.ClassDef)
    if in_class:
        # dataclasses derive their fields from annotations
        outer = [use.name for use in annotation.uses if use.name in ("ClassVar", "InitVar")]
        edits.replace_node(annotation.expression, f"{outer[0]}[Any]" if outer else "Any")
    elif holder.value is None:
        edits.replace_node(holder, "pass")
    else:
        end = edits.file.span(holder.target)[1]
        equals = edits.file.text.index("=", edits.file.span(annotation.expression)[1])
        edits.replace(end, equals, " ")


def rename_definition(edits: Edits, node: FunctionNode | ast.ClassDef, name: str) -> None:
    begin = edits.file.span(node)[0]
    name_match = re.compile(r"(?:async\s+)?(?:def|class)\s+(\w+)").match(edits.file.text, begin)
    assert name_match is not None
    edits.replace(name_match.start(1), name_match.end(1), name)


def with_comments(file: SourceFile, node: ast.stmt) -> int:
    first = first_line(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else node.lineno
    line, column = first, node.col_offset
    while line > 1 and re.match(rf"\s{{{column}}}#", file.lines[line - 2]):
        line -= 1
    # comments at the start of a file are its licence
    return first if line == 1 or "Copyright" in "".join(file.lines[line - 1 : first]) else line


def statement_text(file: SourceFile, node: ast.stmt, edits: Edits, column: int) -> str:
    first, last = with_comments(file, node), node.end_lineno or node.lineno
    edits.indent(first, last, node.col_offset, column)
    end = file.span(node)[1]
    rest = file.text[end : file.line_start(last + 1)]
    if re.fullmatch(r"\s*#.*\n?", rest):
        end += len(rest.rstrip("\n"))
    return edits.apply(file.line_start(first), end)


WIDTH = 100  # maximum number of characters in a line of an import statement


def render(imports: Iterable[Import]) -> str:
    unique_imports = set(imports)
    sections = [{one for one in unique_imports if is_of_python(one.module)}]
    sections.append(unique_imports - sections[0])
    return "\n\n".join("\n".join(_section(section)) for section in sections if section)


def _section(imports: set[Import]) -> list[str]:
    plain = sorted(
        f"import {one.module}" + (f" as {one.alias}" if one.alias not in ("", one.module) else "")
        for one in imports
        if one.attribute is None
    )
    merged: dict[str, list[Import]] = {}
    for one in imports:
        if one.attribute is not None:
            merged.setdefault(one.module, []).append(one)
    return plain + [_from_statement(module, merged[module]) for module in sorted(merged, key=str.lower)]


def _from_statement(module: str, members: list[Import]) -> str:
    names = [
        f"{one.attribute}" + (f" as {one.alias}" if one.alias != one.attribute else "")
        for one in sorted(members, key=lambda one: _member_order(one.attribute or ""))
    ]
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _member_order(name: str) -> tuple[int, str]:
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name.lower()


def in_order(root: SampleItem, included: Iterable[SampleItem]) -> list[SampleItem]:
    """Return the items of the module's top level in the order in which the sample defines them."""
    included = list(included)
    units = list(dict.fromkeys(map(unit, included)))
    early: dict[SampleItem, list[SampleItem]] = {one: [] for one in units}
    needs: dict[SampleItem, list[SampleItem]] = {one: [] for one in units}
    for item in included:
        early[unit(item)] += [unit(one) for one in item.early]
        needs[unit(item)] += [unit(one) for one in (*item.needs, *item.may_need)]
    return list(_Order(early, needs).run([unit(root), *units]))


class _Order:
    def __init__(self, early: dict[SampleItem, list[SampleItem]], needs: dict[SampleItem, list[SampleItem]]) -> None:
        self._early = early
        self._needs = needs
        self._open: set[SampleItem] = set()
        self._done: dict[SampleItem, None] = {}

    def run(self, items: Iterable[SampleItem]) -> Iterable[SampleItem]:
        for item in items:
            self._visit(item)
        return self._done

    def _visit(self, item: SampleItem) -> None:
        if item in self._done or item in self._open:
            return
        self._open.add(item)
        for needed in self._early[item]:
            self._visit(needed)
        # a decorator calls its helpers while it decorates
        functions = [needed for needed in self._early[item] if isinstance(needed, FunctionItem)]
        called = [one for needed in functions for one in self._closure(needed, self._needs)]
        for needed in (*called, *self._needs[item]):
            if needed in self._early and not self._open & set(self._closure(needed, self._early)):
                self._visit(needed)
        self._open.discard(item)
        self._done[item] = None

    @staticmethod
    def _closure(item: SampleItem, edges: dict[SampleItem, list[SampleItem]]) -> Iterator[SampleItem]:
        queue, closure = [item], {item}
        for one in queue:
            yield one
            queue += dict.fromkeys(needed for needed in edges.get(one, ()) if needed not in closure)
            closure.update(edges.get(one, ()))


_FUTURE = "from __future__ import annotations"


class Layout:
    def __init__(
        self,
        collector: Collector,
        root: SampleItem,
        items: Iterable[SampleItem],
        names: Mapping[SampleItem, str],
        annotations: frozenset[Annotation],
    ) -> None:
        self._collector = collector
        self._owner = unit(root)
        self._items = list(items)
        self._has = frozenset(self._items)
        self._names = names
        self._annotations = annotations

    def module(self, docstring: str, ordered: Iterable[SampleItem]) -> str:
        imports = {self._statement(item) for item in self._items if isinstance(item, ImportItem)}
        head = [f'"""{docstring}"""', _FUTURE, *([render(imports)] if imports else [])]
        definitions = [item for item in ordered if isinstance(item, ValueItem | FunctionItem | ClassItem)]
        constants = [
            item
            for item in definitions
            if isinstance(item, ValueItem) and all(isinstance(one, BuiltinItem | ImportItem) for one in item.early)
        ]
        text = "\n\n".join(head) + "\n"
        if constants:
            text += "\n" + "\n".join(self.text(item) for item in constants) + "\n"
        for item in definitions:
            if item not in constants:
                text += "\n\n" + self.text(item) + "\n"
        return text

    def text(self, item: SampleItem) -> str:
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
        edits = Edits(item.file)
        # only the first paragraph, unless a method of the class is the sample
        summary, paragraph, rest = item.file.segment(node).partition("\n\n")
        quotes = summary.lstrip("rRbBuU")[:3]
        if paragraph and item is not self._owner and quotes == rest[-3:]:
            edits.replace_node(node, summary.rstrip() + quotes)
        return statement_text(item.file, node, edits, 4)

    def _members(self, part: PartItem) -> list[tuple[int, bool, str]]:
        if not part.pieces:
            return [(10**9, False, f"    {part.name} = {self._value(part.value, len(part.name) + 7)}")]
        members = []
        for piece in part.pieces:
            assert isinstance(piece.node, ast.stmt)
            is_block = hasattr(piece.node, "body")
            members.append((piece.node.lineno, is_block, statement_text(piece.file, piece.node, self._edits(piece), 4)))
        return members


def _is_whole(expression: str) -> bool:
    try:
        ast.parse(f"_ = {expression}")
    except SyntaxError:
        return False
    return True


def names_for(items: Iterable[SampleItem]) -> dict[SampleItem, str]:
    items = list(items)
    owners_by_name: dict[str, SampleItem] = {}
    shadowed = _bound_by_users(items)
    names: dict[SampleItem, str] = {}
    reserved = {name for item in items for piece in pieces_of(item) for name in piece.absent}
    for item in items:
        if isinstance(item, BuiltinItem):
            names[item] = item.name
            reserved.add(item.name)
    for item in items:
        if isinstance(item, BuiltinItem | PartItem):
            continue
        for name in _candidates(item):
            owner = owners_by_name.setdefault(name, item) if name not in reserved else None
            # `import scipy` and `import scipy.optimize` bind one package
            if owner is item or (owner is not None and _package(owner) == _package(item) != ""):
                if name not in shadowed.get(item, ()):
                    names[item] = name
                    break
                if owner is item:
                    del owners_by_name[name]
    return names


def _candidates(item: SampleItem) -> Iterator[str]:
    name = item.name if item.name.isidentifier() and not iskeyword(item.name) else "function"
    yield name
    longer = f"{name}_{item.module.rpartition('.')[2].strip('_')}"
    yield longer
    yield from (f"{longer}_{number}" for number in count(2))


def _package(item: SampleItem) -> str:
    statement = item.statement if isinstance(item, ImportItem) else None
    is_plain = statement is not None and statement.attribute is None and statement.alias in ("", item.name)
    return statement.module.partition(".")[0] if statement is not None and is_plain else ""


def _bound_by_users(items: Iterable[SampleItem]) -> Mapping[SampleItem, set[str]]:
    bound: dict[SampleItem, set[str]] = {}
    for item in items:
        for piece in pieces_of(item):
            for link in piece.links:
                bound.setdefault(link.item, set()).update(piece.names.bound)
    return bound


_ANY = Import("typing", "Any", "Any")


def hints_of(
    collector: Collector, included: Iterable[SampleItem]
) -> tuple[frozenset[Annotation], tuple[SampleItem, ...]]:
    included = list(included)
    has = set(included)
    annotations: list[Annotation] = []
    more: dict[SampleItem, None] = {}
    for item in included:
        for piece in pieces_of(item):
            for annotation, uses in piece.hints:
                items = [_find_item(collector, use, meaning, piece, has) for use, meaning in uses]
                if all(one is not None for one in items):
                    annotations.append(annotation)
                    for (use, meaning), one in zip(uses, items, strict=True):
                        assert one is not None
                        more[one] = None
                        piece.links.append(Link(use, one, meaning.attribute_count))
                elif isinstance(annotation.holder, ast.AnnAssign) and isinstance(
                    piece.file.parents.get(annotation.holder), ast.ClassDef
                ):
                    any_item = collector.ensure_item(
                        ("hint", "Any"), lambda: ImportItem("Any", "typing", statement=_ANY)
                    )
                    more[any_item] = None
    return frozenset(annotations), tuple(one for one in more if one not in has)


def _find_item(
    collector: Collector, use: Use, meaning: Meaning, piece: Piece, has: set[SampleItem]
) -> SampleItem | None:
    if meaning.treatment is Treatment.IMPORT:
        return collector.add_import(
            meaning.thing, (use.name, *use.attributes)[meaning.attribute_count], meaning.rest, piece
        )
    item = collector.find_item(meaning.thing) if meaning.treatment is not Treatment.ABSENT else None
    if meaning.treatment is Treatment.BUILTIN:
        return collector.builtin(getattr(meaning.thing, "__name__", use.name))
    return item if item in has else None


@dataclass(frozen=True, slots=True)
class Requirements:
    collector: Collector
    root: SampleItem
    items: tuple[SampleItem, ...]
    left_out: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModuleText:
    """The text of a sample's module, with what it defines and imports.

    classes : names of classes and functions among the arguments and results, by their original `module:qualname`
    absent : free names that the original code does not define either
    """

    text: str
    entry: str
    classes: dict[str, str]
    projects: frozenset[str]
    imports: frozenset[str]
    absent: frozenset[str]
    left_out: dict[str, str] = field(default_factory=dict)


def requirements_of(gripped: Gripped) -> Requirements:
    owner = owner_of(gripped)
    first = [call.args[0] for call in gripped.calls if call.args]
    own = set() if owner is None else {owner, *(type(one) for one in first if isinstance(one, owner))}
    collector = Collector(words_in(objects_of(gripped)), own)
    root = _enter_function(gripped, owner, collector)
    collector.expand(objects_of(gripped), root)
    refused = refusals(collector.items)
    if root in refused:
        raise UserError(f"{gripped.entry} cannot be extracted", _reason(refused[root]))
    items = reachable(root, refused)
    for item in items:
        if isinstance(item, ClassItem):
            # a class comes after all classes that it inherits from
            item.early += [one for one in map(collector.find_item, item.cls.__mro__[1:]) if one in items]
    left_out = {_label(part): _reason(refused[part]) for item in items for part in item.may_need if part in refused}
    return Requirements(collector, root, tuple(items), left_out)


def lay_out(gripped: Gripped, requirements: Requirements, origin: str) -> ModuleText:
    annotations, more = hints_of(requirements.collector, requirements.items)
    items = (*requirements.items, *more)
    ordered = in_order(requirements.root, items)
    names = names_for(_by_claim(requirements, items, ordered))
    _check_texts(items, names)
    owner, method = owner_of(gripped), gripped.entry.rpartition(".")[2]
    collector = requirements.collector
    entry = names[requirements.root] if owner is None else f"{names[collector.class_item(owner)]}.{method}"
    layout = Layout(requirements.collector, requirements.root, items, names, annotations)
    text = layout.module(f"{entry} of {origin}, and what it needs.", ordered)
    return ModuleText(
        text,
        entry,
        dict(_argument_names(gripped, requirements, names)),
        frozenset(
            top_level(item.module)
            for item in items
            if isinstance(item, FunctionItem | ClassItem) and not is_imported(item.module)
        ),
        frozenset(
            top_level(item.statement.module)
            for item in items
            if isinstance(item, ImportItem) and not is_of_python(item.statement.module)
        ),
        frozenset(name for item in items for piece in pieces_of(item) for name in piece.absent),
        requirements.left_out,
    )


def owner_of(gripped: Gripped) -> type | None:
    path = gripped.entry.rpartition("<locals>.")[2].rpartition(".")[0]
    if gripped.owner is not None or not path:
        return gripped.owner
    for call in gripped.calls:
        for first in call.args[:1]:
            for cls in first.__mro__ if isinstance(first, type) else type(first).__mro__:
                if cls.__qualname__.rpartition("<locals>.")[2] == path:
                    return cls
    thing: Any = sys.modules.get(gripped.function.__module__)
    for name in path.split("."):
        thing = getattr(thing, name, None)
    if not isinstance(thing, type):
        raise UserError(
            f"the class of {gripped.entry} is not found", "grip the method after the program has defined the class"
        )
    return thing


def _enter_function(gripped: Gripped, owner: type | None, collector: Collector) -> SampleItem:
    function, method = gripped.function, gripped.entry.rpartition(".")[2]
    if owner is None:
        if isinstance(function, partial):
            root: SampleItem = ValueItem(gripped.name, "", value=function)
            collector.remember(root, root)
            collector.check(function, root, "the function")
            return root
        if isinstance(function, MethodType):
            raise UserError(f"{gripped.entry} is bound to an object", "grip the method of its class instead")
        return collector.function(function, method if method.isidentifier() else gripped.name)
    provider = next((cls for cls in owner.__mro__ if method in vars(cls)), None)
    if provider is None:
        raise UserError(f"{owner.__qualname__} has no {method}", "name one of its methods")
    root = collector.part(provider, method)
    item = collector.class_item(owner)
    if item is not root:
        root.need(item)
    if isinstance(item, ClassItem) and not isinstance(vars(provider)[method], staticmethod):
        item.is_live = item.has_bases = True
    return root


def objects_of(gripped: Gripped) -> Iterator[Any]:
    for call in gripped.calls:
        yield from (call.args, call.kwargs, call.results)
        if call.after is not None:
            yield call.after


def _reason(way: Sequence[SampleItem]) -> str:
    through = " -> ".join(dict.fromkeys(_label(item) for item in way if item.name))
    return f"{way[-1].refusal} (needed through {through})"


def _label(item: SampleItem) -> str:
    return f"{item.owner.name}.{item.name}" if isinstance(item, PartItem) and item.owner is not None else item.name


def _by_claim(requirements: Requirements, items: tuple[SampleItem, ...], ordered: list[SampleItem]) -> list[SampleItem]:
    root = requirements.root.owner if isinstance(requirements.root, PartItem) else requirements.root
    first: list[SampleItem] = [] if root is None else [root]
    live = [item for item in items if isinstance(item, ClassItem) and item.is_live]
    imports = [item for item in items if isinstance(item, ImportItem)]
    return list(dict.fromkeys([*first, *live, *imports, *ordered, *items]))


def _check_texts(items: Iterable[SampleItem], names: dict[SampleItem, str]) -> None:
    for link in (link for item in items for piece in pieces_of(item) for link in piece.links):
        if link.use.role is Role.TEXT and names[link.item] != link.use.name:
            raise UserError(
                f"{link.use.name} cannot be renamed, because code looks it up by its name",
                "another function of the sample has the same name",
            )


def _argument_names(
    gripped: Gripped, requirements: Requirements, names: dict[SampleItem, str]
) -> Iterator[tuple[str, str]]:
    for thing in named_in(objects_of(gripped), Everything()):
        item = requirements.collector.find_item(thing)
        if item is not None and item in names and not isinstance(item, ImportItem):
            yield f"{thing.__module__}:{thing.__qualname__}", names[item]
