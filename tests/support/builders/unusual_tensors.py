"""Tensors of every layout, and descriptions of their metadata."""

from collections.abc import Callable
from typing import Any

import torch

Made = Callable[[], torch.Tensor]


def thin(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    dense = torch.rand(shape, generator=generator) ** 2
    return values * (dense < torch.linspace(0, 0.6, shape[-2])[:, None])


def blocks() -> torch.Tensor:
    matrix = torch.zeros(40, 60)
    matrix[4:8, 3:6], matrix[20:24, 9:12], matrix[20:24, 57:60] = 1, 2, 3
    return matrix


def uncoalesced() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3, (1, 200), generator=generator)
    columns = torch.randint(0, 1000, (1, 200), generator=generator)
    values = torch.randn(200, 4, generator=generator)
    return torch.sparse_coo_tensor(torch.cat([rows, columns]), values, (3, 1000, 4), check_invariants=True)


def with_int32_indices() -> torch.Tensor:
    csr = thin(50, 60).to_sparse_csr()
    return torch.sparse_csr_tensor(
        csr.crow_indices().int(), csr.col_indices().int(), csr.values(), (50, 60), check_invariants=True
    )


SPARSE: dict[str, Made] = {
    "small": lambda: torch.eye(3).to_sparse(),
    "coo": lambda: thin(50, 60).to_sparse(),
    "uncoalesced": uncoalesced,
    "hybrid": lambda: thin(6, 7, 3).to_sparse(2),
    "half": lambda: thin(50, 60).half().to_sparse(),
    "without elements": lambda: torch.zeros(3, 4).to_sparse(),
    "without sparse dimensions": lambda: _dense_coo(),
    "differentiable": lambda: thin(50, 60).to_sparse().requires_grad_(),
    "csr": lambda: thin(50, 60).to_sparse_csr(),
    "csc": lambda: thin(50, 60).to_sparse_csc(),
    "bsr": lambda: blocks().to_sparse_bsr((4, 3)),
    "bsc": lambda: blocks().to_sparse_bsc((4, 3)),
    "batch of csr": lambda: _batch(thin(50, 60)).to_sparse_csr(),
    "batch of bsr": lambda: _batch(blocks()).to_sparse_bsr((4, 3)),
    "hybrid csr": lambda: torch.ones(5, 6, 2).to_sparse_csr(dense_dim=1),
    "csr without elements": lambda: torch.zeros(4, 5).to_sparse_csr(),
    "csr of int32": with_int32_indices,
}
QUANTIZED: dict[str, Made] = {
    "quint8": lambda: torch.quantize_per_tensor(thin(50, 60), 0.1, 3, torch.quint8),
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(5), 1 / 3, -3, torch.qint8),
    "qint32": lambda: torch.quantize_per_tensor(thin(50, 60), 0.1, 3, torch.qint32),
    "channels last": lambda: _quantized_images()[1:],
    "per channel": lambda: _per_channel(torch.zeros(4, dtype=torch.int64), torch.qint8),
    "per channel of floats": lambda: _per_channel(torch.linspace(0, 1, 4), torch.quint8),
}
NESTED: dict[str, Made] = {
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 30), torch.randn(4, 30)]),
    "transposed": lambda: torch.nested.nested_tensor([torch.randn(2, 30), torch.randn(4, 30)]).transpose(1, 2),
    "nested differentiable": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(0)], requires_grad=True),
    "nested scalars": lambda: torch.nested.nested_tensor([torch.tensor(1.0), torch.tensor(2.0)]),
    "nested nothing": lambda: torch.nested.nested_tensor([]),
}
STRIDED: dict[str, Made] = {
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "expanded": lambda: torch.randn(3, 1, 5).expand(3, 1000, 5),
    "expanded bias": lambda: torch.arange(4.0)[:, None].expand(4, 5),
    "windows": lambda: torch.arange(5000.0).as_strided((400, 40), (10, 1)),
    "few windows": lambda: torch.arange(20.0).as_strided((4, 6), (2, 1), 3),
    "of an odd offset": lambda: torch.randn(100)[3:],
    "empty": lambda: torch.randn(3, 0, 5),
    "empty inside": lambda: torch.randn(10, 10)[4:, 3:3],
    "scalar": lambda: torch.tensor(2.5),
    "scalar inside": lambda: torch.arange(10.0)[7],
    "stepped": lambda: torch.randn(20, 30)[1::3, 2::5].t(),
    "conjugate": lambda: torch.randn(100, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(100, dtype=torch.complex64).conj().imag,
    "float8": lambda: torch.randn(100).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.arange(100).to(torch.uint16),
    "int4": lambda: torch.arange(100, dtype=torch.uint8).view(torch.int4),
    "bits16": lambda: torch.arange(100, dtype=torch.uint8).view(torch.bits16),
}
if hasattr(torch, "float4_e2m1fn_x2"):
    STRIDED["float4"] = lambda: torch.arange(100, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
UNUSUAL = SPARSE | QUANTIZED | NESTED
ALL = UNUSUAL | STRIDED


def outline(tensor: torch.Tensor) -> tuple[Any, ...]:
    same = (type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad)
    with torch.no_grad():
        if tensor.is_nested:
            count = tensor.size(0)
            sizes = tensor._nested_tensor_size().tolist() if count else []
            strides = tensor._nested_tensor_strides().tolist() if count else []
            offsets = tensor._nested_tensor_storage_offsets().tolist()
            return (*same, sizes, strides, offsets, outline(tensor.values().detach()))
        same = (*same, tensor.shape)
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
            return (*same, tensor.sparse_dim(), tensor.is_coalesced(), *map(outline, parts))
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return (*same, *map(outline, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return (*same, *map(outline, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())))
        same = (*same, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        same = (*same, tensor.data_ptr() % 16 if tensor.numel() else 0)
        if not tensor.is_quantized:
            return same
        if tensor.qscheme() == torch.per_tensor_affine:
            return (*same, tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point())
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return (*same, tensor.qscheme(), scales.tolist(), zero_points.tolist(), tensor.q_per_channel_axis())


def _batch(matrix: torch.Tensor) -> torch.Tensor:
    return torch.stack([matrix, matrix.flip(0)])


def _dense_coo() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), torch.ones(1, 3), (3,), check_invariants=True)


def _quantized_images() -> torch.Tensor:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    return torch.quantize_per_tensor(images, 0.1, 3, torch.quint8)


def _per_channel(zero_points: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(thin(30, 4), torch.linspace(0.1, 0.3, 4), zero_points, 1, dtype)
