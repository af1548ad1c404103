"""The zoo: traces of real models that ship with opgrip, and the manifest, which states how to record them again."""

from opgrip.traces.zoo.manifest import PREFIX, Recording, ZooTrace, patterns_in, read_manifest, select, zoo_file

__all__ = ["PREFIX", "Recording", "ZooTrace", "patterns_in", "read_manifest", "select", "zoo_file"]
