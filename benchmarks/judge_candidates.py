"""Judge the candidates in benchmarks/candidates, and measure how far verdicts and savings can be trusted.

python benchmarks/judge_candidates.py table      # is each candidate right, faster, and worth it on traces of the zoo?
python benchmarks/judge_candidates.py same       # share of verdicts that call an operator faster or slower than itself
python benchmarks/judge_candidates.py confirm    # savings estimated from single calls and measured in whole steps

`--quick` uses few signatures and runs; `--into PAGE` also replaces the table of the same columns in a page.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opgrip import judge
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.results.judgement import judged_steps, mean_saving, saving_in_words
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED

FOLDER = Path(__file__).resolve().parent / "candidates"


@dataclass(frozen=True, slots=True)
class Example:
    """A candidate of the folder.

    kind : how the candidate is made, such as a Triton kernel, as text for the table
    op : full name of the operator
    source : file and function of the candidate
    has_gradient : True if autograd differentiates the candidate
    """

    kind: str
    op: str
    source: str
    has_gradient: bool = False

    @property
    def candidate(self) -> Mapping[str, str]:
        """The candidate in the form that `judge` takes: its file and function, by operator."""
        return {self.op: f"{FOLDER / self.source}"}


EXAMPLES = (
    Example("plain torch", "aten.native_layer_norm.default", "plain_torch.py:layer_norm", has_gradient=True),
    Example("plain torch", "aten._softmax.default", "plain_torch.py:softmax", has_gradient=True),
    Example("torch.compile", "aten.gelu.default", "compiled.py:gelu", has_gradient=True),
    Example("Triton's interpreter", "aten.sigmoid.default", "in_triton.py:sigmoid"),
    Example("C++ extension", "aten.relu_.default", "in_cpp.py:relu_"),
    Example("numpy", "aten.mm.default", "in_numpy.py:mm"),
    Example("torch.library", "aten.silu.default", "in_library.py:silu", has_gradient=True),
)
TRACES: tuple[str, ...] = ("bert-base.train", "gpt2.generate", "llama-1b.generate", "upernet_swin-t.predict")
TRACES += ("yolox_s.predict", "faster-rcnn_r50.predict")
CONFIRMED: tuple[str, ...] = (
    "soft-actor-critic.train",
    "bert-base.predict",
    "tapas-base.predict",
    "whisper-tiny.generate",
)
CONFIRMED += ("dab-detr_r50.predict",)
"""traces of the zoo whose steps replay in seconds"""
SAME: tuple[str, ...] = (
    "add.Tensor",
    "mul.Tensor",
    "sub.Tensor",
    "div.Tensor",
    "convolution.default",
    "relu.default",
    "cat.default",
)
SAME += ("index.Tensor", "mm.default", "exp.default", "sum.dim_IntList", "where.self")
"""operators of the built-in detector that replace themselves"""
QUICK: dict[str, Any] = {"iterations": 5}
LEAST_SHARE = 0.99  # share of verdicts on identical functions that must be equal or undecided
NEAR = 0.01  # largest allowed difference of an estimated saving from the measured one, as a share of the step


def main(words: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "same", "confirm"))
    parser.add_argument("--only", default="", help="only candidates whose operator contains this text")
    parser.add_argument("--quick", action="store_true", help="use few signatures and runs")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="Markdown page in which to replace the table")
    args = parser.parse_args(words)
    examples = [item for item in EXAMPLES if args.only in item.op]
    if args.what == "same":
        return same(args.quick)
    lines, status = table(examples, args.quick) if args.what == "table" else confirm(args.quick)
    if args.into is not None:
        text = args.into.read_text(encoding="utf-8")
        new, count = re.subn(rf"{re.escape(lines[0])}\n(\|.*\n)*", lambda _: "\n".join([*lines, ""]), text)
        if count != 1:
            raise SystemExit(f"{args.into} has {count} tables with the first line {lines[0]}")
        args.into.write_text(new, encoding="utf-8")
    return status


def table(examples: Sequence[Example], is_quick: bool) -> tuple[list[str], int]:
    """Print a Markdown table of the candidates; return its lines, and the exit status.

    is_quick : True for few signatures and runs
    """
    options = QUICK | {"top": 3} if is_quick else {"top": 12}
    lines = _printed([], "| candidate | operator | right | faster | worth it |", "| --- | --- | --- | --- | --- |")
    for item in examples:
        # C++ is built here, where no time limit of a worker ends it
        subprocess.run([sys.executable, FOLDER / item.source.partition(":")[0]], check=False)
        _printed(lines, f"| {item.kind} | `{item.op}` | {' | '.join(_cells(item, options))} |")
    return lines, 0


def _printed(lines: list[str], *new: str) -> list[str]:
    """Print lines and add them to a list, which is returned."""
    print("\n".join(new), flush=True)
    lines += new
    return lines


def _cells(example: Example, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        steps = judge(example.candidate, [f"zoo:{name}" for name in TRACES], **options).steps
    except UserError as error:
        yield from (f"not judged: {error}", "", "")
        return
    counts, gradients = (sum(map(Counter, found), Counter()) for found in _counts(steps))
    total, broken = counts.total(), sum(step.broken for step in steps)
    yield f"{total + gradients.total() - broken} of {total + gradients.total()}"
    yield ", ".join(f"{counts[verdict]} {verdict}" for verdict in (FASTER, EQUAL, UNDECIDED, SLOWER) if counts[verdict])
    mean = mean_saving(steps)
    yield "" if mean is None else f"{saving_in_words(mean.saving, mean.error, 2)} of {100 * mean.share:.2f} %"


def _counts(steps: Sequence[Any]) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    return [step.verdicts for step in steps], [step.gradients for step in steps]


def same(is_quick: bool) -> int:
    """Judge operators as their own candidates; return 1 if too many verdicts are neither equal nor undecided.

    is_quick : True for few signatures
    """
    candidates = {f"aten.{name}": f"torch:ops.aten.{name}" for name in SAME}
    frame = judge(candidates, "trace:faster_rcnn", top=10 if is_quick else 150).frame
    counts = Counter(frame["verdict"])
    share = (counts[EQUAL] + counts[UNDECIDED]) / len(frame)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    print(f"{100 * share:.1f} % of {len(frame)} verdicts are equal or undecided (goal: {100 * LEAST_SHARE:.0f} %)")
    for row in frame[~frame["verdict"].isin([EQUAL, UNDECIDED])].itertuples():
        print(f"{row.verdict}: {row.op} {row.shapes}, ratio {row.ratio_p50:.3f}")
    return int(share < LEAST_SHARE)


def confirm(is_quick: bool) -> tuple[list[str], int]:
    """Print a table of estimated and measured savings of the layer norm and the softmax together.

    Return its lines, and the exit status: 1 if the saving measured in the candidates' calls in a replayed step and the
    saving estimated for it differ by over 1 % of the step. An estimate is for the recorded step, in which the calls may
    take other shares; the estimate for the replayed step takes their shares in that step.

    is_quick : True for one trace and few runs
    """
    candidates = [f"{op}={source}" for item in EXAMPLES[:2] for op, source in item.candidate.items()]
    names = ["trace", "operators take, recorded", "estimated", "operators take, replayed", "estimated for the replay"]
    names += ["measured in these calls", "difference", "measured in the whole step", "passes"]
    lines = _printed([], f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}")
    far = False
    for name in CONFIRMED[:1] if is_quick else CONFIRMED:
        results = replay(f"zoo:{name}", candidate=candidates, confirm=True, **(QUICK if is_quick else {}))
        (step,), measured = judged_steps(results), results.header["confirmation"]
        difference = measured["estimated_here"] - measured["own_saving"]
        far |= abs(difference) > NEAR
        cells = [
            name,
            f"{100 * (step.share or 0.0):.2f} %",
            saving_in_words(step.saving, step.error, 2),
            f"{100 * measured['share']:.2f} %",
            saving_in_words(measured["estimated_here"], digits=2),
            saving_in_words(measured["own_saving"], measured["own_error"], 2),
            f"{100 * difference:+.2f} %",
            saving_in_words(measured["saving"], measured["error"], 2),
            str(measured["passes"]),
        ]
        _printed(lines, f"| {' | '.join(cells)} |")
    return lines, int(far)


if __name__ == "__main__":
    raise SystemExit(main())
