"""Functions of all kinds, taken out of projects made for it, compute what they computed there."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch

from opgrip.capture.grips.gripped import Gripped, GrippedCall
from opgrip.capture.grips.source.module import ModuleText, lay_out, take
from opgrip.capture.grips.source.proof import check_names
from opgrip.traces.errors import UserError

_projects = count()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes a package of modules, by their text, and gives the first of them, imported."""
    made: list[str] = []

    def make(main: str, **others: str) -> ModuleType:
        name = f"gripped_project_{next(_projects)}"
        made.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, text in {"main": main, **others}.items():
            (tmp_path / name / f"{module}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(f"{name}.main")

    yield make
    for module in [known for known in sys.modules if known.partition(".")[0] in made]:
        del sys.modules[module]


def taken(function: Any, *calls: tuple[Any, ...], owner: type | None = None, entry: str = "") -> ModuleText:
    """The module of a function, which is checked to name nothing that it lacks."""
    kept = [GrippedCall(args, {}, None, None, None, 0, 0, 0) for args in calls]
    entry = entry or getattr(function, "__qualname__", "function").rpartition("<locals>.")[2]
    gripped = Gripped(function, owner, entry, "function", frozenset(), kept)
    made = lay_out(gripped, take(gripped), "a test")
    check_names(made.text, made.absent)
    lines = made.text.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    return made


def loaded(made: ModuleText) -> ModuleType:
    """The module of a sample, which sees nothing of the project."""
    assert not [word for word in made.text.split() if word.startswith("gripped_project")]
    module = ModuleType("sample")
    sys.modules["sample"] = module
    exec(compile(made.text, "sample.py", "exec"), vars(module))
    return module


def entry_of(made: ModuleText) -> Any:
    thing: Any = loaded(made)
    for name in made.entry.split("."):
        thing = inspect.getattr_static(thing, name)
    return getattr(thing, "__func__", thing)


def agrees(function: Any, *args: Any, **keywords: Any) -> ModuleText:
    """Check that the function and the one taken out give the same."""
    made = taken(function)
    one, other = function(*args, **keywords), entry_of(made)(*args, **keywords)
    assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return made


def test_helpers_are_taken_in_and_nothing_else(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch
        from .area import area, unused

        UNUSED = 3

        def other(x):
            return unused(x)

        def ious(a, b):
            # of the first with each
            return torch.minimum(area(a), area(b))
        """,
        area="""
        def side(x):
            return x.sqrt()

        def area(x):
            return side(x) ** 2

        def unused(x):
            return x
        """,
    )
    made = agrees(main.ious, torch.rand(3), torch.rand(3))
    assert "# of the first with each" in made.text
    assert "unused" not in made.text.lower()
    assert [node.name for node in ast.parse(made.text).body if isinstance(node, ast.FunctionDef)] == [
        "side",
        "area",
        "ious",
    ]


def test_helpers_of_one_name_in_two_modules_are_told_apart(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from . import first, second
        from .second import scale as scale_more

        def both(x):
            return first.scale(x) + second.scale(x) * scale_more(x)
        """,
        first="""
        def scale(x):
            return x * 2
        """,
        second="""
        def scale(x):
            return x * 5
        """,
    )
    made = agrees(main.both, torch.rand(3))
    assert "def scale_second(" in made.text


def test_a_helper_gives_way_to_local_variables_and_builtins(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from .more import maximum as largest, total

        def reduce(x):
            maximum = 3
            return largest(x) + maximum + total([1, 2])
        """,
        more="""
        from .shadow import sum as total_of

        def maximum(x):
            return x.max()

        def total(values):
            return total_of(values) + sum(values)
        """,
        shadow="""
        def sum(values):
            return len(values) * 100
        """,
    )
    agrees(main.reduce, torch.rand(3))


def test_constants_are_written_as_literals(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import enum, math, re, logging
        from collections import OrderedDict, namedtuple
        from dataclasses import dataclass
        from typing import NamedTuple
        import numpy as np
        import torch
        from torch import nn

        EPS = 1e-6  # keeps logarithms finite
        RATIO = math.log(1000 / 16)
        DTYPE, DEVICE = torch.float64, torch.device("cpu")
        MEANS = torch.tensor([0.1, 0.2, 0.3])
        GRID = np.arange(3.0)
        TABLE = {"a": [1, 2], "b": (float("inf"), None)}
        logger = logging.getLogger(__name__)
        WORD = re.compile("[a-z]+")
        loss = nn.MSELoss(reduction="none")
        Point = namedtuple("Point", ["x", "y"])
        ORIGIN = Point(1, 2)

        class Mode(enum.Enum):
            SUM = "sum"
            MEAN = "mean"

        @dataclass
        class Sizes:
            width: int
            height: int = 4

        SIZES = Sizes(3)
        CHOICES = {Mode.SUM: torch.sum, Mode.MEAN: torch.mean}

        def use(x, mode=Mode.MEAN):
            logger.debug("used")
            y = x.to(DTYPE).to(DEVICE).clamp(min=EPS, max=RATIO) + MEANS + torch.from_numpy(GRID)
            y = y * TABLE["a"][1] * SIZES.width * SIZES.height + ORIGIN.x + len(WORD.findall("ab cd"))
            return CHOICES[mode](y) + loss(y, y * 2).sum() + Point(1, 2).y
        """
    )
    made = agrees(main.use, torch.rand(3))
    assert "EPS = 1e-6  # keeps logarithms finite" in made.text
    assert "RATIO = 4.135166556742356" in made.text


def test_a_global_that_the_program_changed_has_its_new_value(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        SCALE = 1

        def set_scale(value):
            global SCALE
            SCALE = value

        def scaled(x):
            return x * SCALE
        """
    )
    main.set_scale(7)
    agrees(main.scaled, torch.ones(2))


def test_twenty_seven_tensors_and_more(project: Callable[..., ModuleType]) -> None:
    names = [f"t{index}" for index in range(30)]
    constants = "\n".join(f"C{index} = torch.tensor([{index}.0, 1.0])" for index in range(30))
    main = project(
        f"import torch\n{constants}\n\ndef add({', '.join(names)}):\n"
        f"    return {' + '.join(names)} + {' + '.join(f'C{index}' for index in range(30))}\n"
    )
    agrees(main.add, *(torch.rand(2) for _ in names))


def test_large_tensors_and_objects_are_refused_by_name(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        WEIGHTS = torch.rand(100, 100)

        class Registry:
            def build(self):
                return 1

        MODELS = Registry()

        def weigh(x):
            return x @ WEIGHTS

        def build(x):
            return weigh_less(x)

        def weigh_less(x):
            return MODELS.build()
        """
    )
    with pytest.raises(UserError, match=r"weigh cannot be taken out: .*WEIGHTS.* 10,000 elements"):
        taken(main.weigh)
    with pytest.raises(UserError, match=r"MODELS is an object of class .*Registry.*build -> weigh_less -> MODELS"):
        taken(main.build)


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
    assert taken(main.relu_like).entry == "clamp"
    agrees(main.relu_like, torch.rand(4))
    agrees(main.exp_like, torch.rand(4))
    made = taken(main.count)
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
    made = agrees(main.act, torch.randn(4))
    assert "lambda" not in made.text
    assert "def squares(x):\n    return x ** 2" in made.text
    agrees(main.cubes, torch.randn(4))


def test_recursion_among_functions(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        def even(n, x):
            return x if n == 0 else odd(n - 1, x + 1)

        def odd(n, x):
            return -x if n == 0 else even(n - 1, x * 2)

        def tree(depth):
            def inner(level):
                return 1 if level == 0 else inner(level - 1) + inner(level - 1)
            return inner(depth)
        """
    )
    agrees(main.even, 5, torch.rand(2))
    agrees(main.tree, 4)


def test_decorators_that_change_the_function_stay_and_those_that_register_go(
    project: Callable[..., ModuleType],
) -> None:
    main = project(
        """
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
        """,
        deco="""
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
        """,
    )
    made = agrees(main.loss, torch.rand(3), torch.rand(3), weight=torch.rand(3))
    assert "@weighted\ndef loss(" in made.text
    assert "egistry" not in made.text
    made = agrees(main.all_of, torch.rand(3))
    assert "@torch.no_grad()\ndef frozen(" in made.text
    assert "@silently(times=3)\ndef tripled(" in made.text
    assert "@functools.lru_cache(maxsize=None)\ndef cached(" in made.text
    assert not entry_of(taken(main.frozen))(torch.ones(1, requires_grad=True)).requires_grad
    made = taken(main.fast)
    assert torch.equal(entry_of(made)(torch.ones(2), weight=3.0), main.fast(torch.ones(2), weight=3.0))


def test_scripted_functions_are_taken_as_python(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        @torch.jit.script
        def scripted(x):
            return x + 1

        @torch.jit.script_if_tracing
        def traced(x):
            return scripted(x) * 2
        """
    )
    made = agrees(main.traced, torch.rand(2))
    assert "script" not in made.text.replace("scripted", "")


def test_generators_and_coroutines(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import asyncio

        async def wait(x):
            await asyncio.sleep(0)
            return x * 2

        async def gather(x):
            return [await wait(x), *(await asyncio.gather(wait(x)))]

        def windows(x, size):
            for start in range(0, len(x), size):
                yield x[start : start + size]
        """
    )
    x = torch.arange(6)
    ours, theirs = entry_of(taken(main.windows))(x, 4), main.windows(x, 4)
    torch.testing.assert_close(list(ours), list(theirs))
    torch.testing.assert_close(asyncio.run(entry_of(taken(main.gather))(x)), asyncio.run(main.gather(x)))


def test_partials_and_mutable_defaults(project: Callable[..., ModuleType]) -> None:
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
    made = taken(main.use)
    assert "square = functools.partial(power, exponent=2)" in made.text or "= partial(power" in made.text
    assert torch.equal(entry_of(made)(torch.ones(1)), torch.tensor([2.0]))


def test_a_partial_itself(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import functools

        def power(x, exponent):
            return x ** exponent

        square = functools.partial(power, exponent=2)
        """
    )
    made = taken(main.square)
    assert made.entry == "function"
    assert entry_of(made)(3) == 9


def test_newer_syntax(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import math
        import torch
        from .shapes import Box, area as area_of

        limit = 3

        def sizes(values):
            if (total := sum(values)) > limit and [y := value for value in values]:
                total += y
            match values:
                case [first, *rest] if first > limit:
                    return total + len(rest)
                case {"x": x, **others}:
                    return x
                case Box(width=w):
                    return w
            text = f"{area_of(2)} and {[area_of(v) for v in values]!r:>{limit}}"
            return total + len(text) + sum(area_of(limit) for limit in values)
        """,
        shapes="""
        from dataclasses import dataclass

        @dataclass
        class Box:
            width: int

        def area(x):
            return x * x
        """,
    )
    agrees(main.sizes, [1, 2, 3])
    agrees(main.sizes, [9, 2, 3])


def test_type_annotations_stay_where_the_sample_has_their_names(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from typing import Optional, Union
        import torch
        from torch import Tensor
        from .boxes import Boxes, OptBoxes

        def area(
            x: Union[Tensor, Boxes],
            y: Optional[Tensor] = None,  # not used
            *rest: "Boxes",
            scale: OptBoxes = None,
            **more: Boxes
        ) -> Union[Tensor,
                   Boxes]:
            z: Boxes = x
            w: int = 3
            return z * w
        """,
        boxes="""
        from typing import Optional
        class Boxes:
            pass
        OptBoxes = Optional[Boxes]
        """,
    )
    made = agrees(main.area, torch.rand(2))
    assert "Boxes" not in made.text
    assert "Union" not in made.text
    assert "y: Optional[Tensor] = None,  # not used" in made.text
    assert "scale=None" in made.text
    assert "    z = x\n    w: int = 3\n" in made.text


def test_methods_bring_the_used_part_of_their_class(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
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
        """,
        base="""
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
        """,
    )
    coder = main.Coder(torch.tensor([1.0, 2.0]))
    x = torch.rand(2)
    made = taken(main.Coder.encode, (coder, x), owner=main.Coder, entry="Coder.encode")
    assert "unused" not in made.text
    assert "not_used" not in made.text
    assert "def __init__" not in made.text
    module = loaded(made)
    ours = module.Coder.__new__(module.Coder)
    vars(ours).update(vars(coder))
    assert torch.equal(module.Coder.encode(ours, x), coder.encode(x))

    made = taken(vars(main.Coder)["default"].__func__, owner=main.Coder, entry="Coder.default")
    module = loaded(made)
    assert torch.equal(module.Coder.default().mean, torch.zeros(2))

    made = taken(main.Coder.clip, owner=main.Coder, entry="Coder.clip")
    assert "class Coder:" in made.text
    assert torch.equal(loaded(made).Coder.clip(x), x)


def test_objects_among_the_arguments_bring_what_is_called_of_them(project: Callable[..., ModuleType]) -> None:
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
    made = taken(main.refine, (model, results, config))
    assert "Never" not in made.text
    assert "class Scaled(nn.Module):" in made.text
    module = loaded(made)
    ours = module.Scaled.__new__(module.Scaled)
    vars(ours).update(vars(model))
    ours.head = module.Head()
    got = module.refine(ours, module.Result(*results), module.Config(scale=2))
    torch.testing.assert_close(tuple(got), tuple(main.refine(model, results, config)))


def test_autograd_functions_are_taken_with_their_backward(project: Callable[..., ModuleType]) -> None:
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
    entry_of(taken(main.activate))(x).sum().backward()
    y = x.detach().requires_grad_()
    main.activate(y).sum().backward()
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_classes_that_are_only_compared_with_are_left_empty(project: Callable[..., ModuleType]) -> None:
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
    made = agrees(main.tensor_of, torch.rand(2))
    assert "class Boxes:\n    pass" in made.text
    assert "class BadBoxes(ValueError):\n    pass" in made.text


def test_imports_are_those_of_the_author_merged_and_sorted(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch.nn.functional as F, scipy.special
        import numpy as np
        from torch import nn, Tensor
        import os.path as osp
        from .other import normalize

        def use(x: Tensor):
            m = nn.Identity()
            return normalize(F.relu(m(x))) + np.float32(scipy.special.erf(0.5)) + len(osp.basename("a/b"))
        """,
        other="""
        from torch.nn import functional
        import torch as t

        def normalize(x):
            return functional.normalize(t.abs(x), dim=0)
        """,
    )
    made = agrees(main.use, torch.rand(3))
    assert (
        dedent(
            """
        import os.path as osp

        import numpy as np
        import scipy.special
        import torch as t
        import torch.nn.functional as F
        from torch import Tensor, nn
        """
        )
        in made.text
    )
    assert "F.normalize(t.abs(x), dim=0)" in made.text


def test_imports_inside_functions_are_followed(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        def use(x):
            from .late import twice as double, SHIFT
            import math
            if x is None:
                from gripped_nowhere import something
                return something
            return double(x) + SHIFT + math.pi
        """,
        late="""
        SHIFT = 3

        def twice(x):
            return x * 2
        """,
    )
    main.use(torch.ones(1))
    made = taken(main.use)
    assert "late" not in made.text
    assert torch.equal(entry_of(made)(torch.ones(1)), main.use(torch.ones(1)))


def test_strings_that_span_lines_keep_their_value(project: Callable[..., ModuleType]) -> None:
    main = project(
        '''
        def outer():
            def text(x):
                """Says it.

                At length.
                """
                words = """one
            two
                three"""
                more = ("a"
                        "b")
                return words + more + f"""
                {x}
        """
            return text

        text = outer()
        '''
    )
    made = agrees(main.text, 3)
    assert '    """Says it.\n\n    At length.\n    """' in made.text


def test_functions_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
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
    made = agrees(vars(notebook)["run"], torch.rand(3))
    assert "# doubles" in made.text
    assert "import numpy as np\nimport torch\n" in made.text


def test_a_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {}
    exec("def made(x):\n    return x\n", scope)
    with pytest.raises(UserError, match="there is no source for made"):
        taken(scope["made"])
    with pytest.raises(UserError, match="relu"):
        taken(torch.relu)


def test_code_that_runs_text_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        def run(x):
            exec("y = x")
        """
    )
    with pytest.raises(UserError, match="exec"):
        taken(main.run)


def test_functions_that_are_found_by_their_names_are_taken_in(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        def soft(x):
            return x * 0.5

        def hard(x):
            return x * 2

        def unused(x):
            return x

        def suppress(x, kind="hard"):
            return eval(kind)(x) + getattr(Methods(), f"by_{kind}")(x)

        class Methods:
            def by_hard(self, x):
                return x + 1

            def other(self, x):
                return x
        """
    )
    made = agrees(main.suppress, torch.rand(3))
    assert "def soft" not in made.text
    assert "def other" not in made.text


def test_attributes_of_functions(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        def scaled(x):
            return x * scaled.factor

        scaled.factor = 3
        """
    )
    agrees(main.scaled, torch.rand(2))


def test_single_dispatch_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import functools

        @functools.singledispatch
        def area(x):
            return 0

        @area.register
        def _(x: int):
            return x
        """
    )
    with pytest.raises(UserError, match="singledispatch"):
        taken(main.area)


def test_a_source_that_changed_since_is_refused(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        import torch

        def run(x):
            return torch.relu(x)
        """
    )
    path = Path(str(main.__file__))
    path.write_text(path.read_text().replace("torch.relu", "torch.sigmoid"))
    linecache.checkcache(str(path))
    with pytest.raises(UserError, match="changed since it was imported"):
        taken(main.run)


def test_names_with_two_underscores_and_classes_made_in_functions(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from typing import Generic, TypeVar
        import torch

        T = TypeVar("T")

        class Coder(Generic[T]):
            __scale = 3

            def __twice(self, x):
                return x * 2

            def code(self, x):
                return self.__twice(x) * self.__scale

            def __unused(self):
                return 0

        def make(base):
            class Local(base, dict[str, int]):
                def __init__(self, shift):
                    self.shift = shift
                def code(self, x):
                    return super().code(x) + self.shift
            return Local

        Local = make(Coder)

        def use(x):
            return Local(2).code(x)
        """
    )
    made = agrees(main.use, torch.rand(3))
    assert "__unused" not in made.text
    assert "class Local(Coder, dict):" in made.text


def test_dataclasses_keep_their_fields_and_caches_begin_empty(project: Callable[..., ModuleType]) -> None:
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
    made = agrees(main.area, (2, 3))
    assert "_cache = {}" in made.text
    assert "shape: Any\n" in made.text
    assert "count: ClassVar[Any] = 3" in made.text


def test_methods_that_were_put_into_a_class_later(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        class Coder:
            factor = 2

            def code(self, x):
                return x * self.factor

        def patched(self, x):
            return x * self.factor + 100

        def use(x):
            return Coder().code(x)

        Coder.code = patched
        Coder.factor = 5
        """
    )
    made = agrees(main.use, torch.rand(3))
    assert "    factor = 5\n    code = patched\n" in made.text or "    code = patched\n    factor = 5\n" in made.text


def test_helpers_that_decorators_use_stand_before_what_is_decorated(project: Callable[..., ModuleType]) -> None:
    main = project(
        """
        from .deco import logged

        @logged
        def second(x):
            return first(x) + 1

        @logged
        def first(x):
            return x * 2 if x is not None else second(0)
        """,
        deco="""
        import functools

        NAMES = []

        def name_of(function):
            return clean(function.__name__)

        def clean(name):
            return name.strip("_")

        def logged(function):
            NAMES.append(name_of(function))
            @functools.wraps(function)
            def run(*args):
                return function(*args)
            return run
        """,
    )
    agrees(main.second, 3)
    agrees(main.first, 3)
