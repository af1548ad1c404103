"""What is measured within a thread's calls beside the host's clock: the time of their device, their page faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opgrip.capture.program.accelerators import accelerator_of
from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.signatures import tensors_in
from opgrip.capture.timing.page_faults import may_need_pages

Run = Callable[..., Any]


def measured(
    recorder: Recorder,
    mode: ThreadMode,
    number: int,
    run: Run,
    func: Any,
    values: Sequence[Any],
    started: Callable[[], int],
    on_device: bool = True,
) -> Run | None:
    """What a call runs so that these are kept; None where it has neither.

    Parameters
    ----------
    mode : of the thread
    number : of the signature
    func : the operator; None for what is none
    values : its arguments
    started : the start of the call that runs, in ns, by which they are asked for
    on_device : whether it has a time of its own on a device
    """
    tensors = tensors_in(values)
    device = accelerator_of(tensors, values) if on_device else None
    if device is not None:
        kernels = recorder.kernels
        if kernels is None:
            return mode.device.timed(run, device, started)
        kernels.expect(number, device)
        return run
    if may_need_pages(func, tensors, recorder.output_bytes(number)):
        return mode.faults.counted(run, started)
    return None
