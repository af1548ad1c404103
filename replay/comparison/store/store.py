"""A folder of results: `results/<machine>-<device>/<time>-<trace>-<id>.parquet`, one file a replay, never replaced."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import cannot_be_written
from opgrip.cli.plugins import MissingPackageError
from opgrip.errors import UserError
from opgrip.replay.outcome import Results, read_run, write_results
from opgrip.replay.outputs import is_interrupted
from opgrip.replay.results.results import OK, Result

FOLDER, VARIABLE = "results", "OPGRIP_STORE"
"""Where results are kept, unless a variable names another folder; an empty one keeps none."""
LATEST = re.compile(r"latest(?:~(\d+))?")
"""Names the newest run of a store, or one so many before it."""
DAMAGED = "(damaged)"
_UNFIT = re.compile(r"[^A-Za-z0-9._]+")
_LEAST_OF_ID = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list shows of a run; `ok` counts rows, `dtypes` are those that `--dtype` cast tensors to."""

    time: str = ""
    trace: str = ""
    device: str = ""
    torch: str = ""
    machine: str = ""
    modes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cases: int = 0
    ok: int = 0

    def plain(self) -> dict[str, Any]:
        """By the names of its fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """A replay that was kept.

    Attributes
    ----------
    name : of its file, without its suffix, by which it can be asked for
    """

    path: Path

    @property
    def name(self) -> str:
        """Its file's, without the suffix."""
        return self.path.stem

    def load(self) -> Results:
        """Its rows and header; `UserError` where the file is damaged."""
        return read_run(self.path)

    def summary(self) -> Summary:
        """What a list shows of it; of a damaged file that it is one."""
        try:
            return summary_of(self.load())
        except MissingPackageError:
            raise
        except UserError:
            return Summary(trace=DAMAGED)


class Store:
    """A folder of results, which need not exist.

    Parameters
    ----------
    folder : `None` for the usual one, which `OPGRIP_STORE` names
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = usual_folder() or Path(FOLDER) if folder is None else folder

    def keep(self, rows: Sequence[Result], header: dict[str, Any]) -> Path:
        """Write results to a file of their own, and say where.

        Raises
        ------
        UserError : where it cannot be written
        """
        environment, accelerators = header.get("environment", {}), header.get("accelerator", {}).get("devices", {})
        names = [str(facts["name"]) for facts in accelerators.values() if "name" in facts]
        device = names[0] if names else str(header.get("device", "cpu")).partition(":")[0]
        folder = self.folder / f"{_slug(str(environment.get('machine', 'machine')))}-{_slug(device)}"
        moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")[:-3]
        # it loads torch, and a list of runs needs none
        from opgrip.replay.cases.sources.operator import PREFIX, name_of_target

        target = str(header.get("trace", "results"))
        trace = name_of_target(target) if target.startswith(PREFIX) else Path(target).name.partition(".")[0]
        path = folder / f"{moment}-{_slug(trace)}-{secrets.token_hex(3)}{_suffix()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_be_written(path, error) from error
        write_results(rows, header, path, force=False)
        return path

    def runs(self) -> list[Run]:
        """All that it has, the oldest first."""
        return sorted((Run(path) for path in self._files()), key=lambda run: (run.name, str(run.path)))

    def holds(self, name: str) -> bool:
        """Whether a name is that of a run, or of several, and of no file."""
        return LATEST.fullmatch(name) is not None or (not _holds(Path.is_file, name) and bool(self._named(name)))

    def find(self, name: str) -> Path:
        """The file of a run.

        Parameters
        ----------
        name : a path; the name of a run, or what only one begins or ends with; `latest`, and `latest~1` for the one
            before

        Raises
        ------
        UserError : where there is none, or several
        """
        if _holds(Path.is_file, name):
            return Path(name)
        runs = self.runs()
        match = LATEST.fullmatch(name)
        if match is not None:
            place = int(match[1] or 0)
            if place < len(runs):
                return runs[-1 - place].path
            raise UserError(
                f"{self.folder} holds {len(runs)} runs, and {name} is none of them", "see opgrip results list"
            )
        found = self._named(name)
        if len(found) == 1:
            return found[0].path
        if found:
            raise UserError(f"{name!r} names {len(found)} runs, such as {found[0].name}", "name one by more letters")
        if _holds(is_interrupted, name):
            problem = f"the replay that is to write {name} has not ended"
            raise UserError(problem, "wait for it, or where it was interrupted go on with opreplay ... --resume")
        raise UserError(f"{name} is no file, and no run in {self.folder}", "see opgrip results list")

    def _named(self, name: str) -> list[Run]:
        if len(name) < _LEAST_OF_ID:
            return []
        runs = self.runs()
        exact = [run for run in runs if run.name == name]
        return exact or [run for run in runs if run.name.startswith(name) or run.name.endswith(name)]

    def _files(self) -> Iterator[Path]:
        for path in self.folder.glob("*/*"):
            if path.suffix in (".json", ".parquet") and path.is_file():
                yield path


def summary_of(results: Results) -> Summary:
    """What a list shows of a run."""
    header, rows = results.header, results.rows
    return Summary(
        time=str(header.get("time", "")),
        trace=str(header.get("trace", "")),
        device=str(header.get("device", "")),
        torch=str(header.get("torch", "")),
        machine=str((header.get("environment") or {}).get("machine", "")),
        modes=tuple(dict.fromkeys(map(_words_of_mode, rows))),
        dtypes=tuple(dict.fromkeys(row.dtype for row in rows if row.dtype)),
        cases=len({row.case_of_trace for row in rows}),
        ok=sum(row.status == OK for row in rows),
    )


def _words_of_mode(row: Result) -> str:
    return f"{row.mode} (tune {row.tune})" if row.tune else row.mode


def usual_folder() -> Path | None:
    """Where results are kept when nothing is said; None where they are not."""
    name = os.environ.get(VARIABLE, FOLDER)
    return Path(name).expanduser() if name else None


def _holds(question: Callable[[Path], bool], name: str) -> bool:
    """Whether something is so of a file, whatever its name."""
    try:
        return question(Path(name))
    except (OSError, ValueError):
        # longer than a name can be, where nobody may look, or no name of a file
        return False


def _suffix() -> str:
    """Parquet, which is small and read by many, where what writes it is installed."""
    return ".parquet" if importlib.util.find_spec("pyarrow") is not None else ".json"


def _slug(text: str) -> str:
    return _UNFIT.sub("-", text).strip("-.")[:60] or "unnamed"
