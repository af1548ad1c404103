"""Registration of the device, which torch calls when it is imported."""

import torch

from sim_accelerator.extension import is_built, load_extension


def register() -> None:
    """Make `sim` a device of this process and `torch.sim` its module, once, if its extension is built."""
    if hasattr(torch, "sim") or not is_built():
        return
    torch.utils.rename_privateuse1_backend("sim")
    load_extension()
    # it uses the extension
    from sim_accelerator import device

    torch._register_device_module("sim", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
