"""Calls that would access memory outside their tensors: refused, or their indices brought into bounds.

Traces may come from third parties, and some operators of torch trust their arguments: indices, and sizes that must
agree. `indices` clamps the former, `checking` refuses the latter; both are tables by operator. They were found by
calling the operators of the versions in `REVIEWED` with invalid arguments. A new version of torch needs another look:
its new operators, and new kernels of old ones.
"""

from opgrip.replay.operators.agreement.checking import (
    check_agreement,
    check_graph,
    check_parts,
    checking_parts,
    is_checked,
)
from opgrip.replay.operators.agreement.indices import (
    bound_indices,
    bounded_arguments,
    bounding,
    check_indices,
)

REVIEWED = ((2, 6), (2, 13), (2, 15))
"""Versions of torch whose operators were called; those between them are covered by both ends."""

__all__ = [
    "REVIEWED",
    "bound_indices",
    "bounded_arguments",
    "bounding",
    "check_agreement",
    "check_graph",
    "check_indices",
    "check_parts",
    "checking_parts",
    "is_checked",
]
