"""Small files of every format of other tools, written by the format's own writer from a small trace or built here.

A format has a builder in `BUILDERS` if it has no writer, or if its reader accepts more than its writer writes. Files
have names that their format expects.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from foreign_data import case_files, data_files
from optional import is_installed
from torch import nn

from opgrip.capture import Capture
from opgrip.tools.opgrip import main
from opgrip.traces.io.foreign_files import formats

# Largest size in bytes of the real files that are used if they exist next to this checkout; mutants of large ones are
# slow.
REAL_BYTES = 30_000
MOST_REAL = 4


@dataclass(frozen=True, slots=True)
class ForeignSeed:
    """File of a format, or folder of files.

    files : contents by path below the seed's folder; the name for a single file
    opens : path to open, `.` for the folder
    """

    format_name: str
    files: dict[str, bytes]
    opens: str

    def write(self, folder: Path) -> Path:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / self.opens


def readable_formats() -> list[str]:
    return [name for name, format_ in formats.items() if format_.read is not None]


def make_foreign_seeds(folder: Path, trace: Path) -> list[ForeignSeed]:
    return [seed for name in readable_formats() for seed in seeds_of(name, folder, trace)]


def seeds_of(name: str, folder: Path, trace: Path) -> list[ForeignSeed]:
    """Return the seeds of one format; empty if the package that it needs is not installed."""
    place = folder / f"seeds-{name}"
    place.mkdir(exist_ok=True)
    paths = [*_written(name, place, trace), *BUILDERS.get(name, _nothing)(place), *_real(name)]
    return [_seed(name, path) for path in paths]


def _seed(name: str, path: Path) -> ForeignSeed:
    if path.is_dir():
        inner = sorted(item for item in path.rglob("*") if item.is_file())
        return ForeignSeed(name, {str(item.relative_to(path)): item.read_bytes() for item in inner}, ".")
    return ForeignSeed(name, {path.name: path.read_bytes()}, path.name)


def _written(name: str, folder: Path, trace: Path) -> Iterator[Path]:
    """Yield files that the format's own writer makes of a trace, by the command."""
    format_ = formats.get(name)
    if not any(getattr(format_, writer, None) for writer in ("write", "write_folder")):
        return
    suffix = format_.suffixes[0] if format_ is not None and format_.suffixes else ".bin"
    path = folder / f"written{suffix}"
    with suppress(SystemExit):
        main(["trace", "convert", str(trace), str(path), "--to", name, "--force"])
    if path.exists():
        yield path


def _real(name: str) -> list[Path]:
    paths = [path for pattern in REAL.get(name, ()) for path in data_files(pattern)]
    paths += [path for pattern in CASES.get(name, ()) for path in case_files(pattern)]
    return [path for path in paths if path.stat().st_size < REAL_BYTES][:MOST_REAL]


# locations of real files of formats, next to this checkout
REAL = {
    "dlop": ("dlop/*.json",),
    "param": ("param/configs/**/*.json",),
    "execution_trace": ("param/execution_traces/**/*",),
    "tritonbench": ("tritonbench/*.txt",),
}
CASES = {"aiter": ("aiter/*.csv",)}  # the same in the folder of cases


def _nothing(folder: Path) -> list[Path]:
    return []


def _dlop(folder: Path) -> list[Path]:
    tables = {
        "add": {"input": [[2, 3], [4]], "other": [[2, 3], ""], "alpha": [1, ""]},
        "conv2d": {"input": [[1, 3, 8, 8]], "weight": [[4, 3, 3, 3]], "bias": [[4]], "stride": [[1, 1]]},
    }
    paths = []
    for name, table in tables.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(table))
    paths.append(folder / "where.csv")
    paths[-1].write_text(
        "id,source_neural_network,num_of_calls,parameters\n"
        "#0,net,3,\"{'condition': [[2, 3]], 'tensor1': [[2, 3]], 'tensor2': [[2, 3]]}\"\n"
    )
    return paths


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


def _chrome(folder: Path) -> list[Path]:
    path = folder / "profile.json"
    net, images = _net(), torch.randn(2, 3, 8, 8)
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net(images).sum().backward()
    profile.export_chrome_trace(str(path))
    return [path]


def _onnx(folder: Path) -> list[Path]:
    if not is_installed("onnx"):
        return []
    from onnx import TensorProto, helper, save

    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 8, 8])
    half = helper.make_tensor("half", TensorProto.FLOAT, [1], [0.5])
    nodes = [helper.make_node("Relu", ["x"], ["z"]), helper.make_node("Mul", ["z", "half"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", [image], [result], [half]))
    save(model, folder / "model.onnx")
    return [folder / "model.onnx"]


def _aiter(folder: Path) -> list[Path]:
    path = folder / "shapes.csv"
    path.write_text(
        "M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,us\n"
        "64,256,128,False,torch.bfloat16,torch.bfloat16,False,False,7.5\n"
        "8,16,32,True,torch.float16,torch.float32,False,False,1.5\n"
    )
    return [path]


def _tritonparse(folder: Path) -> list[Path]:
    path = folder / "launches.ndjson"
    code = "@triton.jit\ndef scale(x_ptr, count, BLOCK: tl.constexpr):\n    pass\n"
    source = {"file_path": "/home/user/kernels.py", "start_line": 3, "end_line": 5, "code": code}
    compiled = {"metadata": {"hash": "7f", "name": "scale"}, "file_path": {}, "python_source": source}
    tensor = {"type": "tensor", "shape": [8, 8], "dtype": "torch.float32", "device": "cuda:0", "stride": [8, 1]}
    launch = {
        "event_type": "launch",
        "pid": 7,
        "name": "scale",
        "grid": [4],
        "compilation_metadata": {"hash": "7f", "num_warps": 4, "num_stages": 3, "num_ctas": 1},
        "extracted_args": {
            "x_ptr": {**tensor, "storage_offset": 0, "data_ptr": "0x7f16bfe00000"},
            "count": {"type": "int", "value": 64},
            "BLOCK": {"type": "int", "value": 16},
        },
        "stack": [{"line": 12, "name": "main", "filename": "/home/user/train.py", "loc": "scale[grid](x, 64, 16)"}],
    }
    events = [{"event_type": "compilation", "pid": 7, "payload": compiled}, launch, launch]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return [path]


def _problem(folder: Path) -> list[Path]:
    """Write a kernel of SOL-ExecBench, with two workloads, below `folder`; return its own folder."""
    path = folder / "problem"
    path.mkdir()
    definition = {
        "name": "softmax_h8",
        "op_type": None,
        "axes": {
            "rows": {"type": "var"},
            "columns": {"type": "const", "value": 8},
            "count": {"type": "expr", "expression": "rows * columns"},
        },
        "custom_inputs_entrypoint": "get_inputs",
        "inputs": {
            "x": {"shape": ["rows", "columns"], "dtype": "bfloat16"},
            "scales": {"shape": ["count"], "dtype": "float32"},
        },
        "outputs": {"y": {"shape": ["rows", "columns"], "dtype": "bfloat16"}},
        "reference": "import torch\n\n\ndef run(x, scales):\n    return torch.ops.aten.softmax.int(x, -1)\n",
    }
    (path / "definition.json").write_text(json.dumps(definition, indent=2))
    inputs = {"x": {"type": "custom"}, "scales": {"type": "custom"}}
    workloads = [{"uuid": f"w{rows}", "axes": {"rows": rows}, "inputs": inputs} for rows in (1, 64)]
    (path / "workload.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in workloads))
    return [path]


def _ring(folder: Path) -> list[Path]:
    with Capture(folder / "t.jsonl", last=20, force=True) as capture:
        tensor = torch.ones(3, requires_grad=True)
        for _ in range(4):
            (tensor[torch.tensor([0, 2])] * 2).sum().backward()
        capture._flusher.run_job(capture._flusher.flush)  # type: ignore[union-attr]
        (path,) = folder.glob("t.part*.ring")
        return [Path(shutil.copy(path, folder / "last.ring"))]


def _chakra_json(folder: Path) -> list[Path]:
    port = {"values": "[[1, 2, 0, 4, 4, 'cpu']]", "shapes": "[[4]]", "types": "['Tensor(float)']"}
    schema = {"name": "op_schema", "stringVal": "aten::relu(Tensor self) -> Tensor"}
    node = {"id": "2", "name": "aten::relu", "ctrlDeps": ["1"], "inputs": port, "outputs": port, "attr": [schema]}
    objects = [{"attr": [{"name": "schema", "stringVal": "1.1.1"}]}, node, {**node, "id": "3", "durationMicros": "5"}]
    graph = {"workload_graph": [{"Id": 1, "Name": "aten::add(0)", "NodeType": 4, "is_cpu_op": True}], "ngpus": 8}
    (folder / "trace.json").write_text("\n".join(json.dumps(item, indent=2) for item in objects))
    (folder / "graph.json").write_text(json.dumps(graph, indent=2))
    return [folder / "trace.json", folder / "graph.json"]


# functions that make files of a format in a folder, by format name
BUILDERS: dict[str, Callable[[Path], list[Path]]] = {
    "dlop": _dlop,
    "chrome": _chrome,
    "chakra_json": _chakra_json,
    "onnx": _onnx,
    "ring": _ring,
    "aiter": _aiter,
    "tritonparse": _tritonparse,
    "flashinfer": _problem,
}
