"""Checks of calls that would access memory outside their tensors: they are refused, or their indices are clamped.

Traces may come from third parties, and some operators of torch do not check their arguments: indices, and sizes that
must agree. `indices` clamps indices, `checking` refuses sizes; both are tables by operator. The operators were found by
calling all operators of the versions in `REVIEWED` with invalid arguments. A new version of torch needs another review,
of new operators and of new kernels of old operators.
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
"""versions of torch whose operators were called; versions in between count as reviewed"""

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
