"""Captures that write nothing which tells whose they are."""

from __future__ import annotations

from pathlib import Path

from opgrip.capture.program.capture_choices import FULL
from opgrip.errors import UserError
from opgrip.traces.analysis.redaction import Policy, salt_of

OUTPUT = "private.jsonl"
"""Where a trace goes that no name was given for: those of the script and the model tell what ran."""


def check_private(private: bool, salt_file: str | Path | None, values: str, grip_to: str | Path | None) -> None:
    """Raise `UserError` for what would write what a private capture must not."""
    if salt_file is not None and not private:
        raise UserError("--salt-file is of names that --private hashes", "add --private")
    if not private:
        return
    if values == FULL:
        raise UserError("--values full writes the values themselves", "leave out --private, or --values")
    if grip_to is not None:
        raise UserError("--grip-to writes samples with source and values", "leave out --private, or --grip-to")


def policy_of(private: bool, salt_file: str | Path | None) -> Policy | None:
    """How records are redacted; None where they are not."""
    if not private:
        return None
    return Policy() if salt_file is None else Policy(salt_of(Path(salt_file)))
