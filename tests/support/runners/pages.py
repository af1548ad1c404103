"""Browser that opens pages from files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from optional import needs


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a browser, which takes seconds to start."""
    return pytest.mark.slow(needs("playwright", "axe_playwright_python", "chromium")(test))


@contextmanager
def opened(path: Path, address: str = "", **options: Any) -> Iterator[Any]:
    """Yield a page of Playwright; an error in its console or any network request fails the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(**options)
        problems: list[str] = []
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: asked(request.url, problems))
        page.goto(f"{path.resolve().as_uri()}#{address}")
        page.wait_for_selector("main h1")
        yield page
        browser.close()
    assert problems == []


def asked(url: str, problems: list[str]) -> None:
    if not url.startswith(("file:", "data:", "blob:")):
        problems.append(f"asked for {url}")


def table_cells(page: Any, column: int, caption: str = "") -> list[str]:
    """Return the shown cells of a column, numbered from 1, of the table with this caption or of every table."""
    table = f"table.dataTable[aria-label='{caption}']" if caption else "table.dataTable"
    cells = page.locator(f"{table} tbody tr td:nth-child({column})")
    cells.first.wait_for()
    texts: list[str] = cells.all_inner_texts()
    return texts
