"""Report of the private torch APIs that this torch has, and what opgrip does instead of missing ones."""

import platform

import torch

from opgrip.capture.models.operators import torch_tables
from opgrip.capture.torch_compat import compiler_private
from opgrip.capture.torch_compat import torch_private as of_capture
from opgrip.platform import activity_records, precisions
from opgrip.replay.operators import torch_private as of_replay


def main() -> None:
    rows = [
        (package, name, state)
        for package, places in (
            ("capture", of_capture.private_places()),
            ("capture", compiler_private.private_places()),
            ("capture", torch_tables.private_places()),
            ("both", activity_records.private_places()),
            ("both", precisions.private_places()),
            ("replay", of_replay.private_places()),
        )
        for name, state in places.items()
    ]
    width = max(len(name) for _, name, _ in rows)
    print(f"torch {torch.__version__}, Python {platform.python_version()}")
    for package, name, state in rows:
        print(f"{package:8} {name:{width}} {state}")


if __name__ == "__main__":
    main()
