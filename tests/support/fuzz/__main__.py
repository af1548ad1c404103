"""Fuzzer of the readers of untrusted traces and files of other tools, by mutations of small real files.

Other exceptions than `UserError`, and excess of the limits of time and memory, are findings; their files are kept.

    python tests/support/fuzz --seconds 600
    python tests/support/fuzz --seed 7          the same mutants again
    python tests/support/fuzz build/fuzz/*      replays the kept findings
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1].iterdir())
sys.path.insert(0, str(Path(__file__).resolve().parent))

from consumers import CONSUMERS, FOREIGN_CONSUMERS, MARK, chosen, consume, format_name_of
from foreign_seeds import make_foreign_seeds
from mutations import foreign_mutant, mutant
from programs import ROOT
from seeds import make_seeds

SECONDS, LIMIT_S, LIMIT_BYTES = 600, 5, 500 << 20
# Address space that a process may use in addition to its own, so that a decompression bomb ends it and not the machine.
MOST_ADDRESSES = 3 << 30
FOREIGN = 0.5  # share of mutants that are other tools' files
BATCH = 25  # mutants that one process reads one after the other
FOUND = ROOT / "build" / "fuzz"


@dataclass(frozen=True, slots=True)
class Finding:
    """Faulty behaviour on a mutant: a line that similar findings have in common (`kind`), and the details."""

    kind: str
    detail: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the mutants (default: the time)")
    parser.add_argument("files", nargs="*", type=Path, help="mutants to try instead of new ones")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    # a fork has only the first thread
    torch.set_num_threads(1)
    findings: dict[str, Finding] = {}
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for paths in _files(args, Path(folder)):
            for path, finding in _try_all(paths):
                if finding.kind not in findings:
                    findings[finding.kind] = finding
                    _keep(path, finding, f"{args.seed}-{len(findings)}")
            count += len(paths)
    print(f"{count:,} mutants: {len(findings)} findings")
    return 1 if findings else 0


def _files(args: argparse.Namespace, folder: Path) -> Iterator[Sequence[Path]]:
    if args.files:
        yield from ([path] for path in args.files if ".jsonl" in path.suffixes or format_name_of(path) is not None)
        return
    seeds, random = make_seeds(folder), Random(args.seed)
    foreign_seeds = make_foreign_seeds(folder, folder / "tiny.jsonl")
    by_format = {
        seed.format_name: [item for item in foreign_seeds if item.format_name == seed.format_name]
        for seed in foreign_seeds
    }
    print(f"formats: {', '.join(f'{name} ({len(own)})' for name, own in by_format.items())}", flush=True)
    # import and measure once, before the forks
    for consumer in CONSUMERS:
        consume(folder / "tiny.jsonl", consumer)
    for place, own in enumerate(by_format.values()):
        for consumer in FOREIGN_CONSUMERS:
            consume(own[0].write(folder / f"seed{place}{MARK}{own[0].format_name}"), consumer)
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        paths = []
        for number in range(BATCH):
            if by_format and random.random() < FOREIGN:
                # choose each format equally often, regardless of its number of seeds
                seed = foreign_mutant(random.choice(by_format[random.choice(sorted(by_format))]), random)
                paths.append(seed.write(folder / f"mutant{number}{MARK}{seed.format_name}"))
                continue
            content, suffix = mutant(random.choice(seeds), random)
            path = folder / f"mutant{number}.jsonl{suffix}"
            path.write_bytes(content)
            paths.append(path)
        yield paths
        for path in paths:
            _remove(path)


def _remove(path: Path) -> None:
    folder = next((item for item in (path, path.parent) if MARK in item.name), None)
    if folder is None:
        path.unlink()
    else:
        shutil.rmtree(folder)


def _try_all(paths: Sequence[Path]) -> Iterator[tuple[Path, Finding]]:
    """Yield findings of a child process that reads some files; if it ends early, another reads the files after that
    one.
    """
    remaining = list(paths)
    while remaining:
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(source)
            _child(remaining, sink)
        os.close(sink)
        tried = 0
        with os.fdopen(source) as lines:
            for line in lines:
                report = json.loads(line)
                tried = report["place"] + 1
                if report.get("kind"):
                    yield remaining[report["place"]], Finding(report["kind"], report["detail"])
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status) and tried:
            doing = "over 5 s" if os.WTERMSIG(status) == signal.SIGPROF else signal.strsignal(os.WTERMSIG(status))
            yield remaining[tried - 1], Finding(f"{doing} in {report['consumer']}", "its process ended")
        elif tried < len(remaining):
            raise RuntimeError(f"a process ended with {status} after {tried} of {len(remaining)} files")
        remaining = remaining[tried:]


def _child(paths: Sequence[Path], sink: int) -> None:
    warm = _peak_bytes()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_ADDRESSES, resource.RLIM_INFINITY))
    try:
        with os.fdopen(sink, "w") as reports:
            for place, path in enumerate(paths):
                for consumer in chosen(path):
                    reports.write(json.dumps({"place": place, "consumer": consumer.__name__}) + "\n")
                    reports.flush()
                    for finding in _findings(path, consumer, warm):
                        warm = max(warm, _peak_bytes())
                        reports.write(json.dumps({"place": place, "consumer": consumer.__name__, **finding}) + "\n")
    finally:
        os._exit(0)


def _findings(path: Path, consumer: object, warm: int) -> Iterator[dict[str, str]]:
    # limit processor time, since others may use the processor; the signal ends the process inside C code too
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        consume(path, consumer)  # type: ignore[arg-type]
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [item for item in traceback.extract_tb(error.__traceback__) if str(ROOT) in item.filename]
        where = own[-1] if own else place
        kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno} {where.name}"
        yield {"kind": kind, "detail": "".join(traceback.format_exception(error, limit=-12))}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak_bytes() - warm
    if grown > LIMIT_BYTES:
        name = getattr(consumer, "__name__", "")
        yield {"kind": f"over 500 MB in {name}", "detail": f"{grown >> 20} MB"}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _keep(path: Path, finding: Finding, name: str) -> None:
    FOUND.mkdir(parents=True, exist_ok=True)
    format_name = format_name_of(path)
    if format_name is not None:
        folder = next(item for item in (path, path.parent) if MARK in item.name)
        shutil.copytree(folder, FOUND / f"{name}{MARK}{format_name}", dirs_exist_ok=True)
        kept = FOUND / f"{name}{MARK}{format_name}" / path.relative_to(folder)
    else:
        kept = FOUND / f"{name}.jsonl{path.suffix if path.suffix != '.jsonl' else ''}"
        kept.write_bytes(path.read_bytes())
    print(f"\n{finding.kind}: {kept}\n{finding.detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
