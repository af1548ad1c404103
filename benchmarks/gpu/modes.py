"""Check that results of modes equal eager's, on calls of several kinds."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch

from gpu.programs import capture_layers, expect_ok, replay_rows
from gpu.step import NotHereError, Place, Step, expect
from opgrip.errors import UserError
from opgrip.replay.modes import find_mode

# modes, with the time limit of each in s: compilers take seconds per call
MODES = {
    **dict.fromkeys(("eager", "jit", "cudagraph"), 150.0),
    **dict.fromkeys(("compile", "reduce-overhead", "onnxruntime", "xla", "jax", "tvm", "tensorrt"), 180.0),
    **dict.fromkeys(("compile-max", "aot"), 240.0),
}
OF_ANY_DEVICE = ("eager", "jit")  # modes that need no compiler for the device
PROVIDERS = {"onnxruntime": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
PRECISIONS = {"tensorrt": "high"}  # precision of eager float32 products for modes that always multiply in TF32
JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def is_installed(name: str) -> bool:
    """Return True if a module can be found, without importing it."""
    return find_spec(name) is not None


def check_runtime(name: str) -> None:
    """Raise `NotHereError` if a mode's runtime is installed, but not for CUDA."""
    if name in PROVIDERS:
        import onnxruntime

        if PROVIDERS[name] not in onnxruntime.get_available_providers():
            raise NotHereError(f"this onnxruntime has no {PROVIDERS[name]}: install onnxruntime-gpu")
    if name == "tensorrt" and not is_installed("tensorrt"):
        raise NotHereError("tensorrt is not installed")
    if name in ("xla", "jax") and not any(map(is_installed, JAX_PLUGINS)):
        raise NotHereError("this jax has no CUDA: pip install 'jax[cuda12]'")
    if name == "tvm":
        import tvm

        if not tvm.cuda(0).exist:
            raise NotHereError("this tvm has no CUDA")


def check_mode(place: Place, name: str) -> None:
    """Check that each call under a mode is ok, that is, equals eager's results."""
    try:
        mode, _ = find_mode(name)
    except UserError as error:
        raise NotHereError(str(error)) from error
    check_runtime(name)
    torch.set_float32_matmul_precision(PRECISIONS.get(name, "highest"))
    rows = [row for row in replay_rows(place, capture_layers(place), mode=[name], timeout=120) if row.mode == name]
    place.note(
        us={row.op: row.median_us for row in rows},
        notes={row.op: row.note for row in rows if row.note},
        max_abs={row.op: row.max_abs for row in rows},
        matmul_precision=torch.get_float32_matmul_precision(),
    )
    expect_ok(rows)
    if mode.in_graphs:
        without = [row.op for row in rows if "no CUDA graph" in row.note]
        expect(not without, f"calls have no CUDA graph: {without}")


STEPS = tuple(
    Step(
        f"--mode {name}",
        partial(check_mode, name=name),
        timeout_s,
        "" if name in OF_ANY_DEVICE else "compilers and other runtimes are tried on CUDA",
    )
    for name, timeout_s in MODES.items()
)
