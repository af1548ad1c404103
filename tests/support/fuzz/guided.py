"""Coverage-guided fuzzer (atheris) of the readers of other tools' files.

    python tests/support/fuzz/guided.py --seconds 60
    python tests/support/fuzz/guided.py --runs 20000 --seed 1         the same files on every machine

It exits with status 1 if a reader raises another error than `UserError` or exceeds 10 s or 2 GB, and keeps the file
in build/fuzz. Without atheris (`pip install '.[fuzz]'`), which some Python versions lack, it prints a note and exits
with status 0.
"""

import argparse
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path

sys.path.extend(str(folder) for folder in Path(__file__).resolve().parents[1].iterdir())
sys.path.insert(0, str(Path(__file__).resolve().parent))

from optional import is_installed

SECONDS, LIMIT_S, LIMIT_MB = 60, 10, 2048
MOST_BYTES = 1 << 17
MOST_RECORDS = 50_000
FOUND = Path(__file__).resolve().parents[3] / "build" / "fuzz"


def main() -> int:
    """Run the fuzzer; libFuzzer ends the process when it finds something or its time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="duration of the run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=-1, help="maximum number of files (default: no limit)")
    parser.add_argument("--seed", type=int, default=0, help="of the files (default: the time)")
    args = parser.parse_args()
    if not is_installed("atheris"):
        print("atheris is not installed, so that no fuzzer is guided: pip install '.[fuzz]'")
        return 0
    import atheris

    with atheris.instrument_imports(include=["opgrip.traces.formats", "opgrip.traces.io.foreign_files"]):
        from opgrip.traces.io.foreign_files import formats

        formats.names()
    from foreign_seeds import make_foreign_seeds, readable_formats
    from programs import train_tiny_net

    from opgrip.errors import UserError
    from opgrip.traces import TraceReader

    folder = Path(tempfile.mkdtemp(prefix="opgrip-fuzz-"))
    train_tiny_net(folder / "tiny.jsonl")
    names = readable_formats()
    corpus = folder / "corpus"
    corpus.mkdir()
    for place, seed in enumerate(make_foreign_seeds(folder, folder / "tiny.jsonl")):
        # the first byte selects the reader of a file; the other files of a folder stay unchanged
        if seed.opens in seed.files and len(seed.files[seed.opens]) < MOST_BYTES:
            (corpus / str(place)).write_bytes(bytes([names.index(seed.format_name)]) + seed.files[seed.opens])

    def read(data: bytes) -> None:
        name = names[data[0] % len(names)] if data else names[0]
        path = folder / "file.json"
        path.write_bytes(data[1:])
        try:
            for _ in islice(TraceReader(path, format_name=name), MOST_RECORDS):
                pass
        except UserError:
            pass

    FOUND.mkdir(parents=True, exist_ok=True)
    choice = (f"-runs={args.runs}", f"-seed={args.seed}")
    options = (f"-max_total_time={args.seconds}", f"-timeout={LIMIT_S}", f"-rss_limit_mb={LIMIT_MB}")
    limits = (f"-max_len={MOST_BYTES}", f"-artifact_prefix={FOUND}{os.sep}", "-verbosity=0", "-print_final_stats=1")
    atheris.Setup([sys.argv[0], *choice, *options, *limits, str(corpus)], read)
    print(f"guided by code: {', '.join(names)}", flush=True)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
