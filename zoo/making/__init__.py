"""Making the traces of the zoo: capturing the models, packing the traces, and recording their figures."""

from opgrip.zoo.making.making import Distinct, count_distinct, differences_anew, is_current, make_trace

__all__ = ["Distinct", "count_distinct", "differences_anew", "is_current", "make_trace"]
