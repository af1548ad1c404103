"""Which operators a trace may name: those that compute on tensors, and check how far their views reach.

The rules go by an operator's namespace, the types of its arguments and its name, so that they hold for operators that a
later torch adds: a namespace that stands nowhere here is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from opgrip.replay.operators.torch_private import is_dispatched

COMPUTING = frozenset(
    {
        *("aten", "prims", "quantized", "quantized_decomposed", "quantization", "onnx", "rngprims", "torchvision"),
        "torch_nn",
        # copies of FSDP2 around its collectives
        "fsdp",
        # marks a range of calls, and is passed over in units
        "profiler",
    }
)
"""Namespaces of operators on tensors, as programs call them."""

BETWEEN_PROCESSES = frozenset(
    {
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"),
        "mempool",
    }
)
"""Namespaces of what works with other processes, their memory included."""
NO_OTHERS = "works with other processes, of which a replay has none"

OF_TORCH_ITSELF = frozenset(
    {
        *("prim", "static_runtime", "inductor", "inductor_prims", "debugprims", "debug_mode_ops", "streams", "export"),
        *("onnx_symbolic", "coor", "cuda", "prepacked", "mkldnn_prepacked", "mkldnn", "onednn", "mkl", "_quantized"),
        *("sparse", "flex_lib", "flex_gemm", "_native", "_native_aot", "_test", "_inductor_test"),
    }
)
"""Namespaces of what compilers and runtimes call, which rely on these to have checked it."""

READS_OR_WRITES_FILES = frozenset({"from_file", "save", "load", "_save", "_load"})
UNCHECKED = re.compile(
    r"_reshape_alias(_copy)?|_sparse_(coo|csr|csc|bsr|bsc|compressed)_tensor_unsafe|_nested_view_from_\w+"
    r"|sparse_compressed_tensor|_sobol_engine_\w+|_thnn_differentiable_\w+|_compute_linear_combination"
    r"|_(add|remove)_batch_dim|_cum(max|min)_helper|_cholesky_solve_helper|slow_conv_transpose\dd|embedding_bag_byte_prepack_with_rowwise_min_max"
)
"""Names of operators that reach outside of their memory by what the caller says, and that programs do not call.

They give views, or are steps inside of others that have checked it.
"""

_FILE_ARGUMENTS = re.compile(r"(file_?name|file|path|folder|directory|url|uri)s?")
_NUMBERS = re.compile(r"int|float|bool|Tensor")
_ADDRESS_ARGUMENTS = re.compile(r".*(data_ptr|pointer|address).*|ptr|\w+_ptr")


def _names_a_file(argument: Any) -> bool:
    # einsum's path is one of whole numbers
    return bool(_FILE_ARGUMENTS.fullmatch(argument.name)) and not _NUMBERS.search(str(argument.type))


def refusal(function: Any, extensions: Collection[str] = ()) -> str | None:
    """Why a trace may not name an operator; None where it may.

    Parameters
    ----------
    function : an overload
    extensions : modules that the user trusts; operators in the namespace of one are its own
    """
    schema = function._schema
    namespace, _, name = schema.name.partition("::")
    if namespace in BETWEEN_PROCESSES:
        return NO_OTHERS
    if namespace not in COMPUTING and namespace not in {module.partition(".")[0] for module in extensions}:
        if namespace in OF_TORCH_ITSELF:
            return "is for torch's own compilers and runtimes"
        return f"is not trusted: name {namespace} with --extension"
    if name in READS_OR_WRITES_FILES or any(map(_names_a_file, schema.arguments)):
        return "reads or writes files"
    if any(_ADDRESS_ARGUMENTS.fullmatch(argument.name) for argument in schema.arguments):
        return "takes an address of memory"
    if UNCHECKED.fullmatch(name):
        return "does not check how far it reaches"
    if not is_dispatched(function):
        return "is for TorchScript alone"
    return None
