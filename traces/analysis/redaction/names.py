"""Salted names, and words that are public because torch, Python or the system define them."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import torch

from opgrip.traces.analysis.redaction.policy import FILES, FUNCTIONS, LABELS, MODULES, Policy
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS
from opgrip.traces.table.profiler_labels import STEP_LABEL

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


DIGITS = 5
"""Bytes of a hash: of ten thousand names, two are alike once in twenty thousand times."""
SALTED = re.compile(r"x[0-9a-f]{10}")
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_LINES = 1 << 20
MADE_UP = frozenset(
    ("<locals>", "<lambda>", "<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "__enter__", "__exit__")
)
"""Names that Python gives to functions, or asks of them, besides those that every object has."""
_INDEX = re.compile(r"[0-9]{1,4}")
_CALLER = re.compile(r"(.*):([0-9]+) ([^ ]*)")
OPTIMIZER_LABEL = re.compile(r"Optimizer\.(step|zero_grad)#(\w+)\.(step|zero_grad)")


class Names:
    """Makes salted names.

    Parameters
    ----------
    policy : has the salt, and what stays
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._key = blake2b(policy.salt).digest()

    def word(self, text: str) -> str:
        """The salted form of a text."""
        # the file name of a program can hold lone surrogates
        data = text.encode("utf-8", "surrogatepass")
        return f"x{blake2b(data, key=self._key, digest_size=DIGITS).hexdigest()}"

    def shift_ns(self) -> int:
        """By how much times of a day are moved: up to thirty years, the same for all traces of a salt."""
        day = int.from_bytes(blake2b(b"clock", key=self._key, digest_size=8).digest(), "big")
        return day % (30 * 365 * 86_400 * 10**9)

    def module(self, path: str) -> str:
        """A module's path, its parts hashed; numbers of a list's modules stay."""
        if self._policy.keeps(MODULES):
            return path
        return self._parts(path, ".", lambda part: bool(_INDEX.fullmatch(part)))

    def class_name(self, name: str) -> str:
        """A class's name; those of torch stay."""
        if self._policy.keeps(MODULES):
            return name
        return self._parts(name, ".", lambda part: part in torch_classes())

    def function(self, name: str) -> str:
        """A function's qualified name; `forward` and the words that Python makes up stay."""
        if self._policy.keeps(FUNCTIONS):
            return name
        return self._parts(name, ".", is_word_of_python)

    def object_name(self, name: str) -> str:
        """`module:qualname`."""
        return ":".join(self.function(part) for part in name.split(":"))

    def file(self, path: str) -> str:
        """A file's path, its parts hashed; the suffix of Python stays."""
        if self._policy.keeps(FILES) or not path:
            return path
        stem, suffix = (path[:-3], ".py") if path.endswith(".py") else (path, "")
        return self._parts(stem, "/", lambda part: False) + suffix

    def line(self, file: str, line: int) -> int:
        """A line's number, which would tell a file that is public; another one, the same for the same line."""
        if self._policy.keeps(FILES) or not line:
            return line
        return 1 + int(self.word(f"{file}:{line}")[1:], 16) % MOST_LINES

    def caller(self, text: str) -> str:
        """A frame, `file:line function`."""
        match = _CALLER.fullmatch(text)
        if match is None:
            return self.word(text)
        file, line, function = match[1], int(match[2][:18]), match[3]
        return f"{self.file(file)}:{self.line(file, line)} {self.function(function)}"

    def operator(self, op: str, kind: str = "") -> str:
        """An operator's name; that of a gripped function is the program's own."""
        if is_public_operator(op):
            return op
        if kind == FUNCTION and not op.startswith(HIGHER_ORDER):
            return self.object_name(op)
        if op.startswith(REGION):
            kernels = self._parts(op.removeprefix(REGION), "+", lambda part: bool(REGION_KERNEL.fullmatch(part)))
            return REGION + kernels
        if not self._policy.hide_operators:
            return op
        separator = ":" if ":" in op else "."
        return self._parts(op, separator, lambda part: part == "default")

    def unrecorded(self, name: str) -> str:
        """What could not be recorded, and no signature names: no replay needs its name."""
        if is_public_operator(name) or name in OWN_PLACES:
            return name
        for prefix in OWN_PLACES_OF:
            if name.startswith(prefix):
                return prefix + self._parts(name.removeprefix(prefix), "\0", str.isdecimal)
        return self.object_name(name)

    def hides(self, op: str) -> bool:
        """Whether an operator's name does not stay."""
        return self._policy.hide_operators and not is_public_operator(op)

    def label(self, text: str) -> str:
        """A label of `record_function`; those that torch's optimizers and recordings of steps open stay."""
        match = OPTIMIZER_LABEL.fullmatch(text)
        is_optimizers = match is not None and match[2] in optimizer_classes()
        if self._policy.keeps(LABELS) or is_optimizers or STEP_LABEL.fullmatch(text):
            return text
        return self.word(text)

    def device(self, name: str) -> str:
        """A device; one of a back end that another package brings and names keeps its number alone."""
        if DEVICE.fullmatch(name):
            return name
        number = re.search(r":[0-9]{1,4}$", name)
        return f"privateuseone{number[0] if number else ''}"

    def thread(self, name: str) -> str:
        """A thread's name; of those that Python and torch number, the number stays."""
        if self._policy.keeps(LABELS):
            return name
        first = name.partition(" (")[0]
        if THREAD.fullmatch(first):
            return first
        return self.word(name)

    def text(self, text: str) -> str:
        """A string argument; settings of operators, devices and types stay, and equations by other letters."""
        if is_public_text(text):
            return text
        return self.word(text)

    def equation(self, text: str) -> str:
        """An equation of `einsum`, its letters in the order of the alphabet."""
        if not EINSUM.fullmatch(text):
            return self.text(text)
        letters = dict.fromkeys(letter for letter in text if letter.isalpha())
        return text.translate({ord(letter): ALPHABET[place] for place, letter in enumerate(letters)})

    def error(self, text: str) -> str:
        """An error's message: the kind of error alone."""
        match = EXCEPTION.match(text)
        if match is not None and is_public_exception(match[0]):
            return match[0]
        return self.word(text)

    def _parts(self, text: str, separator: str, stays: Callable[[str], bool]) -> str:
        return separator.join(part if not part or stays(part) else self.word(part) for part in text.split(separator))


def is_word_of_python(name: str) -> bool:
    """Whether a function's name is one that Python or torch asks for."""
    is_special = name.startswith("__") and name.endswith("__") and hasattr(object, name)
    return is_special or name in FUNCTION_WORDS or name in MADE_UP
