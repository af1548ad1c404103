"""An independent count of the operators that a program runs."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Counter of operators, which shares no code with the recorder that it checks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))
