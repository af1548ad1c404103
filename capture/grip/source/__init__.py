"""From a live function to a module text that stands alone, and the sample folder around it."""

from opgrip.capture.grip.source.folder import write_folder
from opgrip.capture.grip.source.module import source_tags

__all__ = ["source_tags", "write_folder"]
