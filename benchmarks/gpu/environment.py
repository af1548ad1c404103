"""Describe the machine of a check, without names of people and hosts."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import distributions
from typing import Any

import torch

from gpu.reports import NCU, NSYS, find_binary
from opgrip.errors import UserError
from opgrip.platform.machine import processor

# fields of `nvidia-smi --query-gpu`
GPU_FIELDS = (
    *("name", "driver_version", "vbios_version", "compute_cap", "memory.total", "power.limit", "clocks.max.sm"),
    *("clocks.max.mem", "ecc.mode.current", "mig.mode.current", "compute_mode", "persistence_mode", "temperature.gpu"),
)
# name prefixes of packages whose versions matter
PACKAGES = ("torch", "triton", "nvidia", "onnx", "jax", "tvm", "tensor", "numpy", "nvtx", "opgrip", "pytorch-triton")
# name prefixes of variables that influence the run
VARIABLES = ("CUDA_", "NVIDIA_", "PYTORCH_", "TORCH", "NVTE_", "XLA_", "OMP_", "OPGRIP_", "CUBLAS_", "CUDNN_")


def is_there(device: str) -> bool:
    """Return True if torch has a device of that kind, without creating a context."""
    try:
        module = getattr(torch, torch.device(device).type)
    except (AttributeError, RuntimeError):
        return False
    return bool(module.is_available())


def describe_machine(device: str) -> dict[str, Any]:
    """Return versions, settings and devices."""
    return {
        "device": device,
        "gpus": describe_gpus(),
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "architectures": torch.cuda.get_arch_list(),
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "is_wsl": "microsoft" in platform.release().lower(),
        "processor": processor("cpu")[1],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "profilers": {name: _version_of(name) for name in (NSYS, NCU)},
        "packages": {
            name: package.version
            for package in distributions()
            if (name := str(package.metadata["Name"]).lower()).startswith(PACKAGES)
        },
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }


def describe_gpus() -> list[dict[str, str]]:
    """Return nvidia-smi's fields of each GPU; empty without nvidia-smi."""
    gpus: list[dict[str, str]] = []
    # one by one, because a driver that does not know one field refuses all
    for name in GPU_FIELDS:
        lines = _output_of("nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader").splitlines()
        for place, line in enumerate(lines):
            if place == len(gpus):
                gpus.append({})
            gpus[place][name] = line.strip()
    return gpus


def _version_of(profiler: str) -> str:
    try:
        binary = find_binary(profiler)
    except UserError:
        return ""
    lines = _output_of(binary, "--version").strip().splitlines()
    return lines[-1] if lines else ""


def _output_of(*command: str) -> str:
    """Return a program's output; empty if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout
