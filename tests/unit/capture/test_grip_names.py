"""Names that an extracted function needs: exactly its helpers, constants and imports are copied."""

import ast
import linecache
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from extracted_source import check_same_results, entry_of, extract

from opgrip.errors import UserError


def test_only_used_helpers_are_extracted(project: Callable[..., ModuleType]) -> None:
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
    made = check_same_results(main.ious, torch.rand(3), torch.rand(3))
    assert "# of the first with each" in made.text
    assert "unused" not in made.text.lower()
    assert [node.name for node in ast.parse(made.text).body if isinstance(node, ast.FunctionDef)] == [
        "side",
        "area",
        "ious",
    ]


def test_helpers_of_one_name_in_two_modules_are_renamed(project: Callable[..., ModuleType]) -> None:
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
    made = check_same_results(main.both, torch.rand(3))
    assert "def scale_second(" in made.text


def test_helper_is_renamed_if_it_clashes_with_locals_or_builtins(project: Callable[..., ModuleType]) -> None:
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
    check_same_results(main.reduce, torch.rand(3))


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
    made = check_same_results(main.use, torch.rand(3))
    assert "EPS = 1e-6  # keeps logarithms finite" in made.text
    assert "RATIO = 4.135166556742356" in made.text


def test_global_changed_by_the_program_has_its_new_value(project: Callable[..., ModuleType]) -> None:
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
    check_same_results(main.scaled, torch.ones(2))


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
    with pytest.raises(UserError, match=r"weigh cannot be extracted: .*WEIGHTS.* 10,000 elements"):
        extract(main.weigh)
    with pytest.raises(UserError, match=r"MODELS is an object of class .*Registry.*build -> weigh_less -> MODELS"):
        extract(main.build)


def test_type_annotations_are_kept_if_their_names_are_in_the_sample(project: Callable[..., ModuleType]) -> None:
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
            return times(z, w)

        def times(one, other) \\
                -> Boxes:
            return one * other
        """,
        boxes="""
        from typing import Optional
        class Boxes:
            pass
        OptBoxes = Optional[Boxes]
        """,
    )
    made = check_same_results(main.area, torch.rand(2))
    assert "Boxes" not in made.text
    assert "Union" not in made.text
    assert "y: Optional[Tensor] = None,  # not used" in made.text
    assert "scale=None" in made.text
    assert "    z = x\n    w: int = 3\n" in made.text


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
    made = extract(main.use)
    assert "late" not in made.text
    assert torch.equal(entry_of(made)(torch.ones(1)), main.use(torch.ones(1)))


def test_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {}
    # use another file name: Python 3.13 has the text of `python -c` under <string>
    exec(compile("def made(x):\n    return x\n", "<made>", "exec"), scope)
    with pytest.raises(UserError, match="no source was found for made"):
        extract(scope["made"])
    with pytest.raises(UserError, match="relu"):
        extract(torch.relu)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('def area(x):\n    exec("y = x")\n', "exec"),
        (
            "import functools\n\n@functools.singledispatch\ndef area(x):\n    return 0\n\n"
            "@area.register\ndef _(x: int):\n    return x\n",
            "singledispatch",
        ),
    ],
)
def test_function_whose_code_is_not_known_is_refused(project: Callable[..., ModuleType], text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        extract(project(text).area)


def test_source_changed_after_import_is_refused(project: Callable[..., ModuleType]) -> None:
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
        extract(main.run)
