"""Makes the traces of the zoo: captures their models, packs what was written, and says what it holds."""

from opgrip.zoo.making.making import Distinct, count_distinct, differences_anew, is_current, make_trace

__all__ = ["Distinct", "count_distinct", "differences_anew", "is_current", "make_trace"]
