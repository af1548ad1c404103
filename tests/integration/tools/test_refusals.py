"""Refused command lines, suggestions of similar names, and formats of opgrip trace convert."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import cheats
import pytest
import torch
from example_trace import write
from programs import ROOT, SHIPPED_TRACES, refusal, run_command, succeed

from opgrip.cli.command import nearest
from opgrip.tools.opgrip import main
from opgrip.traces import UserError, load
from opgrip.traces.io.foreign_files import format_of, formats
from opgrip.traces.io.shipped_traces import shipped_traces
from opgrip.traces.schema.records import End

KINDS = "choose from came, went, counts, shares, values, operators, any"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trace nothing", "invalid choice 'nothing'"),
        ("trace info", "the following arguments are required: TRACE"),
        ("trace info https://a.com/net.onnx", "https://a.com/net.onnx is a URL, not a file: download it first"),
        ("trace validate none.jsonl", "none.jsonl cannot be read: no such file"),
        ("trace timeline t.jsonl -o timeline.svg", "timeline.svg is not the name of a .json or .json.gz file"),
        ("trace graph t.jsonl -o graph.dot", "graph.dot is not the name of a"),
        ("trace diff t.jsonl t.jsonl --fail-on gone", f"--fail-on gone is not a kind of difference: {KINDS}"),
        ("trace diff t.jsonl empty", "empty contains no traces"),
        ("trace merge t.jsonl ./t.jsonl -o all.jsonl", "t.jsonl is named twice: name each trace once"),
        (
            "trace ranks t.jsonl",
            "has the calls of only one process: join the traces of its ranks with opgrip trace merge",
        ),
        ("trace redact t.jsonl -o t.jsonl -f", "t.jsonl is both the trace and the output"),
        ("trace redact t.jsonl -o r.jsonl --report t.jsonl -f", "t.jsonl is both the trace and the report"),
        ("trace redact t.jsonl -o r.jsonl --keep names", "--keep names: unknown kind of content"),
        (f"trace redact t.jsonl -o r.jsonl --salt-file {os.devnull}", "is not a regular file"),
        ("trace tuner t.jsonl --for cublas", "invalid choice 'cublas'"),
        ("trace tuner t.jsonl --tuned absent.csv", "absent.csv cannot be read"),
        ("longtail t.jsonl -o rows.xlsx", "rows.xlsx is not the name of"),
        ("longtail t.jsonl --bandwidth -3", "is not a bandwidth in GB/s above 0"),
        ("samples list --tag Fast", "unknown tag 'Fast': choose from ForLoop, "),
        ("samples list no_such*", "no sample matches these names and tags: "),
        ("samples show bbox2dlta", "unknown sample 'bbox2dlta': did you mean bbox2delta"),
        ("report absent.json -o r.pdf", "r.pdf is not an HTML file: choose a name that ends with .html"),
    ],
)
def test_refusal_is_one_line_and_writes_nothing(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SHIPPED_TRACES[0], "t.jsonl")
    Path("empty").mkdir()
    try:
        status = main(words.split())
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2, 1), error
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "t.jsonl"]


INPUTS = "Operator: aten.relu.default\ncnt: 3, ((T([2], f32),), {})\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs.txt").write_text(INPUTS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("out.csv",), "give the format with --to (opgrip, backendbench, "),
        (("out.onnx",), "files can only be read"),
        ((".",), "is a folder: write a file"),
        (("out.x", "--to", "chakraa"), "did you mean chakra?"),
        (("out.x", "--to", "dlop"), "choose one of opgrip, "),
        (("out.x", "--from", "nothing", "--to", "param"), "choose one of "),
    ],
)
def test_unknown_target_lists_the_formats(
    words: tuple[str, ...], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "convert", "inputs.txt", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("out.x", "--to", "PARAM"), "param"),
        (("out.x", "--to", "Execution-Trace", "--from", "TritonBench"), "execution_trace"),
        (("out.chakra",), "chakra"),
    ],
)
def test_format_names_are_case_insensitive(words: tuple[str, ...], name: str, folder: Path) -> None:
    assert main(["trace", "convert", "inputs.txt", *words]) == 0
    assert format_of(folder / words[0]) == name


def test_all_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["trace", "convert", "--formats"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert {"opgrip", *formats.names()} <= rows.keys()
    assert "written" not in rows["onnx"]
    assert ".param.json" in rows["param"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "save",
    [
        torch.save,
        lambda module, path: torch.save(module, path, _use_new_zipfile_serialization=False),
        lambda module, path: torch.jit.save(torch.jit.script(module), path),
    ],
)
def test_pickled_model_is_refused_with_the_remedy(save: Any, tmp_path: Path) -> None:
    save(torch.nn.Linear(2, 2), str(tmp_path / "net.pt"))
    with pytest.raises(UserError, match=r"never read: record a run of the model"):
        load(tmp_path / "net.pt")


def test_input_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder: name a file in it"):
        load(tmp_path)
    with pytest.raises(UserError, match="standard input is not read"):
        load("-")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe: name a file"):
        load(tmp_path / "pipe")
    for device in ("/dev/zero", "/dev/kmsg"):
        (tmp_path / Path(device).name).symlink_to(device)
        with pytest.raises(UserError, match="is not a regular file: name a file"):
            load(tmp_path / Path(device).name)


def test_unconverted_calls_are_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {"input_data_generator": "\u202eabc", "config": [{"input": [{"args": []}]}]}
    (tmp_path / "op.json").write_text(json.dumps({"torch.add": info}))
    assert main(["trace", "convert", str(tmp_path / "op.json"), str(tmp_path / "o.jsonl"), "--from", "param"]) == 0
    errors = capsys.readouterr().err
    assert "torch.add not converted" in errors
    assert "\\u202eabc" in errors


TRACE = SHIPPED_TRACES[0]
IN_GRAPHS = "opreplay TRACE --exec-mode graph --mode"
NO_GRAPH = ", which runs CUDA graphs itself: time it with --exec-mode events"
BY_NCU = "opreplay TRACE --ncu --batch-device cuda --batch-command"
CANDIDATE = "opreplay TRACE --candidate aten._softmax.default=CHEATS:honest"
IN_CLUSTER = "opreplay trace:faster_rcnn --engine ray --address 127.0.0.1:9"  # nothing listens there


def test_nearest_names_match_the_start_of_a_name_or_of_its_last_part() -> None:
    operators = ["aten.add.Tensor", "aten.index.Tensor", "aten.sort.default", "torchvision.nms.default"]
    assert nearest("aten.adn*", operators)[0] == "aten.add.Tensor"
    assert nearest("nmz*", operators)[0] == "torchvision.nms.default"
    assert nearest("*.indx*", operators)[0] == "aten.index.Tensor"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("opgrip trase info", "opgrip: error: argument VERB: invalid choice 'trase': did you mean trace?"),
        ("opcapture --modle x.py", "opcapture: error: unknown option --modle: did you mean --model?"),
        ("opreplay", "there is nothing to replay"),
        ("opreplay https://example.com/net.onnx", "net.onnx is a URL, not a file: download it first"),
        ("opreplay trace:fster_rcnn", "opgrip ships no trace 'fster_rcnn': did you mean faster_rcnn?"),
        ("opreplay traces/faster_rcnn.jsonl", "no such file or directory, and trace:faster_rcnn is one that ships"),
        ("opreplay stp.jsonl", "no such file or directory: did you mean step.jsonl?"),
        ("opreplay opinfo:all", "opcapture --model opinfo:all; names that are not files are"),
        ("opreplay TRACE --tpo 3", "opreplay: error: unknown option --tpo: did you mean --top?"),
        ("opreplay TRACE --mode compil", "unknown mode 'compil': did you mean compile"),
        ("opreplay TRACE --op aten.adn*", "no op matches --op aten.adn*: the trace has 'aten.add.Tensor'"),
        ("opreplay TRACE --unit function --op delta2box", "the trace has 'delta_xywh_bbox_coder:delta2bbox'"),
        ("opreplay none.jsonl", "none.jsonl cannot be read: no such file"),
        ("opreplay foreign.jsonl", "foreign.jsonl is not a trace"),
        ("opreplay newer.jsonl", "format version 2.0, newer than the 1.x"),
        ("opreplay nothing.jsonl", "the trace contains no calls"),
        ("opreplay TRACE --device cuda", "no CUDA device here"),
        ("opreplay TRACE --iterations 0", "argument --iterations: '0' is not an integer of at least 1"),
        ("opreplay TRACE --memory-limit 8", "'8' is 8 bytes, but at least 1 MiB is needed: add a unit, as in 8GB"),
        ("opreplay TRACE -o results.xls", "results.xls has no known suffix: end its name in .csv, .json, .md"),
        ("opreplay TRACE -o existing.json", "existing.json exists"),
        ("opreplay TRACE --append", "--append needs --output"),
        ("opreplay TRACE --values recordd", "unknown kind of values: 'recordd': did you mean recorded? see "),
        # samples
        ("opreplay samples/nmz", "unknown sample 'nmz': did you mean nms?"),
        ("opreplay samples/xyzzy", "unknown sample 'xyzzy': opgrip samples list shows all"),
        ("opreplay sample:nosuch", "unknown sample 'nosuch': opgrip samples list shows all"),
        ("opreplay sample:bbox2dlta", "unknown sample 'bbox2dlta': did you mean bbox2delta"),
        ("opreplay samples --tag Fast", "unknown tag 'Fast': choose from ForLoop, "),
        ("opreplay samples --op no_such", "no sample matches --op no_such: similar names in samples are "),
        ("opreplay samples --module x", "--module is for traces: "),
        ("opreplay samples --cache program", "--cache program needs a trace of a program, which samples is not: "),
        ("opreplay some.jsonl --tag Reduce", "--tag is for samples: "),
        # operators
        ("opreplay --operator aten.add.Tensr", "'aten.add.Tensr' is registered: did you mean aten.add"),
        ("opreplay --operator aten.mm --inputs '{\"self\": [2, 2]}'", "lacks its argument mat2"),
        (
            'opreplay --operator aten.mm --inputs \'{"self": [-2, 2], "mat2": [2]}\'',
            "from 0 to 4611686018427387903): its schema is aten::mm(",
        ),
        ("opreplay --operator aten.neg --inputs '{\"nobody\": [2]}'", "has no argument nobody"),
        ("opreplay --operator aten.neg --inputs DEEP", "--inputs cannot be read"),
        ("opreplay --operator aten.qq*", "no operator matches 'aten.qq*': use a pattern such as 'aten.add*'"),
        (
            "opreplay --operator aten.neg* --inputs '{\"nobody\": [2]}'",
            "that matches 'aten.neg*' takes these arguments",
        ),
        ("opreplay --operator aten.neg trace.jsonl", "--operator cannot be combined with a trace"),
        ("opreplay --operator aten.neg --tag ForLoop", "--tag is for samples: leave it out with --operator"),
        ("opreplay --inputs {}", "--inputs needs --operator"),
        # CUDA graphs
        (f"{IN_GRAPHS} cudagraph", f"opreplay: error: --exec-mode graph cannot capture cudagraph{NO_GRAPH}"),
        (f"{IN_GRAPHS} jit,reduce-overhead", f"cannot capture reduce-overhead{NO_GRAPH}"),
        (f"{IN_GRAPHS} compile:cudagraphs", f"cannot capture compile:cudagraphs{NO_GRAPH}"),
        (f"{IN_GRAPHS} eager --reference cudagraph", f"cannot capture cudagraph{NO_GRAPH}"),
        (f"{IN_GRAPHS} eager --backward", "capture a backward pass, which runs on the stream of its forward pass"),
        # profilers
        ("opreplay TRACE --nsys --nsys-bin /no/such/nsys", "/no/such/nsys is not a program that can be run: "),
        ("opreplay TRACE --nsys --nsys-args-file /no/file", "/no/file cannot be read as arguments: "),
        ("opreplay TRACE --nsys --streams 2", "nsys cannot separate cases that run concurrently: "),
        ("opreplay TRACE --ncu", "ncu profiles only GPUs (this machine has none), but the cases run on cpu"),
        ("opreplay TRACE --batch-device cuda", "--batch-device needs --ncu"),
        (f"{BY_NCU} srun", "put {command} where the ncu command belongs"),
        (f'{BY_NCU} "\'{{command}}"', "is not a command line"),
        # untrusted candidates
        ("opreplay TRACE --untrusted", "--untrusted is for candidates: add --candidate"),
        (f"{CANDIDATE} --untrusted --confirm", "without protection"),
        (f"{CANDIDATE} --untrusted --backward", "does not support"),
        # options of this machine with workers of a cluster
        (f"{IN_CLUSTER} --pin 0", "only to workers on this machine: give workers their processors with --processors"),
        (f"{IN_CLUSTER} --device cuda:1", "ray spreads cases over devices itself: give --device without a number"),
        (f"{IN_CLUSTER} --device cuda:0,cuda:1", "spreads cases over devices itself: give --device without a number"),
    ],
)
def test_refused_command_line_is_answered_in_one_line(tmp_path: Path, command: str, message: str) -> None:
    for name in ("step.jsonl", "existing.json"):
        (tmp_path / name).touch()
    write(tmp_path / "nothing.jsonl", [End(0, 0, 1)])
    (tmp_path / "foreign.jsonl").write_text('{"a": {"b": 1}}', encoding="utf-8")
    newer = {"type": "header", "format": "opgrip-trace", "version": "2.0"}
    (tmp_path / "newer.jsonl").write_text(json.dumps(newer), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    texts = {"TRACE": str(TRACE), "CHEATS": cheats.__file__, "DEEP": "[" * 100_000}
    name, *words = shlex.split(re.sub("|".join(texts), lambda word: texts[word[0]], command))
    assert message in refusal(name, *words, cwd=tmp_path, in_one_line=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_without_samples_is_reported_and_its_traces_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    error = refusal("opreplay", "runs", cwd=tmp_path)
    assert "runs is a folder without samples: name a trace, or a folder that opgrip grip wrote" in error
    (tmp_path / "runs" / "a.jsonl.gz").touch()
    errors = run_command("opreplay", "runs", cwd=tmp_path).stderr
    assert "a: not replayed: runs/a.jsonl.gz is not a trace" in errors


def test_files_are_accepted_before_and_after_options(tiny_trace: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_trace, tmp_path / "a.jsonl")
    shutil.copy(tiny_trace, tmp_path / "b.jsonl")
    done = run_command("opgrip", "trace", "validate", "a.jsonl", "--unbounded", "b.jsonl", cwd=tmp_path)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["a.jsonl", "b.jsonl"]
    done = run_command("opgrip", "trace", "info", "a.jsonl", "--unbounded", "b.jsonl", cwd=tmp_path)
    assert (done.returncode, "unexpected argument: 'b.jsonl'" in done.stderr) == (2, True)
    done = run_command("opgrip", "trace", "validate", "a.jsonl", "--unbounded", "b.jsonl", "--jsn", cwd=tmp_path)
    assert (done.returncode, "unknown option --jsn" in done.stderr) == (2, True)


@pytest.mark.slow
def test_shipped_trace_is_found_from_any_folder(tmp_path: Path) -> None:
    done = succeed("opgrip", "trace", "info", "trace:faster_rcnn", "--top", "1", cwd=tmp_path)
    assert f"calls       {len(load('trace:faster_rcnn').calls):,}" in done.stdout
    fast = ("--iterations", "1", "--warmup", "0", "--op", "aten.relu*", "--top", "1", "-o", "r.json")
    succeed("opreplay", "trace:faster_rcnn", *fast, cwd=tmp_path)
    assert set(shipped_traces().values()) == {*SHIPPED_TRACES, ROOT / "traces" / "zoo_500.jsonl.gz"}
