"""The zoo: traces of real models that ship, and the manifest that says what they are and how to make them again."""

from opgrip.traces.zoo.manifest import PREFIX, Recording, ZooTrace, patterns_in, read_manifest, select, zoo_file

__all__ = ["PREFIX", "Recording", "ZooTrace", "patterns_in", "read_manifest", "select", "zoo_file"]
