"""Starting points of candidates: files with an operator's schema, its recorded calls, and a function that calls the
operator.
"""

from __future__ import annotations

import inspect
import keyword
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import fsum
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import counted, did_you_mean, printable
from opgrip.cli.output_files import read_input
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.cases.selection import MODULE, Selection
from opgrip.replay.cases.sources.samples import PREFIX, read_folders, sample_cases
from opgrip.replay.cases.subgraph_calls import Links, Outside
from opgrip.replay.cases.subgraphs import SubgraphOperator, make_units
from opgrip.replay.modes.candidate import OF_MODULES
from opgrip.replay.operators.admission import TRUSTED_EXTENSIONS
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.samples import samples
from opgrip.tools.exports.exported_cases import recorded_source
from opgrip.traces import Trace
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.operator_arguments import schema_of
from opgrip.traces.schema.tensor_specs import contiguous, plain_name, tensor_outline
from opgrip.traces.scripts.literals import plain
from opgrip.traces.scripts.script import operator_source

MOST_BYTES = 8 << 20  # maximum number of bytes of a gripped sample's source
MOST_ROWS = 40  # maximum number of recorded calls listed in a file
# where the documentation of an operator may be
DOCUMENTED = (torch.nn.functional, torch, torch.Tensor, torch.special, torch.linalg)
ROLE = re.compile(r":\w+:`~?\.?([^`<]*)(?:<[^`]*>)?`")
MARKUP = re.compile(r"->|\.\. |\\")
ANYTHING = ("*args, **kwargs", "*args, **kwargs")


@dataclass(frozen=True, slots=True)
class CandidateFile:
    op: str
    target: str
    facts: Sequence[str]
    function: str
    remark: str
    source: str
    imported: str
    extensions: Sequence[str] = ()

    def command(self, path: Path) -> str:
        extensions = [word for name in self.extensions for word in ("--extension", name)]
        unit = ["--unit", MODULE] if self.op.startswith(OF_MODULES) else []
        candidate = f"{self.op}={path}:{self.function}"
        return shlex.join(["opreplay", self.target, *unit, "--candidate", candidate, *extensions])

    def text(self, path: Path) -> str:
        made_by = f"Made by opgrip {metadata.version('opgrip')} with torch {torch.__version__}."
        about = [f"Candidate for {self.op}. Judge it with:", "", f"    {self.command(path)}", ""]
        about += [*self.facts, "", self.remark, made_by]
        lines = [printable(line).encode("ascii", "backslashreplace").decode() for line in about]
        comments = [f"# {line}".rstrip() for line in lines]
        imports = [f"import {self.imported}", "", ""] if self.imported else []
        return "\n".join([*comments, "", *imports, self.source, ""])


def file_of_operator(trace: Trace, target: str, op: str, extensions: Sequence[str]) -> CandidateFile:
    cases = make_cases(trace)
    own = [case for case in cases if case.op == op]
    if not own:
        names = sorted({case.op for case in cases})
        near = [name for name in names if name.startswith((f"{op}.", f"aten.{op}."))]
        hint = f"it has {', '.join(near[:5])}" if near else did_you_mean(op, names, f"see opgrip trace info {target}")
        raise UserError(f"no call of {op} is recorded in {target}", hint)
    try:
        operator: Any = find_operator(own[0].signature, (*TRUSTED_EXTENSIONS, *extensions)).function
    except Unsupported as error:
        raise UserError(f"{op} cannot be judged", str(error)) from error
    facts = [*_documentation(operator), *_table(own, cases)]
    module, _, function = op.partition(":")
    if function:
        call = _call_of(function, op.replace(":", "."), ANYTHING)
        return CandidateFile(op, target, facts, *call, module, extensions)
    call = _call_of(op.split(".")[1].strip("_"), operator_source(op), _parameters(operator._schema.arguments))
    return CandidateFile(op, target, facts, *call, "torch", extensions)


def file_of_module(trace: Trace, target: str, path: str) -> CandidateFile:
    try:
        own = make_units(trace, Selection(unit=MODULE, module=(path,), for_candidates=True), MODULE)
    except NothingSelectedError as error:
        raise UserError(f"no module {path} is recorded in {target}", error.hint.partition(";")[0]) from error
    assert isinstance(own[0].operator, SubgraphOperator)
    links = own[0].operator.links
    facts = [*_table(own, make_cases(trace)), "", "Its tensors, in the order of their first use:", ""]
    for index, (spec, use) in enumerate(zip(links.outside, _first_uses(links), strict=True)):
        origin = "" if links.stored[index] else ", computed by an earlier call"
        facts.append(f"  {f'x{index}':<4} {_tensor_outline(spec):<24} {use}{origin}")
    settings = {leaf: _setting(leaf) for leaf in links.settings}
    function = _function_name(re.sub(r"\W", "_", path))
    source = recorded_source(links, function, settings)
    remark = f"The function makes the recorded calls of {own[0].op}: replace them."
    return CandidateFile(f"{OF_MODULES}{path}", target, facts, function, remark, source, "torch")


def _first_uses(links: Links) -> list[str]:
    uses: dict[int, str] = {}
    for call, sources in zip(links.calls, links.sources, strict=True):
        signature, schema = call.signature, schema_of(call.signature)
        positions = [item.name for item in schema.arguments] if schema else map(str, range(len(signature.args)))
        named = [*zip(positions, signature.args, strict=False), *signature.kwargs.items()]
        names = (name for name, value in named for _ in tensors(value))
        for name, source in zip(names, sources, strict=False):
            if isinstance(source, Outside):
                uses.setdefault(source.place, f"{name} of {signature.op}")
    return [uses[index] for index in range(len(links.outside))]


def _setting(leaf: Any) -> str:
    if isinstance(leaf, torch.device):
        return "x0.device"
    return repr(leaf) if isinstance(leaf, torch.dtype) else "None"


def file_of_sample(target: str) -> CandidateFile:
    if not target.startswith(PREFIX):
        return _file_of_folder(Path(target))
    name = target.removeprefix(PREFIX)
    if name not in samples():
        raise UserError(f"unknown sample {name!r}", did_you_mean(name, samples(), "see opgrip samples list"))
    own = samples()[name]
    facts = inspect.cleandoc(own.function.__doc__ or "").split("\n\n")[0].splitlines()
    facts += ["", *(f"{item}: {outlines(own.arguments(item), {})}" for item in own.configurations)]
    module, function = own.function.__module__, own.function.__name__
    arguments = inspect.signature(own.function).parameters.values()
    parameters = [item.name if item.default is item.empty else f"{item.name}={item.default!r}" for item in arguments]
    passed = [item.name for item in arguments]
    call = _call_of(function, f"{module}.{function}", (", ".join(parameters), ", ".join(passed)))
    return CandidateFile(target, target, facts, *call, module)


def _file_of_folder(folder: Path) -> CandidateFile:
    sample, *others = read_folders([folder])
    if others:
        raise UserError(f"{folder} contains several samples", f"name one of them, such as {sample.folder}")
    calls = [case.signature for case in sample_cases(str(sample.folder))]
    facts = [f"Gripped from {sample.origin}, with {counted(len(calls), 'call')}:", ""]
    facts += [outlines(call.args, call.kwargs) for call in calls]
    source = read_input(sample.folder / sample.file, MOST_BYTES, "grip it again").decode()
    remark = f"{sample.entry} is the gripped function: change it."
    return CandidateFile(f"sample:{sample.name}", str(sample.folder), facts, sample.entry, remark, source, "")


def _documentation(operator: Any) -> Iterator[str]:
    if not isinstance(operator, torch._ops.OpOverload):
        return
    yield from (f"Schema: {operator._schema}", "")
    name = str(operator._schema.name).partition("::")[2]
    public = name.removesuffix("_backward").strip("_").removeprefix("native_").removeprefix("linalg_")
    for place in DOCUMENTED:
        paragraphs = (
            (inspect.getdoc(getattr(place, public, None)) or "").split("\n\n") if hasattr(place, public) else []
        )
        sentences = [text for text in paragraphs if text.strip() and not MARKUP.search(text)]
        if sentences:
            what = "Gradient of" if name.endswith("_backward") else "Documentation of"
            text = ROLE.sub(r"\1", " ".join(sentences[0].split())).replace("`", "")
            yield from (*textwrap.wrap(f"{what} {place.__name__}.{public}: {text}", 116)[:4], "")
            return


def _table(own: Sequence[Case], cases: Iterable[Case]) -> Iterator[str]:
    step_us = fsum(case.captured_total_us for case in cases)
    share = f", {fsum(case.captured_total_us for case in own) / step_us:.2%} of the step" if step_us else ""
    yield f"{counted(sum(case.count for case in own), 'recorded call')}{share}:"
    yield from ("", f"{'of step':>8} {'count':>7} {'us a call':>11}  arguments")
    for case in own[:MOST_ROWS]:
        listed = outlines(case.signature.args, case.signature.kwargs)
        of_step = f"{case.captured_total_us / step_us:.2%}" if step_us else "-"
        us = f"{case.captured_us:,.2f}" if case.captured_us else "-"
        yield f"{of_step:>8} {case.count:>7,} {us:>11}  {listed}"
    if len(own) > MOST_ROWS:
        yield f"and {len(own) - MOST_ROWS:,} more signatures"


def outlines(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    def outline(leaf: Any) -> Any:
        return _Plain(_tensor_outline(leaf)) if hasattr(leaf, "shape") else leaf

    named = (f"{name}={map_leaves(outline, value)!r}" for name, value in kwargs.items())
    return ", ".join([*(repr(map_leaves(outline, value)) for value in args), *named])


class _Plain(str):
    __slots__ = ()

    __repr__ = str.__str__


def _tensor_outline(tensor: Any) -> str:
    text, right = tensor_outline(tensor.dtype, tensor.shape), contiguous(tuple(tensor.shape))
    if not isinstance(tensor, TensorSpec) or tensor.layout is not torch.strided or tensor.stride is None:
        return text if tensor.layout is torch.strided else f"{text} {plain_name(tensor.layout)}"
    moved = any(size > 1 and at != to for size, at, to in zip(tensor.shape, tensor.stride, right, strict=True))
    return f"{text} strides {list(tensor.stride)}" if moved else text


def _call_of(name: str, called: str, parameters: tuple[str, str]) -> tuple[str, str, str]:
    # name, remark and source of a function that makes a call
    function = _function_name(name)
    source = f"def {function}({parameters[0]}):\n    return {called}({parameters[1]})"
    return function, f"The function calls {called}: replace the call.", source


def _function_name(name: str) -> str:
    return name if name.isidentifier() and not keyword.iskeyword(name) else "candidate"


def _parameters(arguments: Iterable[Any]) -> tuple[str, str]:
    parameters, passed = [], []
    for item in arguments:
        try:
            default = _default(item.default_value)
        except UserError:
            return ANYTHING
        if keyword.iskeyword(item.name):
            return ANYTHING
        parameters += ["*"] if item.kwarg_only and "*" not in parameters else []
        parameters.append(f"{item.name}={default}" if item.has_default_value() else item.name)
        passed.append(f"{item.name}={item.name}" if item.kwarg_only else item.name)
    return ", ".join(parameters), ", ".join(passed)


def _default(value: Any) -> str:
    return f"({''.join(f'{plain(item)}, ' for item in value)})" if isinstance(value, list) else plain(value)
