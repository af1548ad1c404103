"""Judge the candidates in benchmarks/candidates, and measure how far verdicts and savings can be trusted.

python benchmarks/judge_candidates.py table      # is each candidate right, faster, and worth it on traces of the zoo?
python benchmarks/judge_candidates.py same       # share of verdicts that call an operator faster or slower than itself
python benchmarks/judge_candidates.py confirm    # savings estimated from single calls and measured in whole steps
python benchmarks/judge_candidates.py cheats     # cheats that gain something, honest candidates that are called wrong

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
from itertools import product, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from opgrip import judge
from opgrip.errors import UserError
from opgrip.replay import replay
from opgrip.replay.results.judgement import judged_steps, mean_saving, saving_in_words
from opgrip.replay.results.paired_ratio import EQUAL, FASTER, SLOWER, UNDECIDED
from opgrip.replay.results.results import FAILED, WRONG

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
FALSE_ALARMS = 0.01  # largest share of judgements on honest candidates that may be `wrong` or `failed`
NEAR = 0.01  # largest allowed difference of an estimated saving from the measured one, as a share of the step


@dataclass(frozen=True, slots=True)
class Pair:
    """A cheat, and an honest candidate that looks like it; both are functions of `cheats.py` unless they name a file.

    kind : `timing`; `values`, whose results are wrong; or `calls`, which are right but only call the operator
    is_wrong : True if the cheat must be called wrong; otherwise it must not be called faster
    """

    kind: str
    pattern: str
    cheat: str
    twin: str
    is_wrong: bool = False


IN_CPP = "cheats_in_cpp.py:"
# cheats with streams and events are left out, because they need an accelerator
PAIRS = (
    Pair("timing", "threads", f"{IN_CPP}mm_on_a_detached_thread", f"{IN_CPP}mm_on_joined_threads"),
    Pair("timing", "threads before the call", "mm_before_the_call", "mm_in_a_pool"),
    Pair("timing", "processes", "mm_left_to_a_process", "mm_of_a_process"),
    Pair("timing", "lazy subclasses", "gelu_deferred", "gelu_of_a_subclass"),
    Pair("timing", "lazy memory", f"{IN_CPP}mm_when_read", f"{IN_CPP}mm_in_mapped_memory"),
    Pair("timing", "patched clocks", "gelu_with_patched_clocks", "gelu_that_times_itself"),
    Pair("timing", "calls collected", "gelu_sixteen_at_once", "gelu_in_parts"),
    Pair("timing", "processors kept busy", "gelu_beside_a_burden", "gelu_beside_a_sleeper"),
    Pair("timing", "settings changed", "gelu_with_fewer_threads_for_others", "gelu_with_own_settings"),
    Pair("values", "identity", "gelu_of_nothing", "add_of_zero", True),
    Pair("values", "no work", "softmax_of_nothing", "relu_of_its_argument", True),
    Pair("values", "argument overwritten", "softmax_of_its_argument", "softmax_of_a_copy", True),
    Pair(
        "values", "stale scratch memory", f"{IN_CPP}softmax_with_stale_scratch", f"{IN_CPP}softmax_with_scratch", True
    ),
    Pair("values", "lower precision", "mm_in_bfloat16", "bmm_in_float32", True),
    Pair("values", "cache by pointer", f"{IN_CPP}mm_cached_by_pointer", f"{IN_CPP}mm_with_workspace"),
    Pair("values", "cache by some values", "mm_by_some_values", "mm_with_halves"),
    Pair("values", "expected value", "mean_of_noise", "mean_in_float64", True),
    Pair("values", "part of the work", "softmax_of_most_rows", "softmax_of_all_rows", True),
    Pair("values", "first calls only", f"{IN_CPP}gelu_until_call_twenty", f"{IN_CPP}gelu_tuned_at_first", True),
    Pair("values", "memory returned again", "softmax_in_one_memory", "softmax_in_place_of_a_freed_result", True),
    Pair("values", "operator's results", "softmax_found_in_memory", "softmax_of_a_copy", True),
    Pair("values", "patched comparisons", "gelu_with_patched_comparisons", "gelu_with_comparisons", True),
    Pair("values", "one random draw", "dropout_with_one_mask", "dropout_with_own_mask", True),
    Pair("calls", "in Python", "gelu_of_torch", "gelu_in_parts"),
    Pair("calls", "in C++", f"{IN_CPP}mm_of_torch", f"{IN_CPP}mm_with_workspace"),
)
OPERATORS = {"mm": "mm.default", "gelu": "gelu.default", "add": "add.Scalar", "softmax": "_softmax.default"}
OPERATORS |= {"bmm": "bmm.default", "mean": "mean.dim", "relu": "relu_.default", "dropout": "native_dropout.default"}
# program whose calls are long enough for a cheat to gain something
PROGRAM = """
import sys, torch
from opgrip import Capture
aten = torch.ops.aten
torch.set_num_threads(1)
with Capture(sys.argv[1]), torch.no_grad():
    for size in (320, 384):
        a, b, x = torch.randn(size, 256), torch.randn(256, size), torch.randn(size, 1024)
        aten.mm(a, b), aten.bmm(a[None].bfloat16(), b[None].bfloat16())
        aten.gelu(x), aten.add.Scalar(x, 0), aten._softmax(x, 1, False), aten.mean(x, [1])
        aten.native_dropout(x, 0.25, True), aten.relu_(x)
"""
RUNS = 24


def main(words: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "same", "confirm", "cheats"))
    parser.add_argument("--only", default="", help="only candidates whose operator or function contains this text")
    parser.add_argument("--quick", action="store_true", help="use few signatures and runs")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="Markdown page in which to replace the table")
    args = parser.parse_args(words)
    examples = [item for item in EXAMPLES if args.only in item.op]
    if args.what == "same":
        return same(args.quick)
    if args.what == "cheats":
        lines, status = cheats([pair for pair in PAIRS if args.only in f"{pair.cheat} {pair.twin}"])
    else:
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


def cheats(pairs: Sequence[Pair]) -> tuple[list[str], int]:
    """Print a table of the verdicts on pairs of cheats and honest candidates; return its lines, and the exit status: 1
    if a cheat gains something with `--untrusted`, or over 1 % of the judgements on honest candidates are false alarms.
    """
    names = ["kind", "cheat", "trusted", "with `--untrusted`", "honest, trusted", "honest, with `--untrusted`"]
    lines = _printed([], f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}")
    counts: Counter[tuple[bool, bool]] = Counter()
    bad: Counter[tuple[bool, bool]] = Counter()
    # C++ is built here, where no time limit of a worker ends it
    subprocess.run([sys.executable, FOLDER / IN_CPP.rstrip(":")], check=True)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "calls.jsonl"
        subprocess.run([sys.executable, "-c", PROGRAM, trace], check=True)
        verdicts = {
            (name, is_untrusted): found
            for names, is_untrusted in _batches(pairs)
            for name, found in _judged(names, trace, is_untrusted).items()
        }
    for pair in pairs:
        cells = []
        for is_cheat, is_untrusted in product((True, False), (False, True)):
            own = verdicts[pair.cheat if is_cheat else pair.twin, is_untrusted]
            found = own[WRONG] + own[FAILED]
            missed = own.total() - found if pair.is_wrong else own[FASTER]
            unwanted = missed if is_cheat else found
            counts[is_cheat, is_untrusted] += own.total()
            bad[is_cheat, is_untrusted] += unwanted
            words = ", ".join(f"{count} {verdict}" for verdict, count in own.items())
            cells.append(f"**{words}**" if unwanted else words)
        _printed(lines, f"| {pair.kind} | {pair.pattern} | {' | '.join(cells)} |")
    for is_cheat, is_untrusted in product((True, False), (False, True)):
        number, of = bad[is_cheat, is_untrusted], counts[is_cheat, is_untrusted]
        words = f"{'missed' if is_cheat else 'false alarms'}{' with --untrusted' if is_untrusted else ''}"
        print(f"{words}: {number} of {of}")
    return lines, int(bool(bad[True, True]) or bad[False, True] > FALSE_ALARMS * counts[False, True])


def _batches(pairs: Sequence[Pair]) -> Iterator[tuple[list[str], bool]]:
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.cheat, pair.twin)))
    by_operator: dict[str, list[str]] = {}
    for name in names:
        by_operator.setdefault(_operator(name), []).append(name)
    yield from (([*filter(None, batch)], True) for batch in zip_longest(*by_operator.values()))
    # trusted ones run in one process, where a cheat would change the verdicts on others
    yield from (([name], False) for name in names)


def _operator(name: str) -> str:
    return f"aten.{OPERATORS[name.rpartition(':')[2].partition('_')[0]]}"


def _judged(names: Sequence[str], trace: Path, is_untrusted: bool) -> dict[str, Counter[str]]:
    sources = {_operator(name): f"{FOLDER}/{name if ':' in name else f'cheats.py:{name}'}" for name in names}
    frame = judge(sources, trace, untrusted=is_untrusted, iterations=RUNS, threads=1).frame
    # with the reasons
    print(frame[["op", "verdict", "ratio_p50", "error"]].to_string(), file=sys.stderr, flush=True)
    return {name: Counter(frame[frame["op"] == _operator(name)]["verdict"].dropna()) for name in names}


if __name__ == "__main__":
    raise SystemExit(main())
