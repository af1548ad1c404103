"""Hashing of a program's names, and names that are kept because torch, Python or the operating system define them."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch

from opgrip.traces.analysis.redaction.policy import FILES, FUNCTIONS, LABELS, MODULES, SCALARS, Policy
from opgrip.traces.schema.python_objects import PACKERS
from opgrip.traces.schema.records import FUNCTION, HIGHER_ORDER, OWN_REASONS, PHASES, is_graph_launch
from opgrip.traces.schema.tensor_specs import DTYPES, LAYOUTS, MEMORY_FORMATS, STORAGE
from opgrip.traces.table.profiler_labels import STEP_LABEL

# namespaces of operators that are part of torch and its own libraries
OPERATOR_NAMESPACES = frozenset(
    ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "quantized")
    + ("quantized_decomposed", "sparse", "mkldnn", "mkl", "onednn", "prepacked", "inductor", "rngprims", "fsdp")
    + ("symm_mem", "torchvision", "torchaudio", "tv", "torch_attn", "xnnpack", "_quantized", "static_runtime")
)
EXTENSIONS = ("mmcv._ext:", "torchvision::")  # prefixes of extension functions that anyone can install
# string settings of operators
MODES = frozenset(
    ("none", "mean", "sum", "batchmean", "prod", "amax", "amin", "max", "min", "avg", "product", "band", "bor", "bxor")
    + ("nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "area", "zeros", "border", "constant")
    + ("reflection", "reflect", "replicate", "circular", "valid", "same", "tanh", "erf", "relu", "gelu", "silu")
    + ("floor", "trunc", "fro", "nuc", "ij", "xy", "L", "U", "N", "T", "C", "left", "right", "reduced", "complete", "r")
    + ("ortho", "forward", "backward", "lower", "higher", "midpoint", "sigmoid", "softmax", "add", "multiply", "update")
    + ("euclid", "backprop", "per_tensor", "per_channel", "math", "flash", "efficient", "cudnn", "gels", "gelsd")
    + ("gelsy", "gelss", "gesvd", "gesvdj", "gesvda", "highest", "high", "medium", "ieee", "tf32", "bf16", "native")
)
BACKENDS = frozenset(("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake", "undefined", "local", "custom"))
REDUCTIONS = frozenset(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "UNUSED"))
RUNS = frozenset(("predict", "loss", "train", "generate"))
# types of arguments that a trace cannot record
OPAQUE_TYPES = frozenset(
    ("function", "builtin_function_or_method", "method", "NoneType", "generator", "module")
    + ("torch.storage.UntypedStorage", "torch.storage.TypedStorage", "UntypedStorage", "ScriptObject")
)
NOT_RECORDED = "not recorded"
OWN_PLACES = frozenset(
    ("module scope", "optimizer scope", "autocast scope", "compiled region", "values on a device", "a Triton kernel")
    + ("torch.jit.trace", "operators and backward passes requested by RPC")
)
# prefixes in the names of losses that a capture counts; a redacted name follows each prefix
OWN_PLACES_OF = ("thread ", "extension ", "signature ")
REGION = "torch.compile:"
# pattern of kernel names that inductor derives from the names of torch's operators
REGION_KERNEL = re.compile(r"(cpp|triton_[a-z]{2,4})_fused_\w+|extern_kernels\.\w+|region")
LIMIT = re.compile(r"[0-9,]{1,20} (calls?|bytes|bytes of memory)")
FUNCTION_WORDS = frozenset(("forward", "backward", "step", "main"))  # function names that torch and Python prescribe
DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|meta|xla|mtia|vulkan|privateuseone|hip)(:[0-9]{1,4})?")
VERSION = re.compile(r"[0-9]+(\.[0-9]+){0,4}((a|b|rc|dev|post)[0-9]{1,8})?")
BUILD = re.compile(r"cpu|cu[0-9]{2,3}|rocm[0-9.]{1,8}|xpu")
THREAD = re.compile(r"MainThread|Thread-[0-9]{1,6}|Dummy-[0-9]{1,6}|autograd|pt_autograd_[0-9]{1,4}")
EXCEPTION = re.compile(r"[A-Z]\w*")
EINSUM = re.compile(r"[a-zA-Z. ]+(,[a-zA-Z. ]+)*(->[a-zA-Z. ]*)?")

_OTHER_EXCEPTIONS = frozenset(("OutOfMemoryError", "AcceleratorError", "LinAlgError", "UnsupportedOperatorException"))


def is_public_operator(op: str) -> bool:
    if op.startswith((*EXTENSIONS, HIGHER_ORDER)) or is_graph_launch(op):
        return True
    namespace, dot, _ = op.partition(".")
    return bool(dot) and ":" not in op and namespace in OPERATOR_NAMESPACES


def is_public_text(text: str) -> bool:
    return (
        text in MODES
        or text in DTYPES
        or text in LAYOUTS
        or text in MEMORY_FORMATS
        or DEVICE.fullmatch(text) is not None
        or re.fullmatch(r"[0-9]{0,2}", text) is not None
    )


def is_public_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return name in _OTHER_EXCEPTIONS or (isinstance(kind, type) and issubclass(kind, BaseException))


def is_public_type(name: str) -> bool:
    return isinstance(getattr(builtins, name, None), type) or name in torch_classes() | OPAQUE_TYPES | {NOT_RECORDED}


@lru_cache(maxsize=1)
def torch_classes() -> frozenset[str]:
    modules = {name for name in dir(torch.nn) if isinstance(getattr(torch.nn, name), type)}
    return frozenset(modules | {"Tensor", "Buffer", "FakeTensor", "DTensor", "AsyncCollectiveTensor"})


@lru_cache(maxsize=1)
def optimizer_classes() -> frozenset[str]:
    return frozenset(name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))


def public_version(text: str) -> str:
    number, plus, build = text.partition("+")
    if not VERSION.fullmatch(number):
        return ""
    return f"{number}{plus}{build}" if BUILD.fullmatch(build) else number


DIGITS = 5  # number of bytes of a hash; two of ten thousand names get the same hash with a probability of 1 in 20,000
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_LINES = 1 << 20
# names that Python generates for functions, and special methods that `object` does not have
MADE_UP = frozenset(
    ("<locals>", "<lambda>", "<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "__enter__", "__exit__")
)
_INDEX = re.compile(r"[0-9]{1,4}")
_CALLER = re.compile(r"(.*):([0-9]+) ([^ ]*)")
OPTIMIZER_LABEL = re.compile(r"Optimizer\.(step|zero_grad)#(\w+)\.(step|zero_grad)")


class NameHasher:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._key = blake2b(policy.salt).digest()

    def word(self, text: str) -> str:
        # the file name of a program can hold lone surrogates
        data = text.encode("utf-8", "surrogatepass")
        return f"x{blake2b(data, key=self._key, digest_size=DIGITS).hexdigest()}"

    def shift_ns(self) -> int:
        day = int.from_bytes(blake2b(b"clock", key=self._key, digest_size=8).digest(), "big")
        return day % (30 * 365 * 86_400 * 10**9)

    def module(self, path: str) -> str:
        if self._policy.keeps(MODULES):
            return path
        return self._parts(path, ".", lambda part: bool(_INDEX.fullmatch(part)))

    def class_name(self, name: str) -> str:
        if self._policy.keeps(MODULES) or name == STORAGE:
            return name
        return self._parts(name, ".", lambda part: part in torch_classes())

    def function(self, name: str) -> str:
        if self._policy.keeps(FUNCTIONS):
            return name
        return self._parts(name, ".", is_word_of_python)

    def object_name(self, name: str) -> str:
        return name if name in PACKERS else ":".join(self.function(part) for part in name.split(":"))

    def file(self, path: str) -> str:
        if self._policy.keeps(FILES) or not path:
            return path
        stem, suffix = (path[:-3], ".py") if path.endswith(".py") else (path, "")
        return self._parts(stem, "/", lambda part: False) + suffix

    def line(self, file: str, line: int) -> int:
        if self._policy.keeps(FILES) or not line:
            return line
        return 1 + int(self.word(f"{file}:{line}")[1:], 16) % MOST_LINES

    def caller(self, text: str) -> str:
        match = _CALLER.fullmatch(text)
        if match is None:
            return self.word(text)
        file, line, function = match[1], int(match[2][:18]), match[3]
        return f"{self.file(file)}:{self.line(file, line)} {self.function(function)}"

    def operator(self, op: str, kind: str = "") -> str:
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
        if is_public_operator(name) or name in OWN_PLACES:
            return name
        for prefix in OWN_PLACES_OF:
            if name.startswith(prefix):
                return prefix + self._parts(name.removeprefix(prefix), "\0", str.isdecimal)
        return self.object_name(name)

    def reason_of_operator(self, op: str) -> str:
        if is_public_operator(op):
            return "operators and extensions that everybody can install"
        if op in OWN_PLACES or op.startswith(OWN_PLACES_OF):
            return "the capture's name for a part of itself"
        is_region = op.startswith(REGION)
        return (
            "kernels generated by torch.compile"
            if is_region
            else ("a custom operator, which could not be replayed without its name")
        )

    def hides(self, op: str) -> bool:
        return self._policy.hide_operators and not is_public_operator(op)

    def label(self, text: str) -> str:
        match = OPTIMIZER_LABEL.fullmatch(text)
        is_optimizers = match is not None and match[2] in optimizer_classes()
        if self._policy.keeps(LABELS) or is_optimizers or STEP_LABEL.fullmatch(text):
            return text
        return self.word(text)

    def device(self, name: str) -> str:
        if DEVICE.fullmatch(name):
            return name
        number = re.search(r":[0-9]{1,4}$", name)
        return f"privateuseone{number[0] if number else ''}"

    def thread(self, name: str) -> str:
        if self._policy.keeps(LABELS):
            return name
        first = name.partition(" (")[0]
        if THREAD.fullmatch(first):
            return first
        return self.word(name)

    def text(self, text: str) -> str:
        if is_public_text(text):
            return text
        return self.word(text)

    def equation(self, text: str) -> str:
        if not EINSUM.fullmatch(text):
            return self.text(text)
        letters = dict.fromkeys(letter for letter in text if letter.isalpha())
        return text.translate({ord(letter): ALPHABET[place] for place, letter in enumerate(letters)})

    def error(self, text: str) -> str:
        match = EXCEPTION.match(text)
        if match is not None and is_public_exception(match[0]):
            return match[0]
        return self.word(text)

    def reason(self, text: str) -> str:
        if text in OWN_REASONS:
            return text
        before, run_by, classes = text.partition("run by ")
        if run_by and not before:
            return run_by + ", ".join(map(self.class_name, classes.split(", ")))
        return self.error(text)

    def known(self, text: str, words: Collection[str]) -> str:
        return text if text in words else self.word(text)

    def reduction(self, text: str) -> str:
        return text if text in REDUCTIONS or self._policy.keeps(SCALARS) else self.text(text)

    def _parts(self, text: str, separator: str, stays: Callable[[str], bool]) -> str:
        return separator.join(part if not part or stays(part) else self.word(part) for part in text.split(separator))


def is_word_of_python(name: str) -> bool:
    is_special = name.startswith("__") and name.endswith("__") and hasattr(object, name)
    return is_special or name in FUNCTION_WORDS or name in MADE_UP


@dataclass(frozen=True, slots=True)
class NameRule:
    redact: Callable[[NameHasher, Any], Any]
    why: str
    kept_by: str = ""
    label: str = ""


OWN = "torch's and Python's own names"
FORMAT = "the format"
TYPES = "torch's types"
ERRORS = "kinds of errors of Python and torch"


def _unchanged(names: NameHasher, value: Any) -> Any:
    return value


# rules by the kind of name that a field declares
NAME_RULES: dict[str, NameRule] = {
    "module": NameRule(NameHasher.module, OWN, MODULES),
    "class": NameRule(NameHasher.class_name, OWN, MODULES),
    "function": NameRule(NameHasher.function, OWN, FUNCTIONS),
    "object": NameRule(NameHasher.object_name, OWN, FUNCTIONS, "class"),
    "file": NameRule(NameHasher.file, OWN, FILES),
    "caller": NameRule(NameHasher.caller, OWN, FILES),
    "thread": NameRule(NameHasher.thread, OWN, LABELS),
    "error": NameRule(NameHasher.error, ERRORS),
    "reason": NameRule(NameHasher.reason, ERRORS, MODULES),
    "text": NameRule(NameHasher.text, "a setting, device or type that torch knows", SCALARS, "string"),
    "device": NameRule(
        lambda names, value: names.device(value) if isinstance(value, str) else value, "devices determine times"
    ),
    "backend": NameRule(lambda names, text: names.known(text, BACKENDS), "backends of torch"),
    "reduction": NameRule(NameHasher.reduction, "reductions of torch", SCALARS),
    "type": NameRule(
        lambda names, text: text if is_public_type(text) else names.error(text),
        "types of Python and torch",
        "",
        "opaque",
    ),
    "limit": NameRule(
        lambda names, text: text if LIMIT.fullmatch(text) else names.word(text), "the limit that ended the recording"
    ),
    "kind": NameRule(_unchanged, FORMAT),
    "phase": NameRule(lambda names, text: text if text in PHASES else "forward", FORMAT),
    "dtype": NameRule(_unchanged, TYPES),
    "layout": NameRule(_unchanged, TYPES),
    "memory_format": NameRule(_unchanged, TYPES),
}
