"""Tests of default values for unrecorded arguments: operators accept them, and their spread is realistic."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import torch
from foreign_data import operator_of
from versions import is_removed

from opgrip.replay.inputs.input_options import RECORDED, with_values
from opgrip.replay.inputs.inputs import Inputs, device_map
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.values.defaults import DEFAULTS, default_values

REFUSED_OTHERWISE = """\
Operator: aten.bernoulli.default
cnt: 1, ((T([20, 3], f32),), {})
Operator: aten.multinomial.default
cnt: 1, ((T([20, 30], f32), 4), {})
Operator: aten.binary_cross_entropy.default
cnt: 1, ((T([20, 3], f32), T([20, 3], f32)), {})
Operator: aten.poisson.default
cnt: 1, ((T([10, 20], f32),), {})
Operator: aten.linalg_cholesky.default
cnt: 1, ((T([2, 20, 20], f64),), {})
Operator: aten.div.Tensor_mode
cnt: 1, ((T([20, 20], i64), T([20, 20], i64)), {'rounding_mode': 'floor'})
Operator: aten.index_put.default
cnt: 1, ((T([100, 5], f32), [T([100], b8)], T([40, 5], f32)), {})
cnt: 1, ((T([100, 5], f32), [T([30], i64), T([30], i64)], T([30], f32)), {})
Operator: aten._pack_padded_sequence.default
cnt: 1, ((T([20, 5, 7], f32), T([5], i64), False), {})
Operator: aten.repeat_interleave.Tensor
cnt: 1, ((T([20], i64),), {'output_size': 60})
Operator: aten._assert_async.default
cnt: 1, ((T([], b8),), {})
Operator: aten.max_unpool2d.default
cnt: 1, ((T([2, 3, 4, 4], f32), T([2, 3, 4, 4], i64), [8, 8]), {})
Operator: aten._embedding_bag.default
cnt: 1, ((T([1000, 64], f32), T([200], i64), T([10], i64)), {})
"""


def values_of(op: str, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors for a call of an operator whose arguments are unrecorded."""
    signature, models = with_values(Signature(0, OPERATOR, op, args, kwargs), {}, RECORDED)
    made, named = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
    flat = [*made, *named.values()]
    items = (item for each in flat for item in (each if isinstance(each, list) else [each]))
    return tuple(item for item in items if isinstance(item, torch.Tensor))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, "cpu")


def test_operators_accept_their_default_values(tmp_path: Path) -> None:
    (tmp_path / "calls.txt").write_text(REFUSED_OTHERWISE)
    for signature in load(tmp_path / "calls.txt").signatures:
        signature, models = with_values(signature, {}, RECORDED)
        args, kwargs = Inputs(signature.args, signature.kwargs, models, device_map("cpu", None), 0).make()
        operator_of(signature)(*args, **kwargs)


def test_default_row_indices_cover_the_table() -> None:
    _, indices = values_of("aten.embedding.default", tensor(1000, 4), tensor(50, 20, dtype=torch.int64))
    assert int(indices.min()) >= 0
    assert int(indices.max()) < 1000
    assert len(indices.unique()) > 500
    _, picked = values_of("aten.index.Tensor", tensor(7, 900), [None, tensor(500, dtype=torch.int64)])
    assert len(picked.unique()) > 300
    assert int(picked.max()) < 900


def test_default_mask_has_half_or_the_recorded_number_of_true() -> None:
    _, mask = values_of("aten.masked_fill.Scalar", tensor(10, 10), tensor(10, 10, dtype=torch.bool), 0)
    assert int(mask.sum()) == 50
    signature = ("aten.nonzero.default", (tensor(100, dtype=torch.bool),), {}, tensor(7, 1, dtype=torch.int64))
    (model,) = default_values(*signature)[2].values()
    drawn = model.draw((100,), torch.bool, torch.Generator().manual_seed(0))
    assert int(drawn.sum()) == 7


def test_recorded_values_and_unknown_calls_are_unchanged() -> None:
    recorded = TensorSpec((4,), (1,), torch.bool, "cpu", values=3)
    args, kwargs, models = default_values("aten.logical_not.default", (recorded,), {})
    assert (args, kwargs, models) == ((recorded,), {}, {})
    assert default_values("mmcv.nms.default", (tensor(4),), {}) == ((tensor(4),), {}, {})
    # an operator called with nonsense
    assert default_values("aten.gather.default", (1, "x", tensor(4, dtype=torch.int64)), {})[2] == {}


def test_every_default_refers_to_existing_arguments() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    named = [
        (f"aten.{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}", argument.name)
        for schema in schemas
        for argument in schema.arguments
        if "Tensor" in str(argument.type)
    ]
    for op, patterns in ((op, row.argument.split("|")) for row in DEFAULTS for op in row.op.split("|")):
        if op.startswith("aten.") and not is_removed(op):
            arguments = {argument for name, argument in named if fnmatchcase(name, op)}
            assert any(fnmatchcase(item, pattern) for item in arguments for pattern in patterns), op
