"""The sizes of what calls of a trace give when they run again, in a process of its own: a line of JSON for each call.

python -m opgrip.tools.redaction.shapes TRACE NUMBER ...
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opgrip.errors import one_line
from opgrip.replay.cases.cases import contexts_of
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces import load
from opgrip.traces.schema.arguments import leaves, tensors
from opgrip.traces.schema.records import Signature

Shapes = list[list[int]]


def main(path: str, numbers: Sequence[str]) -> None:
    """Print the sizes of signatures' outputs."""
    trace = load(Path(path), partial=True)
    contexts = contexts_of(trace, trace.own_distinct_calls)
    signatures = {item.number: item for item in trace.signatures}
    for number in map(int, numbers):
        signature = signatures[number]
        with warnings.catch_warnings(), restored(contexts.get(number, {})):
            warnings.simplefilter("ignore")
            print(json.dumps({"signature": number, **_run(signature, trace.values)}), flush=True)


def recorded_shapes(signature: Signature) -> Shapes:
    """The sizes of what the signature's first call gave."""
    return [list(spec.shape) for spec in tensors(signature.outputs)]


def _run(signature: Signature, values: Mapping[int, Any]) -> dict[str, Any]:
    device = next((spec.device for spec in tensors([signature.args, signature.kwargs])), "cpu")
    place = device_map(device, None if _is_there(device) else "cpu")
    try:
        operator = find_operator(signature)
        args, kwargs = Inputs(signature.args, signature.kwargs, values, place, seed=0).make()
        result = operator.function(*args, **kwargs)
    except Unsupported as error:
        return {"unsupported": one_line(error)}
    except Exception as error:
        return {"error": one_line(error)}
    return {"shapes": [list(tensor.shape) for tensor in _tensors(result)]}


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor))


def _is_there(device: str) -> bool:
    kind = device.partition(":")[0]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind == "cpu" or (accelerator is not None and accelerator.type == kind)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
