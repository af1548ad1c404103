"""Replays cases one after the other; a bad one costs its row and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import nvtx
import torch

from opgrip.replay.cases import Case
from opgrip.replay.contexts import restored
from opgrip.replay.inputs import DeviceMap, Inputs
from opgrip.replay.operators import TRUSTED_EXTENSIONS, Operator, Unsupported, find_operator
from opgrip.replay.results import FAILED, OK, SKIPPED, UNSUPPORTED, Result, describe_shapes, same_outputs
from opgrip.replay.timing import Arguments, Effort, measure, synchronizer
from opgrip.replay.work import bytes_of, flops_of
from opgrip.traces.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.errors import one_line

NVTX_DOMAIN = "opgrip"
EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Settings:
    """How cases are replayed.

    Attributes
    ----------
    place : where tensors go that were recorded on a device
    device : what the results name, and what is waited for
    extensions : extension modules whose functions may be called
    """

    place: DeviceMap
    device: str
    effort: Effort = Effort()  # noqa: RUF009 - frozen
    seed: int = 0
    extensions: Collection[str] = TRUSTED_EXTENSIONS


def replay(cases: Sequence[Case], settings: Settings) -> Iterator[Result]:
    """A result for each case, in order, each as soon as it is there."""
    for case in cases:
        yield _replay_case(case, settings)


def _replay_case(case: Case, settings: Settings) -> Result:
    result = Result(
        case=case.number,
        op=case.op,
        shapes=describe_shapes(case.signature),
        count=case.count,
        share=case.share,
        mode=EAGER,
        device=settings.device,
        status=OK,
        captured_us=case.captured_us,
        captured_total_us=case.captured_total_us,
        bytes=bytes_of(case.signature),
    )
    if case.signature.raised is not None:
        return replace(result, status=SKIPPED, error=f"it raised when it was captured: {case.signature.raised}")
    try:
        # captured below autograd, so replayed without it
        with restored(case.context), torch.no_grad():
            return _measure_case(case, settings, result)
    except Unsupported as error:
        return replace(result, status=UNSUPPORTED, error=str(error))
    except NotImplementedError as error:
        return replace(result, status=UNSUPPORTED, error=one_line(error, 300))
    except Exception as error:
        return replace(result, status=FAILED, error=one_line(error, 300))


def _measure_case(case: Case, settings: Settings, result: Result) -> Result:
    signature = case.signature
    operator = find_operator(signature, settings.extensions)
    inputs = Inputs(signature.args, signature.kwargs, case.values, settings.place, settings.seed)
    inputs.keep()
    args, kwargs = inputs.make()
    outputs = operator.function(*args, **kwargs)
    match = same_outputs(signature.outputs, _outlines(outputs))
    flops = flops_of(operator.function, args, kwargs, outputs)
    del args, kwargs, outputs
    with nvtx.annotate(f"{case.op} #{case.number}", domain=NVTX_DOMAIN):
        timing = measure(
            operator.function, _supplier(operator, inputs), synchronizer(_device_of(case, settings)), settings.effort
        )
    return replace(
        result,
        outputs_match=match,
        flops=flops,
        samples=len(timing.times_ns),
        median_us=timing.quantile_us(0.5),
        p10_us=timing.quantile_us(0.1),
        p90_us=timing.quantile_us(0.9),
    )


def _supplier(operator: Operator, inputs: Inputs) -> Callable[[], Arguments]:
    """Gives every run the arguments in their first state, where runs can change them."""
    if not operator.mutates:
        same = inputs.make()
        return lambda: same

    def restored() -> Arguments:
        inputs.restore()
        return inputs.make()

    inputs.restore()
    return restored


def _device_of(case: Case, settings: Settings) -> str:
    devices = {settings.place(spec.device) for spec in tensors([case.signature.args, case.signature.kwargs])}
    return next((device for device in sorted(devices) if device != "cpu"), settings.device)


def _outlines(outputs: Any) -> Any:
    """Outputs with a spec of shape and dtype in each tensor's place."""

    def outline(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorSpec(tuple(leaf.shape), None, leaf.dtype, str(leaf.device))

    return map_leaves(outline, outputs)
