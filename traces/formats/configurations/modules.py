"""Determines the operators that a module, function or named model calls, by running it on meta tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.errors import one_line
from opgrip.traces.formats.configurations.generators import Arguments
from opgrip.traces.formats.operator_schemas import NotConverted
from opgrip.traces.schema.arguments import Opaque, TensorSpec, encode, leaves, map_leaves


def alex_net(num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """Return AlexNet. Source: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"."""

    def convolution(*arguments: Any) -> tuple[nn.Module, nn.Module]:
        return nn.Conv2d(*arguments), nn.ReLU(inplace=True)

    def hidden(inner: int) -> tuple[nn.Module, ...]:
        return nn.Dropout(dropout), nn.Linear(inner, 4096), nn.ReLU(inplace=True)

    return nn.Sequential(
        nn.Sequential(
            *(*convolution(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), *convolution(64, 192, 5, 1, 2), nn.MaxPool2d(3, 2)),
            *(*convolution(192, 384, 3, 1, 1), *convolution(384, 256, 3, 1, 1), *convolution(256, 256, 3, 1, 1)),
            nn.MaxPool2d(3, 2),
        ),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Sequential(*hidden(256 * 36), *hidden(4096), nn.Linear(4096, num_classes)),
    )


class Bottleneck(nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            *_normalized(inner, width, 1),
            nn.ReLU(inplace=True),
            *_normalized(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normalized(width, outer, 1),
        )
        is_same = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_normalized(inner, outer, 1, stride))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.shortcut(x)
        result: Tensor = self.activation(y)
        return result


def resnet(num_classes: int = 1000) -> nn.Module:
    """Return ResNet-50. Source: He et al. 2016, "Deep residual learning for image recognition", table 1."""
    blocks: list[nn.Module] = []
    inner = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(inner, width, 1 if index else stride))
            inner = 4 * width
    stem = (*_normalized(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, num_classes))


def _normalized(inner: int, outer: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer)


MODELS = {"pytorch.model.alex_net": alex_net, "pytorch.model.resnet": resnet}  # models by the names that files use


# maximum number of calls of building and running one module, because a file could ask for a billion layers
OF_CASE = 20_000
OF_FILE = 1_000_000  # maximum number of calls of all modules and functions of one file
PIECES = 100_000  # maximum length of a dimension along which an operator may split a tensor
# maximum size in bytes of a tensor with memory that torch creates from numbers; a file's own tensors have no memory
MADE_BYTES = 1 << 20
# functions that allocate a requested number of results before they call an operator
CUTTING = re.compile(r".*(split|chunk)|torch\.combinations")
VALUES = "_opgrip_values"  # attribute of a meta tensor that holds the number of its value model
PREFIX = "torch.nn."
OF_FUNCTIONS = {"torch.": torch, "torch.nn.functional.": nn.functional, "torch.Tensor.": torch.Tensor}


@dataclass(frozen=True, slots=True)
class Recorded:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str = ""
    module_type: str = ""


class MetaRecording:
    """Runs modules and functions on meta tensors and returns the operators that they call.

    device : device that the recorded calls name instead of `meta`
    """

    def __init__(self, device: str, unbounded: bool = False) -> None:
        self._device = device
        self._unbounded = unbounded
        self._calls = 0

    def module(self, name: str, build: Arguments, arguments: Arguments) -> Iterator[Recorded]:
        with self._running() as watch:
            args, kwargs = on_meta((build.args, build.kwargs))
            module = module_names()[name](*args, **kwargs)
            with watch.paths(name, module):
                args, kwargs = on_meta((arguments.args, arguments.kwargs))
                watch.record = True
                module(*args, **kwargs)
        yield from watch.calls

    def function(self, name: str, arguments: Arguments) -> Iterator[Recorded]:
        with self._running() as watch:
            args, kwargs = on_meta((arguments.args, arguments.kwargs))
            if CUTTING.fullmatch(name) and any(type(leaf) is int and leaf > PIECES for leaf in leaves((args, kwargs))):
                raise ValueError(f"the function splits a tensor into more than {PIECES:,} pieces")
            watch.record = True
            function_names()[name](*args, **kwargs)
        yield from watch.calls

    @contextmanager
    def _running(self) -> Iterator[_Watch]:
        if self._calls > OF_FILE and not self._unbounded:
            raise NotConverted(f"the modules of the file make more than {OF_FILE:,} calls")
        watch = _Watch(self._device, None if self._unbounded else OF_CASE)
        try:
            with torch.device("meta"), watch:
                yield watch
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(one_line(error)) from error
        finally:
            self._calls += watch.operation_count


class _Watch(TorchDispatchMode):
    def __init__(self, device: str, most: int | None) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self.record = False
        self.operation_count = 0
        self._device = device
        self._most = most
        self._stack = [("", "")]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operation_count += 1
        if self._most is not None and self.operation_count > self._most:
            raise NotConverted(f"the module makes more than {self._most:,} calls")
        tree = (args, kwargs or {})
        tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
        is_cutting = any(value.type.kind() == "ListType" for value in function._schema.returns)
        if is_cutting and any(size > PIECES for tensor in tensors for size in tensor.shape):
            raise ValueError(f"the function splits a tensor along a dimension larger than {PIECES:,}")
        if self.record:
            self.keep(str(function), tree)
        if _has_memory(function, tree, tensors):
            _check_made(function, args, kwargs or {})
        return function(*args, **kwargs or {})

    def keep(self, op: str, tree: Any) -> None:
        tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]
        counts = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
        shared = [storage for storage, count in counts.items() if count > 1]
        args, kwargs = map_leaves(lambda leaf: self._recordable(leaf, shared), tree)
        self.calls.append(Recorded(op, tuple(args), kwargs, *self._stack[-1]))

    def paths(self, name: str, module: nn.Module) -> ExitStack:
        stack = ExitStack()
        for path, inner in module.named_modules():
            owner = (f"{name}.{path}" if path else name, type(inner).__name__)
            enter = inner.register_forward_pre_hook(lambda *_, owner=owner: self._stack.append(owner))
            leave = inner.register_forward_hook(lambda *_: self._stack.__delitem__(-1))
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        return stack

    def _recordable(self, leaf: Any, shared: list[int]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            leaf = torch.device(self._device) if leaf == torch.device("meta") else leaf
            try:
                encode(leaf)
            except TypeError:
                return Opaque(type(leaf).__qualname__)
            return leaf
        if leaf.layout is not torch.strided:
            raise ValueError(f"unsupported: the function creates a tensor of layout {leaf.layout}")
        storage = leaf.untyped_storage()._cdata
        return TensorSpec(
            tuple(leaf.shape),
            leaf.stride(),
            leaf.dtype,
            self._device,
            offset=int(leaf.storage_offset()),
            requires_grad=leaf.requires_grad,
            # a view or a tensor that was written holds other values
            values=getattr(leaf, VALUES, None) if leaf._version == 0 else None,
            storage=shared.index(storage) if storage in shared else None,
            conj=leaf.is_conj(),
            neg=leaf.is_neg(),
        )


def _has_memory(function: Any, tree: Any, tensors: Iterable[torch.Tensor]) -> bool:
    if any(not tensor.is_meta for tensor in tensors):
        return True
    devices = [leaf for leaf in leaves(tree) if isinstance(leaf, torch.device)]
    makes = not tensors and any(argument.name == "device" for argument in function._schema.arguments)
    return any(device.type != "meta" for device in devices) or (makes and not devices)


def _check_made(function: Any, args: Any, kwargs: Any) -> None:
    def without_memory(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to("meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(without_memory, (tuple(args), dict(kwargs)))
    if any(argument.name == "device" for argument in function._schema.arguments):
        kwargs["device"] = torch.device("meta")
    results = function(*args, **kwargs)
    if any(leaf.nbytes > MADE_BYTES for leaf in leaves(results) if isinstance(leaf, torch.Tensor)):
        raise ValueError(f"the function creates a tensor of more than {MADE_BYTES:,} bytes")


def on_meta(tree: Any) -> Any:
    def made(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf)):
            return torch.device("meta")
        if not isinstance(leaf, TensorSpec):
            return leaf
        assert leaf.stride is not None, "a configuration only has strided tensors"
        tensor = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
        setattr(tensor, VALUES, leaf.values)
        return tensor.requires_grad_(leaf.requires_grad)

    return map_leaves(made, tree)


def _is_device(text: str) -> bool:
    try:
        return bool(torch.device(text))
    except RuntimeError:
        return False


@lru_cache
def module_names() -> Mapping[str, Callable[..., nn.Module]]:
    classes = {
        f"{PREFIX}{name}": item
        for name, item in vars(nn).items()
        if isinstance(item, type) and issubclass(item, nn.Module) and item.__module__.startswith("torch.nn.modules.")
    }
    return {**classes, **MODELS}


@lru_cache
def function_names() -> Mapping[str, Callable[..., Any]]:
    by_space = get_overridable_functions()
    return {
        f"{prefix}{function.__name__}": function
        for prefix, space in OF_FUNCTIONS.items()
        for function in by_space.get(space, ())
        if not getattr(function, "__name__", "_").startswith("_")
    }
