"""Makes the traces of the zoo: captures their models, packs what was written, and says what it holds."""

from opgrip.tools.zoo.distinct import Distinct, count_distinct
from opgrip.tools.zoo.making import differences_anew, is_current, make_trace

__all__ = ["Distinct", "count_distinct", "differences_anew", "is_current", "make_trace"]
