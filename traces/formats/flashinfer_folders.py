"""Writer of a trace as a FlashInfer-Bench data set: signatures that differ only in sizes share a kernel definition.

Sizes that differ between the signatures of a definition become variable axes, and sizes that never differ become
constants. Sizes that are always equal to each other become one axis.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import math
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opgrip.traces.formats.operator_schemas import schemas_of
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.io.tensor_file import STORED_AS_THEY_ARE, write_foreign_tensors
from opgrip.traces.schema.arguments import TensorSpec, leaves
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.schema.tensor_specs import contiguous, plain_name
from opgrip.traces.table.trace import Trace

# dtypes that both torch and a definition can name
DTYPES = frozenset(
    {
        *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "bool"),
    }
)
# maximum number of elements of a tensor whose values are stored; larger tensors get random values
STORED_ELEMENTS = 1 << 20


class NoForm(ValueError):
    """Raised if a signature cannot be written as a kernel definition."""


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    """A kernel definition, and the signatures that it represents.

    reference : Python text that calls the operator
    inputs, outputs : name and dtype of each input and output
    members : signatures, each with the shapes of its inputs and outputs
    """

    op: str
    reference: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    members: list[tuple[Signature, list[tuple[int, ...]], list[tuple[int, ...]]]] = field(default_factory=list)


def write_folder(trace: Trace, folder: Path, losses: Losses) -> None:
    """Write the kernel definitions, the workloads, and the values of integer tensors, on which operators depend."""
    counts = Counter(trace.own_calls["signature"].tolist())
    firsts = trace.own_calls.drop_duplicates("signature").reset_index().set_index("signature")["index"]
    for name in ("definitions", "workloads"):
        (folder / name).mkdir()
    signatures = [item for item in trace.signatures if item.number in counts]
    for kernel in _kernels(signatures, counts, losses):
        _write_kernel(kernel, trace, folder)
        for signature, _, _ in kernel.members:
            call = int(firsts[signature.number])
            for what in _lost(signature, counts[signature.number]):
                losses.lose(call, signature.op, what)


def _lost(signature: Signature, count: int) -> Iterator[str]:
    tensors = [leaf for leaf in leaves((signature.args, signature.kwargs)) if isinstance(leaf, TensorSpec)]
    if count > 1:
        yield "how often it was called"
    if any(tensor.stride != contiguous(tensor.shape) or tensor.offset for tensor in tensors):
        yield "strides of tensors"
    if any(tensor.values is not None and tensor.dtype.is_floating_point for tensor in tensors):
        yield "values of floats"
    if any(tensor.device != "cpu" for tensor in tensors):
        yield "devices of tensors"


def _kernels(signatures: Iterable[Signature], counts: Mapping[int, int], losses: Losses) -> Iterator[KernelDefinition]:
    """Yield kernel definitions, each for a group of signatures that differ only in sizes.

    A signature with an output size that is not an axis forms a separate group.
    """
    kernels: dict[str, KernelDefinition] = {}
    for signature in signatures:
        try:
            kernel = _kernel(signature)
        except NoForm as error:
            losses.skip(signature.op, str(error), counts[signature.number])
            continue
        key = f"{kernel.reference} {kernel.inputs} {kernel.outputs} {_ranks(kernel)}"
        if key in kernels:
            kernels[key].members.extend(kernel.members)
        else:
            kernels[key] = kernel
    for kernel in kernels.values():
        if _axes(kernel) is not None:
            yield kernel
        else:
            for member in kernel.members:
                yield KernelDefinition(kernel.op, kernel.reference, kernel.inputs, kernel.outputs, [member])


def _ranks(kernel: KernelDefinition) -> list[int]:
    _, inputs, outputs = kernel.members[0]
    return [len(shape) for shape in (*inputs, *outputs)]


def _kernel(signature: Signature) -> KernelDefinition:
    if signature.kind != OPERATOR:
        raise NoForm("not an operator of torch's dispatcher")
    schema = next(iter(schemas_of(signature.op)), None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    inputs: list[tuple[str, TensorSpec]] = []

    def text(name: str, value: Any) -> str:
        if isinstance(value, TensorSpec):
            free = f"{name}_" if keyword.iskeyword(name) else name
            inputs.append((free, value))
            return free
        if isinstance(value, list | tuple):
            items = [text(f"{name}_{place}", item) for place, item in enumerate(value)]
            return f"[{', '.join(items)}]"
        return _literal(value)

    parts = [text(names[place] if place < len(names) else f"x{place}", arg) for place, arg in enumerate(signature.args)]
    parts += [f"{name}={text(name, value)}" for name, value in signature.kwargs.items()]
    outputs = list(_outputs(signature.outputs))
    parameters = ", ".join(name for name, _ in inputs)
    call = f"torch.ops.{signature.op}({', '.join(parts)})"
    return KernelDefinition(
        signature.op,
        f"import torch\n\n\ndef run({parameters}):\n    return {call}\n",
        tuple((name, _dtype(tensor)) for name, tensor in inputs),
        tuple((name, _dtype(tensor)) for name, tensor in outputs),
        [(signature, [tensor.shape for _, tensor in inputs], [tensor.shape for _, tensor in outputs])],
    )


def _literal(value: Any) -> str:
    match value:
        case float() if not math.isfinite(value):
            raise NoForm("unsupported: infinite or NaN number")
        case None | bool() | int() | float() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
    raise NoForm(f"the format cannot represent a value of type {type(value).__name__}")


def _outputs(tree: Any) -> Iterator[tuple[str, TensorSpec]]:
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, TensorSpec)]
    for place, tensor in enumerate(tensors):
        yield ("output" if len(tensors) == 1 else f"output_{place}"), tensor


def _dtype(tensor: TensorSpec) -> str:
    name = plain_name(tensor.dtype)
    if name not in DTYPES:
        raise NoForm(f"the format has no dtype {name}")
    if tensor.layout != torch.strided or tensor.cls is not None or tensor.made_of is not None:
        raise NoForm("unsupported: tensor that is sparse, quantized or of a subclass")
    return name


Sizes = tuple[int, ...]  # sizes of one dimension in all members


def _axes(kernel: KernelDefinition) -> dict[Sizes, str] | None:
    """Return the name of each axis of a kernel definition, by the axis's sizes in all signatures of the definition.

    The result is None if an output size is neither an input size nor constant.
    """
    axes: dict[Sizes, str] = {}
    variables = 0
    for is_output in (False, True):
        for sizes in _dimensions(kernel, is_output):
            if sizes in axes:
                continue
            if len(set(sizes)) == 1:
                axes[sizes] = f"size_{sizes[0]}"
            elif is_output:
                return None
            else:
                axes[sizes] = f"n{variables}"
                variables += 1
    return axes


def _dimensions(kernel: KernelDefinition, is_output: bool) -> Iterator[Sizes]:
    shapes = [member[2] if is_output else member[1] for member in kernel.members]
    for tensor in zip(*shapes, strict=True):
        yield from zip(*tensor, strict=True)


def _write_kernel(kernel: KernelDefinition, trace: Trace, folder: Path) -> None:
    axes = _axes(kernel)
    assert axes is not None, "it was looked at before"
    kind = kernel.op.split(".")[1]
    parts = (kernel.op, kernel.reference, kernel.inputs, kernel.outputs, sorted(axes.items()))
    name = f"{kind}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"

    def specs(tensors: Sequence[tuple[str, str]], is_output: bool) -> dict[str, Any]:
        dimensions = iter(_dimensions(kernel, is_output))
        shapes = kernel.members[0][2] if is_output else kernel.members[0][1]
        return {
            tensor: {"shape": [axes[next(dimensions)] for _ in shape], "dtype": dtype}
            for (tensor, dtype), shape in zip(tensors, shapes, strict=True)
        }

    definition = {
        "name": name,
        "op_type": kind,
        "tags": [f"operator:{kernel.op}"],
        "axes": {
            axis: {"type": "const", "value": sizes[0]} if axis.startswith("size_") else {"type": "var"}
            for sizes, axis in axes.items()
        },
        "inputs": specs(kernel.inputs, False),
        "outputs": specs(kernel.outputs, True),
        "reference": kernel.reference,
    }
    path = folder / "definitions" / kind / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(definition, indent=2))
    lines = []
    for place, (signature, _, _) in enumerate(kernel.members):
        identity = str(uuid.UUID(hashlib.sha256(f"{name} {place}".encode()).hexdigest()[:32]))
        variables = {axis: sizes[place] for sizes, axis in axes.items() if not axis.startswith("size_")}
        inputs = _sources(
            kernel, signature, trace, folder, f"blob/workloads/{kind}/{name}/{name}_{identity}.safetensors"
        )
        workload = {"uuid": identity, "axes": variables, "inputs": inputs}
        lines.append(json.dumps({"definition": name, "solution": None, "workload": workload, "evaluation": None}))
    path = folder / "workloads" / kind / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def _sources(kernel: KernelDefinition, signature: Signature, trace: Trace, folder: Path, file: str) -> dict[str, Any]:
    """Return, for each input of a signature, how a workload gets its values, as a JSON object.

    Values of integer and boolean tensors are drawn from the value model and stored in `file`, a path in `folder`.
    """
    specs = [leaf for leaf in leaves((signature.args, signature.kwargs)) if isinstance(leaf, TensorSpec)]
    stored: dict[str, torch.Tensor] = {}
    for (name, _), spec in zip(kernel.inputs, specs, strict=True):
        model = trace.values.get(spec.values) if spec.values is not None else None
        is_whole = not spec.dtype.is_floating_point and spec.dtype in STORED_AS_THEY_ARE
        if model is not None and is_whole and 0 < math.prod(spec.shape) <= STORED_ELEMENTS:
            stored[name] = model.draw(spec.shape, spec.dtype, torch.Generator().manual_seed(0))
    if stored:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_foreign_tensors(path, stored)
    return {
        name: {"type": "safetensors", "path": file, "tensor_key": name} if name in stored else {"type": "random"}
        for name, _ in kernel.inputs
    }
