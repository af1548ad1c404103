"""`opgrip trace graph`: what depends on what in a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, add_reading, printable
from opgrip.traces.errors import UserError
from opgrip.traces.output import whole_file
from opgrip.traces.progress import Reporter
from opgrip.traces.words import DEVICE_TIME, counted

if TYPE_CHECKING:
    from opgrip.traces.graph import Graph

EXAMPLES = """\
examples:
  opgrip trace graph trace:faster_rcnn                  critical path and live memory
  opgrip trace graph trace:faster_rcnn -o graph.json    every call with those that it depends on
  opgrip trace graph trace:faster_rcnn -o graph.dot && dot -Tsvg -O graph.dot
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the graph as .json or .dot")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the critical path's share and the peak of live memory; write the graph."""
    from opgrip.traces import load
    from opgrip.traces.graph import make_graph

    writers = {".json": as_json, ".dot": as_dot}
    if args.output is not None and args.output.suffix not in writers:
        raise UserError(f"{args.output} is neither .json nor .dot", "name one of these")
    with Reporter(args.prog).reading(args.trace):
        trace = load(args.trace, args.partial, args.unbounded)
    if trace.calls.empty or not len(trace.storages):
        raise UserError(f"{args.trace} holds no dataflow", "capture it again with this version")
    graph = make_graph(trace)
    if args.output is not None:
        with whole_file(args.output, args.force) as file:
            for line in writers[args.output.suffix](graph):
                file.write(f"{line}\n".encode())
        print(f"opgrip trace graph: {counted(len(graph.steps), 'call')} to {args.output}", file=sys.stderr)
    for line in _facts(graph):
        print(line, file=sys.stdout)
    return 0


def as_json(graph: Graph) -> Iterator[str]:
    """The graph as one JSON object, a call or storage a line."""
    critical = {"time_ns": graph.critical_ns, "duration_ns": graph.critical_host_ns, "calls": graph.critical_path}
    memory = {"peak_bytes": graph.peak_bytes, "peak_at": graph.peak_at, "outside_bytes": graph.outside_bytes}
    yield f'{{"critical_path": {json.dumps(critical)},'
    yield f'"live_memory": {json.dumps(memory)},'
    for name, items in (("calls", graph.steps.values()), ("storages", graph.storages.values())):
        yield f'"{name}": ['
        lines = [json.dumps(asdict(item)) for item in items]
        yield from (f"{line}," for line in lines[:-1])
        yield from lines[-1:]
        yield "]," if name == "calls" else "]}"


def as_dot(graph: Graph) -> Iterator[str]:
    """The graph for Graphviz, the critical path in red."""
    critical = set(graph.critical_path)
    yield "digraph trace {"
    yield "node [shape=box, fontname=sans]"
    for step in graph.steps.values():
        label = json.dumps(f"{printable(step.op)}\n{printable(step.module)}\n{step.time_ns / 1e3:.1f} us")
        yield f"{step.number} [label={label}{', color=red' if step.number in critical else ''}]"
    for step in graph.steps.values():
        for before in step.after:
            on_path = step.number in critical and before in critical
            yield f"{before} -> {step.number}{' [color=red]' if on_path else ''}"
    yield "}"


def _facts(graph: Graph) -> Iterator[str]:
    steps = graph.steps.values()
    edges = sum(len(step.after) for step in graph.steps.values())
    flow = f"{counted(edges, 'dependency', 'dependencies')}, {counted(len(graph.storages), 'storage')}"
    yield f"calls          {len(graph.steps):,}, {flow}"
    path = f"{counted(len(graph.critical_path), 'call')}, "
    yield f"critical path  {path}{_part(graph.critical_ns, sum(step.time_ns for step in steps))}"
    if any(step.device_ns is not None for step in steps):
        host = _part(graph.critical_host_ns, sum(step.host_ns for step in steps))
        yield f"               {DEVICE_TIME}; on the host, {host}"
    at = "" if graph.peak_at is None else f" at call {graph.peak_at} ({printable(graph.steps[graph.peak_at].op)})"
    peak, outside = graph.peak_bytes / 1e6, graph.outside_bytes / 1e6
    yield f"live memory    {peak:,.2f} MB at most{at}, and {outside:,.2f} MB from before"


def _part(part_ns: int, total_ns: int) -> str:
    return f"{part_ns / 1e6:,.2f} ms of {total_ns / 1e6:,.2f} ms ({part_ns / max(total_ns, 1):.0%})"


verbs.register("trace graph")(Verb("show dependencies, the critical path and live memory", EXAMPLES, prepare, run))
