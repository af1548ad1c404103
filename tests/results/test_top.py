"""The table of results that is walked by keyboard, driven as textual's own tests drive an application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run
from programs import run_command
from textual.widgets import DataTable

from opgrip.replay.outcome import write_results
from opgrip.tools.browser.app import CHUNK, Details, ResultsBrowser

ROWS = [
    *made_run(1, cases=30, repeats=1, module="neck.[bold]conv"),
    replace(
        made_run(2, cases=1, repeats=1).rows[0], op="evil\x1b[2J[red]", status="failed", median_us=None, error="why"
    ),
]


def driven(keys: Callable[[Any, ResultsBrowser], Awaitable[None]]) -> None:
    async def drive() -> None:
        app = ResultsBrowser(ROWS, "net.jsonl")
        async with app.run_test(size=(100, 30)) as pilot:
            await keys(pilot, app)

    asyncio.run(drive())


def test_a_column_sorts_both_ways() -> None:
    async def keys(pilot: Any, app: ResultsBrowser) -> None:
        assert len(app.shown) == app.query_one(DataTable).row_count == 31
        await pilot.press("right", "right", "right", "s")
        times = [row.median_us for row in app.shown if row.median_us]
        assert times == sorted(times, reverse=True)
        await pilot.press("s")
        assert [row.median_us for row in app.shown if row.median_us] == sorted(times)

    driven(keys)


def test_what_is_typed_filters_and_escape_shows_all() -> None:
    async def keys(pilot: Any, app: ResultsBrowser) -> None:
        await pilot.press("slash", "o", "p", "2")
        assert {row.op for row in app.shown} == {"aten.op2.default", *(f"aten.op2{end}.default" for end in range(10))}
        await pilot.press("enter", "escape")
        assert len(app.shown) == 31
        await pilot.press("n")
        assert [row.status for row in app.shown] == ["failed"]

    driven(keys)


def test_a_row_shows_all_that_is_known_of_it() -> None:
    async def keys(pilot: Any, app: ResultsBrowser) -> None:
        await pilot.press("n", "enter")
        assert isinstance(app.screen, Details)
        assert "why" in app.screen.text
        # what would steer the terminal, or style the text, is shown as it is
        assert "evil\\x1b[2J[red]" in app.screen.text
        await pilot.press("escape")
        assert not isinstance(app.screen, Details)

    driven(keys)


@pytest.mark.slow
def test_a_long_table_is_listed_as_far_as_it_is_walked() -> None:
    many = [replace(row, case=place) for place in range(200) for row in ROWS[:30]]

    async def drive() -> None:
        app = ResultsBrowser(many, "net.jsonl")
        async with app.run_test(size=(100, 30)) as pilot:
            table = app.query_one(DataTable)
            assert (len(app.shown), table.row_count) == (6000, CHUNK)
            await pilot.press("ctrl+end")
            await pilot.pause()
            assert table.row_count == 2 * CHUNK
            await pilot.press("slash", "o", "p", "2", "9", "enter")
            assert len(app.shown) == table.row_count == 200
            await pilot.press("enter")
            assert isinstance(app.screen, Details)
            assert "aten.op29.default" in app.screen.text

    asyncio.run(drive())


def test_in_a_pipe_the_table_is_printed(tmp_path: Path) -> None:
    run = made_run(1, cases=3)
    write_results(run.rows, run.header, tmp_path / "r.json", force=False)
    done = run_command("opgrip", "top", tmp_path / "r.json")
    assert (done.returncode, done.stdout.count("aten.op")) == (0, 3)
