"""`opcapture --on-demand -- SCRIPT`: a program that runs at full speed until it is asked to record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from opgrip.capture.command.capture_options import OPTIONS, Recording, Steps
from opgrip.capture.command.script import run_script, script_name
from opgrip.capture.on_demand.autostart import load_recording
from opgrip.capture.on_demand.names import DEFAULT, PRIVATE_DEFAULT, check_pattern
from opgrip.capture.on_demand.settings import WARMUP, Settings
from opgrip.capture.on_demand.starting import start
from opgrip.capture.on_demand.trigger import signal_of
from opgrip.capture.program.capture_choices import KNOWN_EXTENSIONS
from opgrip.capture.program.patches import LateModules
from opgrip.cli.command import INTERRUPTED
from opgrip.cli.options import flag_of, from_arguments, refuse_options
from opgrip.errors import UserError

OF_WHOLE_PROGRAMS = ("last", "grip", "grip_to", "find_longtail", "audit", "force")
"""Options of captures that are not asked for."""


def run_on_demand(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    """Run a script with an agent, and give its exit status."""
    if program is None:
        raise UserError("--on-demand is for scripts", "put one after --, as in opcapture --on-demand -- server.py")
    others = [declared for declared in OPTIONS if declared is not Steps]
    refuse_options(args, others, ("models",), "a script after -- has its own options")
    settings = settings_of(args, script_name(program))
    try:
        start(settings)
    except (UserError, OSError) as error:
        # the program is worth more than its recordings
        print(f"opgrip: this process cannot be asked to record: {' '.join(str(error).split())}", file=sys.stderr)
    # the script's own import of torch finds the environment that the script makes for it
    with LateModules("torch".__eq__, load_recording):
        return _run(program)


def _run(program: Sequence[str]) -> int:
    try:
        return run_script(program)
    except KeyboardInterrupt:
        return INTERRUPTED


def settings_of(args: argparse.Namespace, name: str) -> Settings:
    """What the command line says of recordings."""
    pattern = args.output or (PRIVATE_DEFAULT if args.private else DEFAULT)
    check_pattern(pattern)
    unset, recording = asdict(Recording()), asdict(from_arguments(Recording, args))
    options = {word: value for word, value in recording.items() if value != unset[word]}
    refused = next((word for word in OF_WHOLE_PROGRAMS if word in options or getattr(args, word, None)), None)
    if refused is not None:
        raise UserError(f"{flag_of(refused)} is for a capture of a whole program", "leave it or --on-demand out")
    if "extension" in options:
        options["extensions"] = (*KNOWN_EXTENSIONS, *options.pop("extension"))
    if "salt_file" in options:
        # the program may change its folder
        options["salt_file"] = options["salt_file"].absolute()
    if args.private or args.salt_file is not None:
        # loads torch, which the script itself loads later
        from opgrip.capture.program.capture_choices import check_private

        check_private(args.private, args.salt_file, args.values, None)
    if args.signal is not None:
        signal_of(args.signal)
    if args.max_disk is not None and args.every is None:
        raise UserError("--max-disk without --every", "recordings that are asked for stay")
    if args.new_only and args.every is None:
        raise UserError("--new-only without --every", "recordings that are asked for stay")
    if args.new_only and args.private and args.salt_file is None:
        raise UserError("--new-only with --private needs names that stay alike", "add --salt-file FILE")
    steps = None if args.seconds is not None else args.steps
    return Settings(
        *(name, str(Path(pattern).absolute()), steps, args.seconds),
        # a model's first steps warm up more than the capture
        warmup=WARMUP if args.warmup == Steps().warmup else args.warmup,
        step_module=args.step_module,
        signal=args.signal,
        every_s=args.every,
        max_disk_bytes=args.max_disk,
        new_only=args.new_only,
        options=options,
    )
