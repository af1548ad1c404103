"""Devices as runtimes other than torch call them."""

from __future__ import annotations

import torch


def device_index(device: str) -> int:
    """The number of a device among those of its kind: of torch's current one where the name has none."""
    place = torch.device(device)
    index: int | None = place.index
    if index is None:
        return 0 if place.type == "cpu" else int(torch.get_device_module(place).current_device())
    return index
