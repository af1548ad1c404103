"""Checks, before any case runs, that results can be written as the command line requests."""

from __future__ import annotations

import argparse
from pathlib import Path

from opgrip.cli.options import flag_of, from_arguments, words_in
from opgrip.cli.output_files import check_writable
from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.replay.analyses import analyses
from opgrip.replay.replay_options import OutputOptions
from opgrip.replay.reports import report_for
from opgrip.replay.workers.journal import journal_path


def check_output(output: OutputOptions, args: argparse.Namespace) -> None:
    """Raise `UserError` if the results cannot be written as requested."""
    path = output.output
    if path is None:
        if output.append:
            raise UserError("--append needs to know what it adds to", "name the file with --output")
        return
    if output.list:
        raise UserError("--list runs no case and writes no results", "leave out --output")
    report = report_for(path)
    analysis = analyses.get(report.needs)
    if analysis is not None and not analysis.is_requested(from_arguments(analysis.options, args)):
        flag = flag_of(words_in(analysis.options)[0])
        hint = "end its name in .json" if args.sequence else f"add {flag}, or end its name in .json"
        raise UserError(f"{path} shows what {flag} finds", hint)
    if output.append and report.read is None:
        raise UserError(f"rows cannot be added to {path}", "write .json or .csv")
    if report.package:
        needed(*report.package)
    check_writable(path, output.may_replace)


def is_completed(output: OutputOptions) -> bool:
    """Return True if the results are complete and there is nothing to resume.

    Raises
    ------
    UserError : if `--resume` is given without `--output`
    """
    if not output.resume:
        return False
    if output.output is None:
        raise UserError("--resume needs to know what it goes on with", "name the file with --output")
    return output.output.exists() and not is_interrupted(output.output) and not output.append


def is_interrupted(output: Path) -> bool:
    """Return True if there is something next to the output that `--resume` can continue."""
    return any(path.exists() for path in (journal_path(output), parts_folder(output)))


def parts_folder(output: Path) -> Path:
    """Return the folder for the rows of each of several traces until all results are complete."""
    return output.with_name(f"{output.name}.parts")
