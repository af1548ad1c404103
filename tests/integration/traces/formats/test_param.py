"""Reading PARAM's operator configurations as traces, with their ranges, and writing traces as such."""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import data_files, needs_data, write_as
from outside import with_package
from programs import SHIPPED_TRACES, run_command, succeed

from opgrip.cli.option_types import Cut
from opgrip.errors import UserError
from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.formats.configurations.param import MOST_BYTES, MOST_CASES, NAME
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import TensorSpec, map_leaves
from opgrip.traces.schema.records import Signature

GENERATOR = "PyTorch:DefaultDataGenerator"
RANGES = "RangeConfigIterator"


def tensor(*shape: Any, dtype: str = "float", **others: Any) -> dict[str, Any]:
    return {"type": "tensor", "dtype": dtype, "shape": list(shape), **others}


def ranged(*shape: Any, **others: Any) -> dict[str, Any]:
    return tensor(*shape, __range__=["shape"], **others)


def number(value: Any, kind: str = "int", **others: Any) -> dict[str, Any]:
    return {"type": kind, "value": value, **others}


def operator(*inputs: Any, build: Any = None, **others: Any) -> dict[str, Any]:
    config = {"input": list(inputs)} | ({"build": build} if build is not None else {})
    return {"input_data_generator": GENERATOR, "config": [config], **others}


def entry(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"args": list(args), "kwargs": kwargs}


def read(path: Path, operators: Any, cut: Cut = Cut()) -> Trace:
    path = path / "config.json"
    path.write_text(json.dumps(operators))
    return load(path, reader=TraceReader(path, cut=cut))


def shapes(trace: Trace) -> list[list[tuple[int, ...]]]:
    return [[arg.shape for arg in signature.args if isinstance(arg, TensorSpec)] for signature in trace.signatures]


def reasons(trace: Trace) -> list[str]:
    assert trace.end is not None
    return [item.reason for item in trace.end.dropped]


def test_all_types_of_arguments_are_read(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {
            "torch.baddbmm": operator(
                entry(tensor(2, 1, 4), tensor(2, 3, 5), tensor(2, 5, 4), beta=number(1), alpha=number(0.5, "float"))
            ),
            "aten::_to_copy": operator(
                entry(
                    tensor(dtype="long"),
                    dtype=number("bfloat16", "dtype"),
                    layout=number("strided", "layout"),
                    device=number("cpu", "device"),
                    pin_memory=number(False, "bool"),
                )
            ),
            "torch.cat": operator(entry(number([tensor(1, 2), tensor(3, 2)], "tuple"), number(0, "long"))),
            "aten::index": operator(
                entry(tensor(8, 8), number([{"type": "none"}, tensor(3, dtype="long")], "genericlist"))
            ),
            "aten::div": operator(entry(tensor(2), tensor(2), rounding_mode=number("floor", "str"))),
        },
    )
    baddbmm, copy, cat, index, div = trace.signatures
    assert baddbmm.kwargs == {"beta": 1, "alpha": 0.5}
    assert baddbmm.args[2].stride == (20, 4, 1)
    assert copy.args[0].shape == ()
    assert not copy.args[0].requires_grad
    assert copy.kwargs == {
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "pin_memory": False,
    }
    assert isinstance(cat.args[0], tuple)
    assert [item.shape for item in cat.args[0]] == [(1, 2), (3, 2)]
    assert index.args[1][0] is None
    assert (div.op, div.kwargs) == ("aten.div.Tensor_mode", {"rounding_mode": "floor"})
    assert reasons(trace) == []


def test_tensors_are_drawn_as_by_the_generator_of_param(tmp_path: Path) -> None:
    trace = read(tmp_path, {"aten::add": operator(entry(tensor(64, 64), tensor(64, 64, dtype="uint8")))})
    floats, bytes_ = (
        trace.values[spec.values].draw(spec.shape, spec.dtype, torch.Generator().manual_seed(1))
        for spec in trace.signatures[0].args
    )
    assert 0 <= floats.min() < 0.1 < 0.9 < floats.max() <= 1
    assert (int(bytes_.min()), int(bytes_.max())) == (0, 9)


def test_schema_determines_overload_and_positions(tmp_path: Path) -> None:
    text = "aten::sum.dim_IntList(Tensor self, int[1] dim, bool keepdim=False, *, ScalarType? dtype=None) -> (Tensor)"
    build = [entry(number(text, "str"))]
    entries = [
        entry(tensor(4, 4), {"type": "none"}),
        entry(tensor(4, 4), number([number(1)], "genericlist"), number(True, "bool"), number(7)),
    ]
    trace = read(tmp_path, {"aten::sum": operator(*entries, build=build)})
    assert [(item.op, item.args[1:], item.kwargs) for item in trace.signatures] == [
        ("aten.sum.dim_IntList", (None,), {}),
        ("aten.sum.dim_IntList", ([1], True), {"dtype": torch.float64}),
    ]


def test_modules_and_models_become_the_operators_that_they_call(tmp_path: Path) -> None:
    operators = {
        "torch.nn.Conv2d": operator(
            entry(tensor(1, 3, 8, 8)), build=[entry(number(3), number(4), kernel_size=number(3))]
        ),
        "torch.nn.functional.layer_norm": operator(entry(tensor(2, 8), number([number(8)], "genericlist"))),
        "torch.nn.functional.cross_entropy": operator(
            entry(tensor(2, 8), tensor(2, dtype="long"), reduction=number("sum", "str"))
        ),
        "pytorch.model.resnet": operator(entry(tensor(2, 3, 64, 64)), build=[]),
        "torch.linalg.norm": operator(entry(tensor(3, 3))),
    }
    trace = read(tmp_path, operators)
    counts = trace.calls["op"].value_counts()
    assert counts["aten.convolution.default"] == 1 + 53
    assert counts["aten.layer_norm.default"] == 1
    assert counts["aten.nll_loss_forward.default"] == 1
    assert counts["aten.linalg_norm.default"] == 1
    assert "pytorch.model.resnet.4.body.0" in set(trace.calls["module"])
    assert reasons(trace) == []


def test_configuration_of_one_operator_has_a_device(tmp_path: Path) -> None:
    form = {
        "op_name": "torch.add",
        "op_info": operator(entry(tensor(4), tensor(4))),
        "run_options": {"device": "cuda", "iteration": 1},
    }
    (signature,) = read(tmp_path, form).signatures
    assert signature.op == "aten.add.Tensor"
    assert [spec.device for spec in signature.args] == ["cuda", "cuda"]


def test_plugin_iterators_and_generators_are_found_by_name(tmp_path: Path) -> None:
    environment = with_package(
        tmp_path / "site",
        dict.fromkeys(("opgrip.iterators", "opgrip.generators"), "planted_configurations"),
    )
    ours = operator({"powers": 4}, {"wrong": 1}, input_iterator="PowersOfTwo", input_data_generator="planted:Ones")
    (tmp_path / "config.json").write_text(json.dumps({"aten::add": ours}))
    done = succeed("opgrip", "trace", "convert", "config.json", "a.jsonl", cwd=tmp_path, env=environment)
    assert "1 call of aten::add not converted: an entry cannot be read (KeyError: 'powers')" in done.stderr
    trace = load(tmp_path / "a.jsonl")
    assert shapes(trace) == [[(1,)], [(2,)], [(4,)], [(8,)]]
    assert {type(model).__name__ for model in trace.values.values()} == {"Constant"}


@needs_data
@pytest.mark.parametrize("path", data_files("param/configs/*.json"), ids=lambda path: path.stem)
def test_all_operators_of_real_files_become_cases(path: Path, tmp_path: Path) -> None:
    assert format_of(path) == NAME
    trace = load(path)
    assert reasons(trace) == []
    form = json.loads(path.read_text())
    names = {form["op_name"]} if "op_name" in form else set(form)
    modules = {name for name in names if name.startswith("pytorch.model.")}
    called = {f"torch.{op.split('.')[1]}" for op in trace.calls["op"]} | {
        f"aten::{op.split('.')[1]}" for op in trace.calls["op"]
    }
    assert names - modules <= called
    assert all(any(str(module).startswith(name) for module in trace.calls["module"]) for name in modules)


def plain(signature: Signature) -> str:
    def told(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        return TensorSpec(leaf.shape, None, leaf.dtype, "cpu", requires_grad=leaf.requires_grad)

    return f"{signature.op} {map_leaves(told, (signature.args, signature.kwargs))}"


def counted(trace: Trace) -> dict[str, int]:
    texts = {signature.number: plain(signature) for signature in trace.signatures}
    counts: dict[str, int] = trace.own_calls["signature"].map(texts).value_counts().to_dict()
    return counts


def test_written_trace_is_read_again_except_reported_losses(tmp_path: Path) -> None:
    trace = load(SHIPPED_TRACES[0])
    losses = write_as(NAME, trace, tmp_path / "a.json")
    again = load(tmp_path / "a.json")
    assert {reason for _, reason in losses.skipped} == {"not an operator of torch's dispatcher"}
    expected = counted(trace)
    lost = {plain(item) for item in trace.signatures if item.kind != "operator"}
    assert counted(again) == {call: count for call, count in expected.items() if call not in lost}
    assert len(losses.calls) == len(again.calls)
    first = losses.calls[0]
    assert "time and place in the program" in first[2]

    write_as(NAME, again, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


HUGE_LAYER = number(600_000), number(600_000)


@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ({"torch.nothing": operator(entry(tensor(4)))}, "not registered in torch"),
        ({"torch.load": operator(entry(number("/etc/passwd", "str")))}, "not registered in torch"),
        ({"torch.add": operator(entry(tensor(4), number([1, 4], __range__=["value"])))}, "can expand a range"),
        ({"torch.add": operator(entry(tensor(1 << 57, 4), number(1)))}, "larger than the address space"),
        ({"torch.add": operator(entry(tensor(4), number(1 << 70)))}, "more than 64 bits"),
        ({"torch.add": operator(entry(tensor(4), {"type": "what"}))}, "unknown argument type: 'what'"),
        ({"torch.add": operator(entry(tensor(4), {"type": "int", "value_range": [4, 1]}))}, "not a range"),
        ({"torch.add": operator(entry(tensor(4)), input_iterator="Other")}, "unknown input_iterator: Other"),
        ({"torch.add": operator(entry(tensor(4)), input_data_generator=[1])}, "unknown input_data_generator"),
        ({"torch.add": operator(entry(ranged([1, 4, 0])), input_iterator=RANGES)}, "has the step 0"),
        ({"torch.add": operator(entry(tensor(4, __copy__=[3])), input_iterator=RANGES)}, "__copy__"),
        ({"torch.add": operator(7)}, "an entry of a section is not a JSON object: 7"),
        (
            {"torch.add": operator(entry(tensor(4)), build=[entry(number("aten::add(", "str"))])},
            "the build section is not an operator schema",
        ),
        ({"torch.add": 7}, "its `config` is not a list"),
        (
            {"torch.nn.Transformer": operator(entry(tensor(4, 4)), build=[entry(num_encoder_layers=number(10**12))])},
            "makes more than 20,000 calls",
        ),
        (
            # on the CPU, named explicitly, where its weight would take 1.4 TB
            {"torch.nn.Linear": operator(entry(tensor(2, 3)), build=[entry(*HUGE_LAYER, device=number("cpu", "str"))])},
            "reduction dim",
        ),
        (
            {"torch.tensor_split": operator(entry(input=tensor(3), sections=number(1 << 27)))},
            "100,000 pieces",
        ),
    ],
)
def test_unreadable_operator_is_counted_with_the_reason(tmp_path: Path, operators: dict[str, Any], reason: str) -> None:
    both = {**operators, "torch.mul": operator(entry(tensor(4), tensor(4)))}
    (tmp_path / "config.json").write_text(json.dumps(both))
    trace = load(tmp_path / "config.json", reader=TraceReader(tmp_path / "config.json", format_name=NAME))
    assert set(trace.calls["op"]) == {"aten.mul.Tensor"}
    (told,) = reasons(trace)
    assert reason in told


def test_reading_allocates_nothing_on_a_named_device(tmp_path: Path) -> None:
    like = {"torch.zeros_like": operator(entry(input=tensor(1 << 45), device=number("cpu", "str")))}
    (tmp_path / "config.json").write_text(json.dumps(like))
    trace = load(tmp_path / "config.json", reader=TraceReader(tmp_path / "config.json", format_name=NAME))
    assert list(trace.calls["op"]) == ["aten.zeros_like.default"]


@pytest.mark.slow
def test_oversized_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lists.json").write_text('{"op": {"config": [' + "[]," * (3 << 20) + "[]]}}")
    with pytest.raises(UserError, match="contains more than 4,194,304 values"):
        list(TraceReader(tmp_path / "lists.json", format_name=NAME))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"aten::add": operator(entry(tensor(1), number(1)) | {"count": 10**12})}))
    with pytest.raises(UserError, match="1,000,000 calls"):
        load(path)
    sizes = [[1, 1 << 62]] * 40
    path.write_text(json.dumps({"aten::add": operator(entry(ranged(*sizes)), input_iterator=RANGES)}))
    assert reasons(load(path)) == ["an entry has more than 2**200 combinations of values"]
    path.write_text(json.dumps({"input_iterator": " " * MOST_BYTES}))
    with pytest.raises(UserError, match="more than 64 MB"):
        load(path)


FAST = ("--iterations", "1", "--warmup", "0", "--device", "cpu")


def test_value_of_a_range_does_not_depend_on_other_cases(tmp_path: Path) -> None:
    argument = {"type": "int", "value_range": [100, 1 << 40]}
    operators = {"aten::add": operator(entry(ranged([1, 50, 1]), argument), input_iterator=RANGES)}
    values = [signature.args[1] for signature in read(tmp_path, operators).signatures]
    assert len(set(values)) == 50
    assert all(100 <= value <= 1 << 40 for value in values)
    assert [item.args[1] for item in read(tmp_path, operators, Cut(7, 9)).signatures] == values[7:9]


def test_ranges_are_combined_with_the_last_argument_fastest(tmp_path: Path) -> None:
    operators = {
        "aten::add": operator(
            entry(
                ranged([1, 2], 3, [4, 8, 2], dtype=["float", "double"]) | {"__range__": ["shape", "dtype"]},
                tensor(1),
                alpha=number([5, 7], __range__=["value"]),
            ),
            input_iterator=RANGES,
        )
    }
    trace = read(tmp_path, operators)
    cases = [(item.args[0].dtype, item.args[0].shape, item.kwargs["alpha"]) for item in trace.signatures]
    dtypes = (torch.float32, torch.float64)
    assert cases == [
        (dtype, (first, 3, last), alpha) for dtype, first, last, alpha in product(dtypes, (1, 2), (4, 6, 8), (5, 6, 7))
    ]


def test_sizes_are_copied_from_other_arguments_in_order(tmp_path: Path) -> None:
    first = ranged([1, 2], -1, -1, __copy__=[{"shape": [1, [1, 1]]}, {"shape": [2, [2, 2]]}])
    second = ranged(-1, [3, 4], 5, __copy__=[{"shape": [0, [0, 0]]}])
    third = tensor(-1, -1, 6, __copy__=[{"shape": [0, [0, 0]]}, {"shape": [1, [1, 2]]}])
    trace = read(tmp_path, {"torch.baddbmm": operator(entry(first, second, third), input_iterator=RANGES)})
    assert shapes(trace) == [[(b, n, 6), (b, n, 5), (b, 5, 6)] for b, n in product((1, 2), (3, 4))]


def test_each_entry_of_build_is_combined_with_all_of_input(tmp_path: Path) -> None:
    operators = {
        "torch.nn.Linear": operator(
            entry(ranged([1, 2], 8)),
            build=[entry(number(8), number([3, 4], __range__=["value"]))],
            build_iterator=RANGES,
            input_iterator=RANGES,
        )
    }
    trace = read(tmp_path, operators)
    products = [item for item in trace.signatures if item.op == "aten.addmm.default"]
    assert [[spec.shape for spec in item.args] for item in products] == [
        [(outer,), (rows, 8), (8, outer)] for outer, rows in product((3, 4), (1, 2))
    ]
    assert set(trace.calls["module"]) == {"torch.nn.Linear"}


def ten_million(step: int = 1) -> dict[str, Any]:
    first = ranged([1, 1000, step], [1, 100])
    second = ranged(-1, [1, 100], __copy__=[{"shape": [0, [0, 1]]}])
    return {"torch.mm": operator(entry(first, second), input_iterator=RANGES)}


def test_only_requested_cases_of_ten_million_are_generated(tmp_path: Path) -> None:
    assert shapes(read(tmp_path, ten_million(), Cut(9_999_998))) == [
        [(1000, 100), (100, 99)],
        [(1000, 100), (100, 100)],
    ]
    assert shapes(read(tmp_path, ten_million(), Cut(10_000, 10_001))) == [[(2, 1), (1, 1)]]
    sampled = read(tmp_path, ten_million(), Cut(sample=5, sample_seed=3))
    assert len(sampled.signatures) == 5
    assert sampled.header["cases"] == 10_000_000
    chance = random.Random(3)
    places = sorted(chance.sample(range(10_000_000), 5))
    assert [item[0][0] for item in shapes(sampled)] == [1 + place // 10_000 for place in places]
    assert [item.number for item in sampled.signatures] == places


def test_too_many_cases_are_refused_with_their_count_and_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    message = f"represents 10,000,000 cases, but at most {MOST_CASES:,} are read: .*--start and --stop.*--sample"
    with pytest.raises(UserError, match=message):
        load(tmp_path / "config.json")
    done = run_command("opgrip", "trace", "info", tmp_path / "config.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_opreplay_and_convert_take_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    done = succeed("opreplay", "config.json", "--start", "9999999", *FAST, cwd=tmp_path)
    assert "float32[1000,100] float32[100,100]" in done.stdout
    assert "1 case: 1 ok" in done.stderr
    listed = run_command("opreplay", "config.json", "--sample", "4", "--sample-seed", "1", "--list", cwd=tmp_path)
    assert listed.stdout.endswith("4 cases\n")
    words = ("config.json", "part.jsonl", "--start", "5", "--stop", "8")
    succeed("opgrip", "trace", "convert", *words, cwd=tmp_path)
    assert shapes(load(tmp_path / "part.jsonl")) == [[(1, 1), (1, size)] for size in (6, 7, 8)]
    beyond = run_command("opreplay", "config.json", "--start", "10000000", cwd=tmp_path)
    assert beyond.stderr.endswith(
        "no case is left from --start 10000000: the file has 10,000,000 cases, numbered from 0\n"
    )
