"""Tests that a merged trace contains the records of its parts, renumbered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from example_trace import SPEC, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import train_tiny_net
from several_traces import small_trace

from opgrip.errors import UserError
from opgrip.traces import load
from opgrip.traces.analysis.merge import merge
from opgrip.traces.analysis.validation import validate
from opgrip.traces.io.reader import TraceReader
from opgrip.traces.schema.arguments import Opaque, numbers_of
from opgrip.traces.schema.records import (
    Calls,
    Context,
    DeviceTimes,
    Effects,
    End,
    Entered,
    Kernels,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.values.exact import Booleans


def test_merged_trace_is_not_merged_again(tmp_path: Path) -> None:
    paths = [small_trace(tmp_path / f"{name}.jsonl") for name in ("first", "second", "third")]
    merge(paths[:2], tmp_path / "two.jsonl")
    with pytest.raises(
        UserError, match=r"two\.jsonl is already a merge of several traces: merge the traces of all processes at once"
    ):
        merge([tmp_path / "two.jsonl", paths[2]], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_copy_of_a_recording_is_not_merged_with_it(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "rank.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rank.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"copy\.jsonl and \S*rank\.jsonl are from the same recording: name one"):
        merge([tmp_path / "rank.jsonl", tmp_path / "copy.jsonl"], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


OPS = ("aten.relu.default", "aten.sin.default", "aten.gelu.default")
SMALL_NUMBERS = st.integers(0, 2)


@st.composite
def parts(draw: st.DrawFn) -> list[Record]:
    number_of = {
        kind: draw(st.permutations([3, 11, 59])) for kind in ("signature", "scope", "context", "values", "thread")
    }
    records: list[Record] = []
    for place, number in enumerate(number_of["context"]):
        records.append(Context(number, {"threads": place}))
    for place, number in enumerate(number_of["scope"]):
        forward = number_of["scope"][0] if place else None
        records.append(
            Scope(number, f"layer{place}", "", "forward", context=number_of["context"][place], forward=forward)
        )
    records += [Values(number, Booleans(place, 70)) for place, number in enumerate(number_of["values"])]
    signatures = []
    for place, number in enumerate(number_of["signature"]):
        spec = replace(SPEC, values=number_of["values"][draw(SMALL_NUMBERS)])
        signatures.append(Signature(number, "operator", OPS[place], (spec,), {}, spec))
    thread, scope = number_of["thread"][0], number_of["scope"][draw(SMALL_NUMBERS)]
    records.append(Thread(thread, "MainThread"))
    has_ended = [draw(st.booleans()) for _ in signatures]
    # a call that runs during a flush has no signature in the trace yet
    for place, signature in enumerate(signatures):
        if draw(st.booleans()):
            opened = replace(signature, outputs=Opaque("not recorded"))
            records.append(Entered(thread, 10 * place, scope, signature.number, opened))
    records += (signature for signature, ended in zip(signatures, has_ended, strict=True) if ended)
    for place, signature in enumerate(signatures):
        if has_ended[place]:
            records.append(
                Observed(signature.number, [number_of["values"][draw(SMALL_NUMBERS)]], None, 10 * place, place)
            )
            records.append(Kernels(signature.number, [f"kernel{place}"], [1], [5]))
            records.append(Effects(signature.number, place, 7, ((signature.args[0],), {})))
            calls = Calls(thread, [signature.number], [scope], [10 * place], [5], [2], [0, place + 1], place or -1)
            records += [calls, DeviceTimes(thread, sum(has_ended[:place]), [place])]
            if draw(st.booleans()):
                records.append(Entered(thread, 10 * place, scope, signature.number))
    ended = sum(has_ended)
    return [*records, End(ended, ended, 100)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(processes=st.lists(parts(), min_size=1, max_size=3))
def test_merged_trace_has_the_facts_of_each_process(processes: list[list[Record]], tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{place}.jsonl", records) for place, records in enumerate(processes)]
    merge(paths, tmp_path / "all.jsonl", force=True)
    validation = validate(tmp_path / "all.jsonl")
    assert [item.message for item in validation.findings if item.kind == "reference"] == []
    by_process = meanings(TraceReader(tmp_path / "all.jsonl"))
    own = [meanings(TraceReader(path)) for path in paths]
    # signatures and the facts about them belong to no process
    assert by_process.pop(None, set()) == set().union(*(statements.get(None, set()) for statements in own))
    of_threads = [{key: words for key, words in statements.items() if key is not None} for statements in own]
    assert by_process == {process: said[0] for process, said in enumerate(of_threads) if said}
    whole = load(tmp_path / "all.jsonl")
    for process, path in enumerate(paths):
        alone = load(path)
        threads = [number for number, thread in whole.threads.items() if thread.process == process]
        unfinished = [item.opened for item in whole.unfinished if item.thread in threads]
        assert [item and item.op for item in unfinished] == [
            item.opened and item.opened.op for item in alone.unfinished
        ]


def meanings(reader: TraceReader) -> dict[int | None, set[tuple[object, ...]]]:
    records = list(reader)
    op = {item.number: item.op for item in records if isinstance(item, Signature)}
    scope = {item.number: item for item in records if isinstance(item, Scope)}
    context = {item.number: item.settings["threads"] for item in records if isinstance(item, Context)}
    models = {item.number: item.model for item in records if isinstance(item, Values)}
    # a trace of one process does not mention processes
    process = {item.number: item.process or 0 for item in records if isinstance(item, Thread)}
    statements: dict[int | None, set[tuple[object, ...]]] = {}

    def values(tree: object) -> tuple[object, ...]:
        return tuple(None if number is None else models[number] for number in numbers_of(tree))

    def place(number: int) -> tuple[object, ...]:
        record = scope[number]
        forward = None if record.forward is None else scope[record.forward].module
        return record.module, None if record.context is None else context[record.context], forward

    def say(number: int | None, *words: object) -> None:
        statements.setdefault(number, set()).add(words)

    for record in records:
        match record:
            case Signature():
                say(None, "signature", record.op, values((record.args, record.outputs)))
            case Observed():
                say(None, "observed", op[record.signature], tuple(models[number or 0] for number in record.values))
            case Effects():
                say(None, "effects", op[record.signature], record.operators, values(record.after))
            case Kernels():
                say(None, "kernels", op[record.signature], *record.names)
            case Calls():
                for signature, where, start in zip(record.signature, record.scope, record.start_ns, strict=True):
                    say(process[record.thread], "call", op[signature], place(where), start)
            case Entered():
                opened = record.opened
                name = op[record.signature] if opened is None else opened.op
                # if a call of it ended, both signatures are the same
                assert op.get(record.signature, name) == name
                described = None if opened is None else values((opened.args,))
                say(process[record.thread], "entered", name, place(record.scope), record.start_ns, described)
    return statements
