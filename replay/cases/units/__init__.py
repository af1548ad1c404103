"""Calls of a module or a Python function, taken as one."""

from opgrip.replay.cases.units.places import CALL, FUNCTION, MODULE, UNIT_KINDS
from opgrip.replay.cases.units.units import UNIT, make_units

__all__ = ["CALL", "FUNCTION", "MODULE", "UNIT", "UNIT_KINDS", "make_units"]
