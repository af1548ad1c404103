"""From a live function to a module text that stands alone, and the sample folder around it."""

from opgrip.capture.grips.source.folder import write_folder
from opgrip.capture.grips.source.tags import source_tags

__all__ = ["source_tags", "write_folder"]
