"""Recording of the zoo's traces in separate processes, and the traces' statistics."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from opgrip.capture.command.capture_options import make_parser
from opgrip.capture.command.model_steps import build, run_step
from opgrip.cli.command import counted
from opgrip.cli.output_files import Damage, read_chunks, whole_file
from opgrip.cli.plugins import needed
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, shortened
from opgrip.platform.sandbox import run_program
from opgrip.traces import Trace, load
from opgrip.traces.analysis.differences import compare_traces
from opgrip.traces.analysis.longtail import find_longtail
from opgrip.traces.schema.records import EXTENSION, FUNCTION
from opgrip.traces.table.profiler_labels import is_mark
from opgrip.traces.zoo import Recording, ZooTrace, zoo_file
from opgrip.traces.zoo.manifest import FORMAT, MANIFEST, MODELS, SUFFIX

BANDWIDTH = 1e10  # bytes per second; affects how much time a long-tail function could save, not whether it is one


def record_of(path: Path, trace: ZooTrace, step_ms: float) -> Recording:
    content = load(path)
    header, data, operators = content.header, path.read_bytes(), operator_signatures(content)
    return Recording(
        versions=_versions(content, trace.library),
        machine=str(header["devices"].get(header.get("device"), header["devices"]["cpu"])),
        steps=int(header["steps"]),
        step_ms=step_ms,
        calls=len(content.own_calls),
        signatures=len(operators),
        operators=len(set(operators)),
        longtail=len(longtail_functions([content])),
        size_bytes=len(data),
        sha256=sha256(data).hexdigest(),
    )


def operator_signatures(trace: Trace) -> list[str]:
    return [item.op for item in trace.signatures if item.kind != FUNCTION and not is_mark(item.op)]


def longtail_functions(traces: Iterable[Trace]) -> set[tuple[str, str]]:
    return {(item.file, item.name) for item in find_longtail(traces, lambda trace: BANDWIDTH).functions}


def _versions(content: Trace, library: str) -> dict[str, str]:
    versions = {name: str(content.header[name]) for name in ("torch", "opgrip")}
    model = content.header.get("model")
    if isinstance(model, dict):
        versions |= {str(name): str(number) for name, number in (model.get("packages") or {}).items()}
    if library not in versions:
        # models of a library that ships with opgrip have its version
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions


LEVEL = 19  # highest compression level at which reading takes no more memory than usual
QUANTILE_DIGITS = 4  # number of digits of quantiles; more digits are sampling noise and would be a fifth of a file


def recipe_command(trace: ZooTrace) -> list[str]:
    return ["opcapture", *trace.arguments]


def pack(plain: Path, trace: ZooTrace, path: Path) -> Path:
    first, *lines = plain.read_bytes().splitlines(keepends=True)
    header = _line(json.loads(first) | {"command": recipe_command(trace)})
    data = b"".join([header, *map(_with_short_quantiles, lines)])
    with whole_file(path, force=True) as file:
        file.write(needed("zstandard").ZstdCompressor(level=LEVEL).compress(data))
    return path


def command_of(path: Path) -> list[str] | None:
    first = b""
    try:
        for chunk in read_chunks(path):
            first += chunk
            if b"\n" in chunk:
                break
        return list(map(str, json.loads(first.partition(b"\n")[0])["command"]))
    except (ValueError, KeyError, TypeError, UserError, Damage):
        return None


def short_quantiles(quantiles: Sequence[float]) -> list[float]:
    """Return quantiles rounded to few digits where this keeps them in the same order."""
    shortened = list(quantiles)
    for index in range(1, len(quantiles) - 1):
        before, value, after = quantiles[index - 1 : index + 2]
        short = float(f"{value:.{QUANTILE_DIGITS}g}")
        if before < value < after and shortened[index - 1] < short < after:
            shortened[index] = short
    return shortened


def _with_short_quantiles(line: bytes) -> bytes:
    if b'"quantiles":[' not in line:
        return line
    record = json.loads(line)
    quantiles = record.get("quantiles")
    if not isinstance(quantiles, list) or not all(isinstance(value, float) for value in quantiles):
        return line
    return _line(record | {"quantiles": short_quantiles(quantiles)})


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Distinct:
    traces: int
    operators: int
    extension_functions: int
    longtail: int

    @property
    def line(self) -> str:
        return (
            f"{counted(self.operators, 'operator')}, {self.extension_functions} of them functions of extensions, "
            f"and {counted(self.longtail, 'long-tail function')} in {counted(self.traces, 'trace')}"
        )


def count_distinct(traces: Iterable[ZooTrace]) -> Distinct:
    recorded_traces = [trace for trace in traces if trace.recording is not None]
    operators: dict[str, str] = {}
    functions: set[tuple[str, str]] = set()
    for trace in recorded_traces:
        content = load(zoo_file(trace))
        for item in content.signatures:
            if item.kind != FUNCTION and not is_mark(item.op):
                operators[item.op] = item.kind
        functions |= longtail_functions([content])
    extensions = sum(kind == EXTENSION for kind in operators.values())
    return Distinct(len(recorded_traces), len(operators), extensions, len(functions))


TIMEOUT_S = 1800.0  # time limit in seconds for a capture, and again for timing its step without capture
# Python code that runs `opcapture` without its script
OPCAPTURE = "import sys; from opgrip.capture.start import main; sys.exit(main())"
STEPS = 5
ENOUGH_S = 20.0  # time in seconds after which no more steps are timed
LAST_WORDS = 300  # maximum number of characters reported of a process's last message


def is_current(trace: ZooTrace, folder: Path = MODELS) -> bool:
    file = folder / f"{trace.name}{SUFFIX}"
    if trace.recording is None or not file.is_file():
        return False
    if sha256(file.read_bytes()).hexdigest() != trace.recording.sha256:
        return False
    return command_of(file) == recipe_command(trace)


def make_trace(
    trace: ZooTrace, folder: Path = MODELS, timeout_s: float = TIMEOUT_S, times_step: bool = True
) -> ZooTrace:
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / f"{trace.name}.jsonl"
        _run(["-c", OPCAPTURE, *trace.arguments, "-o", str(plain), "--force"], trace, timeout_s)
        step_ms = _time_step(trace, timeout_s) if times_step else 0.0
        folder.mkdir(parents=True, exist_ok=True)
        packed = pack(plain, trace, folder / f"{trace.name}{SUFFIX}")
        return replace(trace, recording=record_of(packed, trace, step_ms))


def differences_of_new_recording(trace: ZooTrace, shipped: Path, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Record a trace again; return a line for each signature whose number of calls differs from before."""
    with tempfile.TemporaryDirectory() as scratch:
        make_trace(trace, Path(scratch), timeout_s, times_step=False)
        new_trace = load(Path(scratch) / shipped.name)
        difference = compare_traces(load(shipped), new_trace, ("shipped", "new"))
    rows = [row for row in difference.rows if row.counts[0] != row.counts[1]]
    return [f"{row.counts[0]:,} -> {row.counts[1]:,} calls of {row.call}" for row in rows]


def _time_step(trace: ZooTrace, timeout_s: float) -> float:
    output = _run(["-m", "opgrip.zoo.making", *trace.arguments], trace, timeout_s)
    try:
        return round(float(json.loads(output.splitlines()[-1])["step_ms"]), 3)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(f"the step of {trace.name} cannot be timed", shortened(output[-LAST_WORDS:], 200)) from error


def _step_ms(arguments: Sequence[str]) -> float:
    args = make_parser().parse_args(list(arguments))
    program = build(args, Reporter("opgrip zoo"))
    run_step(program, program.inputs())
    seconds: list[float] = []
    while len(seconds) < STEPS and sum(seconds) < ENOUGH_S:
        inputs = program.inputs()
        start = perf_counter()
        run_step(program, inputs)
        seconds.append(perf_counter() - start)
    return median(seconds) * 1e3


def _run(words: Sequence[str], trace: ZooTrace, timeout_s: float) -> str:
    environment = os.environ | {"OPGRIP_STORE": ""}
    finished = run_program([sys.executable, *words], timeout_s, environment, started=_offer_to_killer)
    if finished.status is None:
        raise UserError(f"recording {trace.name} took longer than {timeout_s:g} s", "allow more with --timeout")
    if finished.status:
        raise UserError(f"{trace.name} cannot be recorded", _last_words(finished.status, finished.errors))
    return finished.output


def _offer_to_killer(pid: int) -> None:
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("900")


def _last_words(status: int, errors: str) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line for line in errors.splitlines() if line.strip()] or [f"exit status {status}"]
    line_text = next((line for line in reversed(lines) if "error:" in line), lines[-1])
    return shortened(line_text.partition("error: ")[2] or line_text, LAST_WORDS)


def write_manifest(traces: Iterable[ZooTrace], path: Path = MANIFEST) -> None:
    items = [asdict(trace) for trace in traces]
    with whole_file(path, force=True) as file:
        file.write((json.dumps({"format": FORMAT, "traces": items}, indent=1) + "\n").encode())


if __name__ == "__main__":
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        time_ms = _step_ms(sys.argv[1:])
    print(json.dumps({"step_ms": time_ms}))
