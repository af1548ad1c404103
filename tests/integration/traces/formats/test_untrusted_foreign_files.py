"""Tests of untrusted files of other tools: every registered reader raises only `UserError`."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from random import Random

import pytest
from programs import ROOT

from opgrip.errors import UserError
from opgrip.traces import TraceReader, load
from opgrip.traces.io.foreign_files import format_of

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_mutations import foreign_mutant
from foreign_seeds import ForeignSeed, readable_formats, seeds_of

MUTANTS = 20


@pytest.fixture(scope="module")
def seeds(tiny_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ForeignSeed]]:
    folder = tmp_path_factory.mktemp("seeds")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return {name: seeds_of(name, folder, tiny_trace) for name in readable_formats()}


@pytest.mark.parametrize("name", readable_formats())
def test_seeds_are_files_of_their_format(name: str, seeds: dict[str, list[ForeignSeed]], tmp_path: Path) -> None:
    if not seeds[name] and name == "onnx":
        pytest.skip("onnx is not installed: make runtimes")
    assert seeds[name], f"the fuzzer has no file of {name}: add one to tests/support/fuzz/foreign_seeds.py"
    calls = 0
    for place, seed in enumerate(seeds[name]):
        path = seed.write(tmp_path / str(place))
        assert format_of(path) == name
        with suppress(UserError):
            calls += len(load(path).calls)
    assert calls


@pytest.mark.parametrize("name", readable_formats())
@pytest.mark.slow
def test_mutated_files_are_read_or_refused_in_one_line(
    name: str, seeds: dict[str, list[ForeignSeed]], tmp_path: Path
) -> None:
    random = Random(name)
    for place in range(MUTANTS if seeds[name] else 0):
        path = foreign_mutant(random.choice(seeds[name]), random).write(tmp_path / str(place))
        try:
            for _ in TraceReader(path, format_name=name):
                pass
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
