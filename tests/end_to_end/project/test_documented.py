"""Documentation compared with the declarations."""

from __future__ import annotations

from programs import ROOT, run_python


def test_documented_options_and_columns_match_their_declarations() -> None:
    # in an interpreter without parts that other tests add
    run_python(ROOT / "docs" / "tables.py", "--check", status=0)
