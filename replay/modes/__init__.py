"""Modes: ways to run a call, such as eager or compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import did_you_mean, positive
from opgrip.cli.option_types import names
from opgrip.cli.options import IDENTITY, RUN, option, titled
from opgrip.cli.plugins import Registry, install_command
from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.replay.operators.memory import Arguments, CallMemory, Function

EAGER, CANDIDATE = "eager", "candidate"
# argument of modes that can search for faster code, as in `tvm:untuned`; with it, they do not search
UNTUNED = "untuned"


@titled("execution")
@dataclass(frozen=True, slots=True)
class Tuning:
    trials: int = option(
        0,
        "with --mode tvm: let the compiler try this number of programs, and use the fastest",
        word="tune",
        parse=positive,
        metavar="TRIALS",
        only=("single cases",),
        role=IDENTITY,
    )
    tuner: str | None = option(
        None,
        "with --tune: search algorithm: evolutionary (default), replay-trace or replay-func",
        metavar="NAME",
        only=("single cases",),
        role=IDENTITY,
        column="tune",
    )

    def of(self, mode: str) -> Tuning:
        named_mode, argument = find_mode(mode)
        return self if named_mode.tuners and argument != UNTUNED else Tuning()

    def words_of(self, mode: str) -> str:
        tuning = self.of(mode)
        return " ".join(filter(None, (str(tuning.trials), tuning.tuner))) if tuning.trials else ""


@dataclass(frozen=True, slots=True)
class Task:
    """A call that a mode is to prepare.

    args, kwargs : example arguments, which the mode may overwrite
    others : more example arguments, with other values or shapes
    weights : indices of tensor arguments that no call of the program makes or writes, so that they may be converted
        once
    grad : True if gradients of its results are needed
    argument : text after the mode's name, such as `NAME` in `compile:NAME`
    store : folder for files that a later run of the same call can load; None to keep none
    candidate : function that loads the user's implementation of the operator; None if there is none
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: Sequence[Arguments] = ()
    mutates: bool = False
    weights: Collection[int] = ()
    grad: bool = False
    device: str = "cpu"
    threads: int = 1
    argument: str = ""
    store: Path | None = None
    tuning: Tuning = Tuning()
    candidate: Callable[[], Function] | None = None


@dataclass(frozen=True, slots=True)
class RunOutputs:
    outputs: Sequence[Any]
    arguments: Sequence[Any] = ()

    @classmethod
    def of(cls, result: Any, arguments: Arguments, mutates: bool, copies: bool = False) -> RunOutputs:
        from opgrip.replay.operators.memory import copied, tensors_in
        from opgrip.traces.schema.arguments import leaves

        parts = list(leaves(result)), tensors_in(list(arguments)) if mutates else []
        return cls(*([copied(leaf) for leaf in part] if copies else part for part in parts))


@dataclass(frozen=True, slots=True)
class Program:
    """A call that a mode has prepared: compiled, loaded, and run once if the first run is slower.

    function : the function to time; on the CPU it returns when the work is done, on other devices when it is launched
    enter : untimed function that converts the arguments for `function`; None to pass them unchanged
    leave : function that converts the result of `function` to torch tensors; None if it returns them
    in_place : True if `function` writes into the call's arguments although `enter` converts them
    enters_each_run : True if `enter` must be called before each run
    memory : memory that was allocated in advance and that the runs use; None if runs allocate their memory
    enter_us : time that a call takes before its compiled graphs run; None if unknown
    """

    function: Function
    enter: Callable[[Arguments], Arguments] | None = None
    leave: Callable[[Any], RunOutputs] | None = None
    in_place: bool = False
    enters_each_run: bool = False
    note: str = ""
    memory: CallMemory | None = None
    enter_us: float | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run calls.

    needs, extra : packages that the mode imports, and the extra of opgrip that installs them
    devices : supported device types; empty for all
    differentiable : True if autograd works through the programs; if False, a backward is compiled as a separate graph
    ahead : True if preparing programs is slow enough to do it in several processes before timing
    in_torch : True if the programs use torch's allocator and streams
    in_graphs : True if the programs are CUDA graphs
    autotunes : True if preparing a program times kernels on the accelerator
    argument : what may follow the mode's name after a colon, such as `backend`; empty if nothing may
    tuners : search methods, the default first; empty if the mode cannot search
    """

    make: Callable[[Task], Program]
    needs: Sequence[str] = ()
    extra: str = ""
    devices: Sequence[str] = ()
    differentiable: bool = False
    ahead: bool = True
    in_torch: bool = True
    in_graphs: bool = False
    autotunes: bool = False
    argument: str = ""
    arguments: Callable[[], Collection[str]] = tuple
    tuners: Sequence[str] = ()


modes: Registry[Mode] = Registry("opgrip.replay.modes", "opgrip.modes")


def mode(name: str, **about: Any) -> Callable[[Callable[[Task], Program]], Callable[[Task], Program]]:
    def enter(make: Callable[[Task], Program]) -> Callable[[Task], Program]:
        modes.register(name)(Mode(make, **about))
        return make

    return enter


def find_mode(text: str) -> tuple[Mode, str]:
    """Return the mode that a text such as `compile:NAME` names, and its argument (empty if it has none)."""
    name, colon, argument = text.partition(":")
    named_mode = modes.get(name)
    if named_mode is None:
        raise UserError(
            f"unknown mode {name!r}",
            did_you_mean(
                name, modes.names(), f"choose from {', '.join(modes.names())}; docs/modes.md shows how to add one"
            ),
        )
    if colon and not (named_mode.argument and argument):
        hint = f"write {name}:{named_mode.argument.upper()}" if named_mode.argument else f"write {name}"
        raise UserError(f"{text!r} is not a mode", hint)
    lacking = [package for package in named_mode.needs if not _is_installed(package)]
    if lacking:
        hint = install_command(named_mode.extra) or "install it"
        are = "is" if len(lacking) == 1 else "are"
        raise UserError(f"the mode {name} needs {', '.join(lacking)}, which {are} not installed", hint)
    if argument and argument not in named_mode.arguments():
        arguments = named_mode.arguments()
        hint = did_you_mean(argument, arguments, f"choose from {', '.join(arguments)}")
        raise UserError(f"the mode {name} has no {named_mode.argument} {argument!r}", hint)
    return named_mode, argument


def runs_graphs(text: str) -> bool:
    named_mode, argument = find_mode(text)
    return named_mode.in_graphs or argument == "cudagraphs"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@titled("execution")
@dataclass(frozen=True, slots=True)
class ModeOptions:
    """Options for the modes to run, and for the reference mode with which they are compared."""

    mode: tuple[str, ...] = option(
        (EAGER,),
        lambda: (
            f"how to run the calls: {', '.join(modes.names())}, or compile:NAME for another "
            f"torch.compile backend; several modes are compared (default: {EAGER})"
        ),
        parse=names,
        metavar="NAME,...",
        role=IDENTITY,
        common=True,
    )
    reference: str = option(
        EAGER,
        "mode that results and times are compared with (default: %(default)s)",
        metavar="MODE",
        only=("single cases",),
        role=RUN,
    )

    @property
    def all_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.reference, *self.mode)))

    def check(self, tuning: Tuning, in_graph: bool = False) -> None:
        graphs = [name for name in self.all_names if runs_graphs(name)]
        if in_graph and graphs:
            raise UserError(
                f"--exec-mode graph cannot capture {graphs[0]}, which runs CUDA graphs itself",
                "time it with --exec-mode events",
            )
        searching = [named_mode for named_mode, argument in map(find_mode, self.all_names) if argument != UNTUNED]
        tuners = [tuner for named_mode in searching for tuner in named_mode.tuners]
        if tuning.tuner is not None and not tuning.trials:
            raise UserError("--tuner needs --tune", "add the number of programs to try: --tune 64")
        if tuning.trials and not tuners:
            raise UserError("these modes cannot search for better programs", "leave --tune out, or add --mode tvm")
        if tuning.tuner is not None and tuning.tuner not in tuners:
            raise UserError(f"unknown tuner {tuning.tuner!r}", f"choose from {', '.join(tuners)}")
