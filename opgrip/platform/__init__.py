"""Facts about the machine: devices, measured speeds, contention, private interfaces of torch, and its clocks."""

import time
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

if not TYPE_CHECKING:
    # a copy: tests of programs (freezegun) replace functions of `time`, also in the modules that have imported them
    _spec = find_spec("time")
    time = module_from_spec(_spec)
    _spec.loader.exec_module(time)

monotonic, perf_counter, perf_counter_ns = time.monotonic, time.perf_counter, time.perf_counter_ns
process_time_ns, thread_time_ns = time.process_time_ns, time.thread_time_ns
sleep, time_ns = time.sleep, time.time_ns
