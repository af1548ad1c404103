"""Subgraph cases: all calls of a module or a Python function as one case, whose calls form a graph."""

from __future__ import annotations

import inspect
import keyword
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

import pandas as pd
import torch
from torch import Tensor, fx, nn

from opgrip.cli.command import MOST
from opgrip.cli.option_types import matches
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.cases.call_sites import CallSite
from opgrip.replay.cases.cases import Case, values_of
from opgrip.replay.cases.functions import LazyOperator
from opgrip.replay.cases.selection import (
    ALL_EXCLUDED,
    BACKWARD,
    FORWARD,
    MODULE,
    Selection,
    labeled_calls,
    no_calls,
    no_match,
    no_match_of_both,
    no_match_within_label,
)
from opgrip.replay.cases.subgraph_calls import (
    Facts,
    Links,
    Outside,
    ResultOf,
    Source,
    SubgraphCall,
    SubgraphRun,
    facts_of,
    is_setting,
    link,
    make_runs,
)
from opgrip.replay.inputs.filling import drawn_values
from opgrip.replay.operators.agreement import checking_again
from opgrip.replay.operators.agreement.indices import bounding
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS, Unsupported, find_operator
from opgrip.replay.operators.memory import Function
from opgrip.traces import Trace
from opgrip.traces.analysis.timeline import OUTSIDE, TimelinePlace, frames_of, origins
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import NO_STORAGE, Scope, Signature
from opgrip.traces.schema.tensor_specs import tensor_outline
from opgrip.traces.values import Drawable


class SubgraphOperator(LazyOperator):
    """The calls of a subgraph as one function, which is created when it is first needed."""

    __slots__ = ("_extensions", "_graph_module", "is_training", "links")
    links: Links
    is_training: bool
    _extensions: tuple[str, ...]
    _graph_module: fx.GraphModule | None

    def __init__(self, links: Links, extensions: Collection[str], is_training: bool) -> None:
        self._set(mutates=links.mutates, links=links, is_training=is_training)
        self._set(_extensions=tuple(extensions), _graph_module=None)

    @property
    def function(self) -> fx.GraphModule:
        if self._graph_module is None:
            self._set(_graph_module=make_graph_module(self.links, self._extensions))
        assert self._graph_module is not None
        return self._graph_module

    def __repr__(self) -> str:
        return f"UnitOperator({len(self.links.calls)} calls)"


def make_graph_module(links: Links, extensions: Collection[str]) -> fx.GraphModule:
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
        # results that have other sizes in another run make the sizes of later calls differ
        self._guard = checking_again if any(facts.varies for facts in links.calls) else bounding
        self._parts: dict[Source, fx.Node] = {}
        outputs_of_call: dict[int, list[ResultOf]] = {}
        for output in links.outputs:
            outputs_of_call.setdefault(output.call, []).append(output)
        for index, (facts, sources) in enumerate(zip(links.calls, links.sources, strict=True)):
            self._results.append(self._call(facts.signature, iter(sources)))
            for output in outputs_of_call.get(index, ()):
                # extract outputs right after the call, or its unused results would stay alive until the last output is
                # extracted
                self._tensor(output)
        self.graph.output(tuple(self._tensor(output) for output in links.outputs))

    def _call(self, signature: Signature, sources: Iterator[Source]) -> fx.Node:
        function = find_operator(signature, self._extensions).function
        for name in signature.kwargs:
            # names become part of the graph's code, and a trace may be untrusted
            if not name.isidentifier() or keyword.iskeyword(name):
                raise Unsupported(f"{name!r} cannot be the name of an argument in Python")

        def build(leaf: Any) -> Any:
            if isinstance(leaf, TensorSpec):
                return self._tensor(next(sources))
            return self._settings[leaf] if is_setting(leaf) else leaf

        args, kwargs = map_leaves(build, signature.args), map_leaves(build, signature.kwargs)
        return self.graph.call_function(self._guard(function), args, kwargs)

    def _tensor(self, source: Source) -> fx.Node:
        if isinstance(source, Outside):
            return self._outside[source.place]
        if source not in self._parts:
            if isinstance(source, ResultOf):
                self._parts[source] = self._part(source)
            else:
                where = (self._tensor(source.base), source.spec.shape, source.spec.stride, source.spec.offset)
                self._parts[source] = self.graph.call_function(torch.ops.aten.as_strided.default, where)
        return self._parts[source]

    def _part(self, result: ResultOf) -> fx.Node:
        node = self._results[result.call]
        assert node is not None, "a call that marks a range of a profile returns no tensor"
        for key in paths_of(self._calls[result.call].signature.outputs)[result.place]:
            node = self.graph.call_function(operator.getitem, (node, key))
        return node


def paths_of(tree: Any) -> list[tuple[Any, ...]]:
    if isinstance(tree, TensorSpec):
        return [()]
    items: Any = ()
    if isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif isinstance(tree, dict):
        items = tree.items()
    return [(key, *path) for key, item in items for path in paths_of(item)]


def make_places(trace: Trace, unit: str, selection: Selection) -> dict[int, TimelinePlace]:
    origin = origins(trace)
    find = partial(_module, module_types(trace)) if unit == MODULE else _function
    place_of_scope: dict[int, TimelinePlace] = {}
    for scope in trace.scopes:
        place = find(origin[scope.number], scope.phase, selection)
        if place is not None and matches(scope.phase, selection.phase):
            place_of_scope[scope.number] = place
    return place_of_scope


def module_types(trace: Trace) -> dict[str, str]:
    return {scope.module: scope.module_type for scope in trace.scopes if scope.module_type}


def unit_name(place: TimelinePlace, types: Mapping[str, str]) -> str:
    kind, phase = types.get(place.name), "" if place.phase == FORWARD else place.phase
    return " ".join(filter(None, (place.name, f"({kind})" if kind else "", phase)))


def _module(types: Mapping[str, str], scope: Scope, phase: str, selection: Selection) -> TimelinePlace | None:
    path = _selected_path(scope.module, selection.module) if selection.module else scope.module
    if path is None:
        return None
    name = path or (scope.module_type if not scope.module else "") or OUTSIDE
    place = TimelinePlace(name, phase)
    if selection.for_candidates and phase != FORWARD:
        return None
    is_selected = matches(name, selection.op) or matches(unit_name(place, types), selection.op)
    return place if is_selected else None


def _selected_path(path: str, patterns: Sequence[str]) -> str | None:
    if "" in patterns or (not path and matches("", patterns)):
        # the root also matches `*`, but is meant only for calls made directly in it
        return ""
    return next((outer for outer in _with_parents(path) if matches(outer, patterns)), None)


def _with_parents(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _function(scope: Scope, phase: str, selection: Selection) -> TimelinePlace | None:
    if not matches(scope.module, selection.module):
        return None
    for depth, (file, function) in enumerate(frames_of(scope)):
        name = f"{PurePath(file).stem}:{function}" if function else OUTSIDE
        if matches(name, selection.op):
            return TimelinePlace(name, phase, file, scope.callers[depth:])
    return None


UNIT = "unit"  # kind of the signature of a subgraph; it does not occur in traces


def make_units(
    trace: Trace, selection: Selection, unit: str, extensions: Collection[str] = TRUSTED_EXTENSIONS
) -> list[Case]:
    """Return cases of subgraphs: uninterrupted sequences of calls that one thread made in one module or function.

    unit : `module` or `function`
    """
    calls = trace.own_calls
    if calls.empty:
        raise no_calls(trace)
    facts = {signature.number: facts_of(signature) for signature in trace.signatures}
    if not len(trace.storages) and any(item.inputs for item in facts.values()):
        raise UserError("the trace lacks the dataflow between its calls", "capture the program again")
    # autograd keeps results inside a module for the backward pass, which are not results of the module
    using = {scope.number for scope in trace.scopes if scope.phase == FORWARD} if selection.for_candidates else None
    runs = make_runs(trace, make_places(trace, unit, selection), facts, labeled_calls(trace, selection), using)
    if not runs:
        raise _nothing_selected(trace, unit, selection)
    types = module_types(trace) if unit == MODULE else {}
    if selection.for_candidates:
        _check_classes(runs, types, selection.module)
    runs = [run for run in runs if not any(map(selection.excludes, (run.place.name, unit_name(run.place, types))))]
    if not runs:
        raise NothingSelectedError(*ALL_EXCLUDED)
    alike: dict[tuple[str, str, tuple[SubgraphCall, ...]], list[SubgraphRun]] = {}
    for run in runs:
        alike.setdefault((run.place.name, run.place.phase, run.calls), []).append(run)
    total = max(sum(len(group) * _median_ns(group) for group in alike.values()), 1.0)
    drawn, scopes = drawn_values(trace), origins(trace)
    is_training = any(scope.phase == BACKWARD for scope in trace.scopes)
    make_operator = partial(SubgraphOperator, extensions=extensions, is_training=is_training)
    cases = [
        _case(
            number,
            unit_name(group[0].place, types),
            group,
            facts,
            drawn,
            trace.contexts,
            total,
            make_operator,
            _call_sites(group, scopes, unit),
        )
        for number, group in enumerate(alike.values())
    ]
    cases.sort(key=lambda case: (-case.share, case.number))
    return cases[: selection.top]


def _check_classes(runs: Sequence[SubgraphRun], types: Mapping[str, str], patterns: Sequence[str]) -> None:
    paths = sorted({run.place.name for run in runs} & types.keys())
    for pattern in patterns:
        by_class = {types[path]: path for path in reversed(paths) if matches(path, (pattern,))}
        if len(by_class) > 1:
            listing = ", ".join(f"{path} ({kind})" for kind, path in [*by_class.items()][: -MOST - 1 : -1])
            raise UserError(
                f"--candidate {MODULE}:{pattern} matches modules of {len(by_class)} classes: {listing}",
                "name modules of one class",
            )


def _case(
    number: int,
    name: str,
    runs: Sequence[SubgraphRun],
    facts: Mapping[int, Facts],
    drawn: Mapping[int, Drawable],
    contexts: Mapping[int, Mapping[str, Any]],
    total_ns: float,
    make_operator: Callable[[Links], SubgraphOperator],
    call_sites: Sequence[CallSite],
) -> Case:
    index = runs[0].place
    escaping_results = sorted(set().union(*(run.escaping_results for run in runs)))
    links = link(runs[0].calls, facts, escaping_results, frozenset.intersection(*(run.stored for run in runs)))
    signature = Signature(number, UNIT, name, (*links.outside, *links.settings), {}, links.results)
    median_ns, raw_ns = _median_ns(runs), sum(run.raw_ns for run in runs)
    contexts_of_calls = Counter(number for run in runs for number in run.contexts if number is not None)
    context = next((number for number, _ in contexts_of_calls.most_common(1)), None)
    return Case(
        signature,
        values_of([signature], drawn),
        count=len(runs),
        captured_us=median_ns / 1e3,
        captured_total_us=raw_ns / 1e3,
        share=len(runs) * median_ns / total_ns,
        context={} if context is None else contexts.get(context, {}),
        phase=index.phase,
        operator=make_operator(links),
        captured_spread=_spread(runs),
        perturbed=sum(run.perturbed for run in runs),
        call_sites=call_sites,
        storages=[
            (run.first, tuple(NO_STORAGE if item == NO_STORAGE else run.storages[item] for item in links.memory))
            for run in runs
        ],
    )


def _call_sites(runs: Sequence[SubgraphRun], scopes: Mapping[int, Scope], unit: str) -> list[CallSite]:
    sites: dict[tuple[str, str, str], list[float]] = {}
    for run in runs:
        scope = scopes[run.scope]
        if unit == MODULE:
            module, line = run.place.name if scope.module_type else "", ""
        else:
            module, line = scope.module, f"{scope.file}:{scope.line} {scope.function}" if scope.file else ""
        sites.setdefault((module, run.place.phase, line), []).append(run.raw_ns / 1e3)
    counted = (CallSite(*where, len(times), sum(times)) for where, times in sites.items())
    return sorted(counted, key=lambda site: -site.count)


def _median_ns(runs: Sequence[SubgraphRun]) -> float:
    return statistics.median(run.time_ns for run in runs)


def _spread(runs: Sequence[SubgraphRun]) -> float | None:
    if len(runs) == 1:
        return None
    low, _, high = statistics.quantiles((run.time_ns for run in runs), n=4, method="inclusive")
    return (high - low) / max(_median_ns(runs), 1.0)


def _nothing_selected(trace: Trace, unit: str, selection: Selection) -> UserError:
    calls = trace.own_calls
    everything = make_places(trace, unit, Selection())
    names = calls["scope"].map({number: index.name for number, index in everything.items()}).rename(unit)
    calling_scopes = set(calls["scope"])
    if not calling_scopes & make_places(trace, unit, replace(selection, module=(), phase=())).keys():
        return no_match(names, selection.op, selection.op_flag)
    if not calling_scopes & make_places(trace, unit, replace(selection, op=(), phase=())).keys():
        paths = {path for name in calls["module"].dropna().unique() for path in _with_parents(name)}
        return no_match(pd.Series(sorted(paths), name="module"), selection.module, selection.module_flag)
    selects_some = calling_scopes & make_places(trace, unit, selection).keys()
    return no_match_within_label(selection) if selects_some else no_match_of_both(selection)


MOST_TENSORS = 12  # maximum number of tensors that an error lists


def load_module(load: Callable[[], Any], operator: SubgraphOperator, args: Sequence[Any]) -> Function:
    """Return a user's implementation of a module as a function of the arguments of the recorded module.

    load : function that imports the implementation: a function, or a subclass or an instance of `nn.Module`
    """
    loaded, tensors = load(), args[: len(operator.links.outside)]
    if not isinstance(loaded, nn.Module) and not (inspect.isclass(loaded) and issubclass(loaded, nn.Module)):
        return lambda *args, **kwargs: loaded(*args[: len(tensors)])
    module = deepcopy(loaded) if isinstance(loaded, nn.Module) else _instance_of(loaded)
    module.train(operator.is_training).to(tensors[0].device if tensors else None)
    slots = list(_slots(module, tensors, operator.links.stored))
    inputs = sorted(set(range(len(tensors))) - {index for _, _, index in slots})
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise Unsupported(
            f"{type(module).__name__}.forward{inspect.signature(module.forward)} does not accept the inputs of the "
            "recorded module (its tensors other than parameters and buffers): "
            f"{_listed(tensors[index] for index in inputs)}"
        ) from error

    def call(*args: Any, **kwargs: Any) -> Any:
        for owner, name, index in slots:
            owner[name] = args[index]
        return module(*[args[index] for index in inputs])

    return call


def _instance_of(module_class: type[nn.Module]) -> nn.Module:
    try:
        return module_class()
    except TypeError as error:
        raise Unsupported(
            f"{module_class.__name__}() needs arguments ({error}): give each parameter of its `__init__` a default"
        ) from error


def _slots(
    module: nn.Module, tensors: Sequence[Tensor], stored: Sequence[bool]
) -> Iterator[tuple[dict[str, Any], str, int]]:
    free = sorted(range(len(tensors)), key=lambda index: not stored[index])
    indices: dict[int, int] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            raise Unsupported(f"{type(part).__name__} keeps its parameters in a list: give a function that calls it")
        for name, own in [*part._parameters.items(), *part._buffers.items()]:
            if own is None:
                continue
            # parameters that are used twice have one tensor
            index = indices.get(id(own), next((index for index in free if _fits(own, tensors[index])), None))
            owner = part._parameters if name in part._parameters else part._buffers
            if index is not None:
                indices[id(own)] = index
                free = [other for other in free if other != index]
                yield owner, name, index
            elif owner is part._parameters:
                raise Unsupported(
                    f"{type(module).__name__}.{f'{path}.' if path else ''}{name} is {_listed([own])}, and none of the "
                    "recorded module's remaining tensors fits it: "
                    f"{_listed(tensors[index] for index in sorted(free))}"
                )


def _fits(own: Tensor, tensor: Tensor) -> bool:
    # a replay may cast floating-point tensors
    are_floating = own.is_floating_point() and tensor.is_floating_point()
    return own.shape == tensor.shape and (are_floating or own.dtype == tensor.dtype)


def _listed(tensors: Iterable[Tensor]) -> str:
    outlines = [tensor_outline(tensor.dtype, tensor.shape) for tensor in tensors]
    more = f" and {len(outlines) - MOST_TENSORS} more" if len(outlines) > MOST_TENSORS else ""
    return f"{', '.join(outlines[:MOST_TENSORS])}{more}" or "none"
