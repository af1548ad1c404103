"""What the header of a merged trace says."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import train_tiny_net
from several_traces import small_trace

from opgrip.replay.cases.cases import make_cases
from opgrip.traces import load
from opgrip.traces.corpus import read_corpus
from opgrip.traces.corpus.cases import write_cases
from opgrip.traces.corpus.distill import FIELD
from opgrip.traces.errors import UserError
from opgrip.traces.merge import merge


def test_a_merged_trace_is_no_distilled_one(tmp_path: Path) -> None:
    paths = []
    for name, sizes in {"first": (10, 20, 30), "second": (10, 500, 700)}.items():
        corpus = read_corpus([str(small_trace(tmp_path / f"{name}.jsonl", sizes))])
        # not in the order in which the calls follow each other
        keys = corpus.frame["key"].tolist()[::-1]
        paths.append(tmp_path / f"{name}-cases.jsonl")
        write_cases(corpus, keys, paths[-1], fields={FIELD: {"keys": keys[:1], "traces": {}}})
    assert len(make_cases(load(paths[0]))) == 1
    merge(paths, tmp_path / "all.jsonl")
    whole = load(tmp_path / "all.jsonl")
    assert FIELD not in whole.header
    assert len(make_cases(whole)) == 5


def test_calls_of_threads_that_are_not_declared_stay_their_process_own(tmp_path: Path) -> None:
    paths = [small_trace(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    merge(paths, tmp_path / "all.jsonl")
    calls = load(tmp_path / "all.jsonl").calls
    assert calls.groupby("process")["thread"].nunique().to_dict() == {0: 1, 1: 1}
    assert calls.groupby("process").size().to_dict() == {0: 4, 1: 4}


def test_a_merged_trace_is_not_merged_again(tmp_path: Path) -> None:
    paths = [small_trace(tmp_path / f"{name}.jsonl") for name in ("first", "second", "third")]
    merge(paths[:2], tmp_path / "two.jsonl")
    with pytest.raises(UserError, match=r"two\.jsonl is merged already: merge the traces of all processes at once"):
        merge([tmp_path / "two.jsonl", paths[2]], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_a_copy_of_a_recording_is_not_merged_with_it(tmp_path: Path) -> None:
    train_tiny_net(tmp_path / "rank.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "rank.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"copy\.jsonl is of the same recording as \S*rank\.jsonl: name one"):
        merge([tmp_path / "rank.jsonl", tmp_path / "copy.jsonl"], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()
