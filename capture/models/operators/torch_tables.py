"""Operators that can be called with sample inputs: those in torch's test tables, and all registered ones."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opgrip.cli.plugins import needed
from opgrip.platform.private_apis import PrivatePlaces

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

FORWARD, IN_PLACE = "forward", "in place"


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """An operator, or other callable, with sample inputs."""

    name: str
    categories: frozenset[str]
    function: Callable[..., Any]
    dtypes: Callable[[str], tuple[torch.dtype, ...]]
    differentiable: Callable[[str], frozenset[torch.dtype]]
    samples: Callable[[str, torch.dtype, bool], Iterator[Arguments]]
    in_place: Callable[..., Any] | None = None


# namespaces of torch's own operators
OF_TORCH = frozenset(
    {
        *("aten", "prim", "prims", "prepacked", "quantized", "quantized_decomposed", "quantization", "_quantized"),
        *("rngprims", "debugprims", "inductor", "inductor_prims", "profiler", "static_runtime", "export", "streams"),
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
        *("mempool", "onnx", "onnx_symbolic", "mkldnn", "mkldnn_prepacked", "onednn", "mkl", "sparse", "_test"),
        *("_inductor_test", "debug_mode_ops", "flex_lib", "flex_gemm", "_native", "_native_aot", "coor", "cuda"),
        *("_torch_testing", "torch_nn", "_dynamo", "xnnpack", "vulkan", "vulkan_prepack", "metal", "nvprims"),
        *("higher_order", "dynamo", "triton", "torchao_internal", "aoti_custom_ops", "aoti_torch", "pipeline"),
    }
)

_places = PrivatePlaces()
private_places = _places.report
_all_names = _places.take("torch._C._dispatch_get_all_op_names", list, "operators outside torch's table are not found")
_has_kernel_for = _places.take(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    lambda name, key: False,
    "operators that only call others are not recognized",
)


def registered_operators() -> Iterator[Any]:
    for full_name in sorted(_all_names()):
        namespace, _, rest = full_name.partition("::")
        packet, _, overload = rest.partition(".")
        try:
            function = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        if isinstance(function, torch._ops.OpOverload):
            yield function


def is_custom(function: Any) -> bool:
    """Return True if a package other than torch registered an operator."""
    return function.namespace not in OF_TORCH


def is_public(function: Any) -> bool:
    return function.namespace == "aten" and not name_of(function).split(".")[1].startswith("_")


def is_composite(function: Any) -> bool:
    """Return True if an operator does nothing but call others."""
    return bool(_has_kernel_for(function.name(), "CompositeImplicitAutograd"))


def name_of(function: Any) -> str:
    return str(function)


FOREACH, OPTIMIZER, CUSTOM, SCHEMA = "foreach", "optimizer", "custom", "schema"
ALL = "all"

# categories by the class of an entry in torch's table
CLASSES = {
    "UnaryUfuncInfo": "unary",
    "BinaryUfuncInfo": "binary",
    "ReductionOpInfo": "reduction",
    "SpectralFuncInfo": "fft",
    "ShapeFuncInfo": "shape",
}

_NN = r"nn\.functional\."
_PATTERNS = {
    "gemm": r"_?(addb?mm|baddbmm|addbmm|b?mm|matmul|__rmatmul__|mv|addmv|addr|dot|vdot|inner|outer|ger|einsum|tensordot"
    rf"|kron|chain_matmul|linalg\.(multi_dot|matrix_power|vecdot)|{_NN}(bi)?linear|sparse\.(mm|sampled_addmm)|addmm.*)",
    "elementwise": r"addc(mul|div)|clamp|lerp|logaddexp2|where|to|zero_",
    "reduction": r"(max|min|a?min|a?max|aminmax|(var|std)(_mean)?|logsumexp|dist|trapz|trapezoid|corrcoef|cov|equal"
    r"|allclose|sum_to_size|_segment_reduce)",
    "scan": r"cum\w+|logcumsumexp|diff|gradient",
    "indexing": r"__getitem__|gather|take(_along_dim)?|put|index_\w+|_?unsafe_masked_index\w*|diag\w*"
    r"|masked_(fill|scatter|select)"
    r"|scatter\w*|select(_scatter)?|slice(_scatter)?|narrow\w*|nonzero\w*|argwhere|where|diagonal\w*|as_strided\w*|tri[lu]\w*"
    rf"|{_NN}(embedding(_bag)?|one_hot)|isin|unravel_index",
    "sorting": r"sort|argsort|msort|topk|kthvalue|(nan)?median|mode|unique\w*|searchsorted|bucketize|arg(max|min)|"
    r"(nan)?quantile|cumm(ax|in)|histc|histogram\w*|bincount",
    "random": r"bernoulli|multinomial|normal|log_normal|uniform|cauchy|exponential|geometric|rand\w*|"
    rf"{_NN}(\w*dropout\w*|gumbel_softmax|rrelu|fractional_max_pool\w*)",
    "nn": rf"{_NN}.*|native_\w+|_native\w+|_batch_norm\w*|_upsample\w+|(log_)?softmax|max_pool2d_with_indices_backward",
    "activation": rf"{_NN}(\w*(relu\w*|elu|silu|mish|gelu|glu|sigmoid|hardswish|tanh\w*|softplus|softsign|shrink"
    r"|threshold|softmax|softmin))|(log_)?softmax|sigmoid|tanh",
    "convolution": rf"{_NN}(conv\w+|unfold|fold)",
    "pooling": rf"{_NN}\w*(pool|unpool)\w*|max_pool\w+",
    "loss": rf"{_NN}(\w*_loss|cross_entropy|binary_cross_entropy\w*|kl_div|cosine_embedding_loss|huber_loss)",
    "normalization": rf"{_NN}(\w+_norm|normalize)|native_\w+_norm|_native_batch_norm\w*|_batch_norm\w*|renorm",
    "attention": rf"{_NN}(scaled_dot_product_attention|multi_head_attention_forward)|_\w*attention\w*"
    r"|torch\.ops\.aten\.\w*attention\w*",
    "linalg": r"linalg\..*|cholesky\w*|qr|svd\w*|lu\w*|geqrf|ormqr|triangular_solve|pinverse|matrix_exp|logdet|det"
    r"|inverse|pca_lowrank|symeig|eig|cdist|cross|trace|norm",
    "fft": r"fft\..*|stft|istft",
    "signal": r"signal\..*",
    "special": r"special\..*",
    "masked": r"masked\..*",
    "sparse": r"sparse\..*|to_sparse",
    "creation": r"empty\w*|zeros\w*|ones\w*|full\w*|new_\w+|arange|eye|(lin|log)space|scalar_tensor|tri[lu]_indices|"
    r"block_diag|complex|polar|meshgrid|cartesian_prod|combinations",
    "shape": r"reshape\w*|view\w*|ravel|flatten|unflatten|t|T|H|mT|mH|transpose\w*|permute\w*|movedim|(un)?squeeze\w*|"
    r"expand\w*|broadcast_\w+|repeat\w*|tile|flip\w*|roll|rot90|[vhd]?stack|[vhd]?split\w*|column_stack|cat|concat\w*|chunk|"
    r"tensor_split|split_with_sizes\w*|unbind\w*|unfold\w*|atleast_\dd|swapaxes|unsafe_(chunk|split)|contiguous|clone|"
    rf"alias_copy|resize\w*|_chunk_cat|{_NN}(pad|pixel_\w+|channel_shuffle)|constant_pad_nd",
    "resizing": rf"{_NN}(interpolate|upsample\w*|grid_sample)|_upsample\w+",
}
_BY_NAME = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
# names of all categories; `custom` are operators registered by other packages, `schema` are operators of torch that its
# table lacks
CATEGORIES = (ALL, *sorted({*CLASSES.values(), *_PATTERNS, FOREACH, OPTIMIZER, CUSTOM, SCHEMA}))


def categories_of(info: Any) -> frozenset[str]:
    by_name = {name for name, pattern in _BY_NAME.items() if pattern.fullmatch(info.name)}
    by_class = {CLASSES[kind.__name__] for kind in type(info).__mro__ if kind.__name__ in CLASSES}
    return frozenset(by_name | by_class)


EXTRA = "opinfo"
# shapes of parameters for optimizers; two-dimensional, because one of the optimizers accepts no other parameters
PARAMETER_SHAPES = ((4, 5), (7, 3), (2, 2))
OPTIMIZED = (torch.float32, torch.bfloat16, torch.float64)
STEPS = 2  # number of steps per optimizer, of which the first creates its state
MOST_SAMPLES = 200  # maximum number of samples drawn per operator and dtype

_INVOCATIONS = "torch.testing._internal.common_methods_invocations"
_OPTIMIZERS = "torch.testing._internal.common_optimizers"
_NO_SAMPLES = "these operators only have sample inputs generated from their schemas"

_operators = _places.take_later(f"{_INVOCATIONS}.op_db", (), _NO_SAMPLES)
_foreach_tables = [
    _places.take_later(f"{_INVOCATIONS}.foreach_{kind}_op_db", (), "the foreach functions of this kind are left out")
    for kind in ("unary", "binary", "pointwise", "reduce", "other")
]
_optimizers = _places.take_later(f"{_OPTIMIZERS}.optim_db", (), "optimizers are left out")
_optimizer_inputs = _places.take_later(
    f"{_OPTIMIZERS}._get_optim_inputs_including_global_cliquey_kwargs", None, "optimizers are left out"
)
_settings_are_locked = _places.take(
    "torch.backends.flags_frozen", None, "nothing is lost: this torch does not lock its backend flags"
)
_LOCK = "__allow_nonbracketed_mutation_flag"


def table_entries() -> Iterator[OperatorEntry]:
    needed("expecttest", EXTRA)
    with _unchanged_process():
        operators = _operators()
        foreach = [item for table in _foreach_tables for item in table()]
        optimizers = _optimizers() if _optimizer_inputs() is not None else ()
    yield from (_operator_entry(item, categories_of(item)) for item in operators)
    yield from (_operator_entry(item, frozenset({FOREACH})) for item in foreach)
    yield from map(_optimizer_entry, optimizers)


@contextmanager
def _unchanged_process() -> Iterator[None]:
    # importing torch's test modules locks torch's settings and, in older versions, reads the command line
    argv, sys.argv = sys.argv, sys.argv[:1]
    lock = getattr(_settings_are_locked, "__globals__", None)
    was_open = True if lock is None else lock.get(_LOCK, True)
    try:
        yield
    finally:
        sys.argv = argv
        if lock is not None:
            # torch.backends is an object around its module, in whose globals the lock is
            lock[_LOCK] = was_open


def _operator_entry(info: Any, categories: frozenset[str]) -> OperatorEntry:
    variant = getattr(info, "variant_test_name", "")
    return OperatorEntry(
        name=f"{info.name}.{variant}" if variant else info.name,
        categories=categories,
        function=info.op or info.inplace_variant,
        in_place=info.inplace_variant if info.op else None,
        # float32 first: an operator that fails there fails for all dtypes
        dtypes=lambda device: tuple(
            sorted(info.supported_dtypes(torch.device(device).type), key=lambda it: (it is not torch.float32, str(it)))
        ),
        differentiable=lambda device: frozenset(info.supported_backward_dtypes(torch.device(device).type)),
        samples=partial(_samples, info),
    )


def _samples(info: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    # the table's own method draws each sample from the same seed
    for count, sample in enumerate(info.sample_inputs_func(info, device, dtype, wants_grad)):
        if count == MOST_SAMPLES:
            return
        yield (sample.input, *sample.args), dict(sample.kwargs)


def _optimizer_entry(info: Any) -> OperatorEntry:
    return OperatorEntry(
        name=f"optim.{info.optim_cls.__name__}",
        categories=frozenset({OPTIMIZER}),
        function=partial(_optimize, info.optim_cls),
        dtypes=lambda device: OPTIMIZED,
        differentiable=lambda device: frozenset(),
        samples=partial(_optimizer_samples, info),
    )


def _optimizer_samples(info: Any, device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
    for inputs in _optimizer_inputs()(device, dtype, info):
        if inputs.kwargs.get("differentiable"):
            # otherwise the parameters would not be leaves
            continue
        parameters = []
        for shape in PARAMETER_SHAPES:
            parameter = torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
            gradient = torch.randn(shape, device=device).to(dtype)
            parameter.grad = gradient.to_sparse() if info.only_supports_sparse_grads else gradient
            parameters.append(parameter)
        yield (parameters,), dict(inputs.kwargs)


def _optimize(make: Callable[..., Any], parameters: list[torch.nn.Parameter], **settings: Any) -> None:
    optimizer = make(parameters, **settings)
    for _ in range(STEPS):
        # some optimizers call it several times per step
        optimizer.step(*([lambda: random.random()] if make is torch.optim.LBFGS else []))
