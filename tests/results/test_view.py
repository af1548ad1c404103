"""The server of a store's page, and what it answers to whom."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from made_runs import HEADER, made_run
from pages import in_browser, opened
from programs import run_command

from opgrip.errors import UserError
from opgrip.replay.compare.store.store import Store
from opgrip.replay.outcome import Results
from opgrip.tools.report import make_page
from opgrip.tools.report.server import PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(lambda: "<h1>page</h1>") as serving:
        Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def asked(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_who_has_the_token_gets_the_page(server: PageServer) -> None:
    assert asked(server, f"/?token={server.token}") == (200, "<h1>page</h1>")
    assert asked(server, f"/other?token={server.token}")[0] == 404


def test_nobody_else_gets_anything(server: PageServer) -> None:
    for path in ("/", "/?token=", "/?token=x", "/?token=%ff", f"/{server.token}"):
        status, text = asked(server, path)
        assert (status, "page" in text) == (403, False)
    # what another page asks by a name of its own for this machine
    assert asked(server, f"/?token={server.token}", host="evil.example:80")[0] == 403
    assert server.server_address[0] == "127.0.0.1"


def test_what_cannot_be_served_is_told_in_a_line(tmp_path: Path) -> None:
    done = run_command("opgrip", "view", "--store", tmp_path)
    assert (done.returncode, done.stderr.count("\n"), "holds no such runs" in done.stderr) == (2, 1, True)
    run = made_run(1, cases=2)
    Store(tmp_path).keep(run.rows, run.header)
    for port in ("99999",):
        done = run_command("opgrip", "view", "--store", tmp_path, "--port", port)
        assert (done.returncode, "cannot be listened on" in done.stderr) == (2, True)


def test_what_becomes_of_a_store_meanwhile_is_told() -> None:
    def make() -> str:
        raise UserError("results holds no such runs", "opreplay keeps one a replay")

    with PageServer(make) as serving:
        Thread(target=serving.serve_forever, daemon=True).start()
        assert asked(serving, f"/?token={serving.token}") == (
            503,
            "results holds no such runs: opreplay keeps one a replay\n",
        )
        # what is no address of anything
        for path in ("//[", "//[::1/?token=", "/?" + "a=1&" * 1000):
            assert asked(serving, path)[0] == 403
        serving.shutdown()


@in_browser
def test_a_case_has_its_history(tmp_path: Path) -> None:
    runs = {}
    for day in (1, 2, 3):
        run = made_run(day, cases=3)
        header = {**HEADER, "time": f"2026-01-0{day}T00:00:00+00:00"}
        runs[f"day{day}"] = Results([replace(row, p10_us=row.median_us, p90_us=row.median_us) for row in run], header)
    path = tmp_path / "r.html"
    path.write_text(make_page(runs, {}, "days"))
    with opened(path, f"/case/{run.rows[1].key}") as page:
        page.wait_for_selector("h2:has-text('History')")
        page.wait_for_selector("[aria-label='History of the case'] .scatterlayer .point")
        assert page.locator("[aria-label='History of the case'] .scatterlayer .point").count() == 3
