"""`StepCapture`: a capture of whole steps, in whichever threads the program runs them."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from opgrip.capture.hooks.compiled import CompiledWatch
from opgrip.capture.hooks.scopes import ThreadWatch
from opgrip.capture.on_demand.names import unused
from opgrip.capture.program.environment import describe_autocast
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.session.capture import Capture
from opgrip.capture.session.schedule import ALWAYS, Schedule, Watching
from opgrip.capture.torch_compat.torch_private import innermost_mode
from opgrip.cli.output_files import give_name
from opgrip.errors import ExistingFileError


@dataclass(slots=True)
class ThreadStep:
    """A step that a thread is in.

    Attributes
    ----------
    mode : records the thread
    mark : labels the step's calls; None for no label
    """

    mode: ThreadMode
    mark: record_function | None = None


class StepCapture(Capture):
    """Records the threads that are in a step, from when each enters one to when it leaves it.

    Threads that a step starts are not recorded: a mode can be taken off by its own thread alone, and one that stays on
    would slow the thread for as long as it lives.

    Parameters
    ----------
    path : the trace file, with the rank in its name where it is to be
    warmup : whether steps are to be watched before those that are recorded
    options : of `Capture`
    """

    def __init__(self, path: Path, warmup: bool, **options: Any) -> None:
        super().__init__(path, schedule=Schedule(warmup=1) if warmup else ALWAYS, **options)
        self.path = path
        self._file = path.absolute()
        self._recorder.threads.by_steps = True
        watches = [watch for watch in self._watching.watches if not isinstance(watch, ThreadWatch)]
        # while no step has begun, compiled code runs as ever
        self._of_compiled = [watch for watch in watches if isinstance(watch, CompiledWatch)]
        self._hooks, self._hooks_lock = ExitStack(), threading.Lock()
        others = [watch for watch in watches if watch not in self._of_compiled]
        self._watching = Watching(self._recorder, others, with_mode=False)

    def open(self) -> None:
        """Begin the file, and watch what steps call; none is recorded yet."""
        try:
            self._open()
            self.set_learning(self.schedule.warmup > 0)
            # steps are counted elsewhere
            self.schedule = ALWAYS
            self._watching.resume()
            self.discard(if_empty=True)
        except BaseException:
            self.discard()
            self.close()
            raise

    def close(self) -> None:
        """End the recording, and write the rest of the trace."""
        flusher = self._flusher
        super().close()
        with self._hooks_lock:
            self._of_compiled.clear()
            self._hooks.close()
        if flusher is not None and flusher.writer is not None and isinstance(self.failure, ExistingFileError):
            self._take_another_name(flusher.writer.unfinished)

    def _take_another_name(self, part: Path | None) -> None:
        """Where another process has written a file of our name meanwhile: none is replaced."""
        while part is not None:
            self.path = unused(Path(self._file))
            try:
                give_name(part, self.path, force=False)
            except ExistingFileError:
                continue
            self.failure = self.problem = None
            return

    def set_learning(self, learning: bool) -> None:
        """Throw away the calls of steps from now on, or record them."""
        if self._flusher is not None:
            self._flusher.set_learning(learning)

    def leaves_out_step(self) -> bool:
        """Whether there is no budget for the step that begins now in this thread."""
        return self._recorder.leaves_out_step()

    def pass_step(self) -> None:
        """Tell that what this thread does now is no step that the budget was asked for."""
        self._recorder.leave_steps()

    def enter_step(self, nested: bool, label: str | None) -> ThreadStep:
        """Record this thread from now on.

        Parameters
        ----------
        nested : the step ends before anything does that was there when it began
        label : marks the step's calls in the trace; None for no mark

        Raises
        ------
        RuntimeError : where it runs under a mode of the program, which might end before the step does
        """
        if not nested and innermost_mode() is not None:
            raise RuntimeError("a torch mode of the program is on")
        with self._hooks_lock:
            while self._of_compiled:
                self._hooks.enter_context(self._of_compiled.pop())
        mode = self._recorder.threads.here()
        mode.settle()
        mode.set_autocast(describe_autocast())
        mode.look_at_settings()
        mode.__enter__()
        mode.idle = self._recorder.threads.idle
        step = ThreadStep(mode)
        if label is not None:
            step.mark = record_function(label)
            step.mark.__enter__()
        return step

    def leave_step(self, step: ThreadStep) -> bool:
        """Record this thread no more; False where a mode of the program is on above ours, which stays until then.

        Parameters
        ----------
        step : what `enter_step` gave, in the same thread
        """
        mark, step.mark = step.mark, None
        try:
            if mark is not None:
                mark.__exit__(None, None, None)
        finally:
            step.mode.idle = True
        if innermost_mode() not in (step.mode, None):
            return False
        step.mode.__exit__(None, None, None)
        return True

    def _warn(self) -> None:
        # whoever asked for the recording is told, and not the program
        pass

    def _begin_in_child(self) -> None:
        """Leave the recording to the parent: a child is asked itself."""
        flusher, self._flusher = self._flusher, None
        self._forks.active = False
        if flusher is not None and flusher.writer is not None:
            flusher.writer.abandon()
        if self._recorder.fitter.full is not None:
            self._recorder.fitter.full.abandon()
        self._watching.pause()
        # another thread of the parent may have held it
        self._hooks_lock = threading.Lock()
        self._of_compiled.clear()
        self._hooks.close()
