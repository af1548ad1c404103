"""Categories of operators: those of opperf, and what torch's table knows its operators by."""

from __future__ import annotations

import re
from typing import Any

FOREACH, OPTIMIZER, CUSTOM, SCHEMA = "foreach", "optimizer", "custom", "schema"
ALL = "all"

CLASSES = {
    "UnaryUfuncInfo": "unary",
    "BinaryUfuncInfo": "binary",
    "ReductionOpInfo": "reduction",
    "SpectralFuncInfo": "fft",
    "ShapeFuncInfo": "shape",
}
"""By the classes of torch's table."""

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
CATEGORIES = (ALL, *sorted({*CLASSES.values(), *_PATTERNS, FOREACH, OPTIMIZER, CUSTOM, SCHEMA}))
"""All names of categories. `custom` are operators that other packages registered, `schema` those of torch that its
table lacks."""


def categories_of(info: Any) -> frozenset[str]:
    """The categories of an operator of torch's table."""
    by_name = {name for name, pattern in _BY_NAME.items() if pattern.fullmatch(info.name)}
    by_class = {CLASSES[kind.__name__] for kind in type(info).__mro__ if kind.__name__ in CLASSES}
    return frozenset(by_name | by_class)
