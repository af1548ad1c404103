"""Functions of an ONNX model itself, of modules or of operators: their nodes stand where they are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from opgrip.cli.extras import needed
from opgrip.errors import one_line
from opgrip.traces.io.foreign_files import Losses

MOST_NODES = 1_000_000
"""Of a model whose functions stand where they are called: thirty functions that call each other twice are a billion."""
MOST_DEPTH = 200
"""Functions that call each other, one inside of the other, and graphs within graphs."""

Key = tuple[str, str, str]


class _TooMany(ValueError):
    """That functions call each other without end, or too often."""


def inlined(model: Any, losses: Losses) -> Any:
    """The model without functions; where they go beyond the bounds, calls of them stay what no operator is for."""
    functions = {_key(item, item.name): item for item in model.functions}
    try:
        _check(model.graph.node, functions)
        return needed("onnx.inliner", "onnx").inline_local_functions(model)
    except Exception as error:
        # onnx has errors of many kinds for a model that is wrong
        losses.defaults.append(f"functions of the model: not followed ({one_line(error, 100)})")
    # inference would go through their bodies
    del model.functions[:]
    return model


def _check(nodes: Iterable[Any], functions: dict[Key, Any]) -> None:
    sizes: dict[Key, int] = {}
    running: set[Key] = set()

    def size_of(nodes: Iterable[Any], depth: int) -> int:
        if depth > MOST_DEPTH:
            raise _TooMany("they nest too deep")
        total = 0
        for node in nodes:
            key = _key(node, node.op_type)
            total += size_of_function(key, depth) if key in functions else 1
            total += sum(size_of(graph.node, depth + 1) for graph in _graphs(node))
            if total > MOST_NODES:
                raise _TooMany(f"they are more than {MOST_NODES:,} nodes")
        return total

    def size_of_function(key: Key, depth: int) -> int:
        if key in running:
            raise _TooMany("one calls itself")
        if key not in sizes:
            running.add(key)
            sizes[key] = size_of(functions[key].node, depth + 1)
            running.remove(key)
        return sizes[key]

    size_of(nodes, 0)


def _key(item: Any, name: str) -> Key:
    # onnx has two names for its own domain
    return "" if item.domain == "ai.onnx" else item.domain, name, getattr(item, "overload", "")


def _graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
