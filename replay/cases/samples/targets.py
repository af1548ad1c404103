"""Samples as opreplay is told them: those that ship by name, those that were gripped by their folder."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePath

from opgrip.cli.suggestions import nearest
from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, matches
from opgrip.replay.cases.samples.gripped import folders_in, gripped_samples, hash_of
from opgrip.replay.cases.samples.shipped import SHIPPED, find_samples, samples_named, shipped_case
from opgrip.samples import samples
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.io.sample_folder import CALLS

JOINED = "; opgrip trace merge joins several"
LOOKED_AT = 20
"""Files of a folder."""
PREFIX = "sample:"
"""What a sample that ships is called by, whatever folders there are: `sample:nms`."""


def names_samples(target: str) -> bool:
    """Whether what a user names is samples rather than a trace: `samples`, `sample:nms`, `samples/nms`, a folder."""
    if target.startswith(PREFIX) or PurePath(target).parts[:1] == (SHIPPED,):
        return True
    # some other tools' files are folders
    return Path(target).is_dir() and format_of(Path(target)) is None


def sample_cases(target: str, patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Case]:
    """A case for each configuration of the samples that ship, and for each call of those that were gripped.

    Where a folder here hides a sample that ships, or adds to those that do, that is a warning.

    Parameters
    ----------
    target : a folder that holds gripped samples, or is one; `sample:nms`, for one that ships; `samples`, for all that
        ship and those in such a folder; `samples/nms`, for the folder where it is there, else for the one that ships
    patterns : of names, as shells match file names; none selects all
    tags : that they all have

    Raises
    ------
    UserError : where there is none
    """
    folders, name = _folders(target), _shipped_name(target)
    if folders and PurePath(target).parts[:1] == (SHIPPED,):
        warnings.warn(_note(target, len(folders)), stacklevel=2)
    shipped = [] if name is None else find_samples(name, patterns, tags)
    cases = [shipped_case(sample, configuration) for sample in shipped for configuration in sample.configurations]
    cases += gripped_samples(folders, patterns, tags)
    if not cases:
        raise _nothing_selected(target, patterns, tags)
    return [replace(case, signature=replace(case.signature, number=number)) for number, case in enumerate(cases)]


def _nothing_selected(target: str, patterns: Sequence[str], tags: Sequence[str]) -> UserError:
    """Why a target has no case."""
    folder = Path(target)
    shipped = _shipped_name(target)
    names = [folder.name for folder in _folders(target)]
    names += [] if shipped is None else [sample.name for sample in samples_named(shipped)]
    if not names:
        trace = _trace_in(folder)
        example = "" if trace is None else f", such as {trace}"
        hint = f"name a trace{example}, or a folder that grip wrote"
        return UserError(f"{target} is a folder without samples", hint + (JOINED if trace is not None else ""))
    if not patterns and not tags:
        hint = f"name a folder that grip wrote, or replay {_folders(target)[0] / CALLS} as a trace"
        return UserError(f"{target} holds no sample whose calls were recorded", hint)
    if not any(matches(name, patterns) for name in names):
        near = ", ".join(nearest(patterns[0], names))
        return UserError(f"no sample matches --op {' '.join(patterns)}", f"the nearest in {target} are {near}")
    return UserError(f"{target} holds no sample of these names and tags", "opgrip samples list shows what ships")


def _trace_in(folder: Path) -> Path | None:
    """A file that can be replayed, of the first ones in a folder."""
    files = [path for path in islice(sorted(folder.iterdir()), LOOKED_AT) if path.is_file()]
    for path in files:
        with suppress(UserError):
            if ".jsonl" in path.suffixes or format_of(path) is not None:
                return path
    return None


def fingerprint(target: str) -> str:
    """A hash of the code of the samples that are named, and of the calls of those that were gripped."""
    digest = blake2b(digest_size=16)
    for folder in _folders(target):
        digest.update(hash_of(folder))
    name = _shipped_name(target)
    for sample in () if name is None else samples_named(name):
        digest.update(inspect.getsource(sys.modules[sample.function.__module__]).encode())
    return digest.hexdigest()


def _folders(target: str) -> list[Path]:
    """The folders of gripped samples that are meant."""
    return [] if target.startswith(PREFIX) else folders_in(Path(target))


def _shipped_name(target: str) -> str | None:
    """The name of the sample that ships and is meant, empty for all of them; None for none."""
    if target.startswith(PREFIX):
        return target.removeprefix(PREFIX)
    first, *others = PurePath(target).parts or ("",)
    if first != SHIPPED or (others and _folders(target)):
        return None
    return "/".join(others)


def _note(target: str, count: int) -> str:
    """What a user should know who may have meant samples that ship."""
    name = "/".join(PurePath(target).parts[1:])
    if not name:
        return f"the folder {target} here has samples too, {count}: they run with those that ship"
    hidden = f", not the sample of that name that ships, which is {PREFIX}{name}" if name in samples() else ""
    return f"{target} is the folder here{hidden}"
