"""Tests of real files of other tools, and of malformed ones like those in bug reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_data import CASES, needs_cases
from programs import run_command

from opgrip.errors import UserError
from opgrip.traces import load

FILES = CASES / "files"
pytestmark = needs_cases

REFUSED = {
    "malformed/11_utf16.json": "text in UTF-16",
    "malformed/23_git_lfs_pointer.json": "a git LFS pointer",
    "malformed/25_deep.json": "it is nested too deeply",
    "mluops/nms__case_0.prototxt": "a prototxt",
    "npukernelbench/npukernelbench_level0_18_ne_scalar.json": "JSON lines with the members id, name",
    "nvbench/test_ref.json": "a result of nvbench",
    "tracelens/mi210_gpu_only_trace_gpu_only_trace.json.gz": "contains no operators",
}
# numbers of calls, and of calls and events that are counted as not convertible
READ = {
    "chakra/small_chakra.0.json": (0, 3),
    "hta/rank_non_gpu__rank_non_gpu.json.gz": (286, 810),
    "malformed/01_unescaped_quotes.json": (0, 2),
    "malformed/07_ends_with_comma.json": (1, 1),
    "malformed/13_cut.json.gz": (1, 1),
    "malformed/15_negative_and_huge_times.json": (0, 2),
    "malformed/17_lists_cut_by_profiler.json": (0, 2),
    "param/pt2_et.json": (10, 0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_file_is_named_in_one_line(name: str) -> None:
    for path in FILES.glob(name):
        with pytest.raises(UserError, match=REFUSED[name]) as caught:
            load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", READ)
def test_readable_part_of_a_file_is_read(name: str) -> None:
    for path in FILES.glob(name):
        trace = load(path, partial=True)
        assert trace.end is not None
        assert (trace.call_count, sum(item.count for item in trace.end.dropped)) == READ[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(path for path in FILES.glob("*/*") if path.is_file()), ids=lambda path: str(path.relative_to(FILES))
)
def test_no_file_fails_a_row_or_causes_a_traceback(path: Path, tmp_path: Path) -> None:
    words = (path, "--device", "cpu", "--partial", "--op", "aten.*", "--top", "4")
    done = run_command("opreplay", *words, "--iterations", "1", "--warmup", "0", "-o", tmp_path / "rows.csv")
    assert "Traceback" not in done.stderr
    # operators of an accelerator may have no kernel here
    assert done.returncode in (0, 2) or "no case ran" in done.stderr
    if done.returncode != 2:
        assert ",failed," not in (tmp_path / "rows.csv").read_text(encoding="utf-8")
