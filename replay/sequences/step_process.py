"""Step replay in a process of its own, so that a call that crashes, hangs or loses the device costs only its row.

`python -m opgrip.replay.sequences.step_process` is that process when it is not forked; it reads its request from stdin.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict

from opgrip.cli.progress import Tell, tell_nobody
from opgrip.errors import UserError
from opgrip.replay.operators.devices import DeviceLostError, check_use, is_accelerator, use_device
from opgrip.replay.run.settings import Settings
from opgrip.replay.sequences.dry_run import Excluded
from opgrip.replay.sequences.step_replay import MOST_FAILURES, SequenceSettings, replay_sequence
from opgrip.replay.sequences.step_results import SequenceResult, from_plain
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.watch import NOTHING, Watch
from opgrip.replay.workers.worker import end_without_device, limit_memory, receive
from opgrip.replay.workers.worker_processes import Ended, ForkLimits, answer, run_in_fork, run_spawned

MODULE = "opgrip.replay.sequences.step_process"


def sequence_settings(settings: Settings) -> SequenceSettings:
    """Return the settings of a step replay."""
    return SequenceSettings(
        place=settings.place,
        device=settings.device,
        seed=settings.inputs.seed,
        extensions=settings.inputs.extensions,
        repeats=settings.effort.iterations,
        precision=settings.effort.precision,
        room_bytes=settings.limits.memory_limit,
        timeout_s=settings.limits.timeout,
        mode=settings.modes.mode[-1],
        tolerance=settings.tolerance,
    )


def replay_apart(job: Job, loaded: Loaded, tell: Tell = tell_nobody, may_fork: bool = True) -> SequenceResult:
    """Replay all calls of a job's trace in another process; a call that ends the process is left out of the next one.

    An accelerator needs a new process, since a fork of a process that has used it cannot use it.

    Parameters
    ----------
    may_fork : False if this process has used torch, so that its forks cannot

    Raises
    ------
    UserError : if the trace holds no calls, or processes end without a call to blame, or too many do
    """
    excluded: dict[int, tuple[str, str]] = {}
    while True:
        result = _run(job, loaded, excluded, tell, may_fork)
        if not isinstance(result, Ended):
            return result
        if result.case == NOTHING or result.case in excluded or len(excluded) == MOST_FAILURES:
            raise UserError("the process that runs the calls cannot go on", result.reason)
        excluded[result.case] = result.status, result.reason


def _run(job: Job, loaded: Loaded, excluded: Excluded, tell: Tell, may_fork: bool) -> SequenceResult | Ended:
    settings = sequence_settings(loaded.settings)
    if is_accelerator(settings.device) or not may_fork:
        request = {"job": asdict(job), "excluded": list(excluded.items())}
        plain = run_spawned(MODULE, request, settings.timeout_s, tell)
    else:
        plain = run_in_fork(
            lambda announce, tell: asdict(replay_sequence(loaded.trace, settings, tell, excluded, announce)),
            ForkLimits(settings.device, settings.room_bytes, settings.timeout_s),
            tell,
        )
    return plain if isinstance(plain, Ended) else from_plain(plain)


def main() -> int:
    """Replay a step for the process that started this one."""
    request, output = receive()
    watch = Watch(request["watch"])
    # the last words of a process that dies shall tell why
    warnings.simplefilter("ignore")
    loaded = Job.from_plain(request["job"]).load()
    settings, excluded = sequence_settings(loaded.settings), dict(request["excluded"])
    use_device(settings.device)
    if not is_accelerator(settings.device):
        limit_memory(settings.room_bytes, settings.device)
    try:
        try:
            answer(lambda tell: asdict(replay_sequence(loaded.trace, settings, tell, excluded, watch.entered)), output)
        except Exception as error:
            # where the device is lost, putting its random state back raised in the loss's place
            check_use(settings.device, error)
            raise
    except DeviceLostError as error:
        end_without_device(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
