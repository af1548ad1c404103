"""Names and numbers that stand for torch's types in execution traces: those of C++ and of its enumerations."""

from __future__ import annotations

import torch

from opgrip.traces.schema.torch_names import DTYPES

# in the order of c10::ScalarType, which only grows at its end
_SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64"),
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

DTYPE_CODES: dict[torch.dtype, int] = {DTYPES[name]: code for code, name in enumerate(_SCALAR_TYPES) if name in DTYPES}
LAYOUT_CODES: dict[torch.layout, int] = {
    getattr(torch, name): code for code, name in enumerate(_LAYOUTS) if hasattr(torch, name)
}
MEMORY_FORMAT_CODES: dict[torch.memory_format, int] = {
    getattr(torch, name): code for code, name in enumerate(_MEMORY_FORMATS) if hasattr(torch, name)
}
DTYPE_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}
LAYOUT_OF_CODE = {code: layout for layout, code in LAYOUT_CODES.items()}
MEMORY_FORMAT_OF_CODE = {code: item for item, code in MEMORY_FORMAT_CODES.items()}

ELEMENT_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.uint16: "short unsigned int",
    torch.uint32: "unsigned int",
    torch.uint64: "long unsigned int",
    torch.qint8: "c10::qint8",
    torch.quint8: "c10::quint8",
    torch.qint32: "c10::qint32",
    **{dtype: f"c10::F{name[1:]}" for name, dtype in DTYPES.items() if name.startswith("float8")},
}
"""What C++ calls the elements of a dtype, as the compilers name it that Linux has."""
DTYPE_OF_ELEMENT: dict[str, torch.dtype] = {
    **{name: dtype for dtype, name in ELEMENT_NAMES.items()},
    # other compilers, and libraries of their own
    "long": torch.int64,
    "long long": torch.int64,
    "short": torch.int16,
    "unsigned short": torch.uint16,
    "unsigned long": torch.uint64,
    "__int64": torch.int64,
    "char": torch.int8,
    "half": torch.float16,
    "c10::complex<half>": torch.complex32,
}
