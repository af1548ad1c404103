"""Search for the parts of classes that a sample needs: methods and attributes that its code may read.

Enums, dataclasses and named tuples are included completely. Of other classes, a part is included if code may read an
attribute of this name from an object of the class, or if Python or an imported base class may call it. The code of a
part can need further parts, so `expand` repeats the search until nothing is added.
"""

from __future__ import annotations

import abc
import ast
import enum
import functools
import re
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, Generic, Protocol, is_typeddict

import torch

from opgrip.capture.grip.source.collect import Collector
from opgrip.capture.grip.source.free_names import AttributeOwner, bound_by, names_of
from opgrip.capture.grip.source.imports import is_imported, module_of
from opgrip.capture.grip.source.items import ClassItem, PartItem, Piece, SampleItem
from opgrip.capture.grip.source.live_names import Mentioned, evaluate, named_in, namespace_of_class, python_function
from opgrip.capture.grip.source.source_files import find_definition, first_line
from opgrip.capture.grip.source.values import is_literal, is_plain
from opgrip.errors import UserError

# base classes that only matter for type checkers, or that only enforce that methods are defined
NO_BASES: frozenset[Any] = frozenset({object, abc.ABC, Generic, Protocol})

CONSTRUCTORS = ("__new__", "__init__")
_UNUSED_NAMES = """
    __repr__ __str__ __format__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __deepcopy__ __copy__ __del__
    __dir__ __init_subclass__ __class_getitem__ __sizeof__ __subclasshook__
"""
_UNUSED = frozenset(_UNUSED_NAMES.split())  # special methods that do not affect results

_PLAIN_CLASSES = (type("", (), {}), type("", (abc.ABC,), {}))
_OF_TYPING = ("__annotations__", "__orig_bases__", "__parameters__", "__slots__")
_OF_EACH_CLASS = frozenset({name for cls in _PLAIN_CLASSES for name in vars(cls)} | {*_OF_TYPING})


def is_taken(cls: type) -> bool:
    """Return True if the sample contains the source of a class, rather than an import of it."""
    return not is_imported(cls.__module__)


def is_whole(cls: type) -> bool:
    """Return True for a class that is included completely: an enum, dataclass or named tuple."""
    made_of_fields = {"__dataclass_fields__", "__attrs_attrs__"} & vars(cls).keys() or hasattr(cls, "_field_defaults")
    return bool(made_of_fields) or issubclass(cls, enum.Enum) or is_typeddict(cls)


def provider_of(mro: tuple[type, ...], name: str) -> type | None:
    """Return the first class in a method resolution order that defines an attribute which not every class has, or
    None.
    """
    return next((cls for cls in mro if name in vars(cls)), None) if name not in _OF_EACH_CLASS else None


def is_special(cls: type, name: str) -> bool:
    """Return True for a special method that a class defines and that Python may call implicitly."""
    if not (name.startswith("__") and name.endswith("__")) or name in _UNUSED:
        return False
    functions = [python_function(one) for one in functions_of(vars(cls)[name])]
    return any(one is not None and one.__qualname__.rpartition(".")[0] == cls.__qualname__ for one in functions)


def overrides(cls: type, name: str) -> bool:
    """Return True if an imported base class of `cls` may call the method `name`."""
    bases = [base for base in cls.__mro__ if not is_taken(base) and base not in NO_BASES]
    # modules have too many such methods
    return torch.nn.Module not in bases and not name.startswith("__") and any(name in vars(base) for base in bases)


def functions_of(attribute: Any) -> list[Any]:
    """Return the functions behind a class's attribute, such as getter and setter of a property."""
    if isinstance(attribute, property):
        return [one for one in (attribute.fget, attribute.fset, attribute.fdel) if one is not None]
    for name in ("__func__", "func"):
        inner = getattr(attribute, name, None)
        if inner is not None and not isinstance(attribute, functools.partial):
            return [inner]
    return [attribute] if python_function(attribute) is not None else []


def makes_descriptor(decorator: ast.expr, piece: Piece, value: Any) -> bool:
    """Return True if a decorator makes the attribute `value` of a method a property, a static method or another
    descriptor.
    """
    if isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "getter", "deleter"):
        return True
    decorator_object = evaluate(decorator, piece.namespace)
    return (
        isinstance(decorator_object, type)
        and isinstance(value, decorator_object)
        and is_imported(decorator_object.__module__)
    )


def defines(node: ast.stmt, name: str, cls: type) -> bool:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return False
    # Python mangles names with two leading underscores
    prefix = f"_{cls.__name__.lstrip('_')}__"
    return bool({name, name.replace(prefix, "__", 1) if name.startswith(prefix) else name} & bound_by(node))


def has_changed(node: ast.Assign | ast.AnnAssign, value: Any) -> bool:
    """Return True if a statement assigns a literal, and the current value of the attribute differs from it."""
    return node.value is not None and is_plain(node.value) and not is_literal(node, value)


class ClassParts:
    """Search for the needed parts of all classes that a sample contains.

    own : classes of the object whose method is the sample; their `forward` is only included if code calls it
    """

    def __init__(self, collector: Collector, own: Iterable[type] = ()) -> None:
        self._collector = collector
        self._own = frozenset(own)
        self._reads = 0

    def meet(self, thing: type | FunctionType, user: SampleItem) -> None:
        """Note that the item `user` needs a class of which objects exist, or a function passed as an argument."""
        if isinstance(thing, FunctionType):
            item = self._collector.function(thing, thing.__name__)
        else:
            item = self._collector.class_item(thing)
        self._needs(user, item)
        if isinstance(item, ClassItem):
            item.is_live = item.has_bases = True

    def part(self, cls: type, name: str) -> SampleItem:
        """Return the item for an attribute `name` that a class itself defines; a new item is added to the sample.

        For a class that is included completely, or imported, return the item of the class.
        """
        item = self._collector.class_item(cls)
        if not isinstance(item, ClassItem) or is_whole(cls):
            if isinstance(item, ClassItem):
                item.is_live = True
            return item
        if name not in item.parts:
            part = item.parts[name] = PartItem(name, cls.__module__, owner=item)
            part.need(item)
            self._collector.remember(("part", id(cls), name), part)
            self._take(part, cls, item)
        return item.parts[name]

    def _take(self, part: PartItem, cls: type, item: ClassItem) -> None:
        value = vars(cls)[part.name]
        statements = [node for node in item.node.body if defines(node, part.name, cls)]
        try:
            part.pieces = list(self._pieces(statements, value, part, cls, item))
        except UserError as error:
            part.refuse(str(error))
        if part.pieces:
            for piece in part.pieces:
                self._collector.scan(piece, part)
        else:
            part.value = value
            self._collector.check(value, part, f"{cls.__name__}.{part.name}")

    def _pieces(
        self, statements: list[ast.stmt], value: Any, part: PartItem, cls: type, item: ClassItem
    ) -> Iterator[Piece]:
        namespace = namespace_of_class(cls)
        functions = {
            (inner.__code__.co_filename, inner.__code__.co_firstlineno): function
            for function in functions_of(value)
            if (inner := python_function(function)) is not None
        }
        all_definitions = all(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in statements)
        for node in statements:
            if all_definitions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = functions.get((item.file.name, first_line(node)))
                if function is None:
                    continue
                definition = find_definition(function)
                piece = self._collector.function_piece(definition, part, cls)
                piece.dropped = tuple(one for one in definition.dropped if not makes_descriptor(one, piece, value))
                yield piece
            elif not isinstance(node, ast.Assign | ast.AnnAssign) or not has_changed(node, value):
                yield Piece(item.file, node, namespace, names_of(node), cls)

    # attributes that may be read

    def expand(self, objects: Iterable[Any], root: SampleItem) -> None:
        """Add all parts of classes that code of the sample may use, until no further code is added.

        objects : arguments and results of recorded calls
        root : item that needs the classes of these objects
        """
        objects = list(objects)
        before = (-1, -1)
        while (now := self._size()) != before:
            before = now
            self._read_off_classes()
            mentioned = Mentioned(mention for mention, _, _ in self._collector.mentions)
            for thing in named_in(objects, mentioned):
                self.meet(thing, root)
            for item in self._collector.classes:
                if item.is_live or item.has_bases:
                    self._take_bases(item)
                if item.is_live:
                    self._take_live(item, mentioned)
            self._take_own()

    def _size(self) -> tuple[int, int]:
        flags = sum(item.is_live + item.is_made + item.has_bases for item in self._collector.classes)
        return len(self._collector.items), flags

    def _read_off_classes(self) -> None:
        reads = self._collector.class_reads
        while self._reads < len(reads):
            item, name, user, early = reads[self._reads]
            self._reads += 1
            cls = provider_of(item.cls.__mro__, name)
            if cls is None or is_imported(cls.__module__):
                # an inherited function that creates objects, such as the `apply` of autograd functions
                item.mark_made()
                continue
            user.need(self.part(cls, name), early)
            if cls is not item.cls:
                user.need(self._collector.class_item(cls), early)
            if isinstance(vars(cls)[name], classmethod):
                item.mark_made()

    def _take_bases(self, item: ClassItem) -> None:
        meta = type(item.cls)
        if not is_imported(meta.__module__):
            self.meet(meta, item)
        if is_whole(item.cls):
            self._take_whole(item)
            return
        for between in map(self._collector.find_item, item.cls.__mro__[1:]):
            if isinstance(between, ClassItem):
                between.has_bases = True
        if item.bases:
            return
        for cls in filter(is_taken, item.cls.__mro__):
            written_as = self._base_expressions(cls)
            for base in cls.__bases__:
                if is_imported(base.__module__) and base not in NO_BASES:
                    item.bases[base] = written_as.get(base)
        for base, piece in item.bases.items():
            if piece is not None:
                self._collector.scan(piece, item)
            elif (base_item := self._collector.of_value(base)) is not None:
                item.need(base_item, early=True)
        self._take_decorators(item)

    def _base_expressions(self, cls: type) -> dict[type, Piece]:
        item = self._collector.class_item(cls)
        if not isinstance(item, ClassItem):
            return {}
        namespace = namespace_of_class(cls)
        # type arguments of a generic class matter only to type checkers
        plain = (one.value if isinstance(one, ast.Subscript) else one for one in item.node.bases)
        base_objects = ((evaluate(one, namespace), one) for one in plain)
        pieces = ((base, Piece(item.file, one, namespace, names_of(one))) for base, one in base_objects)
        return {base: piece for base, piece in pieces if isinstance(base, type)}

    def _take_decorators(self, item: ClassItem) -> None:
        namespace = namespace_of_class(item.cls)
        for decorator in item.node.decorator_list:
            if self._stays(decorator, item.cls):
                piece = Piece(item.file, decorator, namespace, names_of(decorator))
                item.decorators.append(piece)
                self._collector.scan(piece, item)

    @staticmethod
    def _stays(decorator: ast.expr, cls: type) -> bool:
        # decorators of the program usually register classes, and are dropped
        decorator_object = evaluate(
            decorator.func if isinstance(decorator, ast.Call) else decorator, namespace_of_class(cls)
        )
        return is_imported(module_of(decorator_object) or "opgrip")

    def _take_whole(self, item: ClassItem) -> None:
        if item.whole is not None:
            return
        dropped = tuple(one for one in item.node.decorator_list if not self._stays(one, item.cls))
        namespace = namespace_of_class(item.cls)
        item.whole = Piece(item.file, item.node, namespace, names_of(item.node), dropped=dropped)
        self._collector.scan(item.whole, item)

    def _take_live(self, item: ClassItem, mentioned: Mentioned) -> None:
        cls = item.cls
        for name in {name for base in filter(is_taken, cls.__mro__) for name in vars(base)}:
            provider = provider_of(cls.__mro__, name)
            if provider is None or is_imported(provider.__module__):
                continue
            if name in CONSTRUCTORS:
                if item.is_made:
                    self._needs(item, self.part(provider, name))
            elif name == "forward" and issubclass(cls, torch.nn.Module) and cls not in self._own:
                self._needs(item, self.part(provider, name))
            elif mentioned.of_others(name) or is_special(provider, name) or overrides(cls, name):
                part = self.part(provider, name)
                if part not in item.may_need:
                    item.may_need.append(part)

    def _take_own(self) -> None:
        for mention, piece, user in tuple(self._collector.mentions):
            if piece.cls is None or mention.owner is AttributeOwner.ANY:
                continue
            for cls in self._own_classes(piece.cls):
                mro = cls.__mro__
                if mention.owner is AttributeOwner.SUPER:
                    mro = mro[mro.index(piece.cls) + 1 :]
                names = {name for base in mro for name in vars(base) if re.fullmatch(mention.attribute, name)}
                for name in names:
                    self._needs_from(mro, name, user)
        for item in self._collector.classes:
            for part in list(item.parts.values()):
                for piece in part.pieces:
                    self._take_calls(piece, item, part)

    def _take_calls(self, piece: Piece, item: ClassItem, part: PartItem) -> None:
        is_class_method = isinstance(vars(item.cls).get(part.name), classmethod)
        for cls in self._own_classes(item.cls):
            own_item = self._collector.class_item(cls)
            if piece.names.makes_own or (piece.names.calls_self and is_class_method):
                if isinstance(own_item, ClassItem):
                    own_item.mark_made()
            elif piece.names.calls_self and issubclass(cls, torch.nn.Module):
                self._needs_from(cls.__mro__, "forward", part)

    def _own_classes(self, cls: type) -> list[type]:
        # classes of the objects that can be `self` in a method of `cls`
        live = [item.cls for item in self._collector.classes if item.is_live and cls in item.cls.__mro__]
        return live or [cls]

    def _needs_from(self, mro: tuple[type, ...], name: str, user: SampleItem) -> None:
        provider = provider_of(mro, name)
        if provider is not None and is_taken(provider):
            self._needs(user, self.part(provider, name))

    @staticmethod
    def _needs(user: SampleItem, needed: SampleItem) -> None:
        if needed is not user and needed not in user.needs:
            user.need(needed)
