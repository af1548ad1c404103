"""The calls of a unit as one function: a graph of torch.fx, which compilers and exporters take as a module."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from opgrip.replay.cases.units.facts import is_setting
from opgrip.replay.cases.units.links import Links, Outside, ResultOf, Source
from opgrip.replay.operators.bounds import bounding
from opgrip.replay.operators.lookup import Operator, Unsupported, find_operator
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import Signature


class UnitOperator(Operator):
    """What a unit's case calls.

    Its function is made when it is first asked for: of most units of a trace it never is. It takes the tensors from
    outside, then the settings: devices, floating-point dtypes and generators. These are arguments, and no constants of
    the graph, since a replay may be elsewhere or in another dtype than the program was, and maps what it passes.

    Raises
    ------
    Unsupported : by `function`, where the calls cannot be run as one
    """

    __slots__ = ("_extensions", "_graph_module", "_links")
    _links: Links
    _extensions: tuple[str, ...]
    _graph_module: fx.GraphModule | None

    def __init__(self, links: Links, extensions: Collection[str]) -> None:
        self._set(mutates=links.mutates, _links=links, _extensions=tuple(extensions), _graph_module=None)

    @property
    def function(self) -> fx.GraphModule:
        """The graph."""
        if self._graph_module is None:
            self._set(_graph_module=make_graph_module(self._links, self._extensions))
        assert self._graph_module is not None
        return self._graph_module

    def _set(self, **attributes: object) -> None:
        # the class that this one extends lets nobody set any
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"UnitOperator({len(self._links.calls)} calls)"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def make_graph_module(links: Links, extensions: Collection[str]) -> fx.GraphModule:
    """The calls in their order, on what flows between them.

    Raises
    ------
    Unsupported : where they cannot be run as one, or an operator is not here
    """
    if links.reason is not None:
        raise Unsupported(links.reason)
    return fx.GraphModule(torch.nn.Module(), _Builder(links, extensions).graph, "Unit")


class _Builder:
    def __init__(self, links: Links, extensions: Collection[str]) -> None:
        self.graph = fx.Graph()
        self._extensions = extensions
        self._outside = [self.graph.placeholder(f"tensor_{place}") for place in range(len(links.outside))]
        self._settings = {leaf: self.graph.placeholder(f"setting_{place}") for place, leaf in enumerate(links.settings)}
        self._results: list[fx.Node] = []
        self._calls = links.calls
        self._parts: dict[Source, fx.Node] = {}
        outputs_of_call: dict[int, list[ResultOf]] = {}
        for output in links.outputs:
            outputs_of_call.setdefault(output.call, []).append(output)
        for index, (facts, sources) in enumerate(zip(links.calls, links.sources, strict=True)):
            self._results.append(self._call(facts.signature, iter(sources)))
            for output in outputs_of_call.get(index, ()):
                # at once, or results that nobody takes would live as long as the last that is taken
                self._tensor(output)
        self.graph.output(tuple(self._tensor(output) for output in links.outputs))

    def _call(self, signature: Signature, sources: Iterator[Source]) -> fx.Node:
        function = find_operator(signature, self._extensions).function
        for name in signature.kwargs:
            # names stand in the graph's code as they are, and a trace is a stranger's
            if not name.isidentifier() or keyword.iskeyword(name):
                raise Unsupported(f"{name!r} is not an argument's name")

        def build(leaf: Any) -> Any:
            if isinstance(leaf, TensorSpec):
                return self._tensor(next(sources))
            return self._settings[leaf] if is_setting(leaf) else leaf

        args, kwargs = map_leaves(build, signature.args), map_leaves(build, signature.kwargs)
        return self.graph.call_function(bounding(function), args, kwargs)

    def _tensor(self, source: Source) -> fx.Node:
        if isinstance(source, Outside):
            return self._outside[source.place]
        if source not in self._parts:
            self._parts[source] = self._part(source) if isinstance(source, ResultOf) else self._view(source)
        return self._parts[source]

    def _view(self, source: Any) -> fx.Node:
        spec = source.spec
        where = (self._tensor(source.base), spec.shape, spec.stride, spec.offset)
        return self.graph.call_function(torch.ops.aten.as_strided.default, where)

    def _part(self, result: ResultOf) -> fx.Node:
        node = self._results[result.call]
        assert node is not None, "what marks a range gives no tensor"
        for key in _paths(self._calls[result.call].signature.outputs)[result.place]:
            node = self.graph.call_function(operator.getitem, (node, key))
        return node


def _paths(tree: Any) -> list[tuple[Any, ...]]:
    """Of each tensor in a tree, the indices and keys that lead to it."""
    if isinstance(tree, TensorSpec):
        return [()]
    items: Any = ()
    if isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif isinstance(tree, dict):
        items = tree.items()
    return [(key, *path) for key, item in items for path in _paths(item)]
