"""Extraction of functions of generated projects, and of methods and classes with the members that they use."""

import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from extracted_source import check_same_results, entry_of, extract, load_extracted
from grip_exchange import run_all, write
from grip_zoo import COMPILED, ZOO, Specimen, gripped
from optional import optional

from opgrip.capture.grip.sample_folder import check_names
from opgrip.capture.grip.source.module import ModuleText, lay_out, requirements_of


def test_closures_become_constants_and_functions_of_the_module(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        def clamp_of(low, transform):
            calls = []

            def helper(x):
                return transform(x)

            def clamp(x, low_default=low):
                calls.append(1)
                return helper(x).clamp(min=low) + low_default

            return clamp

        def counter():
            total = 10
            def count(x):
                nonlocal total
                total += 1
                return x + total
            return count

        relu_like = clamp_of(0.5, lambda x: x * 2)
        exp_like = clamp_of(0.25, torch.exp)
        count = counter()
        """
    )
    assert extract(main.relu_like).entry == "clamp"
    check_same_results(main.relu_like, torch.rand(4))
    check_same_results(main.exp_like, torch.rand(4))
    made = extract(main.count)
    assert torch.equal(entry_of(made)(torch.ones(2)), main.count(torch.ones(2)))


def test_lambdas_become_functions(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch
        squares, cubes = (lambda x: x ** 2), (lambda x, n=3: x ** n)
        act = lambda x: torch.where(
            x > 0,  # as relu
            x,
            squares(x),
        )
        """
    )
    made = check_same_results(main.act, torch.randn(4))
    assert "lambda" not in made.text
    assert "def squares(x):\n    return x ** 2" in made.text
    check_same_results(main.cubes, torch.randn(4))


DECORATED = """
import functools
import torch
from .deco import REGISTRY, weighted, silently, Doubled

@REGISTRY.register("loss")
@weighted
def loss(pred, target):
    return (pred - target).abs()

@torch.no_grad()
@REGISTRY.register("other")
def frozen(x):
    return x * 2

@silently(times=3)
def tripled(x):
    return x + 1

@Doubled
def doubled(x):
    return x - 1

@functools.lru_cache(maxsize=None)
def cached(n):
    return n + 1

fast = weighted(frozen)

def all_of(x):
    return tripled(x) + doubled(x) + cached(3) + frozen(x)
"""

DECORATORS = """
import functools

class Registry:
    def register(self, name):
        return lambda function: function

REGISTRY = Registry()

def mean_of(x, weight):
    return (x * weight).mean()

def weighted(function):
    @functools.wraps(function)
    def wrapper(*args, weight=1.0, **kwargs):
        return mean_of(function(*args, **kwargs), weight)
    return wrapper

def silently(times):
    def decorate(function):
        def wrapper(x):
            return function(x) * times
        return wrapper
    return decorate

class Doubled:
    def __init__(self, function):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, x):
        return self.function(x) * 2
"""


def test_wrapping_decorators_are_kept_and_registering_ones_removed(project: Callable[..., ModuleType]) -> None:
    main = project(DECORATED, deco=DECORATORS)
    made = check_same_results(main.loss, torch.rand(3), torch.rand(3), weight=torch.rand(3))
    assert "@weighted\ndef loss(" in made.text
    assert "egistry" not in made.text
    made = check_same_results(main.all_of, torch.rand(3))
    assert "@torch.no_grad()\ndef frozen(" in made.text
    assert "@silently(times=3)\ndef tripled(" in made.text
    assert "@functools.lru_cache(maxsize=None)\ndef cached(" in made.text
    assert not entry_of(extract(main.frozen))(torch.ones(1, requires_grad=True)).requires_grad
    made = extract(main.fast)
    assert torch.equal(entry_of(made)(torch.ones(2), weight=3.0), main.fast(torch.ones(2), weight=3.0))


def test_partials_and_mutable_defaults_are_extracted(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import functools
        import torch

        def power(x, exponent, seen=[]):
            seen.append(exponent)
            return x ** exponent + len(seen)

        square = functools.partial(power, exponent=2)

        def use(x):
            return square(x)
        """
    )
    made = extract(main.use)
    assert "square = functools.partial(power, exponent=2)" in made.text or "= partial(power" in made.text
    assert torch.equal(entry_of(made)(torch.ones(1)), torch.tensor([2.0]))


def test_functions_of_a_notebook_are_extracted(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {
        "<ipython-input-1-aa>": "import torch\nimport numpy as np\nSCALE = 3\n",
        "<ipython-input-2-bb>": "def helper(x):\n    # doubles\n    return x * 2 + np.pi\n\n"
        "class Box:\n    side = 2\n    def area(self):\n        return self.side ** 2\n",
        "<ipython-input-3-cc>": "def run(x):\n    return torch.relu(helper(x)) * SCALE + Box().area()\n",
    }
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    for name, text in cells.items():
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), vars(notebook))
    made = check_same_results(vars(notebook)["run"], torch.rand(3))
    assert "# doubles" in made.text
    assert "import numpy as np\nimport torch\n" in made.text


optional("mmdet")
optional("mmseg")


def extract_specimen(one: Specimen, folder: Path) -> ModuleText:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gripped(one)
        made = lay_out(found, requirements_of(found), "a test")
    check_names(made.text, made.absent)
    write(folder, found, made)
    return made


@pytest.mark.slow
def test_extracted_functions_run_without_their_projects(tmp_path: Path) -> None:
    made = {one.name: extract_specimen(one, tmp_path / one.name) for one in ZOO}
    assert {name for one in made.values() for name in one.imports} <= {"numpy", "scipy", "torch"}
    found = run_all([tmp_path / name for name in made], ["mmdet", "mmseg", "mmengine", "mmcv"])
    assert {folder: wrong for folder, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_compiled_functions_of_a_framework_remain_imports(tmp_path: Path) -> None:
    made = {one.name: extract_specimen(one, tmp_path / one.name) for one in COMPILED}
    assert all("mmcv" in one.imports for one in made.values())
    found = run_all([tmp_path / name for name in made], ["mmdet", "mmseg"])
    assert {folder: wrong for folder, wrong in found.items() if wrong} == {}


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
