"""The mode `tvm`: an exported call as a Relax program, compiled by TVM for this CPU or GPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from platform import machine
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opgrip.errors import UserError, one_line
from opgrip.replay.modes import UNTUNED, Program, Task, Tuning, mode
from opgrip.replay.operators.admission import Unsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DONE = "trials"  # file that marks a search's database as complete; it contains the number of programs that were tried

# search strategies: evolution with a cost model, or random draws
TUNERS = ("evolutionary", "replay-trace", "replay-func")


@mode(
    "tvm",
    needs=("tvm",),
    extra="tvm",
    devices=("cpu", "cuda"),
    in_torch=False,
    argument="variant",
    arguments=lambda: (UNTUNED,),
    tuners=TUNERS,
)
def make(task: Task) -> Program:
    import torch

    from opgrip.replay.modes.conversions.runtimes import exported, plain, runtime_program

    # read once, when TVM's threads start: the most threads that a later call can request, not bound to cores, like
    # torch's
    os.environ.setdefault("TVM_NUM_THREADS", str(max(os.cpu_count() or 1, task.threads)))
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    import tvm
    from tvm import relax

    program, call = exported(task)
    device = tvm.runtime.device(str(task.device))
    executable, note = _executable(program, task, _target(device, task.threads))
    virtual = relax.VirtualMachine(executable, device)
    # on a GPU it uses the default stream, as torch does
    function = virtual["main"]
    set_threads = tvm.get_global_func("runtime.config_threadpool")

    def to_tvm(tensor: Tensor) -> Any:
        return tvm.runtime.from_dlpack(plain(tensor))

    def prepare() -> None:
        set_threads(1, task.threads)

    return runtime_program(task, call, function, to_tvm, torch.utils.dlpack.from_dlpack, prepare, note)


def _target(device: Any, threads: int) -> Any:
    import tvm

    device_target = tvm.target.Target.from_device(device)
    if device_target.kind.name != "llvm":
        return device_target
    return tvm.target.Target({"kind": "llvm", "mcpu": device_target.attrs["mcpu"], "num-cores": threads})


def _executable(program: torch.export.ExportedProgram, task: Task, target: Any) -> tuple[Any, str]:
    import tvm
    from tvm import relax

    trials = task.tuning.trials
    note = f"tuned, {trials} trials" if trials else ""
    module_path = None if task.store is None else task.store / _name(target, task.tuning)
    if module_path is not None and module_path.exists():
        return tvm.runtime.load_module(str(module_path)), note
    module = _converted(program)
    try:
        pipeline = relax.get_default_pipeline(target)
        executable = (
            _tuned(module, task, target) if trials else tvm.compile(module, target=target, relax_pipeline=pipeline)
        )
    except UserError:
        raise
    except Exception as error:
        raise RuntimeError(f"TVM cannot compile it: {_reason(error)}") from error
    if module_path is not None:
        _keep(executable, module_path)
    return executable, note


def _name(target: Any, tuning: Tuning) -> str:
    processor = target.attrs.get("mcpu") or target.attrs.get("arch")
    cores = target.attrs.get("num-cores", 0)
    return f"tvm-{processor}-{cores}-{tuning.trials}-{tuning.tuner or TUNERS[0]}.so"


def _keep(executable: Any, path: Path) -> None:
    whole = path.with_name(f"{path.name}.{os.getpid()}.so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        executable.export_library(str(whole))
        whole.replace(path)
    except (OSError, RuntimeError):
        whole.unlink(missing_ok=True)


def _converted(program: torch.export.ExportedProgram) -> Any:
    from tvm.relax.frontend.torch import from_exported_program

    try:
        return from_exported_program(program)
    except Exception as error:
        raise Unsupported(f"TVM cannot convert it: {_reason(error)}") from error


def _tuned(module: Any, task: Task, target: Any) -> Any:
    from tvm.s_tir import meta_schedule

    tuner = task.tuning.tuner or TUNERS[0]
    with ExitStack() as stack:
        if task.store is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        else:
            folder = task.store / f"tvm-{target.attrs.get('mcpu', '')}-{task.threads}-{tuner}"
        done = folder / DONE
        if not done.exists() or int(done.read_text()) < task.tuning.trials:
            _search(module, task, target, tuner, folder)
        database = meta_schedule.database.JSONDatabase(work_dir=str(folder))
        return meta_schedule.relax_integration.compile_relax(database, module, target, None)


def _search(module: Any, task: Task, target: Any, tuner: str, folder: Path) -> None:
    from unittest.mock import patch

    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule

    folder.mkdir(parents=True, exist_ok=True)
    passes = [*relax.pipeline.library_dispatch_passes(target), *relax.pipeline.legalize_passes(target)]
    with target:
        parts = tvm.transform.Sequential(passes)(module)
    with patch.dict(os.environ, TVM_NUM_THREADS=str(task.threads)), _intrinsics_of(target):
        database = meta_schedule.relax_integration.tune_relax(
            parts,
            {},
            target,
            str(folder),
            task.tuning.trials,
            builder=meta_schedule.builder.LocalBuilder(max_workers=1, f_build=_build),
            cost_model="xgb" if find_spec("xgboost") else "random",
            strategy=tuner,
            seed=0,
        )
    # the database has 1e10 seconds for a program that does not build or run
    if not any(min(map(float, record.run_secs)) < 1e9 for record in database.get_all_tuning_records()):
        raise RuntimeError("no program that the tuning tried could be run: see logs/ next to the tuning database")
    (folder / DONE).write_text(str(task.tuning.trials))


@contextmanager
def _intrinsics_of(target: Any) -> Iterator[None]:
    import tvm

    name = "tvm.s_tir.tensor_intrin"
    if target.kind.name != "llvm" or machine() != "x86_64" or name in sys.modules:
        yield
        return
    package = ModuleType(name)
    package.__path__ = [str(Path(tvm.__file__).parent / "s_tir" / "tensor_intrin")]
    sys.modules[name] = package
    try:
        # this module stays imported, because its intrinsics can be registered only once
        importlib.import_module(f"{name}.x86")
        yield
    finally:
        del sys.modules[name]


def _build(module: Any, target: Any, _: Any) -> Any:
    # without the tensor intrinsics of all targets, whose import takes a minute
    from tvm.driver import build
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    return build(RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(module), target=target)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(type(error)(lines[-1] if lines else "")).removeprefix("AssertionError: ")
