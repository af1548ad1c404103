"""Functions of generated projects, mmdet and mmseg, extracted from them, return the same results."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from extracted_source import check_same_results, entry_of, extract
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
