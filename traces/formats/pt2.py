"""Reader of programs written by `torch.export.save`, each as the trace of one run.

The graph's JSON is read without `torch.export.load`, which unpickles weights, constants and sample inputs, evaluates
expressions of sizes, and requires a file of the same torch version.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opgrip.errors import UserError, one_line
from opgrip.traces.formats.building import (
    NO_GRADIENTS,
    NO_TIMES,
    NO_VALUES,
    GraphStorages,
    RecordBuilder,
    aliases,
    split,
)
from opgrip.traces.formats.exported_values import CONSTANTS, LEAST_SIZE, Sizes, tensor_of
from opgrip.traces.formats.operator_schemas import NoOverload, bind
from opgrip.traces.io.foreign_files import MOST_BYTES, ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import DECOMPRESSED
from opgrip.traces.schema.records import Record, Scope

OLD_PROGRAM = "serialized_exported_program.json"
# pattern of the names of graph files in the archive; torch 2.6 and 2.7 wrote the second form
PROGRAM = re.compile(rf"(?:[^/]+/)?models/[^/]+\.json|{OLD_PROGRAM}")
OPERATOR = re.compile(r"torch\.ops\.(\w+\.\w+(?:\.\w+)?)")
HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.(\w+)")
# pattern of nodes that compute or check sizes in Python and take no tensor
OF_SIZES = re.compile(r"(?!torch\.ops\.).*|torch\.ops\.aten\.(sym_\w+|_assert_scalar)(\.\w+)?")
FRAME = re.compile(r'File "([^"]*)", line (\d+), in (.+)')
MOST_JSON = 1 << 28  # maximum size in bytes of all graphs of a file
# compression methods that zipfile decompresses in pieces of limited size
UNPACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OPEN_SIZES = f"dynamic sizes: the smallest that the program allows, at least {LEAST_SIZE}"


def recognizes(head: Head) -> bool:
    """Return True for a zip archive with a graph, or with the suffix of exported programs."""
    if not head.start.startswith(b"PK"):
        return False
    try:
        with zipfile.ZipFile(head.path) as archive:
            return head.suffix == ".pt2" or any(map(PROGRAM.fullmatch, archive.namelist()))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return head.suffix == ".pt2"


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the records of a trace with the operators of each exported program in the file."""
    builder = None
    for content in _programs(file):
        program = file.parse(content)
        match program:
            case {"graph_module": {"graph": dict() as graph}}:
                pass
            case _:
                raise file.damage("it contains no graph")
        sizes = Sizes(program.get("range_constraints"))
        values = _Values(graph, sizes, GraphStorages())
        if sizes.are_open and OPEN_SIZES not in file.losses.defaults:
            file.losses.defaults.append(OPEN_SIZES)
        if builder is None:
            version = program.get("torch_version")
            builder = RecordBuilder("pt2", file.losses, {"torch": version} if isinstance(version, str) else {})
        for _ in _add_calls(graph, values, file, builder):
            yield from builder.ready()
    assert builder is not None, "a file without programs is refused"
    yield from builder.end()


def _programs(file: ForeignFile) -> Iterator[bytes]:
    """Yield the JSON text of each graph in the archive; raise `UserError` if the texts exceed a limit together."""
    most = min(MOST_JSON, DECOMPRESSED.of(file.path.stat().st_size)) if not file.unbounded else MOST_BYTES
    try:
        with zipfile.ZipFile(file.path) as archive:
            names = [name for name in archive.namelist() if PROGRAM.fullmatch(name)]
            if not names:
                raise UserError(f"{file.path} contains no exported program", "write one with torch.export.save")
            if len(set(names)) < len(names):
                raise file.damage("two graphs of its archive have one name")
            remaining = most
            for name in names:
                if archive.getinfo(name).compress_type not in UNPACKED:
                    raise file.damage("its graph is compressed by a method that torch does not use")
                with archive.open(name) as member:
                    content = member.read(remaining + 1)
                if len(content) > remaining:
                    raise file.refusal(f"its graphs have more than {most >> 20:,} MB")
                # several names may refer to the same member
                remaining -= len(content)
                yield content
    except OSError as error:
        raise UserError(f"{file.path} cannot be read", str(error.strerror or error).lower()) from error
    except (zipfile.BadZipFile, ValueError, RuntimeError, NotImplementedError, EOFError, zlib.error) as error:
        raise file.damage(f"its archive is broken: {error}"[:200]) from error


def _add_calls(graph: dict[str, Any], values: _Values, file: ForeignFile, builder: RecordBuilder) -> Iterator[None]:
    """Add the calls of a graph's operators; yield after each, so that the caller can write completed records."""
    nodes = graph.get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        target = node.get("target") if isinstance(node, dict) else None
        if not isinstance(target, str):
            file.losses.skip("?", "a node has no `target`, the name of its operator")
            continue
        op = match[1] if (match := OPERATOR.fullmatch(target)) else target[:100]
        try:
            if higher := HIGHER_ORDER.fullmatch(target):
                yield from _add_inner_calls(higher[1], node, values, file, builder)
            elif not OF_SIZES.fullmatch(target):
                _add_call(op, node, values, builder)
                yield
        except NoOverload as error:
            file.losses.skip(op, str(error))
        except ValueError as error:
            file.losses.skip(op, str(error)[:200])
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            file.losses.skip(op, f"a node has an unexpected form ({one_line(error, 100)})")


def _add_call(op: str, node: dict[str, Any], values: _Values, builder: RecordBuilder) -> None:
    arguments = {item["name"]: values.argument(item["arg"]) for item in node["inputs"]}
    bound = bind(op, (), arguments)
    shared = aliases(bound.op, bound.args, bound.kwargs)
    results = node["outputs"]
    shared += [None] * (len(results) - len(shared))
    result_values = [values.result(item, memory) for item, memory in zip(results, shared, strict=False)]
    outputs = result_values[0] if len(result_values) == 1 else tuple(result_values) if result_values else None
    args, kwargs, outputs, numbers = split(bound.args, bound.kwargs, outputs)
    builder.add_call(bound.op, args, kwargs, outputs, scope=_scope(node.get("metadata")), storages=numbers)


def _add_inner_calls(
    name: str, node: dict[str, Any], values: _Values, file: ForeignFile, builder: RecordBuilder
) -> Iterator[None]:
    """Add the calls of the graph inside a higher-order operator, if the operator runs it exactly once.

    Other higher-order operators are skipped, because it is unknown how often they run their graphs.
    """
    arguments: list[Any] = [item.get("arg") for item in node.get("inputs", ()) if isinstance(item, dict)]
    graphs = [(place, item["as_graph"]) for place, item in enumerate(arguments) if _is_graph(item)]
    if len(graphs) != 1 or not name.startswith("wrap"):
        file.losses.skip(
            f"higher_order.{name}", "unsupported: the file does not say which of its graphs runs, and how often"
        )
        return
    ((place, form),) = graphs
    graph, operands = form["graph"], arguments[place + 1 :]
    storages = values.storages
    operand_by_input = dict(zip(map(_name, graph.get("inputs", ())), map(_name, operands), strict=False))
    outer = {inner: storages.of(name) for inner, name in operand_by_input.items() if inner and name}
    inside = GraphStorages(outer, storages.count)
    yield from _add_calls(graph, _Values(graph, values.sizes, inside), file, builder)
    storages.count = inside.count
    # older versions write all results as one list
    results = [name for item in node.get("outputs", ()) for name in _names(item)]
    for name, inner_name in zip(results, (name for item in graph["outputs"] for name in _names(item)), strict=False):
        storages.give(name, inside.of(inner_name))


def _names(argument: Any) -> Iterator[str]:
    match argument:
        case {"as_tensor": {"name": str() as name}}:
            yield name
        case {"as_tensors": list() as items}:
            yield from (name for item in items for name in _names({"as_tensor": item}))


def _is_graph(argument: Any) -> bool:
    match argument:
        case {"as_graph": {"graph": {"nodes": list(), "inputs": list(), "outputs": list()}}}:
            return True
    return False


def _name(argument: Any) -> str:
    match argument:
        case {"as_tensor": {"name": str() as name}}:
            return name
    return ""


class _Values:
    def __init__(self, graph: dict[str, Any], sizes: Sizes, storages: GraphStorages) -> None:
        self.sizes, self.storages = sizes, storages
        names = ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values")
        tables = [table if isinstance(table := graph.get(name), dict) else {} for name in names]
        self._tensors, self._ints, self._bools, self._floats = tables
        for meta in self._tensors.values():
            shape = meta.get("sizes") if isinstance(meta, dict) else None
            for form in shape if isinstance(shape, list) else ():
                sizes.note(form)
        for form in self._ints.values():
            sizes.note(form)

    def tensor(self, form: Any) -> TensorSpec:
        """Return the metadata of the tensor that `form["name"]` names in the graph, with the number of its storage."""
        name = form["name"]
        return tensor_of(self._tensors.get(name), self.sizes, self.storages.of(name))

    def result(self, form: Any, shared: int | None) -> Any:
        """Return a result whose storage has the number `shared`, or a new number if `shared` is None."""
        match form:
            case {"as_tensor": {"name": str() as name}}:
                self.storages.give(name, shared)
            case {"as_tensors": list() as items}:
                for item in items:
                    self.storages.give(item["name"], shared)
        return self.argument(form)

    def argument(self, form: Any) -> Any:
        """Return the argument that a JSON object describes; raise `ValueError` if its form is unknown, or if a trace
        cannot hold it.
        """
        if not isinstance(form, dict) or len(form) != 1:
            raise ValueError(f"an argument is not a JSON object of one member: {str(form)[:60]}")
        ((kind, body),) = form.items()
        if kind in CONSTANTS:
            return CONSTANTS[kind](body)
        match kind:
            case "as_tensor":
                return self.tensor(body)
            case "as_tensors":
                return [self.tensor(item) for item in body]
            case "as_nested_tensors":
                return [[self.tensor(item) for item in row] for row in body]
            case "as_optional_tensors":
                return [self.argument(item) for item in body]
            case "as_optional_tensor" | "as_sym_int" | "as_sym_bool" | "as_sym_float":
                return self._named(kind, body)
            case "as_sym_ints" | "as_sym_bools" | "as_sym_floats":
                return [self._named(kind[:-1], item) for item in body]
        raise ValueError(f"unsupported kind of argument: {str(kind)[:40]}")

    def _named(self, kind: str, form: Any) -> Any:
        match kind, form:
            case "as_sym_int", {"as_name": str() as name}:
                return self.sizes.of(self._ints.get(name))
            case "as_sym_bool" | "as_sym_float", {"as_name": str() as name}:
                table = self._bools if kind == "as_sym_bool" else self._floats
                match table.get(name):
                    case {"as_expr": {"hint": {"as_bool": bool() as hint} | {"as_float": float() as hint}}}:
                        return hint
                raise ValueError("unsupported: data-dependent number")
        return self.argument(form)


def _scope(metadata: Any) -> Scope:
    """Return the scope of a node, from the module stack and the stack trace in its metadata."""
    facts = metadata if isinstance(metadata, dict) else {}
    modules, frames = facts.get("nn_module_stack"), facts.get("stack_trace")
    path, kind = _module(modules) if isinstance(modules, str) else ("", "")
    scope = Scope(0, path, kind, "forward")
    places = FRAME.findall(frames[:20_000]) if isinstance(frames, str) else []
    if not places:
        return scope
    *callers, (name, line, function) = places
    around = tuple(f"{name}:{line} {function}" for name, line, function in reversed(callers))
    return replace(scope, file=name, line=int(line[:9]), function=function.strip(), callers=around)


def _module(stack: str) -> tuple[str, str]:
    """Return the path and class of the innermost module in a text of the form `key,path,class;key,path,class`."""
    _, _, innermost = stack.rpartition(";")
    _, path, kind = (innermost.split(",", 2) + ["", ""])[:3]
    # older ones: L['self'].layer1[0].conv
    path = re.sub(r"^L\['self'\]\.?|^L__self__\.?", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.strip("."), kind.rpartition(".")[2]


formats.register("pt2")(
    Format(
        "programs of torch.export: operators in their order, with shapes and modules",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS),
    )
)
