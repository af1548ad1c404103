"""Extraction of methods and classes together with the members that they use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from extracted_source import check_same_results, entry_of, extract, load_extracted

CODER = """
import abc
import torch
from .base import Base, Mixin

class Coder(Mixin, Base):
    \"\"\"Codes.\"\"\"

    scale = 2
    unused_attribute = object()
    table = {"a": 1}

    def __init__(self, mean):
        super().__init__()
        self.mean = mean

    @property
    def twice(self):
        return self.mean * 2

    @twice.setter
    def twice(self, value):
        self.mean = value / 2

    @staticmethod
    def clip(x):
        return x.clamp(max=1)

    @classmethod
    def default(cls):
        return cls(torch.zeros(2))

    def encode(self, x):
        return super().encode(x) * self.twice + self.clip(x) * self.scale + self.mixed()

    def unused(self):
        return None
"""

BASES = """
import abc

class Base(abc.ABC):
    @abc.abstractmethod
    def encode(self, x):
        return self._hook(x)

    def _hook(self, x):
        raise NotImplementedError

    def not_used(self):
        pass

class Mixin:
    def _hook(self, x):
        return x + 100

    def mixed(self):
        return len(self.table)
"""


def test_methods_include_the_used_part_of_their_class(project: Callable[..., ModuleType]) -> None:
    main = project(CODER, base=BASES)
    coder = main.Coder(torch.tensor([1.0, 2.0]))
    x = torch.rand(2)
    made = extract(main.Coder.encode, (coder, x), owner=main.Coder, entry="Coder.encode")
    assert "unused" not in made.text
    assert "not_used" not in made.text
    assert "def __init__" not in made.text
    module = load_extracted(made)
    ours = module.Coder.__new__(module.Coder)
    vars(ours).update(vars(coder))
    assert torch.equal(module.Coder.encode(ours, x), coder.encode(x))


def test_class_and_static_methods_include_the_used_part_of_their_class(project: Callable[..., ModuleType]) -> None:
    main = project(CODER, base=BASES)
    made = extract(vars(main.Coder)["default"].__func__, owner=main.Coder, entry="Coder.default")
    assert torch.equal(load_extracted(made).Coder.default().mean, torch.zeros(2))

    made = extract(main.Coder.clip, owner=main.Coder, entry="Coder.clip")
    assert "class Coder:" in made.text
    x = torch.rand(2)
    assert torch.equal(load_extracted(made).Coder.clip(x), x)


def test_objects_among_the_arguments_include_their_called_methods(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from typing import NamedTuple
        import torch
        from torch import nn

        class Result(NamedTuple):
            boxes: torch.Tensor
            scores: torch.Tensor

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)
                self.head = Head()
                self.never = Never()

            def forward(self, x):
                return self.head(self.inner(x))

        class Head(nn.Module):
            def forward(self, x):
                return x * 3

        class Never(nn.Module):
            def forward(self, x):
                raise ValueError

        class Config(dict):
            def __getattr__(self, name):
                return self[name]

        def refine(model, results, config):
            assert isinstance(results, Result)
            return Result(model(results.boxes) * config.scale, results.scores)
        """
    )
    model, results, config = main.Scaled(), main.Result(torch.rand(3, 2), torch.rand(3)), main.Config(scale=2)
    made = extract(main.refine, (model, results, config))
    assert "Never" not in made.text
    assert "class Scaled(nn.Module):" in made.text
    module = load_extracted(made)
    ours = module.Scaled.__new__(module.Scaled)
    vars(ours).update(vars(model))
    ours.head = module.Head()
    got = module.refine(ours, module.Result(*results), module.Config(scale=2))
    torch.testing.assert_close(tuple(got), tuple(main.refine(model, results, config)))


def test_autograd_functions_are_extracted_with_their_backward(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch
        from torch.autograd import Function

        class Swish(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x.sigmoid()

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return grad * (x.sigmoid() + slope(x))

        def slope(x):
            return x * x.sigmoid() * (1 - x.sigmoid())

        swish = Swish.apply

        def activate(x):
            return swish(x)
        """
    )
    x = torch.rand(3, requires_grad=True)
    entry_of(extract(main.activate))(x).sum().backward()
    y = x.detach().requires_grad_()
    main.activate(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_classes_that_are_only_compared_with_are_empty(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from .boxes import Boxes, BadBoxes

        def tensor_of(x):
            try:
                return x.tensor if isinstance(x, Boxes) else x
            except BadBoxes:
                return None
        """,
        boxes="""
        class Shape:
            pass

        class Boxes(Shape):
            def tensor_like(self):
                return 1

        class BadBoxes(ValueError):
            pass
        """,
    )
    made = check_same_results(main.tensor_of, torch.rand(2))
    assert "class Boxes:\n    pass" in made.text
    assert "class BadBoxes(ValueError):\n    pass" in made.text


def test_dataclasses_keep_their_fields_and_caches_start_empty(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from dataclasses import dataclass, field
        from typing import ClassVar
        import torch
        from .other import Other, Shape

        _cache = {}

        @dataclass
        class Sizes:
            shape: Shape
            other: "Other" = None
            count: ClassVar[Other] = 3
            more: list = field(default_factory=list)

            def area(self):
                return self.shape[0] * self.shape[1] * self.count + len(self.more)

        def area(shape):
            if shape not in _cache:
                _cache[shape] = torch.rand(40, 40)
            return Sizes(shape).area()
        """,
        other="""
        from typing import Tuple

        class Other:
            pass

        Shape = Tuple[int, int]
        """,
    )
    main.area((2, 3))
    made = check_same_results(main.area, (2, 3))
    assert "_cache = {}" in made.text
    assert "shape: Any\n" in made.text
    assert "count: ClassVar[Any] = 3" in made.text


def test_unused_members_that_cannot_be_extracted_are_left_out_with_a_reason(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        class Coder:
            def __init__(self, mean):
                self.mean = mean

            def code(self, x):
                return x - self.mean

            def reset(self):
                return self._made("0")

            def _made(self, text):
                exec(text)

        def reset(things):
            for thing in things:
                thing.reset()

        def code(coder, x, things=()):
            reset(things)
            return coder.code(x)
        """
    )
    made = extract(main.code, (main.Coder(1.0), torch.ones(3)))
    assert "def reset(self)" not in made.text
    reason = "it calls exec(), which looks up names while it runs (needed through Coder.reset -> Coder._made -> exec)"
    assert made.left_out == {"Coder.reset": reason}
