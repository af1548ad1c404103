"""Which signatures of a corpus a mode or a device cannot run: found by running each once."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from opgrip.cli.keywords import arguments_of
from opgrip.cli.plural import counted
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.command.replay import Replay
from opgrip.replay.modes.mode import EAGER
from opgrip.replay.replay_options import make_parser
from opgrip.replay.results.results import RAN, Result
from opgrip.traces.corpus import Corpus
from opgrip.traces.corpus.cases import write_cases
from opgrip.traces.io.reader import read_header

CASES, RESULTS = ".cases.jsonl.zst", ".results.json"
"""What the names of the files end in that a trial keeps, to go on with."""
TRIED = "tried"
"""Of a kept trace's header: the keys of its signatures, those with the largest share first."""
OF_ANOTHER = "the files that were kept are of another corpus, or of another part of it"
IN_EAGER = "in eager"
"""Status of what eager cannot run here either."""
WHOLE = 0.9995
"""Share of the time above which it is all of it, as it is shown."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried.

    Attributes
    ----------
    modes : that the signatures are run in, besides eager
    device : that they run on
    top : how many signatures are tried, those with the largest share of time; None for all
    keep : path whose name begins those of the files that are kept, which a later trial can go on with; None for none
    resume : go on with what an earlier trial kept
    """

    modes: Sequence[str] = ()
    device: str = "cpu"
    top: int | None = None
    keep: Path | None = None
    resume: bool = False


def find_lacking(corpus: Corpus, trial: Trial, reporter: Reporter, unbounded: bool = False) -> pd.DataFrame:
    """One row a signature and mode that was tried, those with the largest share first.

    mode, op, call, status (as of `opreplay`; `in eager` for what fails there too, and so tells nothing of the mode),
    reason, models, share (of the corpus' time), key.

    Raises
    ------
    UserError : where a mode or the device is not there, or an earlier trial cannot be gone on with
    KeyboardInterrupt : where the user ended it; what was tried by then is kept
    """
    with ExitStack() as stack:
        keep = trial.keep or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "corpus"
        cases, results = kept_files(keep)
        keys = _keys(corpus, trial.top)
        if not (trial.resume and cases.exists()):
            write_cases(corpus, keys, cases, force=True, unbounded=unbounded, fields={TRIED: keys})
        elif read_header(cases, unbounded).fields.get(TRIED) != keys:
            raise UserError(OF_ANOTHER, "leave out --resume")
        modes = list(dict.fromkeys((EAGER, *trial.modes)))
        # warm: what stood before a call in its program is of no matter here
        options = {
            "mode": modes,
            "iterations": 1,
            "warmup": 0,
            "cache": "warm",
            "device": trial.device,
            "output": str(results),
        }
        options |= {"resume": True} if trial.resume else {"force": True}
        replay = Replay(arguments_of(make_parser(), [str(cases)], options, excluded=()), reporter, may_fork=False)
        rows = replay.completed_rows() if trial.resume and results.exists() else _rows(replay)
        return _table(corpus, rows, trial.modes)


def kept_files(keep: Path) -> tuple[Path, Path]:
    """The signatures that are tried, as a trace, and their results, beside the output of a trial."""
    return keep.with_name(f"{keep.stem}{CASES}"), keep.with_name(f"{keep.stem}{RESULTS}")


def _keys(corpus: Corpus, top: int | None) -> list[str]:
    keys = _shares(corpus).index.tolist()
    return keys if top is None else keys[:top]


def _shares(corpus: Corpus) -> pd.Series[float]:
    """By key, its share of the time of the corpus, by falling share."""
    frame = corpus.frame
    weighted = frame["share"] * frame["weight"] / len(corpus.sources)
    return weighted.groupby(frame["key"]).sum().sort_values(ascending=False, kind="stable")


def _rows(replay: Replay) -> Sequence[Result]:
    replayed = replay.run()
    if replayed.problem is not None:
        raise replayed.problem
    if replayed.interrupted:
        raise KeyboardInterrupt
    return replayed.results.rows


def _table(corpus: Corpus, rows: Sequence[Result], modes: Sequence[str]) -> pd.DataFrame:
    shares = _shares(corpus)
    groups = corpus.frame.groupby("key", sort=False)
    models, calls = groups["model"].unique(), groups["call"].first()
    eager = {row.key: row.status for row in rows if row.mode == EAGER}
    lines = []
    for row in rows:
        if row.key not in shares.index:
            raise UserError(OF_ANOTHER, "leave out --resume")
        if row.mode == EAGER and modes and EAGER not in modes:
            continue
        in_eager = row.mode != EAGER and eager.get(row.key) not in RAN and row.status not in RAN
        lines.append(
            {
                "mode": row.mode,
                "op": row.op,
                "call": calls[row.key],
                "status": IN_EAGER if in_eager else row.status,
                "reason": row.error or "",
                "models": ", ".join(sorted(models[row.key])),
                "share": float(shares[row.key]),
                "key": row.key,
            }
        )
    columns = ["mode", "op", "call", "status", "reason", "models", "share", "key"]
    return pd.DataFrame(lines, columns=columns).sort_values("share", ascending=False, kind="stable", ignore_index=True)


def describe_lacking(table: pd.DataFrame) -> list[str]:
    """A line a mode: `onnxruntime: 31 signatures of 12 models cannot run, of 200 that were tried: 3.2% of the time`.

    Where what was tried is a part of the time, it says of how much.
    """
    lines = []
    for mode, own in table.groupby("mode", sort=False):
        lacking = cannot_run(own)
        beside = int((own["status"] == IN_EAGER).sum())
        also = f"; {beside:,} more do not run in eager either" if beside else ""
        tried = float(own["share"].sum())
        of_all = f", {tried:.1%} of the time" if tried < WHOLE else ""
        lines.append(
            f"{mode}: {counted(len(lacking), 'signature')} of {counted(len(_models(lacking)), 'model')} cannot run, of "
            f"{len(own):,} that were tried{of_all}: {lacking['share'].sum():.1%} of the time{also}"
        )
    return lines


def cannot_run(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that a mode, or the device, cannot run, or runs wrong."""
    return table[~table["status"].isin([*RAN, IN_EAGER])]


def by_operator(table: pd.DataFrame) -> pd.DataFrame:
    """What cannot run by operator: mode, op, status, signatures, models, share, reason (of most), by falling share."""
    rows = []
    for (mode, op, status), own in cannot_run(table).groupby(["mode", "op", "status"], sort=False):
        reasons = own["reason"].value_counts()
        facts = {"signatures": len(own), "models": len(_models(own)), "share": float(own["share"].sum())}
        rows.append({"mode": mode, "op": op, "status": status, **facts, "reason": reasons.index[0]})
    columns = ["mode", "op", "status", "signatures", "models", "share", "reason"]
    return pd.DataFrame(rows, columns=columns).sort_values(
        ["mode", "share"], ascending=[True, False], ignore_index=True
    )


def _models(table: pd.DataFrame) -> set[str]:
    return {name for names in table["models"] for name in names.split(", ")}
