"""Random numbers of samples: drawn from generators that are set for the purpose and put back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Let torch, numpy and Python draw the same in the block whatever was drawn before, and go on after it as before.

    Parameters
    ----------
    parts : what the seed is made of
    """
    seed = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
