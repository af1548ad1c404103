"""Private torch APIs that replay uses, and its behaviour without them."""

from __future__ import annotations

import pytest
import torch
from absent_places import is_declared, load_without_places, private_names

from opgrip.platform.private_apis import FOUND
from opgrip.replay.operators import torch_private
from opgrip.replay.operators.lookup import Unsupported


def test_every_private_name_is_declared_with_its_fallback() -> None:
    places = torch_private.private_places()
    assert all(state.strip() for state in places.values())
    assert [name for name in private_names(torch_private) if not is_declared(name, places)] == []


def test_torch_without_private_names_reports_the_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(torch_private, monkeypatch)
    places = bare.private_places()
    assert set(places) == set(torch_private.private_places())
    assert FOUND not in places.values()


def test_modes_that_need_a_missing_private_name_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_without_places(torch_private, monkeypatch)
    bare.compile_in_this_process()
    assert "inductor" in bare.dynamo_backends()
    with pytest.raises(Unsupported, match="what dynamo compiled"):
        bare.graphs_compiled()
    with pytest.raises(Unsupported, match="AOTInductor"):
        bare.packaged(None, "nowhere", make=True)
    assert bare.traced_backward(lambda x: [x], [torch.ones(1)], lambda results: None) is None
