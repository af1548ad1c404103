"""Calls of `replay()` and `benchmark()`: arguments, results, what they leave unchanged, and their memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from example_trace import write
from foreign_data import case_files, needs_cases
from programs import run_python, succeed
from settings import rows_of, settings_of
from torch import Tensor
from torch.nn import functional

import opgrip
from opgrip.capture import Capture
from opgrip.cli.options import arguments_of
from opgrip.errors import ExistingFileError
from opgrip.replay import Results, benchmark, replay
from opgrip.replay.cases.cases import Selection, make_cases
from opgrip.replay.command.job import make_parser
from opgrip.replay.command.run_requests import request_with
from opgrip.replay.inputs import filling
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.replay.operators.memory import bytes_of, with_memory
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.traces import UserError, load
from opgrip.traces.schema.records import EXTENSION, Signature

FAST = {"iterations": 1, "warmup": 0}
OPS = ("aten.convolution.default", "aten.native_batch_norm.default")


@pytest.fixture(scope="module")
def results(tiny_trace: Path) -> Results:
    return replay(tiny_trace, mode=["eager", "jit"], op=OPS, **FAST)


def test_notes_of_a_replay_are_warnings_at_the_line_that_called_it(tiny_trace: Path) -> None:
    with pytest.warns(UserWarning, match="no such module is installed") as notes:
        replay(tiny_trace, op=OPS[:1], extension=["no_such_module"], **FAST)
    assert notes[0].filename == __file__


def test_replay_function_and_opreplay_return_the_same_rows(results: Results, tiny_trace: Path, tmp_path: Path) -> None:
    options = ("--mode", "eager,jit", "--op", OPS[0], "--op", OPS[1], "--iterations", 1, "--warmup", 0)
    succeed("opreplay", tiny_trace, *options, "-o", tmp_path / "r.json")
    same = ["case", "op", "shapes", "count", "mode", "status", "method", "cache"]
    assert results.frame[same].to_dict("records") == Results.load(tmp_path / "r.json").frame[same].to_dict("records")


def test_appended_cases_have_unused_numbers(tmp_path: Path) -> None:
    output = tmp_path / "r.csv"
    for op in ("aten.neg", "aten.abs", "aten.neg", "aten.abs"):
        replay(operator=op, inputs={"self": (4,)}, output=output, append=True, **FAST)
    rows = [(row.case, row.op) for row in Results.load(output)]
    assert rows == [(0, "aten.neg.default"), (1, "aten.abs.default")] * 2


def test_results_and_traces_are_loaded_compared_and_filtered(
    results: Results, tiny_trace: Path, tmp_path: Path
) -> None:
    for suffix in (".json", ".csv", ".parquet"):
        results.save(tmp_path / f"r{suffix}")
        loaded = opgrip.load(tmp_path / f"r{suffix}")
        assert isinstance(loaded, Results)
        assert loaded[0].median_us == results[0].median_us
    assert len(opgrip.compare(tmp_path / "r.json", results).pairs) == 4
    for path in (tiny_trace, "no_such.jsonl"):
        with pytest.raises(UserError, match=r"is not a file of results: write one with opreplay|cannot be read"):
            opgrip.compare(results, path)
    trace = opgrip.load(tiny_trace)
    part = trace.filter(op=["aten.conv*", "aten.relu*"], phase="forward")
    assert 0 < part.call_count < trace.call_count
    assert part.summary(by=["op", "phase"])["calls"].sum() == len(part.calls)
    assert {row.phase for row in replay(part, **FAST)} == {"forward"}
    with pytest.raises(UserError, match="already filtered: pass all conditions"):
        part.filter(op="aten.relu*")
    with pytest.raises(UserError, match="only whole files"):
        replay(opgrip.load(tiny_trace, steps=1))


def test_results_have_a_summary_and_are_saved(results: Results, tmp_path: Path) -> None:
    assert repr(results).endswith("tiny.jsonl: 2 cases in 4 rows: 4 ok>")
    assert results._repr_html_().count("<tr") == 5
    assert [row.mode for row in results] == ["eager", "jit"] * 2
    results.save(tmp_path / "r.json")
    assert len(Results.load(tmp_path / "r.json")) == len(results)
    with pytest.raises(FileExistsError, match="force="):
        results.save(tmp_path / "r.json")
    results.save(tmp_path / "r.json", force=True)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"top": 3, "precision": "5%"}, ("--top", "3", "--precision", "0.05")),
        ({"op": ["aten.a*", "aten.b*"]}, ("--op", "aten.a*", "--op", "aten.b*")),
        ({"threads": [1, 2]}, ("--threads", "1,2")),
        ({"dtype": torch.bfloat16}, ("--dtype", "bfloat16")),
        ({"device": torch.device("cuda", 0)}, ("--device", "cuda:0")),
        ({"memory_limit": "8GB", "exec_mode": "continuous"}, ("--memory-limit", "8GB", "--exec-mode", "continuous")),
        ({"output": Path("r.json"), "budget": None}, ("-o", "r.json")),
    ],
)
def test_keywords_are_the_options_of_the_command(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    assert arguments_of(make_parser(), ["t.jsonl"], keywords) == make_parser().parse_args(["t.jsonl", *words])


def test_inputs_and_configurations_may_be_dictionaries() -> None:
    inputs = [{"self": (8, 4), "other": [8, 1]}, {"self": (2,), "other": 1.5}]
    rows = replay(operator=["aten.add", torch.ops.aten.sub], inputs=inputs, **FAST)
    assert [(row.op, row.shapes, row.status) for row in rows] == [
        (f"aten.{name}.{overload}", shapes, "ok")
        for name in ("add", "sub")
        for overload, shapes in (("Tensor", "float32[8,4] float32[8,1]"), ("Scalar", "float32[2] 1.5"))
    ]
    (row,) = replay(operator="aten.sum", inputs={"self": (8,), "dtype": torch.float64}, **FAST)
    assert (row.shapes, row.status) == ("float32[8] dtype=float64", "ok")
    tensor = {"type": "tensor", "dtype": "float", "shape": [8, 8]}
    config = {"torch.add": {"config": [{"input": [{"args": [tensor, tensor], "kwargs": {}}]}]}}
    results = replay(config, **FAST)
    assert repr(results) == "<Results of configuration.json: 1 case: 1 ok>"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"top": 0}, "top: '0' is not an integer of at least 1"),
        ({"backward": 1}, "backward=1 is neither True nor False"),
        ({"output": "r.txt"}, "r.txt has no known suffix: end its name in .csv, .json"),
        ({"mode": "no_such"}, "unknown mode 'no_such'"),
        ({"inputs": {"self": (2,)}}, "inputs= needs operator="),
        ({"inputs": {"self": torch.ones(2)}}, "an argument cannot be a Tensor: give the tensor's shape as a tuple"),
    ],
)
def test_invalid_option_value_is_reported_in_python_terms(
    tiny_trace: Path, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        replay(tiny_trace, **keywords)
    assert str(caught.value).startswith(message)
    assert "--" not in str(caught.value)


def test_unknown_keyword_and_missing_file_raise_standard_exceptions() -> None:
    with pytest.raises(TypeError, match=r"keyword argument 'modes': did you mean 'mode'"):
        replay("t.jsonl", modes="jit")
    with pytest.raises(FileNotFoundError, match="no such file"):
        replay("no_such.jsonl")


SCRIPT = """
import sys
import torch
from opgrip.replay import replay

if __name__ == "__main__":
    torch.ones(3) + 1
    results = replay(sys.argv[1], top=2, iterations=1, warmup=0)
    print(len(results))
"""


@pytest.mark.slow
def test_script_that_has_used_torch_replays_without_extra_output(tiny_trace: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", tiny_trace, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


SETTINGS = settings_of(warmup=1, iterations=3)


def replayed(folder: Path, program: Any, settings: Workload = SETTINGS) -> dict[str, Result]:
    with Capture(folder / "t.jsonl", extensions=settings.request.inputs.extensions):
        program()
    return {result.op: result for result in rows_of(make_cases(load(folder / "t.jsonl")), settings)}


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(200, 8).index_select(0, torch.randint(0, 200, (300,))),
        lambda: torch.nn.functional.embedding(torch.randint(0, 50, (40, 9)), torch.randn(50, 4)),
        lambda: torch.nn.functional.embedding_bag(
            torch.randint(0, 50, (400,)), torch.randn(50, 4), torch.arange(0, 400, 4)
        ),
        lambda: torch.nn.functional.cross_entropy(torch.randn(300, 80), torch.randint(0, 80, (300,))),
        lambda: torch.zeros(90, 70).scatter_add_(1, torch.randint(0, 70, (90, 70)), torch.randn(90, 70)),
        lambda: torch.zeros(500).index_put_((torch.randint(0, 500, (900,)),), torch.randn(900), accumulate=True),
        lambda: torch.multinomial(torch.rand(20, 100), 7),
        lambda: torch.nn.functional.ctc_loss(
            torch.randn(20, 2, 9).log_softmax(2),
            torch.randint(1, 9, (2, 5)),
            torch.tensor([20, 20]),
            torch.tensor([5, 4]),
        ),
        lambda: torch.nn.MaxUnpool2d(2)(*torch.nn.MaxPool2d(2, return_indices=True)(torch.randn(1, 2, 16, 16))),
        lambda: torch.segment_reduce(torch.randn(100), "sum", lengths=torch.full((25,), 4)),
    ],
)
def test_operators_that_read_indices_get_valid_ones(tmp_path: Path, program: Any) -> None:
    for result in replayed(tmp_path, program).values():
        assert (result.status, result.error) == ("ok", None)
        assert result.faithful


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("os:system", "is not trusted"),
        ("posix:system", "is not trusted"),
        ("mmcv._ext:__loader__", "has no function|not installed"),
        ("mmcv._ext", "is not a function's name"),
    ],
)
def test_functions_are_found_only_in_trusted_extensions(op: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        find_operator(Signature(0, EXTENSION, op, (), {}))


def test_trusted_extension_functions_replay(tmp_path: Path) -> None:
    import math

    trusted = settings_of(warmup=1, iterations=3, extension="math")
    assert replayed(tmp_path, lambda: math.hypot(3.0, 4.0), trusted)["math:hypot"].status == "ok"


def test_other_output_shapes_are_reported(tmp_path: Path) -> None:
    def program() -> None:
        # value models of elements do not show which rows are equal
        torch.randint(0, 10, (5, 3)).repeat(100, 1).unique(dim=0)

    assert replayed(tmp_path, program)["aten.unique_dim.default"].faithful is False


def test_flops_and_bytes_are_those_of_a_call(tmp_path: Path) -> None:
    row = replayed(tmp_path, lambda: torch.mm(torch.ones(4, 5), torch.ones(5, 6)))["aten.mm.default"]
    assert row.flops == 2 * 4 * 5 * 6
    assert (row.bytes_in, row.bytes_out) == (4 * (4 * 5 + 5 * 6), 4 * 4 * 6)


def test_expanded_elements_are_counted_once(tmp_path: Path) -> None:
    x = torch.ones(3, 1).expand(3, 1000)
    assert replayed(tmp_path, lambda: x.sum())["aten.sum.default"].bytes_in == 4 * 3


def test_calls_inside_an_extension_function_are_not_replayed_twice(tmp_path: Path) -> None:
    cases = make_cases(load(write(tmp_path / "t.jsonl")))
    assert {(case.op, case.count) for case in cases} == {("aten.mul.Tensor", 1), ("mmcv._ext:nms", 1)}


def test_top_cases_are_those_with_the_most_time(detector_trace: Path) -> None:
    trace = load(detector_trace)
    everything, top = make_cases(trace), make_cases(trace, Selection(top=5))
    assert [case.number for case in top] == [case.number for case in everything[:5]]
    longest = trace.calls.groupby("signature")["time_ns"].agg(lambda times: len(times) * times.median()).idxmax()
    assert top[0].number == longest


# program that prints the peak memory of a command's largest process, in bytes; the tests' own process cannot start the
# command, because the kernel counts the peak of a process for the commands that it starts
PEAK_OF_CHILDREN = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


@pytest.mark.slow
@needs_cases
def test_replay_of_a_server_takes_at_most_twice_the_memory_of_its_largest_case(tmp_path: Path) -> None:
    (profile,) = case_files("tracelens/inference_sglang_decode_capture_traces_bs_32_rank0.json.gz")
    options = ("--device", "cpu", "--top", "15", "--iterations", "1", "--warmup", "0", "-o", "r.json")
    command = [sys.executable, "-c", PEAK_OF_CHILDREN, sys.executable, "-m", "opgrip.replay", profile, *options]
    peak = int(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()[-1])
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert len(rows) == 15
    largest_bytes = max(row["bytes_in"] + row["bytes_out"] for row in rows)
    assert largest_bytes > 1 << 30
    assert peak <= 2 * largest_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64])
def test_values_of_large_tensors_are_drawn_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled() -> torch.Tensor:
        tensor = torch.empty(1 << 10, 1 << 10, dtype=dtype)
        filling.fill(tensor, None, torch.Generator().manual_seed(0), dtype)
        return tensor

    whole = filled()
    monkeypatch.setattr(filling, "BLOCK", 1 << 14)
    tensor, memory = with_memory(filled, "cpu")
    assert torch.equal(tensor.view(torch.uint8), whole.view(torch.uint8))
    assert memory.peak <= tensor.nbytes + (1 << 19)


ELEMENTS = 1 << 23


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = tmp_path_factory.mktemp("memory") / "writes.jsonl"
    tensors = [torch.rand(ELEMENTS) for _ in range(5)]
    with Capture(path), torch.no_grad():
        tensors[0].add_(tensors[1])
        rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        first, second, third, fourth, _ = ([tensor] for tensor in tensors)
        torch._fused_adamw_(first, second, third, fourth, [], [torch.ones(())], **rates, amsgrad=False, maximize=False)
    return load_workload(request_with(str(path)))


@pytest.mark.parametrize("op", ["aten.add_.Tensor", "aten._fused_adamw_.default"])
def test_mutating_call_needs_its_arguments_twice(workload: Workload, op: str) -> None:
    case = next(case for case in workload.cases if case.op == op)
    rows, memory = with_memory(lambda: prepare(case, workload), "cpu")
    assert [row.status for _, row, _ in rows] == [OK]
    arguments = bytes_of([case.signature.args, case.signature.kwargs])
    assert arguments >= 2 * ELEMENTS * 4
    assert memory.peak <= 2.1 * arguments


def test_runs_of_a_prepared_call_start_with_the_same_values(workload: Workload) -> None:
    case = next(case for case in workload.cases if case.op == "aten.add_.Tensor")
    ((_, _, timed_function),) = prepare(case, workload)
    assert timed_function is not None
    (first, *_), _ = timed_function.ready(1)[0]
    before = first.clone()
    timed_function.run()
    runs = timed_function.ready(3)
    assert len({args[0].data_ptr() for args, _ in runs}) == 3
    for args, _ in runs:
        torch.testing.assert_close(args[0], before, rtol=0, atol=0)


FEW = {"iterations": 3, "warmup": 0}


def sigmoid_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def write_and_return(x: Tensor) -> Tensor:
    return x.copy_(torch.softmax(x, -1))


def test_operator_is_timed_on_shapes_with_its_gradients() -> None:
    results = benchmark(
        torch.add, [{"self": (8, 4), "other": (8, 4)}, {"self": (2,), "other": 1}], backward=True, **FEW
    )
    rows = [(row.op, row.shapes, row.direction, row.status) for row in results]
    assert rows == [
        ("torch.add", "input=float32[8,4] other=float32[8,4]", "forward", "ok"),
        ("torch.add", "input=float32[8,4] other=float32[8,4]", "backward", "ok"),
        ("torch.add", "input=float32[2] other=1", "forward", "ok"),
        ("torch.add", "input=float32[2] other=1", "backward", "ok"),
    ]
    assert all(row.median_us for row in results)
    # nothing was captured
    assert {(row.captured_us, row.captured_total_us, row.share) for row in results} == {(None, None, None)}
    (repeated,) = benchmark(torch.add, [[(8, 4), (8, 4)]], repeats=2, **FEW)
    assert repeated.repeats == [3, 3]
    assert repr(results) == "<Results: 2 cases in 4 rows: 4 ok>"


def test_several_functions_run_on_the_same_inputs_in_all_modes() -> None:
    meta = torch.empty(5, 4, device="meta", dtype=torch.bfloat16).t()
    results = list(benchmark([functional.gelu, sigmoid_gelu], [[(8, 5)], [meta]], mode=["eager", "jit"], **FEW))
    assert [(row.shapes, row.mode, row.status) for row in results] == [
        (shapes, mode, "ok")
        for shapes in ("float32[8,5]", "bfloat16[4,5]")
        for _ in range(2)
        for mode in ("eager", "jit")
    ]
    assert [row.op.rpartition(".")[2] for row in results[::2]] == ["gelu", "sigmoid_gelu", "gelu", "sigmoid_gelu"]
    assert results[0].op == "torch.nn.functional.gelu"
    # the eager reference has no ratio
    is_reference = [row.op == "torch.nn.functional.gelu" and row.mode == "eager" for row in results]
    assert [row.ratio is None for row in results] == is_reference
    assert [row.max_abs is None for row in results] == is_reference
    assert all(row.allocated_bytes and row.peak_bytes for row in results)


def test_values_reach_the_function_unchanged() -> None:
    seen: list[object] = []

    def look(x: Tensor, sizes: list[int], *, mask: Tensor, ids: Tensor) -> Tensor:
        seen.append((x.tolist(), sizes, mask.dtype, ids.unique().tolist()))
        return x

    meta = {
        name: torch.empty(20, dtype=kind, device="meta") for name, kind in (("mask", torch.bool), ("ids", torch.long))
    }
    (row,) = benchmark(look, [{"x": torch.tensor([1.5]), "sizes": [2, 3], **meta}], **FEW)
    assert row.status == "ok"
    assert set(map(str, seen)) == {str(([1.5], [2, 3], torch.bool, [0]))}


CANDIDATES: dict[str, tuple[Any, Any, str, str]] = {
    "zeros": (softmax, torch.zeros_like, "wrong", "output 0: 128 of 128 elements differ, by 0.54 (rel 1) at most"),
    "nan": (softmax, lambda x: torch.softmax(x.sqrt(), -1), "wrong", "by inf (rel inf) at most"),
    "in place": (softmax, write_and_return, "ok", "writes into its arguments"),
    "out of place": (write_and_return, softmax, "ok", ""),
    "out argument": (lambda x: None if x.mul_(2) is x else x, lambda x: None, "wrong", "argument 0: 128 of 128"),
    "tuple for tensor": (
        softmax,
        lambda x: (softmax(x), x),
        "wrong",
        "returns a tuple of 2, but the reference returns a",
    ),
    "dictionary": (lambda x: {"a": x, "b": -x}, lambda x: {"b": -x, "a": x}, "ok", ""),
    "other keys": (lambda x: {"a": x}, lambda x: {"b": x}, "wrong", "a dictionary of 1: 'b', but"),
    "promoted": (softmax, lambda x: softmax(x.double()), "wrong", "output 0 is float64, not float32"),
    "integers": (lambda x: (x > 0).int(), lambda x: (x > 1).int(), "wrong", "elements differ, by 1 (rel 1)"),
    "other chance": (
        lambda x: functional.dropout(x + 9),
        lambda x: functional.dropout(x + 9, 0.1),
        "wrong",
        "distribution",
    ),
    "module": (torch.relu, torch.nn.ReLU(), "ok", ""),
    "raises": (softmax, lambda x: 1 // 0, "failed", "ZeroDivisionError"),
    "reference raises": (lambda x: 1 // 0, softmax, "ok", "not compared: the reference failed"),
    "object": (softmax, lambda x: iter(()), "ok", "not compared: there is a tuple_iterator among the results"),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidate_is_compared_with_the_first_function(name: str) -> None:
    reference, candidate, status, message = CANDIDATES[name]
    _, row, last = benchmark([reference, candidate, reference], [[(8, 16)]], threads=1, **FEW)
    assert row.status == status
    assert message in (row.error or row.note)
    if status == "wrong" and "elements differ" in message:
        assert f"by {row.max_abs:.2g} (rel {row.max_rel:.2g})" in row.error
    assert (row.ratio is None) == (status != "ok" or "reference failed" in message)
    # writes of one function never reach the inputs of another
    assert last.status == ("failed" if "reference raises" in name else "ok")


def test_gradients_of_a_candidate_are_compared() -> None:
    results = benchmark(
        [torch.exp, lambda x: x.exp(), lambda x: x.exp().detach() + 0 * x], [[(8,)]], backward=True, **FEW
    )
    assert [(row.direction, row.status) for row in results] == [
        *[("forward", "ok"), ("backward", "ok")] * 2,
        *[("forward", "ok"), ("backward", "wrong")],
    ]
    # for an output gradient of ones, the gradient of softmax is zero
    results = benchmark([softmax, softmax, lambda x: softmax(x).detach() + 0 * x], [[(4, 8)]], backward=True, **FEW)
    assert [row.status for row in results if row.direction == "backward"] == ["ok", "ok", "wrong"]


def test_functions_of_one_name_have_separate_printed_rows(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    results = benchmark([torch.neg, lambda x: -x, lambda x: x], [[(3,)]], output=output, **FEW)
    assert [row.op for row in results] == ["torch.neg", f"{__name__}.<lambda>", f"{__name__}.<lambda> (2)"]
    assert len({row.key for row in results}) == 3
    *_, reason, summary = str(results).splitlines()
    assert reason.startswith(f"{__name__}.<lambda> (2): wrong: output 0: 3 of 3 elements differ")
    assert summary == repr(results) == "<Results: 3 cases: 2 ok, 1 wrong>"
    assert Results.load(output).frame["ratio"].notna().sum() == 1
    with pytest.raises(ExistingFileError, match=r"exists: choose another name, or replace it with force=True"):
        benchmark(torch.neg, [[(3,)]], output=output, **FEW)


@pytest.mark.parametrize(
    ("functions", "inputs", "words"),
    [
        pytest.param(torch.neg, [], "expected a list with the inputs of each case", id="no inputs"),
        pytest.param(torch.neg, [torch.ones(3)], "for each case, got Tensor", id="a tensor for a case"),
        pytest.param([], [[(3,)]], "no function to time", id="no function"),
        pytest.param({"neg": torch.neg}, [[(3,)]], "expected functions to time, got str", id="a dictionary"),
    ],
)
def test_functions_and_inputs_of_other_types_are_refused(functions: Any, inputs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        benchmark(functions, inputs, **FEW)


def test_options_of_replay_are_refused_by_benchmark() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        benchmark(torch.neg, [[(3,)]], top=3)
    with pytest.raises(TypeError, match=r"'profile': it is an option of replay\(\) only"):
        benchmark(torch.neg, [[(3,)]], profile=True)
    with pytest.raises(UserError, match="unknown mode 'quick'"):
        benchmark(torch.neg, [[(3,)]], mode="quick")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rtol": 0.1}, "nothing is compared"),
        ({"atol": 0.1}, "nothing is compared"),
        ({"force": True}, "no output is written"),
        ({"clock_warmup": 2}, "the clock of cpu is not raised"),
        ({"precision": 0.1}, "iterations is given"),
        ({"cache": "program,warm"}, "a function follows no calls"),
        ({"exec_mode": "events"}, "needs the clock of a GPU"),
        ({"tuner": "evolutionary"}, "tuner= needs tune="),
        ({"tune": 4}, "these modes cannot search"),
    ],
)
def test_options_without_effect_are_refused_by_benchmark(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        benchmark(torch.neg, [[(3,)]], **FEW, **options)
    if {"rtol", "atol"} & options.keys():
        benchmark([torch.neg, torch.neg], [[(3,)]], **FEW, **options)
