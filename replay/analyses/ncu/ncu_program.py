"""Where ncu is, and how a template of a command names it."""

from opgrip.replay.analyses.profiling.profiler_programs import Flags

FLAGS = Flags("--export", "--metrics", {"-o": "--export", "-f": "--force-overwrite"}, ("--nvtx-include",))
PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
"""Where installers put it, beside the folders of PATH."""
COMMAND = "{command}"
"""Stands for ncu and its arguments in the template of a batch's command."""
