"""`opgrip view`: a store in a browser, with the history of each case."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from fnmatch import fnmatchcase

from opgrip.cli.command import add_debug, not_negative, positive
from opgrip.cli.extras import MissingPackageError
from opgrip.errors import UserError
from opgrip.tools.verbs.kept_runs import add_store
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip view                                  the newest runs of the store; Ctrl-C ends it
  opgrip view --trace '*faster_rcnn*' --runs 30
  opgrip view --port 8000 --open

It listens on 127.0.0.1 alone, and answers who has the token in the address that it prints. From another machine:
ssh -L 8000:127.0.0.1:8000 HOST
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)
    parser.add_argument("--trace", metavar="GLOB", help="only runs of such traces")
    parser.add_argument("--machine", metavar="GLOB", help="only runs of such machines")
    parser.add_argument("--runs", type=positive, default=20, metavar="N", help="the newest (default: %(default)s)")
    parser.add_argument("--port", type=not_negative, default=0, metavar="N", help="(default: one that is free)")
    parser.add_argument("--open", action="store_true", help="open the browser")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until the user ends it."""
    from opgrip.tools.report.server import PageServer

    make = _Maker(args)
    make()
    try:
        server = PageServer(make, args.port)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {args.port} cannot be listened on: {error}", "choose another with --port") from error
    print(f"{args.prog}: {server.address}", file=sys.stderr, flush=True)
    if args.open:
        webbrowser.open(server.address)
    with server:
        server.serve_forever()
    return 0


class _Maker:
    """Makes the page of a store, again when a run was added or removed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._made = args, ""
        self._of: list[str] | None = None

    def __call__(self) -> str:
        from opgrip.replay.compare.store.store import Store, summary_of
        from opgrip.tools.report import make_page

        args, store = self._args, Store(self._args.store)
        kept = store.runs()
        names = [run.name for run in kept]
        if names != self._of:
            chosen = {}
            for run in reversed(kept):
                try:
                    results = run.load()
                except MissingPackageError:
                    raise
                except UserError:
                    continue
                about = summary_of(results)
                if fnmatchcase(about.trace, args.trace or "*") and fnmatchcase(about.machine, args.machine or "*"):
                    chosen[run.name] = results
                if len(chosen) == args.runs:
                    break
            if not chosen:
                raise UserError(f"{store.folder} holds no such runs", "opreplay keeps one a replay")
            self._made, self._of = make_page(chosen, {}, str(store.folder)), names
        return self._made


verbs.register("view")(Verb("a store in a browser, with the history of each case", EXAMPLES, prepare, run))
