"""Lookup of the operators that a trace may name, and properties of operators that follow from their names."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature as signature_of
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from opgrip.errors import one_line
from opgrip.replay.operators.admission import (
    ALL_OF_TORCH,
    LOOK_FOR,
    TRUSTED_EXTENSIONS,
    Unsupported,
    Untrusted,
    absent_extensions,
    import_trusted,
    module_of,
)
from opgrip.replay.operators.torch_private import is_dispatched, operator_names
from opgrip.traces.schema.arguments import Opaque
from opgrip.traces.schema.operator_arguments import LARGEST, MOST_DIMENSIONS, TYPES
from opgrip.traces.schema.python_objects import NamedSpec
from opgrip.traces.schema.records import COMPILED, EXTENSION, FUNCTION, OPERATOR, Signature, is_graph_launch

_INTERPRETED = ("triton.runtime.interpreter", "InterpretedFunction")
_KERNELS = (("triton.runtime.jit", "JITFunction"), _INTERPRETED)
_AROUND = (("triton.runtime.autotuner", "Autotuner"), ("triton.runtime.autotuner", "Heuristics"))

# function that returns the attribute of a trusted module, given a name `module:kernel`
FindKernel = Callable[[str], Any]


def kernel_in(thing: Any) -> Any:
    while _is_any(thing, _AROUND):
        thing = thing.fn
    return thing if _is_any(thing, _KERNELS) else None


def launcher(kernel: Any, find: FindKernel) -> Callable[..., None]:
    if not _is_any(kernel, (_INTERPRETED,)):
        _check_driver()
    parameters = tuple(signature_of(kernel.fn).parameters)

    def launch(*args: Any, grid: tuple[int, ...], constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        running = [name for name in parameters if name not in constants]
        if len(running) != len(args) or not {*constants} <= {*parameters}:
            raise Unsupported(f"the kernel's parameters have changed since the capture, to {', '.join(parameters)}")
        _check_grid(grid)
        for name, value in options.items():
            # options that are not numbers name files and targets
            if type(value) not in (int, bool, float) or name in parameters or name in ("grid", "warmup"):
                raise Unsupported(f"the launch has the option {name[:60]!r}, which a replay does not support")
        named = dict(zip(running, args, strict=True)) | {
            name: _constant(value, find) for name, value in constants.items()
        }
        kernel.run(grid=tuple(grid), warmup=False, **named, **options)

    return launch


def _constant(value: Any, find: FindKernel) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_constant(item, find) for item in value)
    if isinstance(value, Opaque):
        raise Unsupported(f"a constant of the launch has the type {value.type_name}, which a trace cannot hold")
    if isinstance(value, NamedSpec):
        return find(value.name)
    if isinstance(value, torch.dtype):
        language = sys.modules["triton.language"]
        dtype = getattr(language, TYPES.get(value, ""), None)
        if not isinstance(dtype, language.dtype):
            raise Unsupported(f"the installed Triton has no dtype {value}")
        return dtype
    return value


def _is_any(thing: Any, classes: Sequence[tuple[str, str]]) -> bool:
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in classes)
    return any(isinstance(kind, type) and isinstance(thing, kind) for kind in kinds)


def _check_driver() -> None:
    try:
        sys.modules["triton"].runtime.driver.active.get_current_target()
    except Exception as error:
        reason = "a Triton kernel needs a GPU that Triton has a driver for; TRITON_INTERPRET=1 runs it on the CPU"
        raise Unsupported(reason) from error


def _check_grid(grid: Any) -> None:
    sizes = grid if isinstance(grid, tuple | list) else ()
    if not 1 <= len(sizes) <= MOST_DIMENSIONS or any(
        type(size) is not int or not 0 <= size <= LARGEST for size in sizes
    ):
        raise Unsupported(f"the grid of a launch is not a list of 1 to {MOST_DIMENSIONS} sizes: {str(grid)[:60]}")


# namespaces of operators on tensors that programs call
COMPUTING = frozenset(
    {
        *("aten", "prims", "quantized", "quantized_decomposed", "quantization", "onnx", "rngprims", "torchvision"),
        "torch_nn",
        # copies that FSDP2 makes before and after its collectives
        "fsdp",
        # marks a range of calls; subgraphs skip it
        "profiler",
    }
)

# namespaces of operators that communicate between processes
BETWEEN_PROCESSES = frozenset(
    {*("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"), "mempool"}
)
NO_OTHERS = "communicates with other processes, which do not exist in a replay"

# namespaces of operators that compilers and runtimes call with checked arguments
OF_TORCH_ITSELF = frozenset(
    {
        *("prim", "static_runtime", "inductor", "inductor_prims", "debugprims", "debug_mode_ops", "streams", "export"),
        *("onnx_symbolic", "coor", "cuda", "prepacked", "mkldnn_prepacked", "mkldnn", "onednn", "mkl", "_quantized"),
        *("sparse", "flex_lib", "flex_gemm", "_native", "_native_aot", "_test", "_inductor_test"),
    }
)

NOT_REVIEWED = "is private and was not reviewed: replay with --sandbox, or with --trust if you trust the trace"
READS_OR_WRITES_FILES = frozenset({"from_file", "save", "load", "_save", "_load"})
# namespaces of kernels in C++, which may trust their arguments
KERNELS = frozenset({"aten", "quantized", "quantization", "torchvision"})
# where public operators are documented, with the beginnings of their names
_PUBLIC = (
    *((torch, ""), (torch.Tensor, ""), (torch.nn.functional, "")),
    *((torch.special, "special_"), (torch.linalg, "linalg_"), (torch.fft, "fft_")),
)
_FILE_ARGUMENTS = re.compile(r"(file_?name|file|path|folder|directory|url|uri)s?")
_COMPRESSED_TENSOR = re.compile(r"sparse_(compressed|[cb]s[cr])_tensor")
_NUMBERS = re.compile(r"int|float|bool|Tensor")
_ADDRESS_ARGUMENTS = re.compile(r".*(data_ptr|pointer|address).*|ptr|\w+_ptr")


def is_private(function: Any) -> bool:
    namespace, _, name = function._schema.name.partition("::")
    if namespace != "aten" or name.startswith("_"):
        return namespace in KERNELS and (name.startswith("_") or namespace != "torchvision")
    names = ((place, name.removeprefix(start).removesuffix("_")) for place, start in _PUBLIC if name.startswith(start))
    # even None has a docstring since Python 3.13
    return not any(hasattr(place, short) and getattr(place, short).__doc__ for place, short in names)


@cache
def _reviewed() -> frozenset[str]:
    return frozenset(json.loads(Path(__file__).with_name("reviewed.json").read_text(encoding="utf-8")))


def refusal(function: Any, extensions: Collection[str] = ()) -> str | None:
    """Return the reason why an operator that a trace names is not run, or None if it is allowed."""
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    if namespace in BETWEEN_PROCESSES:
        return NO_OTHERS
    if namespace in OF_TORCH_ITSELF:
        return "is for torch's own compilers and runtimes"
    if not is_trusted(namespace, extensions):
        return f"is not trusted: {LOOK_FOR}"
    # einsum's path is a list of integers
    texts = (argument.name for argument in schema.arguments if not _NUMBERS.search(str(argument.type)))
    if name in READS_OR_WRITES_FILES or any(map(_FILE_ARGUMENTS.fullmatch, texts)):
        return "reads or writes files"
    if any(_ADDRESS_ARGUMENTS.fullmatch(argument.name) for argument in schema.arguments):
        return "takes a memory address"
    if _COMPRESSED_TENSOR.fullmatch(name):
        return "does not check which memory it accesses"
    if not is_dispatched(function):
        return "is only for TorchScript"
    if ALL_OF_TORCH not in extensions and str(function) not in _reviewed() and is_private(function):
        return NOT_REVIEWED
    return None


def is_trusted(namespace: str, extensions: Collection[str]) -> bool:
    if namespace in COMPUTING or namespace in {module_of(name).partition(".")[0] for name in extensions}:
        return True
    return any(namespace in namespaces_of(name) for name in _named_by_user(extensions))


def _named_by_user(extensions: Collection[str]) -> list[str]:
    return [name for name in extensions if name not in (*TRUSTED_EXTENSIONS, ALL_OF_TORCH)]


def namespaces_of(extension: str) -> frozenset[str]:
    namespaces, problem = _import_once(extension)
    if problem is not None:
        raise Unsupported(f"--extension {extension} cannot be imported: {problem}")
    return namespaces


@cache
def _import_once(extension: str) -> tuple[frozenset[str], str | None]:
    before, problem = set(operator_names()), None
    try:
        import_trusted(extension)
    except (Exception, SystemExit) as error:
        problem = one_line(error)
    return frozenset(name.partition("::")[0] for name in operator_names() if name not in before), problem


__all__ = ["TRUSTED_EXTENSIONS", "Operator", "Unsupported", "find_operator", "is_view"]

_OPERATOR = re.compile(r"(_?[A-Za-z]\w*)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")

MAIN = "__main__"

# modules that register operators when they are first imported, by namespace
REGISTERED_LATE = {
    "torch_nn": ("torch.nn.modules.linear_cross_entropy",),
    "fsdp": ("torch.distributed.fsdp",),
    "torchvision": ("torchvision",),
}


@dataclass(frozen=True, slots=True)
class Operator:
    function: Callable[..., Any]
    mutates: bool


def find_operator(signature: Signature, extensions: Collection[str] = TRUSTED_EXTENSIONS) -> Operator:
    """Return the operator or extension function that a signature names.

    Raises `Unsupported` if it is missing, not trusted or not allowed, or if an extension cannot be imported.
    """
    namespace, origin = signature.op.partition(".")[0], signature.registered_by
    for extension in _named_by_user(extensions):
        # also for torch's operators, because an extension may register kernels for them
        if not any(absent_extensions([extension])):
            namespaces_of(extension)
    if signature.kind == COMPILED:
        raise Unsupported("a compiled region is not an operator: capture it with --compiled operators")
    if signature.kind == FUNCTION:
        raise Unsupported("the trace has the operators that this function ran: replay those")
    if is_graph_launch(signature.op):
        raise Unsupported("the trace lacks the graph's calls: start the capture before the program captures its graphs")
    if signature.kind == EXTENSION:
        try:
            return Operator(_find_function(signature.op, extensions), mutates=True)
        except Untrusted as error:
            raise Untrusted(error.subject, error.extension or origin) from error
    is_custom = namespace not in COMPUTING | BETWEEN_PROCESSES | OF_TORCH_ITSELF
    if origin is not None and is_custom and not is_trusted(namespace, extensions):
        raise Untrusted(signature.op, origin)
    function = _find_overload(signature.op)
    reason = refusal(function, extensions)
    if reason is not None:
        raise Unsupported(f"{signature.op} {reason}")
    return Operator(function, mutates=bool(function._schema.is_mutable))


def mutates(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return signature.kind == EXTENSION
    try:
        return bool(_find_overload(signature.op)._schema.is_mutable)
    except Unsupported:
        return False


def is_view(signature: Signature) -> bool:
    if signature.kind != OPERATOR:
        return False
    try:
        schema = _find_overload(signature.op)._schema
    except Unsupported:
        return False
    if schema.is_mutable or not schema.returns:
        return False
    return all(value.alias_info is not None for value in schema.returns)


def _find_overload(name: str) -> Any:
    if name.partition(".")[0] in BETWEEN_PROCESSES:
        raise Unsupported(f"{name} {NO_OTHERS}")
    match = _OPERATOR.fullmatch(name)
    if match is None:
        raise Unsupported(f"{name!r} is not an operator's name")
    namespace, packet, overload = match.groups()
    function = _registered(namespace, packet, overload)
    if function is None:
        for module in REGISTERED_LATE.get(namespace, ()):
            # torchvision for another version of torch raises a RuntimeError
            with suppress(ImportError, RuntimeError):
                import_trusted(module)
        function = _registered(namespace, packet, overload)
    if not isinstance(function, torch._ops.OpOverload):
        raise Unsupported(f"{name} is not registered in torch {torch.__version__}")
    return function


def _registered(namespace: str, packet: str, overload: str) -> Any:
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        return None


def _find_function(name: str, extensions: Collection[str]) -> Callable[..., Any]:
    thing, module_name, attribute = _attribute(name, extensions)
    kernel = kernel_in(thing)
    if kernel is not None:
        return launcher(kernel, partial(_find_kernel, extensions=extensions))
    if not isinstance(thing, BuiltinFunctionType):
        raise Unsupported(f"{module_name} has no function {attribute}")
    if module_name in TRUSTED_EXTENSIONS and ALL_OF_TORCH not in extensions and name not in _reviewed():
        raise Unsupported(f"{name} {NOT_REVIEWED}")
    return thing


def _find_kernel(name: str, extensions: Collection[str]) -> Any:
    thing, module_name, attribute = _attribute(name, extensions)
    if kernel_in(thing) is None:
        raise Unsupported(f"{module_name} has no Triton kernel {attribute}")
    return thing


def _attribute(name: str, extensions: Collection[str]) -> tuple[Any, str, str]:
    match = _FUNCTION.fullmatch(name)
    if match is None:
        raise Unsupported(f"{name!r} is not a function's name")
    module_name, attribute = match.groups()
    if module_name == MAIN:
        # a running program is named __main__; its importable name comes from its file
        for trusted in extensions:
            with suppress(Unsupported, ImportError):
                thing = getattr(_import(trusted), attribute, None)
                if kernel_in(thing) is not None:
                    return thing, module_of(trusted), attribute
        raise Untrusted(f"the program's own {attribute}", None)
    # functions of torch itself are no operators of an extension
    modules = (name for name in extensions if module_of(name) == module_name != ALL_OF_TORCH)
    extension = next(modules, None)
    if extension is None:
        raise Untrusted(f"the extension {module_name}", module_name)
    try:
        module = _import(extension)
    except ImportError as error:
        raise Unsupported(f"{module_name} is not installed ({error})") from error
    return getattr(module, attribute, None), module_name, attribute


def _import(extension: str) -> ModuleType:
    if extension not in TRUSTED_EXTENSIONS:
        # the first import finds the namespaces
        namespaces_of(extension)
    return import_trusted(extension)


OTHER, LONG_TAIL = "other", "long tail"

# families, each with a pattern of operator names; the first match counts
FAMILIES: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|sdpa|flash"),
    ("resampling", r"upsample|interpolate|grid_sampl|affine_grid|pixel_(un)?shuffle|roi_|pad"),
    ("convolution", r"conv(?!ert)"),
    ("matrix product", r"^_?(scaled_|int_|ba?dd|add?b?|b)?(mm|mv)(_|$)|matmul|linear|^v?dot$|outer|einsum|^addr$"),
    ("normalization", r"norm(?!al)"),
    ("pooling", r"pool"),
    ("loss", r"loss|cross_entropy|kl_div"),
    ("softmax", r"softmax|logsumexp"),
    ("activation", r"relu|gelu|silu|sigmoid|tanh|elu|hardswish|hardtanh|mish|softplus|leaky|threshold|glu|dropout"),
    ("random", r"rand|bernoulli|normal_?$|multinomial|uniform|exponential|poisson"),
    ("sorting", r"sort|topk|unique|kthvalue|searchsorted|bucketize|nms|histc|bincount|msort"),
    ("indexing", r"index|gather|scatter|embedding|nonzero|where|take|masked|put|one_hot"),
    ("optimizer", r"_fused_|_foreach_|_amp_"),
    ("memory", r"copy|clone|cat|stack|contiguous|empty|zeros|ones|full|fill|zero_|arange|linspace|eye|tril|triu|repeat|"
     r"roll|flip|_to_copy|new_|lift|resize|constant_pad|tri[lu]_indices|meshgrid|split|unfold|im2col|col2im"),
    ("view", r"view|reshape|permute|transpose|squeeze|expand|select|slice|detach|alias|as_strided|unbind|^t$|chunk|"
     r"diagonal|narrow|flatten|real|imag"),
    ("reduction", r"sum|mean|^(arg)?(max|min)$|amax|amin|any|all$|prod|var|std|cum|norm|count|median|mode"),
    ("elementwise", r""),
)  # fmt: skip
_COMPILED = tuple((family, re.compile(pattern)) for family, pattern in FAMILIES)


def family_of(op: str) -> str:
    """Return the operator family, such as `convolution` for `aten.convolution_backward.default`."""
    if ":" in op:
        return EXTENSION
    namespace, _, rest = op.partition(".")
    if namespace not in ("aten", "prims") or not rest:
        return LONG_TAIL if namespace not in ("torchvision", "mmcv", "quantized") else EXTENSION
    name = rest.partition(".")[0].removesuffix("_backward")
    return next((family for family, pattern in _COMPILED if pattern.search(name)), OTHER)


# operators that raise for invalid indices on the CPU; on an accelerator such indices make the device unusable
CHECKED_ON_CPU = frozenset(
    {
        *("index", "index_put", "index_put_", "_index_put_impl_", "index_select", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "index_fill", "index_fill_", "gather", "take", "embedding"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "nll_loss_forward"),
    }
)

# operators that do not use integers as indices; views and pointwise operators do not either
NO_INDICES = frozenset(
    {
        *("cat", "stack", "clone", "_to_copy", "copy_", "copy", "_local_scalar_dense", "contiguous", "equal"),
        *("sort", "topk", "sum", "max", "min", "amax", "amin", "any", "all", "argmax", "argmin", "cumsum", "prod"),
        *("nonzero", "flip", "roll", "repeat", "constant_pad_nd", "detach", "alias", "lift_fresh", "select_backward"),
        *("ones_like", "zeros_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "resize_", "tril", "triu"),
        *("fill", "fill_", "zero", "zero_", "masked_fill_", "bernoulli_", "random_", "masked_select", "set_"),
    }
)

# operators that crash for some integer values
DIVIDE = frozenset({"div", "div_", "floor_divide", "floor_divide_", "remainder", "remainder_", "fmod", "fmod_"})

# operators that overwrite their first argument
OVERWRITE = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_"}
)


def overwrites(function: Callable[..., Any]) -> bool:
    """Return True if an operator overwrites its first argument completely without reading it."""
    return _name_of(function) in OVERWRITE


def sizes_vary(function: Callable[..., Any]) -> bool:
    """Return True if an operator's result shapes may depend on argument values, or if it is not part of aten."""
    return _name_of(function) is None or torch.Tag.dynamic_output_shape in getattr(function, "tags", ())


def takes_any_numbers(function: Callable[..., Any], device: str) -> bool:
    """Return True if integer arguments of any value are known to crash neither the operator nor the device."""
    name = _name_of(function)
    if name is None:
        return False
    if name in NO_INDICES or getattr(function, "is_view", False):
        return True
    if torch.Tag.pointwise in getattr(function, "tags", ()):
        return name not in DIVIDE
    return name in CHECKED_ON_CPU and torch.device(device).type == "cpu"


def _name_of(function: Callable[..., Any]) -> str | None:
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return None
    return str(function._schema.name).partition("::")[2]
