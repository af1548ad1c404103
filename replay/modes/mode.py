"""What a mode is: a way to run calls, such as a compiler or another runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import positive
from opgrip.cli.option_types import names
from opgrip.cli.options import IDENTITY, RUN, option, titled
from opgrip.cli.plugins import Registry
from opgrip.cli.suggestions import did_you_mean
from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.replay.operators.memory import Arguments, Function, Memory

EAGER = "eager"


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class Tuning:
    """How long a compiler may search for better code: not at all where it has no trials."""

    trials: int = option(
        0,
        "let a compiler that can search try so many programs",
        word="tune",
        parse=positive,
        metavar="TRIALS",
        only=("single cases",),
        role=IDENTITY,
    )
    tuner: str | None = option(
        None,
        "its way to search",
        metavar="NAME",
        only=("single cases",),
        role=IDENTITY,
        column="tune",
    )

    def words_of(self, mode: str) -> str:
        """Return how a mode's compiler searches, as `64` or `64 replay-trace`; an empty text where it does not."""
        if not self.trials or not find_mode(mode)[0].tuners:
            return ""
        return " ".join(filter(None, (str(self.trials), self.tuner)))


@dataclass(frozen=True, slots=True)
class Task:
    """A call that a mode makes ready to run.

    Attributes
    ----------
    function : an operator, a Python function, or the calls of a module as one
    args, kwargs : an example of what it takes, which the mode may run on and write into
    others : further examples, whose values or shapes are others
    mutates : whether a call may write into its arguments
    grad : whether gradients of its results are asked for
    device : that its tensors are on
    threads : of an operator on the CPU
    argument : what followed the mode's name, as in `compile:NAME`; empty where nothing did
    store : folder for what a later run of the same call can load again; None where there is none
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: Sequence[Arguments] = ()
    mutates: bool = False
    grad: bool = False
    device: str = "cpu"
    threads: int = 1
    argument: str = ""
    store: Path | None = None
    tuning: Tuning = Tuning()


@dataclass(frozen=True, slots=True)
class Results:
    """What one run gave.

    Attributes
    ----------
    outputs : its results, with all that is in lists and tuples of them, one after the other
    arguments : tensors among its arguments, as the run left them; empty where it does not write into any
    """

    outputs: Sequence[Any]
    arguments: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A call that is ready to run: compiled, loaded, and run at least once where its first run is slower.

    Attributes
    ----------
    function : what is timed; it waits until its work is done, on the CPU, or leaves that to the device's streams
    enter : makes of the call's arguments what `function` takes, outside of the time; None where it takes them as they
        are, and writes into them as the call does
    leave : what `function` gave, as tensors of torch; only together with `enter`
    in_place : whether `function` writes into the call's arguments, although it takes them by way of `enter`
    enters_each_run : whether `enter` is needed before each run, since there is one place for all arguments
    note : how it was made, in a word or two
    memory : what its runs use of memory that it took when it was made; None where they take it as they run
    """

    function: Function
    enter: Callable[[Arguments], Arguments] | None = None
    leave: Callable[[Any], Results] | None = None
    in_place: bool = False
    enters_each_run: bool = False
    note: str = ""
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run calls.

    Attributes
    ----------
    make : the program of a call; whatever it raises is the reason why there is none
    needs : packages that it imports
    extra : of opgrip, that installs them; empty where there is none
    devices : kinds of device that it runs on; none where it takes any that torch has
    differentiable : whether autograd goes through its programs; else a backward is compiled as a graph of its own
    ahead : whether making a program takes so long that several processes make them before any is timed
    in_torch : whether its programs take memory of torch's allocator and work on torch's streams
    in_graphs : whether its programs are CUDA graphs, which no other graph holds and one thread replays
    autotunes : whether making a program for an accelerator times kernels there, which nothing may disturb
    argument : what may follow its name after a colon, in a word; empty where nothing may
    arguments : all that may follow it
    tuners : ways to search that it knows, the default first; none where it cannot search
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
"""Modes by name. A file in this folder enters its own, and so does a module that an entry point names."""


def mode(name: str, **about: Any) -> Callable[[Callable[[Task], Program]], Callable[[Task], Program]]:
    """A decorator that enters a function as the `make` of a mode, whose other attributes are `about`."""

    def enter(make: Callable[[Task], Program]) -> Callable[[Task], Program]:
        modes.register(name)(Mode(make, **about))
        return make

    return enter


def find_mode(text: str) -> tuple[Mode, str]:
    """The mode of a name, and what follows its colon.

    Raises
    ------
    UserError : where there is none of that name, or a package that it needs is not installed
    """
    name, colon, argument = text.partition(":")
    named_mode = modes.get(name)
    if named_mode is None:
        raise UserError(
            f"there is no mode {name!r}", did_you_mean(name, modes.names(), f"there are {', '.join(modes.names())}")
        )
    if colon and not (named_mode.argument and argument):
        hint = f"write {name}:{named_mode.argument.upper()}" if named_mode.argument else f"write {name}"
        raise UserError(f"{text!r} is no mode", hint)
    lacking = [package for package in named_mode.needs if not _is_installed(package)]
    if lacking:
        hint = f"pip install 'opgrip[{named_mode.extra}]'" if named_mode.extra else "install it"
        raise UserError(f"the mode {name} needs {', '.join(lacking)}, which is not installed", hint)
    if argument and argument not in named_mode.arguments():
        arguments = named_mode.arguments()
        hint = did_you_mean(argument, arguments, f"there are {', '.join(arguments)}")
        raise UserError(f"{name} has no {named_mode.argument} {argument!r}", hint)
    return named_mode, argument


def runs_graphs(text: str) -> bool:
    """Whether the programs of a mode, by its name and argument, are CUDA graphs; raises as `find_mode` does."""
    named_mode, argument = find_mode(text)
    return named_mode.in_graphs or argument == "cudagraphs"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@titled("how they are run")
@dataclass(frozen=True, slots=True)
class ModeOptions:
    """The modes, and the one that the others are compared with."""

    mode: tuple[str, ...] = option(
        (EAGER,),
        lambda: f"{', '.join(modes.names())}; compile:NAME for another backend of dynamo (default: {EAGER})",
        parse=names,
        metavar="NAME,...",
        role=IDENTITY,
    )
    reference: str = option(
        EAGER,
        "what results and times are compared with (default: %(default)s)",
        metavar="MODE",
        only=("single cases",),
        role=RUN,
    )

    @property
    def all_names(self) -> tuple[str, ...]:
        """All modes that are run, the reference first."""
        return tuple(dict.fromkeys((self.reference, *self.mode)))

    def check(self, tuning: Tuning, in_graph: bool = False) -> None:
        """Raise `UserError` where a mode does not exist, or lacks a package, or cannot do what it is asked to.

        Parameters
        ----------
        in_graph : whether runs are captured as CUDA graphs to be timed
        """
        graphs = [name for name in self.all_names if runs_graphs(name)]
        if in_graph and graphs:
            raise UserError(
                f"--exec-mode graph captures what {graphs[0]} runs, which is a CUDA graph already",
                "time it with --exec-mode events",
            )
        tuners = [tuner for name in self.all_names for tuner in find_mode(name)[0].tuners]
        if tuning.tuner is not None and not tuning.trials:
            raise UserError("--tuner is for a search", "say how many programs to try: --tune 64")
        if tuning.trials and not tuners:
            raise UserError("none of these modes can search for better programs", "leave --tune out, or add tvm")
        if tuning.tuner is not None and tuning.tuner not in tuners:
            raise UserError(f"there is no tuner {tuning.tuner!r}", f"there are {', '.join(tuners)}")
