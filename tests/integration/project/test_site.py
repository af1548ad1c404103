"""The documentation as a site: its navigation has every page, it builds without warnings, and it needs no network."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from optional import needs
from programs import ROOT, run_python

# addresses of what a browser loads to show a page
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?((?:https?:)?//[^\s\">]+)|<link\b[^>]*\bhref=\"?((?:https?:)?//[^\s\">]+)"
)


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    documents = [path.name for path in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"))]
    assert sorted(pages) == sorted("index.md" if name == "README.md" else name for name in documents)
    parts = re.findall(r"^  - (.+):$", navigation, re.MULTILINE)
    assert parts == ["Tutorials", "How-to guides", "Reference", "Explanation"]


@pytest.mark.slow
@needs("mkdocs", "material", "mkdocstrings")
def test_site_builds_without_warnings_and_external_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    done = run_python("-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert "records the operator calls" in pages["index.html"]
    assert 'href="modes.html"' in pages["index.html"]
    for name in (
        "capture.Capture",
        "replay.replay",
        "replay.Results",
        "replay.benchmark",
        "traces.load",
        "traces.Trace",
    ):
        assert f'id="opgrip.{name}"' in pages["python-api.html"]
    assert {name: found for name, page in pages.items() if (found := LOADED.findall(page))} == {}
    # files outside docs/ that pages link to
    for target in set(re.findall(r'href="?(repository/[^\s">#]+)', "".join(pages.values()))):
        assert os.path.getsize(tmp_path / target) > 0
    assert (tmp_path / "repository/traces/schema.json").read_bytes() == (ROOT / "traces/schema.json").read_bytes()
