"""Sizes that operators trust to agree with each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.agreement.checking import check_agreement, check_graph
from opgrip.replay.operators.agreement.table import CHECKS
from opgrip.replay.operators.bounds import bound_indices

ATEN = torch.ops.aten
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-3, "amsgrad": False, "maximize": False}
SGD = {
    "weight_decay": 0.0,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": False,
}
BATCH_NORM = (True, 0.1, 1e-5)


def f(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "told"),
    [
        ("_fused_adam_", ([f(64)], [f(64)], [f(1)], [f(64)], [], [f()]), ADAM, r"exp_avgs has \(1,\) where \(64,\)"),
        ("_fused_adam_", ([f(64)], [f(64)], [], [f(64)], [], [f()]), ADAM, "exp_avgs has 0 where 1"),
        ("_fused_sgd_", ([f(64)], [f(64)], [f(1)]), SGD, "momentum_buffer_list"),
        ("upsample_nearest2d", (f(1, 1, 3, 3), [7, 7], 1e-25, 1e-25), {}, "scales_h has 1e-25 where about 7/3"),
        ("upsample_bilinear2d", (f(1, 1, 3, 3), [7, 7], False, float("nan"), 2.0), {}, "scales_h has nan"),
        ("native_batch_norm", (f(1, 64, 1, 1), f(1), None, None, None, *BATCH_NORM), {}, "weight has 1 where 64"),
        ("native_group_norm", (f(1, 2, 2), None, None, 1, 2, 10**8, 1, 1e-5), {}, "N, C and HxW"),
        ("native_group_norm", (f(1, 2, 2), None, None, 1, 2, 2, 0, 1e-5), {}, "C modulo group"),
        ("native_layer_norm", (f(2, 3), [3], f(1), None, 1e-5), {}, "weight"),
        ("_weight_norm_interface", (f(64, 2), f(1), 0), {}, "g has 1 where 64"),
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            (f(5, 2, 4, 4), f(1, 2, 4, 4), f(1, 2, 4, 4)),
            {},
            "batch of key has 1 where 5",
        ),
        ("_adaptive_avg_pool2d_backward", (f(1, 1, 1, 1), f(5, 5, 5, 5)), {}, "grad_output"),
        ("grid_sampler_2d_backward", (f(1, 1, 1, 1), f(1, 1, 4, 4), f(1, 9, 9, 2), 0, 0, False, []), {}, "grad_output"),
        ("_cdist_backward", (f(1), f(4, 2), f(4, 2), 1.0, f(1)), {}, "cdist"),
        ("_pdist_backward", (f(1), f(5, 2), 2.0, f(10)), {}, "grad"),
        (
            "mkldnn_rnn_layer",
            (f(2, 1, 4), f(256, 4), f(256, 64), f(256), f(256), f(1, 1), f(1, 1), False, [], 2, 64, 1)
            + (True, False, False, False),
            {},
            "hx_ has 1 where 64",
        ),
    ],
)
def test_sizes_that_do_not_agree_are_refused(op: str, args: Any, kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        check_agreement(getattr(ATEN, op).default, args, kwargs)


class _Checking(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_agreement(function, args, kwargs or {})
        self.names |= {function._schema.name} & set(CHECKS)
        return function(*args, **(kwargs or {}))


def image() -> torch.Tensor:
    return torch.rand(2, 4, 6, 6, requires_grad=True)


def step(optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    model = nn.Linear(3, 4)
    model(torch.rand(2, 3)).sum().backward()
    optimizer(model.parameters(), fused=True, **options).step()  # type: ignore[call-arg]
    return torch.zeros(1, requires_grad=True)


@pytest.mark.parametrize(
    "program",
    [
        lambda: step(torch.optim.Adam, amsgrad=True),
        lambda: step(torch.optim.AdamW),
        lambda: step(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda: step(torch.optim.SGD, lr=0.1),
        lambda: step(torch.optim.Adagrad),
        lambda: nn.BatchNorm2d(4)(image()),
        lambda: nn.BatchNorm2d(4).eval()(image()),
        lambda: nn.InstanceNorm2d(4)(image()),
        lambda: nn.GroupNorm(2, 4)(image()),
        lambda: nn.LayerNorm(6)(image()),
        lambda: F.interpolate(image(), scale_factor=1.7),
        lambda: F.interpolate(image(), scale_factor=0.3, mode="bilinear", antialias=True),
        lambda: F.interpolate(image(), size=(5, 9), mode="bicubic"),
        lambda: F.scaled_dot_product_attention(image(), image(), image()),
        lambda: F.scaled_dot_product_attention(image(), image()[:, :2], image()[:, :2], enable_gqa=True),
        lambda: F.grid_sample(image(), torch.rand(2, 3, 3, 2)),
        lambda: F.adaptive_avg_pool2d(image(), 2),
        lambda: torch.cdist(image(), image()),
        lambda: F.pdist(image()[0, 0]),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))(image()),
        lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True)(torch.rand(5, 2, 4))[0],
        lambda: nn.LSTM(4, 6, bias=False)(torch.rand(5, 2, 4))[0],
    ],
)
def test_what_torch_itself_calls_is_admitted(program: Callable[[], torch.Tensor]) -> None:
    with _Checking() as mode:
        program().sum().backward()
    assert mode.names or not torch.backends.mkldnn.is_available()


def test_indices_of_an_embedding_s_gradient_are_brought_into_bounds() -> None:
    indices = torch.full((2,), 10**9)
    bound_indices(ATEN.embedding_dense_backward.default, (f(2, 4), indices, 10, -1, True), {})
    assert indices.tolist() == [9, 9]


def test_a_unit_whose_results_differ_from_those_recorded_is_refused() -> None:
    graph = torch.fx.Graph()
    image = graph.placeholder("image")
    weight = graph.call_function(ATEN.ones.default, ([1],))
    graph.output(graph.call_function(ATEN.native_batch_norm.default, (image, weight, None, None, None, *BATCH_NORM)))
    with pytest.raises(Unsupported, match="weight has 1 where 64"):
        check_graph(torch.fx.GraphModule(nn.Module(), graph), (f(1, 64, 1, 1),))
