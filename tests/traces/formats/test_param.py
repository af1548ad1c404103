"""PARAM's operator configurations as traces, and traces as those."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import DATA, data_files, needs_data, write_as
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outside import with_package
from programs import SHIPPED_TRACES, run_command

from opgrip.traces import Trace, TraceReader, load
from opgrip.traces.arguments import TensorSpec, map_leaves
from opgrip.traces.cuts import Cut
from opgrip.traces.errors import UserError
from opgrip.traces.foreign import format_of
from opgrip.traces.formats.param import MOST_BYTES, MOST_CASES, NAME
from opgrip.traces.records import Signature

GENERATOR = "PyTorch:DefaultDataGenerator"
RANGES = "RangeConfigIterator"
FAST = ("--iterations", "1", "--warmup", "0", "--device", "cpu")


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
    """Of each signature."""
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


def test_tensors_are_drawn_as_the_generator_draws_them(tmp_path: Path) -> None:
    trace = read(tmp_path, {"aten::add": operator(entry(tensor(64, 64), tensor(64, 64, dtype="uint8")))})
    floats, bytes_ = (
        trace.values[spec.values].draw(spec.shape, spec.dtype, torch.Generator().manual_seed(1))
        for spec in trace.signatures[0].args
    )
    assert 0 <= floats.min() < 0.1 < 0.9 < floats.max() <= 1
    assert (int(bytes_.min()), int(bytes_.max())) == (0, 9)


def test_value_ranges_give_each_case_a_value_that_does_not_depend_on_the_others(tmp_path: Path) -> None:
    argument = {"type": "int", "value_range": [100, 1 << 40]}
    operators = {"aten::add": operator(entry(ranged([1, 50, 1]), argument), input_iterator=RANGES)}
    values = [signature.args[1] for signature in read(tmp_path, operators).signatures]
    assert len(set(values)) == 50
    assert all(100 <= value <= 1 << 40 for value in values)
    assert [item.args[1] for item in read(tmp_path, operators, Cut(7, 9)).signatures] == values[7:9]


def test_ranges_are_all_combinations_the_last_argument_fastest(tmp_path: Path) -> None:
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


def test_lists_and_nested_ranges_are_expanded(tmp_path: Path) -> None:
    sizes = number([number([2, 4, 2], __range__=["value"]), number([1, 2], __range__=["value"])], "genericlist")
    operators = {
        "aten::zeros": operator(
            entry(
                sizes | {"__range__": ["value"]},
                dtype=number(["float", "long"], "dtype", __list__=["value"]),
                pin_memory=number([True, False], "bool", __range__=["value"]),
            ),
            input_iterator=RANGES,
        )
    }
    trace = read(tmp_path, operators)
    assert [(item.args[0], item.kwargs["dtype"], item.kwargs["pin_memory"]) for item in trace.signatures] == [
        ([rows, columns], dtype, pinned)
        for rows, columns, dtype, pinned in product((2, 4), (1, 2), (torch.float32, torch.int64), (True, False))
    ]


def test_sizes_are_copied_from_other_arguments_in_their_order(tmp_path: Path) -> None:
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


def test_a_schema_says_which_overload_is_called_and_what_positions_mean(tmp_path: Path) -> None:
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


def test_modules_and_models_are_the_operators_that_they_call(tmp_path: Path) -> None:
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


def test_one_operators_form_has_a_device(tmp_path: Path) -> None:
    form = {
        "op_name": "torch.add",
        "op_info": operator(entry(tensor(4), tensor(4))),
        "run_options": {"device": "cuda", "iteration": 1},
    }
    (signature,) = read(tmp_path, form).signatures
    assert signature.op == "aten.add.Tensor"
    assert [spec.device for spec in signature.args] == ["cuda", "cuda"]


@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ({"torch.nothing": operator(entry(tensor(4)))}, "not registered in torch"),
        ({"torch.load": operator(entry(number("/etc/passwd", "str")))}, "not registered in torch"),
        ({"torch.nn.DataParallel": operator(entry(tensor(4)), build=[entry(number(4))])}, ""),
        ({"torch.add": operator(entry(tensor(4), number([1, 4], __range__=["value"])))}, "expanded by RangeConfigIter"),
        ({"torch.add": operator(entry(tensor(-1, 4), number(1)))}, "is no shape"),
        ({"torch.add": operator(entry(tensor(1 << 57, 4), number(1)))}, "larger than memory"),
        ({"torch.add": operator(entry(tensor(*[1] * 99), number(1)))}, "no list of sizes"),
        (
            {"torch.add": operator(entry(tensor(4, dtype="float17"), number(1)))},
            "a dtype 'float17', which there is not",
        ),
        ({"torch.add": operator(entry(tensor(4), number(1 << 70)))}, "more than 64 bits"),
        ({"torch.add": operator(entry(tensor(4), {"type": "what"}))}, "an argument of type 'what'"),
        ({"torch.add": operator(entry(tensor(4), {"type": []}))}, "an argument of type []"),
        ({"torch.add": operator(entry(tensor(4), {"type": "int", "value_range": [4, 1]}))}, "no range"),
        ({"torch.add": operator(entry(tensor(4)), input_iterator="Other")}, "there is no input_iterator Other"),
        ({"torch.add": operator(entry(tensor(4)), input_data_generator=[1])}, "there is no input_data_generator"),
        ({"torch.add": operator(entry(ranged([1, 4, 0])), input_iterator=RANGES)}, "a range whose step is 0"),
        ({"torch.add": operator(entry(ranged(["a", 4])), input_iterator=RANGES)}, "no range of whole numbers"),
        ({"torch.add": operator(entry(tensor(4, __copy__=[{"shape": [0, [7, 0]]}])), input_iterator=RANGES)}, "a copy"),
        ({"torch.add": operator(entry(tensor(4, __copy__=[3])), input_iterator=RANGES)}, "a copy"),
        ({"torch.add": operator(7)}, "an entry that is no object"),
        ({"torch.add": operator(entry(tensor(4)), build=[entry(number("aten::add(", "str"))])}, "a schema that cannot"),
        ({"torch.add": operator(entry(7))}, "an argument that is no object"),
        ({"torch.add": {"config": [{"output": []}]}}, "without an input section"),
        ({"torch.add": {"config": 7}}, "no list of configurations"),
        ({"torch.add": 7}, "no list of configurations"),
        (
            {"torch.nn.Transformer": operator(entry(tensor(4, 4)), build=[entry(num_encoder_layers=number(10**12))])},
            "makes more than 20,000 calls",
        ),
        (
            {"torch.nn.LSTM": operator(entry(tensor(10**9, 1, 4)), build=[entry(number(4), number(4))])},
            "a tensor apart that is longer",
        ),
        (
            {
                "torch.nn.Linear": operator(
                    entry(tensor(4)), build=[entry(number(1 << 40), number(1 << 40), device=number("cpu", "device"))]
                )
            },
            "",
        ),
    ],
)
def test_what_cannot_be_read_is_counted_with_the_reason(tmp_path: Path, operators: dict[str, Any], reason: str) -> None:
    both = {**operators, "torch.mul": operator(entry(tensor(4), tensor(4)))}
    (tmp_path / "config.json").write_text(json.dumps(both))
    trace = load(tmp_path / "config.json", reader=TraceReader(tmp_path / "config.json", format_name=NAME))
    assert set(trace.calls["op"]) == {"aten.mul.Tensor"}
    (told,) = reasons(trace)
    assert reason in told


def ten_million(step: int = 1) -> dict[str, Any]:
    first = ranged([1, 1000, step], [1, 100])
    second = ranged(-1, [1, 100], __copy__=[{"shape": [0, [0, 1]]}])
    return {"torch.mm": operator(entry(first, second), input_iterator=RANGES)}


def test_of_ten_million_cases_those_are_made_that_are_asked_for(tmp_path: Path) -> None:
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


def test_without_a_part_so_many_cases_are_refused_with_their_count_and_the_flags(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    told = f"stands for 10,000,000 cases, of which {MOST_CASES:,} are read at most: .*--start and --stop.*--sample"
    with pytest.raises(UserError, match=told):
        load(tmp_path / "config.json")
    done = run_command("opgrip", "trace", "info", tmp_path / "config.json")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_a_part_of_a_trace_of_calls_is_refused(tmp_path: Path) -> None:
    reader = TraceReader(SHIPPED_TRACES[0], cut=Cut(3))
    with pytest.raises(UserError, match="stands for no cases that --start"):
        list(reader)


def test_opreplay_and_convert_take_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ten_million()))
    done = run_command("opreplay", "config.json", "--start", "9999999", *FAST, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "float32[1000,100] float32[100,100]" in done.stdout
    assert "1 case: 1 ok" in done.stderr
    listed = run_command("opreplay", "config.json", "--sample", "4", "--sample-seed", "1", "--list", cwd=tmp_path)
    assert listed.stdout.endswith("4 cases\n")
    words = ("config.json", "part.jsonl", "--start", "5", "--stop", "8")
    done = run_command("opgrip", "trace", "convert", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shapes(load(tmp_path / "part.jsonl")) == [[(1, 1), (1, size)] for size in (6, 7, 8)]
    beyond = run_command("opreplay", "config.json", "--start", "10000000", cwd=tmp_path)
    assert beyond.stderr.endswith(
        "no case is left from --start 10000000: there are 10,000,000, the first being case 0\n"
    )


def test_iterators_and_generators_of_another_package_are_found_by_name(tmp_path: Path) -> None:
    environment = with_package(
        tmp_path / "site",
        dict.fromkeys(("opgrip.iterators", "opgrip.generators"), "planted_configurations"),
    )
    ours = operator({"powers": 4}, {"wrong": 1}, input_iterator="PowersOfTwo", input_data_generator="planted:Ones")
    (tmp_path / "config.json").write_text(json.dumps({"aten::add": ours}))
    done = run_command("opgrip", "trace", "convert", "config.json", "a.jsonl", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1 call of aten::add not converted: an entry that cannot be read (KeyError: 'powers')" in done.stderr
    trace = load(tmp_path / "a.jsonl")
    assert shapes(trace) == [[(1,)], [(2,)], [(4,)], [(8,)]]
    assert {type(model).__name__ for model in trace.values.values()} == {"Constant"}


@needs_data
@pytest.mark.parametrize("path", data_files("param/configs/*.json"), ids=lambda path: path.stem)
def test_of_real_files_all_operators_become_cases(path: Path, tmp_path: Path) -> None:
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


@needs_data
@pytest.mark.parametrize(
    "name", ["aten_ops", "simple_add_range", "batch_example", pytest.param("alex_net", marks=pytest.mark.slow)]
)
def test_real_files_are_replayed(name: str, tmp_path: Path) -> None:
    path = DATA / "param" / "configs" / f"{name}.json"
    done = run_command("opreplay", path, *FAST, "--strict", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def plain(signature: Signature) -> str:
    """A signature as the format can say it."""

    def told(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        return TensorSpec(leaf.shape, None, leaf.dtype, "cpu", requires_grad=leaf.requires_grad)

    return f"{signature.op} {map_leaves(told, (signature.args, signature.kwargs))}"


def counted(trace: Trace) -> dict[str, int]:
    """Calls by what the format can say of them."""
    told = {signature.number: plain(signature) for signature in trace.signatures}
    counts: dict[str, int] = trace.own_calls["signature"].map(told).value_counts().to_dict()
    return counts


def test_a_trace_of_ours_comes_back_but_for_what_is_told_as_lost(tmp_path: Path) -> None:
    trace = load(SHIPPED_TRACES[0])
    losses = write_as(NAME, trace, tmp_path / "a.json")
    again = load(tmp_path / "a.json")
    assert {reason for _, reason in losses.skipped} == {"it is no operator of torch's dispatcher"}
    expected = counted(trace)
    lost = {plain(item) for item in trace.signatures if item.kind != "operator"}
    assert counted(again) == {call: count for call, count in expected.items() if call not in lost}
    assert len(losses.calls) == len(again.calls)
    first = losses.calls[0]
    assert "time and place in the program" in first[2]

    write_as(NAME, again, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


@needs_data
def test_real_files_come_back_as_they_were(tmp_path: Path) -> None:
    for path in data_files("param/configs/*.json"):
        trace = load(path)
        write_as(NAME, trace, tmp_path / "a.json")
        again = load(tmp_path / "a.json")
        assert sorted(counted(again)) == sorted(map(without_defaults, counted(trace)))


def without_defaults(call: str) -> str:
    """What the writer gives as all other defaults."""
    return call.replace("{'beta': 1, 'alpha': 1}", "{}")


def test_what_the_format_has_no_type_for_is_not_written(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        {
            "torch.add": operator(entry(tensor(4, dtype="complex64"), tensor(4))),
            "torch.mul": operator(entry(tensor(4), tensor(4))),
        },
    )
    losses = write_as(NAME, trace, tmp_path / "a.json")
    assert losses.skipped == {("aten.add.Tensor", "the format has no tensors of complex64"): 1}
    assert set(load(tmp_path / "a.json").calls["op"]) == {"aten.mul.Tensor"}


@pytest.mark.parametrize(
    "content",
    [
        '{"torch.add": {"config": [{"input": [', # cut
        '{"torch.add": {"input_iterator": "", "config": []}, "torch.add": {"config": []}}',
        '{"torch.add": {"input_iterator": ' + "[" * 3000 + "]" * 3000 + "}}",
        '{"torch.add": {"input_iterator": ' + "9" * 5000 + "}}",
        '{"op_info": {}, "op_name": "torch.add", "run_options": {"device": "../x"}}',
    ],
    ids=["cut", "twice", "deep", "digits", "device"],
)  # fmt: skip
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert format_of(tmp_path / "config.json") == NAME
    with pytest.raises(UserError, match="cannot be read") as told:
        load(tmp_path / "config.json")
    assert "\n" not in str(told.value)


def test_bombs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    items = number([number(1)] * 2000, "genericlist")
    heavy = {
        "aten::zeros": operator(
            entry(items, dtype=number("float", "dtype"), x=ranged([1, 9999])), input_iterator=RANGES
        )
    }
    path.write_text(json.dumps(heavy))
    with pytest.raises(UserError, match="more than 5,000,000 arguments"):
        load(path)
    path.write_text(json.dumps({"aten::add": operator(entry(tensor(1), number(1)) | {"count": 10**12})}))
    with pytest.raises(UserError, match="10,000,000 calls"):
        load(path)
    sizes = [[1, 1 << 62]] * 40
    path.write_text(json.dumps({"aten::add": operator(entry(ranged(*sizes)), input_iterator=RANGES)}))
    assert reasons(load(path)) == ["more combinations than there are numbers for"]
    path.write_text(json.dumps({"input_iterator": " " * MOST_BYTES}))
    with pytest.raises(UserError, match="more than 64 MB"):
        load(path)


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1 << 65, 1e400, "", "tensor", "shape", "torch.nn.Linear", [], [1, 2, 0], {}, {"type": "int"}]
)
SMALL = {
    "torch.baddbmm": operator(
        entry(
            ranged([1, 2], -1, 3, __copy__=[{"shape": [1, [1, 0]]}]),
            tensor(2, 2),
            beta=number([1, 3], __range__=["value"]),
            alpha={"type": "float", "value_range": [0.0, 2.0]},
        ),
        input_iterator=RANGES,
    ),
    "torch.nn.Linear": operator(
        entry(tensor(2, 8)), build=[entry(number(8), number(4), bias=number(True, "bool"))], build_iterator=RANGES
    ),
    "aten::add": operator(
        entry(tensor(2), tensor(2), number(1)),
        build=[entry(number("aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor", "str"))],
    ),
}


def places_in(form: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    return [path] * bool(path) + [place for key, value in items for place in places_in(value, (*path, key))]


@given(st.lists(st.tuples(st.sampled_from(places_in(SMALL)), JUNK), min_size=1, max_size=3))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutants_are_read_or_refused(tmp_path: Path, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    form = json.loads(json.dumps(SMALL))
    for (*above, last), junk in changes:
        inner = form
        try:
            for key in above:
                inner = inner[key]
            inner[last] = junk
        except (KeyError, IndexError, TypeError):
            continue
    (tmp_path / "config.json").write_text(json.dumps(form))
    reader = TraceReader(tmp_path / "config.json", format_name=NAME)
    try:
        trace = load(tmp_path / "config.json", reader=reader)
    except UserError:
        return
    write_as(NAME, trace, tmp_path / "again.json")
    load(tmp_path / "again.json", reader=TraceReader(tmp_path / "again.json", format_name=NAME))
