"""Precision of float32 products, from the settings of any torch version."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch

from opgrip.platform import precisions
from opgrip.platform.precisions import PLACES, allows_tf32, read_precision, set_precision


@pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")
def test_old_and_new_settings_determine_tf32() -> None:
    assert not allows_tf32("cuda.matmul")
    before = read_precision("cuda.matmul")
    try:
        torch.set_float32_matmul_precision("high")
        assert allows_tf32("cuda.matmul")
        torch.set_float32_matmul_precision("highest")
        assert not allows_tf32("cuda.matmul")
        set_precision("cuda.matmul", "tf32")
        assert allows_tf32("cuda.matmul")
    finally:
        set_precision("cuda.matmul", before)


@pytest.mark.skipif(read_precision("cuda.matmul") is None, reason="torch has one precision for all places")
@pytest.mark.parametrize("changed", PLACES)
def test_each_setting_is_read_where_a_program_sets_it(changed: str) -> None:
    before = read_precision(changed)
    try:
        for value in ("ieee", "tf32"):
            set_precision(changed, value)
            assert [read_precision(place) for place in PLACES] == [
                attrgetter(f"{place}.fp32_precision")(torch.backends) for place in PLACES
            ]
            assert read_precision(changed) == value
    finally:
        set_precision(changed, before)


def test_older_torch_is_queried_by_its_older_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precisions, "read_precision", lambda place: None)
    assert (allows_tf32("cuda.matmul"), allows_tf32("cudnn.conv")) == (False, torch.backends.cudnn.allow_tf32)
    monkeypatch.setattr(torch.backends, "cudnn", None)
    assert not allows_tf32("cudnn.rnn")
