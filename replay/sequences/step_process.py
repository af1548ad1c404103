"""Step replay in a separate process, so that a call that crashes, hangs or loses the device costs only its row.

If the process is not forked, it is `python -m opgrip.replay.sequences.step_process`, which reads its request from
stdin.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict

from opgrip.cli.progress import Tell, tell_nobody
from opgrip.errors import UserError
from opgrip.platform.heartbeat import IDLE, Heartbeat
from opgrip.platform.sandbox import Ended, answer, receive_request
from opgrip.replay.operators.devices import DeviceLostError, check_use, is_accelerator, use_device
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.sequences.step_replay import MOST_FAILURES, SequenceSettings, replay_sequence
from opgrip.replay.sequences.step_results import SequenceResult, from_plain
from opgrip.replay.workers.worker import end_without_device, limit_memory, start_child

MODULE = "opgrip.replay.sequences.step_process"


def sequence_settings(workload: Workload) -> SequenceSettings:
    """Return the settings for a step replay of a workload."""
    request = workload.request
    return SequenceSettings(
        place=workload.place,
        device=workload.device,
        seed=request.inputs.seed,
        extensions=request.inputs.extensions,
        repeats=request.effort.iterations,
        precision=request.effort.precision,
        room_bytes=request.limits.memory_limit,
        timeout_s=request.limits.timeout,
        mode=request.modes.mode[-1],
        tolerance=request.tolerance,
    )


def replay_apart(workload: Workload, tell: Tell = tell_nobody, may_fork: bool = True) -> SequenceResult:
    """Replay all calls of a trace in order in a separate process; a call that ends the process is left out of the next
    try.

    may_fork : True if this process has not used torch yet, so that it can be forked
    Raises `UserError` if the trace contains no calls, if a process ends without a call to blame, or if too many
    processes end.
    """
    excluded: dict[int, tuple[str, str]] = {}
    settings = sequence_settings(workload)

    def run(_: int, output: int, heartbeat: Heartbeat) -> None:
        limit_memory(settings.room_bytes, settings.device)
        answer(lambda tell: asdict(replay_sequence(workload.trace, settings, tell, excluded, heartbeat.enter)), output)

    while True:
        with start_child(workload, may_fork, run, MODULE, {"excluded": list(excluded.items())}) as child:
            result = child.result(tell)
        if not isinstance(result, Ended):
            return from_plain(result)
        if result.item == IDLE or result.item in excluded or len(excluded) == MOST_FAILURES:
            raise UserError("the process that runs the calls cannot continue", result.reason)
        excluded[result.item] = result.status, result.reason


def main() -> int:
    """Replay a step on behalf of the parent process."""
    request, heartbeat, output = receive_request()
    # the parent reports the last line that a dying process writes as the reason
    warnings.simplefilter("ignore")
    workload = load_workload(RunRequest.from_plain(request["request"]))
    settings, excluded = sequence_settings(workload), dict(request["excluded"])
    use_device(settings.device)
    if not is_accelerator(settings.device):
        limit_memory(settings.room_bytes, settings.device)
    try:
        try:
            answer(
                lambda tell: asdict(replay_sequence(workload.trace, settings, tell, excluded, heartbeat.enter)), output
            )
        except Exception as error:
            # if the device is lost, restoring its random state has raised this error instead
            check_use(settings.device, error)
            raise
    except DeviceLostError as error:
        end_without_device(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
