"""Calls of a module or a Python function, taken as one."""

from opgrip.replay.cases.selection import FUNCTION, MODULE
from opgrip.replay.cases.units.units import UNIT, make_units

__all__ = ["FUNCTION", "MODULE", "UNIT", "make_units"]
