"""Hooks of mkdocs, which add pages from the repository's root, files outside `docs/`, and plain docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
FRONT = "---\nhide: [navigation]\n---\n"
"""metadata of the front page, which has no pages next to it"""
ROOT_PAGES = {path.name: "index.md" if path.name == "README.md" else path.name for path in ROOT.glob("*.md")}
"""documents in the repository's root, and their pages of the site"""
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
"""link of a page in `docs/` to a file that is not in it"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the repository's root, and the files outside `docs/` that pages link to."""
    for name, page in ROOT_PAGES.items():
        content = _as_in_docs((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=FRONT + content if page == "index.md" else content))
    linked = {path for page in files.documentation_pages() for path in OUTSIDE.findall(page.content_string)}
    for path in sorted(linked - ROOT_PAGES.keys()):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to files outside `docs/` to their pages or copies in the site."""
    return OUTSIDE.sub(lambda link: f"]({ROOT_PAGES.get(link[1], f'repository/{link[1]}')}", markdown)


def _as_in_docs(text: str) -> str:
    """Return a document of the root with its links as they would be in `docs/`."""
    text = re.sub(r"\]\((?!\w+:|#|docs/)", "](../", text)
    return text.replace("](docs/", "](")


class PlainDocstrings(Extension):
    """Reads `name : description` in the sections of docstrings as a description: types are in signatures."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"(?m)^(\*{0,2}\w+(?:, \w+)*) : (.+)$", r"\1\n    \2", obj.docstring.value)
            # an indented block is code in Markdown too
            obj.docstring.value = re.sub(r"(?m)^::\n", "", text)
