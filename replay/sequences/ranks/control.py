"""Control channel between ranks: it exchanges data outside the replayed collectives, and ends all ranks if one ends."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from time import monotonic
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from opgrip.cli.command import USAGE_ERROR, counted, printable
from opgrip.errors import UserError, one_line
from opgrip.replay.sequences.step_options import RankLaunch

T = TypeVar("T")
BEAT_S = 0.5  # time in seconds between two heartbeats
SILENT_S = 4 * BEAT_S  # seconds without a heartbeat after which a rank counts as ended once its collective has failed
_turns = count()  # numbers of the replays in this process, equal in all ranks, for separate keys in the store


class Control:
    """Process group of all ranks of a replay, with a thread in each rank that sends heartbeats.

    timeout_s : all ranks end if one of them sends no heartbeat for this time
    """

    def __init__(self, launch: RankLaunch, timeout_s: float) -> None:
        self.launch, self.timeout_s = launch, timeout_s
        timeout, prefix = timedelta(seconds=timeout_s), f"opgrip/{next(_turns)}"
        try:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            distributed.init_process_group(
                "gloo", store=PrefixStore(f"{prefix}/group", store), rank=rank, world_size=world_size, timeout=timeout
            )
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{launch.address}:{launch.port}"
            reason = printable(str(error).splitlines()[0])[:160]
            raise UserError(
                f"rank {launch.rank} of {launch.world_size} cannot reach the other ranks at {where} ({reason})",
                "start as many processes as --nproc-per-node states, or wait longer with --collective-timeout",
            ) from error
        self._is_ending = False
        self._life = _Life(launch, prefix, timeout_s, self._end_at_once)
        self._life.start()

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._life.stop()
        if kind is None:
            with suppress(RuntimeError):
                distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.launch.rank == 0

    def most(self, *numbers: int) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._waiting_for_others(lambda: distributed.all_reduce(tensor, distributed.ReduceOp.MAX))
        return [int(number) for number in tensor]

    def share(self, plain: Any) -> list[Any]:
        """Send the JSON-compatible value `plain` to all ranks, and return a list with the value of each rank."""
        text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
        return [json.loads(bytes(part.numpy())) for part in self.share_tensors(text)]

    def share_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        length = torch.tensor([len(tensor)])
        lengths = [torch.empty_like(length) for _ in range(self.launch.world_size)]
        self._waiting_for_others(lambda: distributed.all_gather(lengths, length))
        counts = [int(item) for item in lengths]
        padded = torch.zeros(max(counts), dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        self._waiting_for_others(lambda: distributed.all_gather(parts, padded))
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def together(self, do: Callable[[], T]) -> T:
        problem, result = None, None
        try:
            result = do()
        except UserError as error:
            problem = [error.problem, error.hint]
        self._waiting_for_others(self._life.meet)
        problems = [(rank, item) for rank, item in enumerate(self.share(problem)) if item]
        if problems:
            rank, (what, hint) = problems[0]
            if not self.is_first:
                raise SystemExit(USAGE_ERROR)
            raise UserError(what if rank == 0 else f"rank {rank}: {what}", hint)
        return result  # type: ignore[return-value]

    def refuse(self, reason: str) -> NoReturn:
        self._is_ending = True
        if not self._life.is_first_to_tell():
            raise SystemExit(USAGE_ERROR)
        raise UserError(
            f"rank {self.launch.rank}: {reason}", "replay only the collectives, on generated values: --only collectives"
        )

    def lost(self, error: Exception) -> NoReturn:
        self._is_ending = True
        silent = self._life.silent_ranks(SILENT_S)
        if not self._life.is_first_to_tell():
            raise SystemExit(USAGE_ERROR)
        raise UserError(*_words(silent, self.timeout_s, one_line(error))) from error

    def _waiting_for_others(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            self.lost(error)

    def _end_at_once(self, silent: Sequence[int], was_told: bool) -> None:
        # in the heartbeat thread, because the main thread may be waiting for a rank that has ended
        if self._is_ending:
            # the main thread reports the end, or knows that another rank does
            return
        if (silent or not was_told) and self._life.is_first_to_tell():
            what, hint = _words(silent, self.timeout_s, "")
            print(f"opreplay: error: {what}: {hint}", file=sys.stderr, flush=True)
        os._exit(USAGE_ERROR)


def _words(silent: Sequence[int], timeout_s: float, error: str) -> tuple[str, str]:
    if silent:
        which = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        has, does = ("has", "does") if len(silent) == 1 else ("have", "do")
        return f"{which} {has} ended, or {does} not respond", "all ranks end; see its last output"
    reason = f" ({printable(error.splitlines()[0])[:160]})" if error else ""
    return (
        f"a rank did not reach a collective within {counted(round(timeout_s), 'second')}{reason}",
        "all ranks end; wait longer with --collective-timeout",
    )


# sends heartbeats and listens for those of others, because a process that waits in a collective runs no Python code in
# its main thread
class _Life(threading.Thread):
    def __init__(
        self, launch: RankLaunch, prefix: str, timeout_s: float, end: Callable[[Sequence[int], bool], None]
    ) -> None:
        super().__init__(name="opgrip ranks", daemon=True)
        self._launch, self._prefix, self._timeout_s, self._end = launch, prefix, timeout_s, end
        self._store = TCPStore(
            launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._lock = threading.Lock()
        self._beats = self._meetings = 0
        self._heard = dict.fromkeys(range(launch.world_size), (-1, monotonic()))
        self._stopping = False
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        # Python allows only the main thread to set signal handlers
        self._hears_signals = threading.current_thread() is threading.main_thread()
        if self._hears_signals:
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
            self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            signaled = signal.SIGTERM in self._wait()
            if self._stopping:
                return
            try:
                silent = self._listen(SILENT_S if signaled else self._timeout_s, waits=signaled)
            except RuntimeError:
                # the store has ended with the process that holds it
                silent = [0]
            if signaled or silent:
                self._end(silent, signaled)
                return

    def stop(self) -> None:
        self._stopping = True
        if self._hears_signals:
            signal.set_wakeup_fd(self._waker_before)
            signal.signal(signal.SIGTERM, self._before)
        os.write(self._waker, b"\0")
        self.join()
        for end in (self._awake, self._waker):
            os.close(end)

    def meet(self) -> None:
        self._meetings += 1
        key = f"{self._prefix}/here/{self._meetings}"
        with self._lock:
            here = self._store.add(key, 1)
        while here < self._launch.world_size:
            threading.Event().wait(BEAT_S / 10)
            with self._lock:
                here = self._store.add(key, 0)

    def silent_ranks(self, seconds: float) -> list[int]:
        try:
            return self._listen(seconds, waits=True)
        except RuntimeError:
            return [0]

    def is_first_to_tell(self) -> bool:
        try:
            with self._lock:
                return self._store.add(f"{self._prefix}/told", 1) == 1
        except RuntimeError:
            return self._launch.rank <= 1

    def _wait(self) -> bytes:
        ready, _, _ = select.select([self._awake], [], [], BEAT_S)
        return os.read(self._awake, 64) if ready else b""

    def _listen(self, seconds: float, waits: bool) -> list[int]:
        until = monotonic() + (seconds if waits else 0)
        while True:
            silent = self._exchange(seconds)
            if monotonic() >= until:
                return silent
            threading.Event().wait(BEAT_S / 2)

    def _exchange(self, seconds: float) -> list[int]:
        with self._lock:
            self._beats += 1
            self._store.set(f"{self._prefix}/beat/{self._launch.rank}", str(self._beats))
            now = monotonic()
            silent = []
            for rank, (beat, since) in self._heard.items():
                key = f"{self._prefix}/beat/{rank}"
                newest = int(self._store.get(key)) if self._store.check([key]) else -1
                if newest != beat:
                    self._heard[rank] = newest, now
                elif rank != self._launch.rank and now - since >= seconds:
                    silent.append(rank)
            return silent
