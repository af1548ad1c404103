"""Qualified names of functions, including Python versions whose code objects lack them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from opgrip.capture.program import places as qualified_names
from opgrip.capture.program.places import qualified_name


def plain() -> None:
    pass


def outer() -> list[Callable[..., Any]]:
    class Inner:
        def method(self) -> Callable[[], None]:
            def deepest() -> None:
                pass

            return deepest

        @staticmethod
        def decorated() -> None:
            pass

    return [Inner.method, Inner().method(), Inner.decorated, lambda: None]


class Model:
    def forward(self) -> None:
        pass


def code_of(function: Callable[..., Any]) -> CodeType:
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    return code


def test_qualified_name_equals_that_of_the_function() -> None:
    for function in (plain, outer, *outer(), Model.forward):
        assert qualified_name(code_of(function), globals()) == function.__qualname__


def test_qualified_name_is_read_from_the_source_if_code_lacks_it() -> None:
    names = qualified_names._names(__file__)
    for function in (plain, outer, *outer(), Model.forward):
        code = code_of(function)
        assert names[code.co_name, code.co_firstlineno] == function.__qualname__


def test_plain_name_is_used_without_a_source() -> None:
    scope: dict[str, Any] = {}
    exec(compile("class A:\n    def f(self): pass\n", "<nowhere>", "exec"), scope)
    expected = "A.f" if sys.version_info >= (3, 11) else "f"
    assert qualified_name(code_of(scope["A"].f), scope) == expected
