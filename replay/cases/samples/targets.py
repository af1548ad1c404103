"""Samples as opreplay is told them: those that ship by name, those that were gripped by their folder."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path, PurePath

from opgrip.replay.cases.cases import Case, matches
from opgrip.replay.cases.samples.gripped import folders_in, gripped_samples, hash_of
from opgrip.replay.cases.samples.shipped import SHIPPED, find_samples, named, shipped_case
from opgrip.traces.errors import UserError
from opgrip.traces.suggestions import nearest


def names_samples(target: str) -> bool:
    """Whether what a user names is samples rather than a trace: `samples`, `samples/nms`, a folder."""
    return PurePath(target).parts[:1] == (SHIPPED,) or Path(target).is_dir()


def sample_cases(target: str, patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Case]:
    """A case for each configuration of the samples that ship, and for each call of those that were gripped.

    Parameters
    ----------
    target : a folder that holds gripped samples, or is one; `samples`, for all that ship and those in such a folder;
        `samples/nms`, for one of either kind
    patterns : of names, as shells match file names; none selects all
    tags : that they all have

    Raises
    ------
    UserError : where there is none
    """
    shipped = find_samples(target, patterns, tags) if _ships(target) else []
    cases = [shipped_case(sample, name) for sample in shipped for name in sample.configurations]
    cases += gripped_samples(Path(target), patterns, tags)
    if not cases:
        raise _nothing_selected(target, patterns)
    return [replace(case, signature=replace(case.signature, number=number)) for number, case in enumerate(cases)]


def _nothing_selected(target: str, patterns: Sequence[str]) -> UserError:
    """Why a target has no case."""
    folder = Path(target)
    names = [sample.name for sample in named(target)] if _ships(target) else [path.name for path in folders_in(folder)]
    if not names:
        trace = next((path for path in sorted(folder.iterdir()) if ".jsonl" in path.suffixes), None)
        example = "" if trace is None else f", such as {trace}"
        return UserError(f"{target} is a folder without samples", f"name a trace{example}, or a folder that grip wrote")
    if not any(matches(name, patterns) for name in names):
        near = ", ".join(nearest(patterns[0], names))
        return UserError(f"no sample matches --op {' '.join(patterns)}", f"the nearest in {target} are {near}")
    return UserError(f"{target} holds no sample of these names and tags", "opgrip samples list shows what ships")


def fingerprint(target: str) -> str:
    """A hash of the code of the samples that are named, and of the calls of those that were gripped."""
    digest = blake2b(digest_size=16)
    for folder in folders_in(Path(target)):
        digest.update(hash_of(folder))
    for sample in named(target) if _ships(target) else ():
        digest.update(inspect.getsource(sys.modules[sample.function.__module__]).encode())
    return digest.hexdigest()


def _ships(target: str) -> bool:
    """Whether samples that ship are meant, a folder of the same name not being one sample."""
    return PurePath(target).parts[:1] == (SHIPPED,) and folders_in(Path(target)) != [Path(target)]
