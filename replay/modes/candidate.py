"""Candidates (users' implementations of operators and modules), and the mode `candidate`, which runs them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

from opgrip.cli.command import InvalidValueError, did_you_mean
from opgrip.cli.options import OUTPUT, RUN, option, titled
from opgrip.cli.output_files import read_input
from opgrip.errors import UserError
from opgrip.replay.modes import CANDIDATE, Program, Task, mode
from opgrip.replay.operators.admission import extension_of, import_trusted, module_of

_FORM = re.compile(r"(?P<op>[^=\s]+)=(?P<source>[^=]+?):(?P<function>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")
OF_MODULES = "module:"  # prefix of the path of a module that a candidate implements
_CLASS = re.compile(r" \(.*\)\Z")
IN_PROCESS = "<this process>"  # source of a function that the caller of `judge` passed as an object
_functions: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A user's implementation of an operator or a module.

    op : name of an operator, such as `aten._softmax.default`, or of a sample, or `module:` and a module's path; the
        names of operators and paths may be patterns
    source : absolute path of a Python file, name of a module, or `IN_PROCESS` for a function of this process
    digest : hash of the file, so that results of a changed candidate are not mixed with earlier ones
    """

    op: str
    source: str
    function: str
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.op}={self.source}:{self.function}"

    @property
    def module(self) -> str | None:
        return self.op.removeprefix(OF_MODULES) if self.op.startswith(OF_MODULES) else None

    def hash_of_file(self) -> str:
        if self.source == IN_PROCESS or module_of(self.source) == self.source:
            return ""
        try:
            source = read_input(Path(self.source), 1 << 30, "name a Python file or library")
            return hashlib.blake2b(source, digest_size=16).hexdigest()
        except OSError as error:
            raise UserError(f"{self.source} cannot be read", str(error.strerror)) from error

    def load(self) -> Callable[..., Any]:
        if self.source == IN_PROCESS:
            return _functions[self.function]
        try:
            function: Any = import_trusted(self.source)
        except Exception as error:
            raise UserError(f"{self.source} cannot be imported: {type(error).__name__}: {error}") from error
        module = function
        for part in self.function.split("."):
            function = getattr(function, part, None)
        if not callable(function):
            kinds, what = (isfunction, "function") if self.module is None else (_is_callable, "class or function")
            names = [name for name, value in vars(module).items() if kinds(value)]
            raise UserError(f"{self.source} has no {what} {self.function}", did_you_mean(self.function, names))
        return function  # type: ignore[no-any-return]


def _is_callable(value: Any) -> bool:
    return isfunction(value) or isclass(value)


def parse_candidate(text: str) -> Candidate:
    """Return the candidate that a text such as `OPERATOR=FILE.py:FUNCTION` or `module:PATH=FILE.py:CLASS` names."""
    match = _FORM.fullmatch(text.removeprefix("sample:"))
    if match is None:
        raise InvalidValueError(
            f"{text!r} is not OPERATOR=FILE.py:FUNCTION, such as aten._softmax.default=my_kernels.py:softmax"
        )
    return Candidate(match["op"], extension_of(match["source"]), match["function"])


def _in_folder(folder: Path) -> list[Candidate]:
    candidates = []
    for own in sorted(folder.glob("*/")):
        files = sorted(own.glob(f"{own.name}_implementation*.py"))
        if files:
            name, _, overload = own.name.rpartition("__")
            op = f"aten.{name}.{overload}" if name and overload else f"aten.{own.name}.*"
            candidates.append(Candidate(op, extension_of(str(files[0])), f"{own.name}_kernel_impl"))
    if not candidates:
        raise UserError(f"{folder} has no candidates", "put them into files such as add/add_implementation_v1.py")
    return candidates


def candidate_of(op: str, function: Callable[..., Any]) -> Candidate:
    """Return a function of this process as a candidate; only this process and its forks can run it."""
    _functions[op] = function
    return Candidate(op, IN_PROCESS, op)


@titled("execution")
@dataclass(frozen=True, slots=True)
class CandidateOptions:
    candidate: tuple[Candidate, ...] = option(
        (),
        "judge your implementation of an operator on its recorded calls: whether it is right and faster, and what "
        "share of the step it saves; with --unit module, write module:PATH=FILE.py:CLASS to judge a module; can be "
        "repeated",
        repeated=True,
        parse=parse_candidate,
        metavar="OPERATOR=FILE.py:FUNCTION",
        only=("single cases",),
        role=RUN,
        common=True,
    )
    candidates: Path | None = option(
        None,
        "judge all implementations in a folder of BackendBench's layout: add/add_implementation_v1.py for all "
        "overloads of aten.add, add__Tensor for one",
        parse=Path,
        metavar="FOLDER",
        only=("single cases",),
        role=RUN,
    )
    untrusted: bool = option(
        False,
        "with --candidate, for code that others wrote: run each candidate in a separate process, under bubblewrap if "
        "it is installed, with new values in each run, and check its times and results from outside",
        only=("single cases",),
        role=RUN,
    )
    confirm: bool = option(
        False,
        "with --candidate: also replay the whole step with and without the candidates, and print the measured saving",
        only=("single cases", "traces"),
        role=OUTPUT,
    )

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.op for item in self.candidate if item.module is None))

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.module for item in self.candidate if item.module is not None))

    def find(self, op: str) -> Candidate | None:
        if self.modules:
            op = OF_MODULES + _CLASS.sub("", op)
        return next((item for item in self.candidate if fnmatchcase(op, item.op)), None)

    def read(self) -> CandidateOptions:
        candidates = [*self.candidate, *(_in_folder(self.candidates) if self.candidates is not None else ())]
        for op, count in Counter(item.op for item in candidates).items():
            if count > 1:
                raise UserError(f"{op} has several candidates", "give one --candidate for each operator")
        if self.confirm and not candidates:
            raise UserError("--confirm is for candidates", "add --candidate")
        if self.untrusted and not candidates:
            raise UserError("--untrusted is for candidates", "add --candidate")
        if self.untrusted and self.confirm:
            raise UserError("--confirm runs candidates without protection", "leave --confirm or --untrusted out")
        if (self.confirm or self.untrusted) and any(item.source == IN_PROCESS for item in candidates):
            word = "confirm" if self.confirm else "untrusted"
            raise UserError(
                f"--{word} runs candidates in other processes, which cannot run functions of this one",
                "name them by file and function: my_kernels.py:softmax",
            )
        return replace(
            self, candidate=tuple(replace(item, digest=item.hash_of_file()) for item in candidates), candidates=None
        )


@mode(CANDIDATE, differentiable=True, ahead=False)
def run_candidate(task: Task) -> Program:
    if task.candidate is None:
        raise NotImplementedError("no candidate for this operator: name one with --candidate OPERATOR=FILE.py:FUNCTION")
    return Program(task.candidate())
