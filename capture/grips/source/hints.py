"""Which type annotations stay in a sample: those whose names it has anyway, or may import."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from opgrip.capture.grips.source.collect import Collector
from opgrip.capture.grips.source.imports import Import
from opgrip.capture.grips.source.items import ImportItem, Item, Link, Piece, pieces_of
from opgrip.capture.grips.source.names import Annotation, Use
from opgrip.capture.grips.source.resolve import Found, Kind

_ANY = Import("typing", "Any", "Any")


@dataclass(frozen=True, slots=True)
class Hints:
    """What becomes of the annotations of a sample.

    Attributes
    ----------
    kept : those that stay
    items : what they need besides what the sample has
    """

    kept: frozenset[Annotation]
    items: tuple[Item, ...]


def hints_of(collector: Collector, included: Iterable[Item]) -> Hints:
    """What becomes of the annotations in the source of a sample's items; their names are linked as others are."""
    included = list(included)
    has = set(included)
    kept: list[Annotation] = []
    more: dict[Item, None] = {}
    for item in included:
        for piece in pieces_of(item):
            for annotation, uses in piece.hints:
                meant = [_meant(collector, use, found, piece, has) for use, found in uses]
                if all(one is not None for one in meant):
                    kept.append(annotation)
                    for (use, found), one in zip(uses, meant, strict=True):
                        assert one is not None
                        more[one] = None
                        piece.links.append(Link(use, one, found.taken))
                elif isinstance(annotation.holder, ast.AnnAssign) and _is_field(piece, annotation.holder):
                    more[collector.known(("hint", "Any"), lambda: ImportItem("Any", "typing", statement=_ANY))] = None
    return Hints(frozenset(kept), tuple(one for one in more if one not in has))


def _meant(collector: Collector, use: Use, found: Found, piece: Piece, has: set[Item]) -> Item | None:
    """The item that a name in an annotation stands for, None where the sample does not have it."""
    if found.kind is Kind.IMPORT:
        return collector.imported(found.thing, (use.name, *use.attributes)[found.taken], found.rest, piece)
    item = collector.named(found.thing) if found.kind is not Kind.ABSENT else None
    if found.kind is Kind.BUILTIN:
        return collector.builtin(getattr(found.thing, "__name__", use.name))
    return item if item in has else None


def _is_field(piece: Piece, holder: ast.AnnAssign) -> bool:
    return isinstance(piece.file.parents.get(holder), ast.ClassDef)
