"""Connection to a Ray cluster, whose workers run cases; without an address, a cluster is started on this machine."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.replay.workers.executors import EngineOptions, executors

if TYPE_CHECKING:
    from opgrip.replay.workers.ray_pool import RayExecutor

REACH_S = 10.0  # time in seconds within which the head of a cluster must answer
# size in bytes of the object store of a cluster that is started here; it holds traces and rows
OBJECT_STORE_BYTES = 128 << 20
# environment of a cluster that is started here: no usage statistics, connections only from this machine (the second
# variable) and with a secret token, and workers at normal priority instead of Ray's lowest
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
}


def _check_reachable(address: str | None) -> None:
    match = re.fullmatch(r"(?:ray://)?\[?([^]/]+)\]?:([0-9]{1,5})", address or "")
    if match is None:
        return
    try:
        socket.create_connection((match[1], min(int(match[2]), 65535)), timeout=REACH_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"no Ray cluster can be reached at {address}: {reason}", "check the cluster with: ray status"
        ) from error


@executors.register("ray")
@contextmanager
def start_ray(options: EngineOptions, processors: int | None = None) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster and yield an executor; without an address, start a cluster here for the `with` block."""
    # loads torch, and this file is imported to show the help
    from opgrip.replay.workers.ray_pool import RayExecutor

    with _connected(options, processors or len(os.sched_getaffinity(0))) as ray:
        executor = RayExecutor(ray, options)
        try:
            yield executor
        finally:
            executor.close()


@contextmanager
def _connected(options: EngineOptions, processors: int) -> Iterator[Any]:
    _check_reachable(options.address)
    quiet = {} if options.address else QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in quiet}
    # ray reads them when it is imported
    os.environ.update(quiet)
    try:
        ray = needed("ray", "ray")
        needed("ray.util.scheduling_strategies", "ray")
        if ray.is_initialized():
            # initialized by the calling program
            yield ray
            return
        with tempfile.TemporaryDirectory(prefix="opgrip-ray-", ignore_cleanup_errors=True) as folder:
            own = {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "num_cpus": processors,
                "_temp_dir": folder,
            }
            try:
                ray.init(
                    **({"address": options.address} if options.address else own),
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                where = f"at {options.address}" if options.address else "on this machine"
                said = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise UserError(
                    f"no Ray cluster can be reached {where}: {said[:200]}", "check the cluster with: ray status"
                ) from error
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
