"""Trace files as tests, with one test per case or per operator."""

from __future__ import annotations

import argparse
import hashlib
import io
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opgrip.errors import UserError
from opgrip.tools.pytest_plugin.baseline import CASE
from opgrip.tools.pytest_plugin.measured import BENCHMARKS, JUDGED, Judged

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.outcome import Results
    from opgrip.replay.results.results import Result

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
REFUSED = ("sequence", "list", "output", "resume", "append")
"""options of opreplay that produce no rows, or a separate file per replay"""
MOST_OF_NAME = 100


def is_trace(path: Path) -> bool:
    """Return True if a file name has the suffix of a trace."""
    return path.name.endswith(SUFFIXES)


class TraceTest(pytest.Item):
    """Cases of a trace; the test passes if all their rows are ok."""

    is_of_trace = True

    def __init__(self, *, places: Sequence[int], numbers: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.places, self.numbers = places, numbers

    def runtest(self) -> None:
        """Replay the file, unless another of its tests already has, and check the rows of this test."""
        assert isinstance(self.parent, TraceFile)
        judged = self.parent.judged
        self.stash[JUDGED] = judged
        rows = [row for test, row in judged.rows if test == self.nodeid]
        bad = [row for row in rows if row.status not in ("ok", "unsupported", "skipped", "contended")]
        if bad:
            pytest.fail("\n".join(map(_describe, bad)), pytrace=False)
        if all(row.status != "ok" for row in rows):
            pytest.skip(_describe(rows[0]) if rows else "not replayed")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the location that pytest reports."""
        # include the file name, because pytest shows dots as colons in a bare test name
        return self.path, None, f"{self.path.name}: {self.name}"


class TraceFile(pytest.File):
    """A trace, replayed once for all its tests."""

    _judged: Judged | UserError | None = None

    def collect(self) -> Iterator[TraceTest]:
        """Yield a test for each case or operator."""
        from opgrip.replay.replay_options import request_of
        from opgrip.replay.run.workload import load_workload

        try:
            cases = load_workload(request_of(self._arguments())).cases
        except UserError as error:
            raise self.CollectError(str(error)) from error
        by_name: dict[str, list[int]] = {}
        for place, name in enumerate(_names(cases, self.config.getoption("--opgrip-by"))):
            by_name.setdefault(name, []).append(place)
        for name, places in by_name.items():
            numbers = [cases[place].number for place in places]
            yield TraceTest.from_parent(self, name=name, places=places, numbers=numbers)

    @property
    def judged(self) -> Judged:
        """Return the rows of all selected tests, compared with the baseline; fail the test if that is not possible."""
        if self._judged is None:
            try:
                self._judged = self._judge()
            except UserError as error:
                self._judged = error
        if isinstance(self._judged, UserError):
            pytest.fail(str(self._judged), pytrace=False)
        return self._judged

    def _judge(self) -> Judged:
        benchmarks = self.config.stash[BENCHMARKS]
        tests = [item for item in self.session.items if isinstance(item, TraceTest) and item.parent is self]
        places = [place for test in tests for place in test.places]
        with benchmarks.turns.turn():
            results = self._replay_once(min(places), max(places) + 1, benchmarks.turns.folder)
        test_of = {number: test.nodeid for test in tests for number in test.numbers}
        pairs = [(test_of[row.case], row) for row in results.rows if row.case in test_of]
        return benchmarks.judge(pairs, results.header, self.nodeid)

    def _replay_once(self, start: int, stop: int, folder: Path | None) -> Results:
        """Return the results of a range of cases, which workers of pytest-xdist share in a folder."""
        from opgrip.replay.command.replay import replay_arguments
        from opgrip.replay.outcome import read_run, write_results

        args = self._arguments()
        args.start, args.stop = args.start + start, args.start + stop
        if folder is None:
            return replay_arguments(args)
        path = folder / f"{hashlib.sha256(self.nodeid.encode()).hexdigest()}.json"
        if not path.exists():
            results = replay_arguments(args)
            write_results(results.rows, results.header, path, force=False)
        return read_run(path)

    def _arguments(self) -> argparse.Namespace:
        """Return the arguments that opreplay would parse for this file."""
        from opgrip.replay.replay_options import make_parser

        text = self.config.getoption("--opgrip-options")
        with redirect_stderr(io.StringIO()) as said:
            try:
                args = make_parser().parse_args([str(self.path), *shlex.split(text)])
            except (SystemExit, ValueError) as error:
                problem = said.getvalue().strip() or str(error)
                raise UserError(f"--opgrip-options={text!r}: {problem.removeprefix('opreplay: error: ')}") from error
        refused = [name for name in REFUSED if getattr(args, name)]
        if refused:
            raise UserError(f"--opgrip-options: --{refused[0]} is not allowed in a test", "use opreplay")
        return copy(args)


def _names(cases: Sequence[Case], by: str) -> Iterator[str]:
    """Yield the name of each case's test, such as `operator[shapes]`, in the style of parametrized tests."""
    from opgrip.cli.terminal import shorten
    from opgrip.replay.results.results import describe_shapes

    seen: Counter[str] = Counter()
    for case in cases:
        op = shorten(case.op, MOST_OF_NAME)
        if by != CASE:
            yield op
            continue
        name = f"{op}[{shorten(describe_shapes(case.signature), MOST_OF_NAME)}]"
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


def _describe(row: Result) -> str:
    return f"{row.op} {row.shapes} ({row.mode}): {row.status}: {row.error or 'unknown reason'}"
