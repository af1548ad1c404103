"""Which type annotations stay in a sample: those whose names it has anyway, or may import."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from opgrip.capture.grip.source.collect import Collector
from opgrip.capture.grip.source.imports import Import
from opgrip.capture.grip.source.items import ImportItem, Item, Link, Piece, pieces_of
from opgrip.capture.grip.source.names import Annotation, Use
from opgrip.capture.grip.source.resolve import Kind, Meaning

_ANY = Import("typing", "Any", "Any")


@dataclass(frozen=True, slots=True)
class Hints:
    """What becomes of the annotations of a sample.

    Attributes
    ----------
    annotations : those that stay
    items : what they need besides what the sample has
    """

    annotations: frozenset[Annotation]
    items: tuple[Item, ...]


def hints_of(collector: Collector, included: Iterable[Item]) -> Hints:
    """What becomes of the annotations in the source of a sample's items; their names are linked as others are."""
    included = list(included)
    has = set(included)
    annotations: list[Annotation] = []
    more: dict[Item, None] = {}
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
                elif isinstance(annotation.holder, ast.AnnAssign) and _is_field(piece, annotation.holder):
                    more[
                        collector.ensure_item(("hint", "Any"), lambda: ImportItem("Any", "typing", statement=_ANY))
                    ] = None
    return Hints(frozenset(annotations), tuple(one for one in more if one not in has))


def _find_item(collector: Collector, use: Use, meaning: Meaning, piece: Piece, has: set[Item]) -> Item | None:
    """The item that a name in an annotation stands for, None where the sample does not have it."""
    if meaning.kind is Kind.IMPORT:
        return collector.add_import(
            meaning.thing, (use.name, *use.attributes)[meaning.attribute_count], meaning.rest, piece
        )
    item = collector.find_item(meaning.thing) if meaning.kind is not Kind.ABSENT else None
    if meaning.kind is Kind.BUILTIN:
        return collector.builtin(getattr(meaning.thing, "__name__", use.name))
    return item if item in has else None


def _is_field(piece: Piece, holder: ast.AnnAssign) -> bool:
    return isinstance(piece.file.parents.get(holder), ast.ClassDef)
