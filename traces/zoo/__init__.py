"""The zoo: shipped traces of real models, and the manifest that describes them and how to record them again."""

from opgrip.traces.zoo.manifest import PREFIX, Recording, ZooTrace, patterns_in, read_manifest, select, zoo_file

__all__ = ["PREFIX", "Recording", "ZooTrace", "patterns_in", "read_manifest", "select", "zoo_file"]
