"""Words that tell nothing of a program that runs them: torch's own, Python's, the system's. All others are hashed."""

from __future__ import annotations

import builtins
import re
from functools import lru_cache

import torch

from opgrip.traces.schema.records import HIGHER_ORDER
from opgrip.traces.schema.torch_names import DTYPES, LAYOUTS, MEMORY_FORMATS

OPERATOR_NAMESPACES = frozenset(
    ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "quantized")
    + ("quantized_decomposed", "sparse", "mkldnn", "mkl", "onednn", "prepacked", "inductor", "rngprims", "fsdp")
    + ("symm_mem", "torchvision", "torchaudio", "tv", "torch_attn", "xnnpack", "_quantized", "static_runtime")
)
"""Of operators that come with torch and its own libraries."""
EXTENSIONS = ("mmcv._ext:", "torchvision::")
"""How the names of the functions of extensions begin that everybody can install."""
MODES = frozenset(
    ("none", "mean", "sum", "batchmean", "prod", "amax", "amin", "max", "min", "avg", "product", "band", "bor", "bxor")
    + ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area", "zeros", "border", "constant")
    + ("reflection", "reflect", "replicate", "circular", "valid", "same", "tanh", "erf", "relu", "gelu", "silu")
    + ("floor", "trunc", "fro", "nuc", "ij", "xy", "L", "U", "N", "T", "C", "left", "right", "reduced", "complete", "r")
    + ("ortho", "forward", "backward", "lower", "higher", "midpoint", "sigmoid", "softmax", "add", "multiply", "update")
    + ("euclid", "backprop", "per_tensor", "per_channel", "math", "flash", "efficient", "cudnn", "gels", "gelsd")
    + ("gelsy", "gelss", "gesvd", "gesvdj", "gesvda", "highest", "high", "medium", "ieee", "tf32", "bf16", "native")
)
"""Settings of operators."""
BACKENDS = frozenset(("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake", "undefined", "local", "custom"))
REDUCTIONS = frozenset(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED"))
RUNS = frozenset(("predict", "loss", "train", "generate"))
OPAQUE_TYPES = frozenset(
    ("function", "builtin_function_or_method", "method", "NoneType", "generator", "module")
    + ("torch.storage.UntypedStorage", "torch.storage.TypedStorage", "UntypedStorage", "ScriptObject")
)
"""Types of what a trace cannot hold."""
NOT_RECORDED = "not recorded"
OWN_PLACES = frozenset(
    ("module scope", "optimizer scope", "autocast scope", "compiled region", "values on a device", "a Triton kernel")
)
OWN_PLACES_OF = ("thread ", "extension ", "kernels of ", "signature ")
"""What a capture calls its own parts, where one of them could not record; a name follows the latter."""
REGION = "torch.compile:"
REGION_KERNEL = re.compile(r"(cpp|triton_[a-z]{2,4})_fused_\w+|extern_kernels\.\w+|region")
"""A kernel of a compiled region as inductor names it, of operators of torch."""
LIMIT = re.compile(r"[0-9,]{1,20} (calls?|bytes|bytes of memory)")
FUNCTION_WORDS = frozenset(("forward", "backward", "step", "main"))
"""Names that torch and Python ask functions to have."""
DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|meta|xla|mtia|vulkan|privateuseone|hip)(:[0-9]{1,4})?")
VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,4}((a|b|rc|dev|post)[0-9]{1,8})?")
BUILD = re.compile(r"cpu|cu[0-9]{2,3}|rocm[0-9.]{1,8}|xpu")
THREAD = re.compile(r"MainThread|Thread-[0-9]{1,6}|Dummy-[0-9]{1,6}|autograd|pt_autograd_[0-9]{1,4}")
EXCEPTION = re.compile(r"[A-Z]\w*")
EINSUM = re.compile(r"[a-zA-Z. ]+(,[a-zA-Z. ]+)*(->[a-zA-Z. ]*)?")

_OTHER_EXCEPTIONS = frozenset(("OutOfMemoryError", "AcceleratorError", "LinAlgError", "UnsupportedOperatorException"))


def is_public_operator(op: str) -> bool:
    """Whether an operator, or an extension's function, is one that everybody can install."""
    if op.startswith((*EXTENSIONS, HIGHER_ORDER)):
        return True
    namespace, dot, _ = op.partition(".")
    return bool(dot) and ":" not in op and namespace in OPERATOR_NAMESPACES


def is_public_text(text: str) -> bool:
    """Whether a string argument is a setting, a device or a type, or a number of a group."""
    return (
        text in MODES
        or text in DTYPES
        or text in LAYOUTS
        or text in MEMORY_FORMATS
        or DEVICE.fullmatch(text) is not None
        or re.fullmatch(r"[0-9]{0,2}", text) is not None
    )


def is_public_exception(name: str) -> bool:
    """Whether a name is that of an error that Python or torch raises."""
    kind = getattr(builtins, name, None)
    return name in _OTHER_EXCEPTIONS or (isinstance(kind, type) and issubclass(kind, BaseException))


def is_public_type(name: str) -> bool:
    """Whether a name is that of a type of Python or torch, or says that nothing was recorded."""
    return isinstance(getattr(builtins, name, None), type) or name in torch_classes() | OPAQUE_TYPES | {NOT_RECORDED}


@lru_cache(maxsize=1)
def torch_classes() -> frozenset[str]:
    """Names of torch's modules, and of its classes of tensors."""
    modules = {name for name in dir(torch.nn) if isinstance(getattr(torch.nn, name), type)}
    return frozenset(modules | {"Tensor", "Buffer", "FakeTensor", "DTensor", "AsyncCollectiveTensor"})


@lru_cache(maxsize=1)
def optimizer_classes() -> frozenset[str]:
    """Names of torch's optimizers."""
    return frozenset(name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))


def public_version(text: str) -> str:
    """A version without what whoever built it put behind it: `2.6.0+acme` is `2.6.0`; empty for what is none."""
    number, plus, build = text.partition("+")
    if not VERSION.fullmatch(number):
        return ""
    return f"{number}{plus}{build}" if BUILD.fullmatch(build) else number
