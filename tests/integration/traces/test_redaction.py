"""Redacted traces and private captures reveal nothing about their owner, and can be replayed."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from example_trace import RECORDS, write
from hypothesis import given
from hypothesis import strategies as st
from programs import ROOT, refusal, run_command, succeed
from torch import nn

from opgrip.capture import Capture
from opgrip.errors import UserError
from opgrip.replay.inputs.filling import with_defaults
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.replay.operators.lookup import find_operator
from opgrip.traces import load
from opgrip.traces.analysis.redaction import Policy, Redaction, salt_of
from opgrip.traces.analysis.redaction.names import NAME_RULES, NameHasher
from opgrip.traces.analysis.redaction.policy import RedactionReport
from opgrip.traces.analysis.redaction.redaction import default_float, default_integer, redact
from opgrip.traces.analysis.validation import validate
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema import arguments, python_objects, records, tensor_specs
from opgrip.traces.schema.arguments import GeneratorSpec, GroupSpec, Opaque, ReductionSpec, TensorSpec, leaves, tensors
from opgrip.traces.schema.privacy import DROPPED, HEADER_FIELDS, Privacy, privacy_of
from opgrip.traces.schema.python_objects import ModuleSpec, NamedSpec, ObjectSpec
from opgrip.traces.schema.records import (
    OWN_REASONS,
    UNSEEN_THREAD,
    Context,
    Dropped,
    Effects,
    End,
    Entered,
    Header,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.values.exact import Exact

WRITTEN = {"type", "format", "version"}  # header fields that the writer adds
SECRET = "SECRET-xyz"
CARD = 4111111111111111
SCHEMA = json.loads((ROOT / "traces" / "schema.json").read_text(encoding="utf-8"))


def tensor(shape: tuple[int, ...], dtype: torch.dtype, number: int | None, **options: Any) -> TensorSpec:
    stride = tuple(torch.empty(shape).stride())
    return TensorSpec(shape, stride, dtype, "cpu", values=number, **options)


def planted(secret: str = SECRET) -> list[Record]:
    ints, floats = tensor((2,), torch.int64, 0), tensor((1,), torch.float64, 1, cls=secret)
    opened = Signature(9, "function", f"{secret}:{secret}", (secret, ints), {secret: secret})
    head = ModuleSpec(f"{secret}:Head", {secret: floats}, {}, {}, {secret: secret})
    trees = (
        *(secret, {secret: CARD, "k": [secret]}, (secret, CARD), CARD, float(CARD), {secret}, secret.encode()),
        *(ObjectSpec(f"{secret}:{secret}", {secret: secret}), head, NamedSpec(f"m:{secret}"), Opaque(secret)),
        *(GroupSpec(secret, secret, (0, 1), 0), ReductionSpec(secret), GeneratorSpec("cpu", CARD), ints, floats),
        complex(CARD, CARD),
    )
    return [
        Values(0, Exact([CARD, 3])),
        Values(1, Exact([float(CARD)]), tensor="0123456789abcdef" * 2),
        Signature(0, "function", f"{secret}:{secret}", trees, {secret: secret}, secret),
        Signature(1, "operator", "aten.add.Tensor", (ints, CARD), {}, raised=f"ValueError: {secret}"),
        Signature(2, "compiled", "aten.mul.Tensor", (floats, float(CARD)), {}, Opaque(secret)),
        Signature(3, "operator", "profiler._record_function_enter_new.default", (secret,), {}),
        Observed(1, [0], secret),
        Effects(0, 1, 1, ((secret,), {secret: secret}), tensor((2,), torch.uint8, 0)),
        Context(0, {secret: True, "autocast": secret, "grad": True}),
        Scope(0, f"a.{secret}.0", secret, secret, f"{secret}:f", f"{secret}.forward", f"/home/{secret}/a.py", 7, (), 0),
        Scope(
            1,
            "",
            "",
            "forward",
            callers=(f"/home/{secret}/a.py:7 {secret}", secret),
            gripped=True,
            inside=f"{secret}:f",
        ),
        Thread(0, secret),
        Kernels(0, [secret, f"/{secret}"], [1, 1], [1, 1]),
        Entered(0, 1, 0, 9, opened),
        End(
            *(0, 4, 1, [Dropped(f"{secret}:f", secret, 1)], [Dropped("aten.x", f"run by {secret}", 1)]),
            *([Dropped("aten.x", f"RuntimeError: {secret}", 1)], secret, {"cpu": secret * 40, secret: "x"}),
            {"settings": {"environment": {secret: secret}, "attention": [f"{secret} "]}, secret: secret},
        ),
    ]


def header(secret: str = SECRET) -> dict[str, Any]:
    return {
        "command": ["opcapture", secret],
        "script": [secret],
        "model": {"name": secret, "class": secret, "source": secret, "cfg_options": [secret], "run": secret},
        "time": "2026-11-24T00:14:07+00:00",
        "started_unix_ns": 1795479247337792060,
        "pid": 14980,
        "seed": CARD,
        "torch": f"2.6.0+{secret}",
        "opgrip": secret,
        "platform": f"Linux {secret}",
        "device": secret,
        "devices": {"cpu": f"{secret}\n", secret: "x"},
        "host": secret,
        "trimmed": {"modules": [secret]},
        "distilled": {"keys": [secret], "traces": {}},
        "processes": [{"command": [secret], "host": secret, "rank": 0}],
        "clocks": {"by": secret, "processes": [{"offset_ns": 1, "host": secret}]},
        "accelerator": {"settings": {"environment": {"TOKEN": secret}}},
        secret: secret,
    }


def lines(written: list[Record], policy: Policy) -> bytes:
    redaction = Redaction(policy)
    return b"".join(encode_line(item) for record in written for item in redaction.records(record))


def declared_types() -> Iterator[type]:
    for module in (records, arguments, tensor_specs, python_objects):
        for item in vars(module).values():
            if isinstance(item, type) and is_dataclass(item) and item.__module__ == module.__name__:
                yield item


def test_step_labels_are_kept_and_foreign_devices_renamed() -> None:
    names = NameHasher(Policy())
    assert names.label("opgrip step 12") == "opgrip step 12"
    assert names.label("opgrip step twelve") != "opgrip step twelve"
    assert names.device("cuda:1") == "cuda:1"
    assert names.device("acmechip:3") == "privateuseone:3"
    assert names.device("acmechip") == "privateuseone"


@pytest.mark.parametrize("cls", [*declared_types()], ids=lambda cls: cls.__name__)
def test_every_field_declares_its_privacy(cls: type) -> None:
    special = {"operator", "line", "kernel", "number", "seed"}
    for name, privacy in privacy_of(cls).items():
        assert privacy is not None, f"{cls.__name__}.{name}"
        if privacy.treatment != "nested" and privacy.kind:
            assert privacy.kind in NAME_RULES.keys() | special, f"{cls.__name__}.{name}"


def test_every_header_field_of_the_schema_declares_its_privacy() -> None:
    def undeclared(node: dict[str, Any], table: Any) -> list[str]:
        if isinstance(table, Privacy):
            return []
        table = table[0] if isinstance(table, list) else table
        node = SCHEMA["$defs"]["accelerator"] if "$ref" in node else node.get("items", node)
        forms = node.get("properties", {})
        inner = [name for key in forms.keys() & table.keys() for name in undeclared(forms[key], table[key])]
        return [*(forms.keys() - table.keys()), *inner]

    assert undeclared(SCHEMA["$defs"]["header"], HEADER_FIELDS) == []


def test_no_secret_remains(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", planted(), **header())
    text = source.read_text()
    unknown = json.dumps({"type": "future", "text": SECRET}) + "\n"
    # fields and record types of a later version
    text = text.replace('{"type":"thread",', f'{unknown}{{"type":"thread","later":"{SECRET}",', 1)
    source.write_text(text)
    done = redact(source, tmp_path / "b.jsonl", Policy(hide_operators=True))
    outgoing = (tmp_path / "b.jsonl").read_text()
    assert "SECRET" not in outgoing
    assert str(CARD) not in outgoing
    assert "14980" not in outgoing
    assert "1795479247337792060" not in outgoing
    assert done.passed_over == {"future": 1, "thread.later": 1}
    forms = [json.loads(line) for line in outgoing.splitlines()]
    assert not forms[0].keys() & {name for name, privacy in HEADER_FIELDS.items() if privacy == DROPPED} - WRITTEN
    assert not [form for form in forms if "tensor" in form or "random_state" in form]


OWN = ("thread acme", "extension acme.ops", "acme.private:f", "acme.op.default")


def test_names_in_totals_are_redacted_like_those_of_calls() -> None:
    dropped = [*(Dropped(name.replace("acme", SECRET), "ValueError: x", 1) for name in OWN)]
    dropped += [Dropped("signature 7", "x", 1), Dropped("module scope", "x", 1)]
    dropped += [Dropped("torch.compile:triton_poi_fused_add_0+SECRET_kernel_0", "x", 1)]
    called = Signature(0, "function", f"{SECRET}:f", (), {})
    records = [called, Kernels(0, ["SECRET_kernel"], [1], [1]), End(0, 1, 1, dropped, dropped, dropped)]
    assert b"SECRET" not in (text := lines(records, Policy()))
    assert all(word in text for word in (b'"thread x', b'"signature 7"', b'"module scope"', b'"extension x'))


def test_kernels_of_compiled_regions_keep_only_inductor_names() -> None:
    name = "torch.compile:triton_poi_fused_add_0+SECRET_kernel_0+cpp_fused_mul_1"
    (record,) = Redaction(Policy()).records(Signature(0, "compiled", name, (), {}))
    assert isinstance(record, Signature)
    one, other, another = record.op.removeprefix("torch.compile:").split("+")
    assert (one, another) == ("triton_poi_fused_add_0", "cpp_fused_mul_1")
    assert "SECRET" not in other


@pytest.mark.parametrize("name", ["autograd acme", "Thread-1 (serve_acme)", "pt_autograd_acme", "MainThread acme"])
def test_thread_names_are_redacted_except_standard_ones(name: str) -> None:
    assert "acme" not in NameHasher(Policy()).thread(name)


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        ("aten.arange.default", (1000,)),
        ("aten.arange.start", (4111, 4114)),
        ("aten.arange.start_step", (411.1, 0.0, -3.7)),
        ("aten.arange.start", (7.5, 7.5)),
        ("aten.range.step", (4111.5, 4140, 0.7)),
        ("aten.randint.low", (4111, 4112, [3])),
    ],
)
def test_redacted_ranges_keep_their_number_of_elements(overload: str, args: tuple[Any, ...]) -> None:
    _, packet, name = overload.split(".")
    function = getattr(getattr(torch.ops.aten, packet), name)
    result = function(*args)
    spec = tensor(tuple(result.shape), result.dtype, None)
    (record,) = Redaction(Policy()).records(Signature(0, "operator", overload, args, {}, spec))
    assert isinstance(record, Signature)
    again = function(*record.args)
    assert (again.shape, again.dtype) == (result.shape, result.dtype)
    assert "411" not in str(record.args)


def test_custom_operator_names_are_kept_and_reported_unless_hidden() -> None:
    record = Signature(0, "extension", "acme.kernels:fused", (tensor((2,), torch.float32, None),), {"scale": 2.0})
    report = RedactionReport()
    Redaction(Policy(), report).records(record)
    (told,) = [left for left in report.counts if left.kind == "operator"]
    assert told.value == "acme.kernels:fused"
    assert "custom" in told.why
    assert b"acme" not in lines([record], Policy(hide_operators=True))


def test_redacted_numbers_are_defaults_of_the_same_sign() -> None:
    assert [default_integer(value) for value in (0, 1, 7, -100, CARD)] == [0, 1, 2, -2, 2]
    assert [default_float(value) for value in (0.0, -1.0, 1e-5, -4.1, float("-inf"))] == [0, -1, 0.5, -0.5, -math.inf]


def test_replay_of_a_redacted_trace_runs_and_returns_the_recorded_sizes(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl"):
        mask = torch.tensor([True, False, True, True])
        torch.arange(4111.5, 4115.5).sort()
        mask.nonzero()
        torch.embedding(torch.randn(50, 4), torch.tensor([7, 49, 7]))
        torch.randn(64, 64).index_select(0, torch.tensor([63, 0]))
        torch.randint(4111, 4112, (3,)).clamp(max=4000)[1:]
    redact(tmp_path / "t.jsonl", tmp_path / "r.jsonl", Policy())
    trace = load(tmp_path / "r.jsonl")
    assert trace.values == {}
    assert "411" not in str([signature.args for signature in trace.signatures])
    recorded = [tuple(spec.shape for spec in tensors(signature.outputs)) for signature in trace.signatures]
    for signature, shapes in zip(trace.signatures, recorded, strict=True):
        filled, values = with_defaults(signature, trace.values)
        args, kwargs = Inputs(filled.args, filled.kwargs, values, device_map("cpu", None), seed=0).make()
        outputs = find_operator(filled).function(*args, **kwargs)
        assert tuple(leaf.shape for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)) == shapes, signature.op


def test_values_stay_if_asked_for() -> None:
    report = RedactionReport()
    redaction = Redaction(Policy(keep=frozenset(("values", "scalars"))), report)
    records = [
        Values(5, Exact([CARD, 3])),
        Signature(0, "operator", "aten.neg.default", (tensor((2,), torch.int64, 5),), {}),
    ]
    (model, signature) = [item for record in records for item in redaction.records(record)]
    assert isinstance(model, Values)
    assert isinstance(signature, Signature)
    assert (model.model, signature.args[0].values) == (Exact([CARD, 3]), model.number)
    assert [left.value for left in report.counts if left.kind == "exact values"] == [str([CARD, 3])]


def test_redacted_trace_is_valid_and_has_the_same_calls(tiny_trace: Path, tmp_path: Path) -> None:
    redact(tiny_trace, tmp_path / "r.jsonl.gz", Policy())
    assert validate(tmp_path / "r.jsonl.gz").findings == []
    whole, redacted = load(tiny_trace), load(tmp_path / "r.jsonl.gz")
    for name in ("start_ns", "duration_ns", "op", "phase"):
        assert whole.calls[name].astype(str).tolist() == redacted.calls[name].astype(str).tolist()
    assert len(set(redacted.calls["module"])) == len(set(whole.calls["module"]))
    text = str([redacted.header, redacted.scopes, redacted.signatures])
    assert not any(word in text for word in ("features", "TinyNet", "tests", "programs"))
    assert {"Conv2d", "Linear"} <= {scope.module_type for scope in redacted.scopes}


def test_traces_of_one_salt_have_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "a.jsonl")
    salt = salt_of(tmp_path / "salt")
    assert salt_of(tmp_path / "salt") == salt
    assert (tmp_path / "salt").stat().st_mode & 0o077 == 0
    for name, policy in (("b", Policy(salt)), ("c", Policy(salt)), ("d", Policy())):
        redact(source, tmp_path / f"{name}.jsonl", policy)
    one, other, another = ((tmp_path / f"{name}.jsonl").read_bytes() for name in "bcd")
    assert one == other != another
    for weak in (b"s", bytes(64), b"ab" * 40):
        (tmp_path / "weak").write_bytes(weak)
        with pytest.raises(UserError, match="contains no salt"):
            salt_of(tmp_path / "weak")
    os.mkfifo(tmp_path / "pipe")
    with Popen(["sh", "-c", f"{{ cat '{tmp_path}/salt'; sleep 0.1; printf more; }} > '{tmp_path}/pipe'"]):
        assert salt_of(tmp_path / "pipe") == salt + b"more"
    monkeypatch.setattr("opgrip.cli.output_files.PIPE_S", 0.1)
    with pytest.raises(UserError, match="pipe did not end within"):
        salt_of(tmp_path / "pipe")


def test_reasons_of_the_capture_itself_are_kept() -> None:
    names = NameHasher(Policy())
    assert [names.reason(text) for text in sorted(OWN_REASONS)] == sorted(OWN_REASONS)
    assert names.reason(f"{UNSEEN_THREAD} by Ann") != f"{UNSEEN_THREAD} by Ann"


def test_every_byte_of_the_salt_counts() -> None:
    public = bytes(range(64))
    assert NameHasher(Policy(public + b"one")).word("Net") != NameHasher(Policy(public + b"other")).word("Net")


def test_unknown_keyword_of_an_operator_is_hashed() -> None:
    (record,) = Redaction(Policy()).records(
        Signature(0, "operator", "aten.add.Tensor", (), {SECRET: 1, "alpha": 1, "other": 2})
    )
    assert isinstance(record, Signature)
    assert list(record.kwargs)[1:] == ["alpha", "other"]
    assert SECRET not in record.kwargs


def test_kept_kinds_of_names_are_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl")
    redact(source, tmp_path / "b.jsonl", Policy(keep=frozenset(("modules", "functions", "files", "model"))))
    trace = load(tmp_path / "b.jsonl")
    assert trace.scopes[0].module == "backbone.überconv"
    assert trace.scopes[1].function == "Net.forward"
    assert (trace.scopes[1].file, trace.scopes[1].line) == ("nets.py", 7)
    assert trace.header["model"]["name"] == "m"


@given(st.text("qzQZ019_", min_size=6, max_size=12).map("Q".__add__))
def test_arbitrary_recorded_secret_does_not_remain(secret: str) -> None:
    report = RedactionReport()
    redaction = Redaction(Policy(hide_operators=True), report)
    written = [Header(header(secret)), *planted(secret)]
    text = b"".join(encode_line(item) for record in written for item in redaction.records(record)).decode()
    assert not [item for item in (text, *(left.value for left in report.counts)) if secret in item]


def test_redacting_a_cut_trace_needs_partial(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", RECORDS[:-1])
    with pytest.raises(UserError, match="is cut"):
        redact(source, tmp_path / "b.jsonl", Policy())
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    redact(source, tmp_path / "b.jsonl", Policy(), partial=True)
    assert (tmp_path / "b.jsonl").exists()


PROGRAM = """\
import sys
import threading

import torch
from torch import nn


class SECRETNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.SECRETlayer = nn.Linear(4, 4)
        self.embedding = nn.Embedding(50, 4)

    def forward(self, x, words):
        with torch.profiler.record_function("SECRET-label"):
            y = self.SECRETlayer(x) + self.embedding(words)
        y = y.masked_fill(torch.tensor([[True, False, False, False]]), 4111111111111111)
        return y, torch.tensor([4111111111111111, 3]).unique(), torch.tensor([4111111111111111.0, 1]).double() * 2


model = SECRETNet()
thread = threading.Thread(target=lambda: torch.ones(2).neg(), name="SECRET-thread")
thread.start()
thread.join()
try:
    torch.zeros(2) @ torch.zeros(3)
except RuntimeError:
    pass
model(torch.randn(3, 4), torch.tensor([7, 31, 7]))
"""


def test_private_trace_of_a_script_contains_no_secret(tmp_path: Path) -> None:
    (tmp_path / "SECRET_program.py").write_text(PROGRAM)
    succeed(
        *(
            "opcapture",
            "--private",
            "--stack-depth",
            "3",
            "-o",
            "t.jsonl",
            "--",
            "SECRET_program.py",
            "--token",
            "SECRET",
        ),
        cwd=tmp_path,
    )
    text = (tmp_path / "t.jsonl").read_text()
    assert "SECRET" not in text
    assert str(CARD)[:6] not in text
    assert validate(tmp_path / "t.jsonl").findings == []
    assert {"Linear", "Embedding"} <= {scope.module_type for scope in load(tmp_path / "t.jsonl").scopes}


CUSTOM = """
import torch
library = torch.library.Library("acme", "DEF")
library.define("fused(Tensor x) -> Tensor")
library.impl("fused", lambda x: x.neg(), "CPU")
torch.ops.acme.fused(torch.ones(2))
"""


def test_private_capture_reports_custom_operators_whose_names_stay(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CUSTOM)
    done = run_command("opcapture", "--private", "-o", "t.jsonl", "--", "program.py", cwd=tmp_path)
    assert "names of custom operators are not hidden, because a replay needs them: acme.fused.default;" in done.stderr
    done = run_command("opcapture", "-o", "u.jsonl", "--", "program.py", cwd=tmp_path)
    assert "custom operators" not in done.stderr
    # redacting again hides the operator names that the first redaction kept
    run_command("opgrip", "trace", "redact", "t.jsonl", "-o", "h.jsonl", "--hide-operators", cwd=tmp_path)
    assert "acme" in (tmp_path / "t.jsonl").read_text()
    assert "acme" not in (tmp_path / "h.jsonl").read_text()


def test_default_name_of_a_private_capture_hides_the_program(tmp_path: Path) -> None:
    (tmp_path / "SECRET_program.py").write_text("import torch; torch.ones(2).neg()")
    done = succeed("opcapture", "--private", "--", "SECRET_program.py", cwd=tmp_path)
    assert (tmp_path / "private.jsonl").exists()
    assert "SECRET" not in done.stderr


class SecretNet(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([CARD, 1])


def test_private_capture_writes_no_secret_to_disk_while_it_runs(tmp_path: Path) -> None:
    def written() -> str:
        return "".join(path.read_text() for path in tmp_path.iterdir())

    with Capture(tmp_path / "t.jsonl", private=True, write_ahead=True) as capture:
        SecretNet()(torch.arange(2))
        # each call is written before it runs
        assert "aten.add.Tensor" in written()
        assert "Secret" not in written()
        assert str(CARD) not in written()
    assert capture.problem is None
    assert "Secret" not in written()
    assert str(CARD) not in written()


def test_private_captures_with_one_salt_have_the_same_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with Capture(tmp_path / f"{name}.jsonl", private=True, salt_file=tmp_path / "salt"):
            SecretNet()(torch.arange(2))
    with Capture(tmp_path / "c.jsonl", private=True):
        SecretNet()(torch.arange(2))
    names = [{scope.module_type for scope in load(tmp_path / f"{name}.jsonl").scopes} for name in "abc"]
    assert names[0] == names[1] != names[2]


def test_private_capture_refuses_options_that_write_values(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which writes the values"):
        Capture(tmp_path / "t.jsonl", private=True, values="full")
    with pytest.raises(UserError, match="writes source and values"):
        Capture(tmp_path / "t.jsonl", private=True, grip=["m:f"], grip_to=tmp_path / "grips")
    with pytest.raises(UserError, match="--private"):
        Capture(tmp_path / "t.jsonl", salt_file=tmp_path / "salt")
    assert "--grip, which writes" in refusal("opcapture", "--private", "--grip", "m:f", "-o", tmp_path / "t.jsonl")
