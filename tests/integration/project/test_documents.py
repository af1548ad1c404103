"""Documents: their commands work when typed in order, the notebook runs, and the site builds."""

import base64
import functools
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_data import write_as
from forks import run_forked
from optional import is_installed, needs
from programs import ROOT, SHIPPED_TRACES, program_path, run_command, run_python

from opgrip.capture.command.capture_options import make_parser as capture_parser
from opgrip.capture.on_demand.verbs import VERBS, make_verb_parser
from opgrip.replay.command.job import make_parser as replay_parser
from opgrip.replay.modes import modes
from opgrip.replay.reports.comparison.results_store import Store
from opgrip.tools.opgrip import make_parser as opgrip_parser
from opgrip.traces import load

sys.path.insert(0, str(ROOT / "tests/support/fuzz"))

from foreign_seeds import BUILDERS

PARSERS = {
    name: functools.cache(make)
    for name, make in {"opcapture": capture_parser, "opreplay": replay_parser, "opgrip": opgrip_parser}.items()
}
PROGRAMS = (*PARSERS, "pytest", "torchrun")
CONFIG = re.compile(r"[\w.-]+_coco\.py\b")  # configuration files that mmdet ships
STAND_IN = "builtin:faster_rcnn"
# Trace of the built-in detector that documents replay, and its replacement if the document shows no output.
SHIPPED, OF_SMALL_IMAGES = "traces/faster_rcnn.jsonl", "traces/small.jsonl"
FORM = re.compile(r"\[|\bSOURCE\b|\bPATTERN\b")  # Pattern of lines that describe a command's syntax.
# Options that replace the documented ones if no output is shown, to save time.
SMALL = {
    "opcapture": {"--input-size": "96", "--batch-size": "1", "--warmup": "0", "--steps": "1"},
    # with warm caches, no preceding calls are run
    "opreplay": {"--iterations": "1", "--warmup": "0", "--top": "1", "--cache": "warm"},
}
A_TRACE = re.compile(r"\S+\.jsonl(\.\w+)?\s")
SELECTS = re.compile(r"--(op|unit|sequence|module)\b")
# Selection of a single case if the command selects none: the slowest case varies, and not every case can be plotted.
A_CONVOLUTION = "--op aten.convolution.default"
WHOLE_ZOO = re.compile(r"(opreplay |opgrip corpus (?:distill )?)(?:zoo|trace:zoo_500)(?=\s|$)")
PART_OF_ZOO = r"\1zoo:fast-scnn.predict"  # Replacement of the whole zoo if no output is shown.
# Smaller values of options that are in a command, if no output is shown.
FEWER = {"--repeats": "2", "--threads": "1,2"}
QUOTED = re.compile(r"'[^']*'|(?<!\S)#.*")  # text that a shell does not expand or ignores
# Pattern of syntax that needs a shell; other commands start without one.
OF_A_SHELL = re.compile(r"[][;&|<>$`*?(){}!\\\n]|(?<!\S)~|^\w+=")
# Times and sizes, and counts that differ between versions of torch.
VOLATILE = re.compile(r"\d[\d,.]*(?= (?:ms|us|s|kB|MB|GB|tensors|operators)\b)")
# warnings of captures on a machine that runs other tests
DOUBTFUL = ("times and shares are doubtful", "slow to provide memory")
# Commands that print measurements or dates, which are not compared; their gates may fail.
MEASURED = ("opgrip compare", "opgrip results")
WRONG = "my_kernels_wrong.py"  # name of a candidate that is wrong, for which a command must end with exit status 1
CRASHES = "crash.jsonl"  # name of the trace of a program that crashes
# Reason, by document and file, why previous commands do not make the file.
NOT_THERE = {
    ("docs/gripper.md", "step.jsonl"): "it replays a trace of the reader's own with gripped calls",
    ("docs/profiling.md", "trace.jsonl"): "it runs on another machine",
    ("docs/flight-recorder.md", "train.part*.ring"): "a program that was killed leaves it",
    ("docs/production.md", "step-3445-1.jsonl.zst"): "a program that keeps running was recorded",
}

TRAIN = """
import os
import sys
import torch


def bbox2delta(proposals, gt):
    return (gt - proposals) / (proposals[:, 2:] - proposals[:, :2]).repeat(1, 2)


layer = torch.nn.Linear(4, 2)
boxes = torch.rand(3, 4) + torch.tensor([0.0, 0.0, 2.0, 2.0])
layer(bbox2delta(boxes, boxes + 1)).sum().backward()
with open("/proc/self/cmdline") as own:
    if "crash.jsonl" in own.read():
        os._exit(139)
"""
EXITS = """
import os
import sys
import torch

layer = torch.nn.Linear(4, 2)
layer(torch.ones(3, 4)).sum().backward()
with open("/proc/self/cmdline") as own:
    if "crash.jsonl" in own.read():
        os._exit(139)
if "--epochs" in sys.argv:
    sys.exit(7)
"""
# Files that documents take as the user's own, without showing them.
OWN_FILES = {
    "train.py": TRAIN,
    "my_package/__init__.py": "",
    "my_package/models.py": """
import torch


def small_unet(batch_size: int = 2):
    return torch.nn.Conv2d(3, 4, 3), torch.rand(batch_size, 3, 16, 16)
""",
    "theirs.py": """
import torch


def softmax(x, dim, half_to_float):
    return torch.softmax(x, dim)
""",
}


@dataclass(frozen=True, slots=True)
class Pasted:
    """Command for a shell in a document, and the output shown there, in which a line `...` matches any lines."""

    line: int
    command: str
    shown: list[str] = field(default_factory=list)


def commands_in(text: str) -> list[Pasted]:
    """Return the commands of a document in order: lines of indented blocks that begin with `$` or a program's name."""
    commands: list[Pasted] = []
    for first, block in _blocks(text):
        is_output = False
        for number, line in enumerate(block, first):
            words = line.removeprefix("$ ").split()
            if words and (line.startswith("$ ") or Path(words[0]).name in PROGRAMS):
                is_output = line.startswith("$ ")
                if not FORM.search(line.partition(" #")[0]):
                    commands.append(Pasted(number, line.removeprefix("$ ").strip().replace(".venv/bin/", "")))
            elif is_output and commands and (line or commands[-1].shown):
                commands[-1].shown.append(line)
    return commands


def files_in(text: str) -> dict[str, str]:
    """Return the files that a document shows: blocks of code that begin with a comment with the file's name."""
    files = {}
    for _, block in _blocks(text):
        named = re.fullmatch(r"# (\w+\.py)", block[0])
        if named is not None:
            code = block[1:]
            end = next((place for place, line in enumerate(code) if line.startswith("$ ")), len(code))
            files[named[1]] = "\n".join(code[:end]) + "\n"
    return files


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the indented blocks of a document: the number of the first line, and the lines."""
    block: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), "."], 1):
        if line.startswith("    "):
            first = first or number
            block.append(line[4:].rstrip())
        elif block and not line.strip():
            block.append("")
        elif block:
            yield first, block
            block, first = [], 0


def prepare_folder(folder: Path, name: str, text: str, detector_trace: Path) -> None:
    (folder / "traces").mkdir()
    (folder / "docs").mkdir()
    for trace in SHIPPED_TRACES:
        shutil.copy(trace, folder / "traces")
    shutil.copy(detector_trace, folder / OF_SMALL_IMAGES)
    with gzip.open(folder / "traces" / "another.jsonl.gz", "wb") as packed:
        packed.write(SHIPPED_TRACES[0].read_bytes())
    own_files = OWN_FILES | files_in(text)
    if name == "docs/capture.md":
        own_files["train.py"] = EXITS
    for path, content in own_files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


def why_not(name: str, pasted: Pasted) -> str | None:
    words = shlex.split(pasted.command, comments=True)
    options = dict(zip(words, [*words[1:], ""], strict=True))
    if words[:3] == ["opgrip", "zoo", "make"]:
        return "it writes into the package, and takes long: test_corpus.py does it in small"
    if "--on-demand" in words or (words[:1] == ["opcapture"] and VERBS.keys() & set(words[1:2])):
        return "it is about a program that keeps running: tests/integration/capture/test_on_demand.py"
    if words[:2] == ["opgrip", "autostart"]:
        return "it changes this environment: tests/end_to_end/capture/test_script.py does it in another one"
    needs_mmdet = any(word.startswith(("mmdet.", "grips/delta2bbox")) for word in words)
    if needs_mmdet and not is_installed("mmdet"):
        return "mmdet is not installed: make openmmlab"
    if any(value.startswith("cuda") for value in options.values()) and not torch.cuda.is_available():
        return "no GPU"
    for program in ("nsys", "ncu"):
        if f"--{program}" in options and not is_installed(program):
            return f"{program} is not installed"
    if added := {*options.get("--mode", "").split(",")} - {"", *modes.names()}:
        return f"the document adds the modes {', '.join(added)} in a package"
    if "--mode" in options and not set(options["--mode"].split(",")) - lacking_modes():
        return f"the modes {options['--mode']} cannot run here: make runtimes"
    return next((NOT_THERE[name, word] for word in words if (name, word) in NOT_THERE), None)


def lacking_modes() -> set[str]:
    return {name for name, mode in modes.items() if any(not is_installed(package) for package in mode.needs)}


def quick_command(pasted: Pasted) -> str:
    """Return the command line to run: fewer calls if the document shows no output, and no packages that are missing.

    The built-in detector replaces configurations of mmdet if mmdet is not installed.
    """
    command = re.sub(r"\bTRACE\b", SHIPPED, pasted.command)
    if not is_installed("mmdet") and CONFIG.search(command):
        command = re.sub(r"--cfg-options \S+", "", CONFIG.sub(STAND_IN, command))
    command = re.sub(
        r"(?<=--mode )\S+",
        lambda names: ",".join(name for name in names[0].split(",") if name not in lacking_modes()),
        command,
    )
    if not pasted.shown:
        command = with_small_images(WHOLE_ZOO.sub(PART_OF_ZOO, command)).replace("opinfo:all", "opinfo:unary")
    # a script on the PATH may belong to another environment
    for script, module in (("torchrun", "torch.distributed.run"), ("pytest", "pytest")):
        command = re.sub(rf"^{script}\b", f"{sys.executable} -m {module}", command)
    name, _, rest = command.partition(" ")
    small = {} if pasted.shown else SMALL.get(name, {})
    if name == "opcapture" and not (STAND_IN in rest or CONFIG.search(rest)):
        # two samples per dtype of each operator unless it specifies a number
        small = {"--per-dtype": "1"} if "opinfo:" in rest and not pasted.shown else {}
    if name == "opreplay" and "--sequence" in rest.split():
        small = {"--iterations": "1"}
    if WHOLE_ZOO.search(pasted.command):
        # a score requires the recorded cache state
        small = {option: value for option, value in small.items() if option != "--cache"}
    for option, value in ({} if pasted.shown else FEWER).items():
        rest = re.sub(rf"{option} [\d,]+", f"{option} {value}", rest)
    if small.get("--top") and "--values" in rest:
        # a case may have no random values
        small = small | {"--top": "3"}
    if "--backward" in rest:
        # a case may have no gradient
        small = {option: value for option, value in small.items() if option != "--top"}
    is_of_detector = A_TRACE.match(rest) and rest.startswith(("traces/", "trace:"))
    if small.get("--top") and is_of_detector and "--mode" in rest and not SELECTS.search(rest):
        # a mode may not support each case
        rest = f"{rest.partition('#')[0].rstrip()} {A_CONVOLUTION}"
    for option, value in small.items():
        rest = re.sub(rf"{option} \S+", "", rest)
        name += f" {option} {value}"
    return f"{name} {rest}"


def with_small_images(command: str) -> str:
    if command.startswith("opreplay ") and "--module" not in command:
        of_any = SELECTS.search(command)
        return command.replace(SHIPPED, OF_SMALL_IMAGES if of_any else f"{OF_SMALL_IMAGES} {A_CONVOLUTION}")
    return command


def run_pasted(pasted: Pasted, folder: Path, cache: Path) -> str:
    """Run a command in `folder`, and return a description of its failure, or an empty text."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OPGRIP_CACHE": str(cache)}
    # the folder of runs that a page tells the reader to set; it is empty before a page
    env["OPGRIP_STORE"] = str(folder / ".runs")
    done = run_line(quick_command(pasted), folder, env)
    if pasted.command.startswith(MEASURED):
        return "" if done.returncode in {0, 1, 3} else f"line {pasted.line}: {pasted.command}\n{done.stdout[-2000:]}"
    if "--opgrip-compare-fail" in pasted.command and ": not decided: " in done.stdout:
        # the machine's speed changed between the two runs, which fails a test of pytest
        return ""
    expected = 1 if WRONG in pasted.command else 0
    if done.returncode != expected and CRASHES not in pasted.command:
        return f"line {pasted.line}: {pasted.command}: status {done.returncode}\n{done.stdout[-2000:]}"
    difference = compare(pasted.shown, done.stdout.splitlines()) if pasted.shown else ""
    return f"line {pasted.line}: {pasted.command}\n{difference}" if difference else ""


def run_line(line: str, folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, or in a fork with all imports done if it only starts one of our commands.

    The result's output includes its standard error.
    """
    # the program that has to crash recognizes the name in its command line
    if line.partition(" ")[0] in PARSERS and CRASHES not in line and not OF_A_SHELL.search(QUOTED.sub("", line)):
        name, *words = shlex.split(line, comments=True)
        return run_forked([program_path(name), *words], folder, env, timeout=550, together=True)
    return subprocess.run(
        ["bash", "-c", f"({line}\n) 2>&1"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


def has_valid_options(pasted: Pasted) -> bool:
    """Return True if the command's own parser accepts it, which prints an error otherwise; the command does not run."""
    program, *words = shlex.split(pasted.command.partition(";")[0], comments=True)
    own_words = words[: words.index("--")] if "--" in words else words
    try:
        if program == "opcapture" and words and words[0] in VERBS:
            make_verb_parser(words[0]).parse_args(words[1:])
        elif program in PARSERS:
            PARSERS[program]().parse_args(own_words)
    except SystemExit:
        return False
    return True


def compare(shown: list[str], printed: list[str]) -> str:
    """Return the first difference between shown and printed output, ignoring numbers with units; empty if equal."""
    shown, printed = ([VOLATILE.sub("N", line.rstrip()) for line in lines] for lines in (shown, printed))
    expected = [line for line in shown if line]
    actual = [line for line in printed if line and not any(text in line for text in DOUBTFUL)]
    place = 0
    any_lines = False
    for line in expected:
        if line == "...":
            any_lines = True
            continue
        rest = actual[place:]
        if any_lines and line in rest:
            place += rest.index(line) + 1
        elif rest and rest[0] == line:
            place += 1
        else:
            return f"shown:   {line}\nprinted: {rest[0] if rest else 'nothing more'}"
        any_lines = False
    if "..." in expected or place == len(actual):
        return ""
    return f"printed, and not shown: {actual[place]}"


DOCUMENTS = [
    name
    for name in ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
    if commands_in((ROOT / name).read_text(encoding="utf-8"))
]
MEASURES = ("docs/ci.md",)  # documents whose commands fail if other processes use the cores


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder for measurements of the machine, shared by all documents."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "pasted-cache"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone if name in MEASURES else ()) for name in DOCUMENTS]
)
def test_commands_of_a_document_run_in_order(name: str, tmp_path: Path, cache: Path, detector_trace: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    prepare_folder(tmp_path, name, text, detector_trace)
    problems, passed_over = [], []
    for pasted in commands_in(text):
        reason = why_not(name, pasted)
        if reason is not None:
            passed_over.append(f"line {pasted.line}: {reason}")
        elif problem := run_pasted(pasted, tmp_path, cache):
            problems.append(problem)
    assert not problems, "\n\n".join(problems)
    if len(passed_over) == len(commands_in(text)):
        pytest.skip("; ".join(passed_over))


def test_first_readme_commands_run(tmp_path: Path, cache: Path, detector_trace: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prepare_folder(tmp_path, "README.md", text, detector_trace)
    commands = [pasted for pasted in commands_in(text) if pasted.command.startswith("opcapture -o")]
    assert commands
    assert [run_pasted(pasted, tmp_path, cache) for pasted in commands] == [""] * len(commands)


DOCUMENT = ROOT / "docs" / "coming-from.md"
GRAPH = """import torch


class GraphModule(torch.nn.Module):
    def forward(self, L_x_: torch.Tensor):
        return (torch.nn.functional.relu(L_x_),)
"""
SPAN = re.compile(r"`([^`]+)`")


def _commands() -> list[Pasted]:
    commands = []
    for number, line in enumerate(DOCUMENT.read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells[1] not in {"here", "---"}:
            spans = SPAN.findall(cells[1])
            commands += [Pasted(number, text) for text in spans if text.partition(" ")[0] in PROGRAMS]
    return commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coming-from")

    def run(*words: str) -> None:
        run_command(*words, cwd=path).check_returncode()

    (path / "train.py").write_text(TRAIN, encoding="utf-8")
    run("opcapture", "-o", "script.jsonl", "--", "train.py")
    trace = load(path / "script.jsonl")
    write_as("tritonbench", trace, path / "inputs.txt")
    write_as("execution_trace", trace, path / "et.json")
    write_as("backendbench", trace, path / "ops.parquet")
    columns = "id,source_neural_network,num_of_calls,parameters"
    parameters = "{'condition': [[8, 4]], 'tensor1': [[8, 4]], 'tensor2': [[8, 4]]}"
    (path / "where.csv").write_text(f'{columns}\n#0,yolact_r50_8x8_coco,12,"{parameters}"\n')
    for table in ("abs.json", "relu.json"):
        (path / table).write_text(json.dumps({"input_size": [[2, 3], [16, 8]]}), encoding="utf-8")
    tensors = [{"type": "tensor", "dtype": "float", "shape": [8, size]} for size in range(1, 6)]
    config = {"torch.add": {"config": [{"input": [{"args": [tensor, tensor], "kwargs": {}} for tensor in tensors]}]}}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run("opgrip", "trace", "convert", "script.jsonl", "dataset", "--to", "flashinfer")
    (path / "graph").mkdir()
    (path / "graph" / "model.py").write_text(GRAPH)
    (path / "graph" / "weight_meta.py").write_text(
        'class Program_weight_tensor_meta_L_x_:\n    name = "L_x_"\n    shape = [2, 3]\n'
        '    dtype = "torch.float32"\n    device = "cpu"\n    mean = 0.0\n    std = 1.0\n    data = None\n'
    )
    for name in ("aiter", "tritonparse", "flashinfer"):
        BUILDERS[name](path)
    for name in ("results.json", "again.json"):
        run("opreplay", "script.jsonl", "--iterations", "3", "--top", "3", "-o", name)
    return path


def test_commands_of_documents_have_existing_options() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    commands = [*_commands(), *(pasted for text in texts for pasted in commands_in(text))]
    assert [pasted.command for pasted in commands if not has_valid_options(pasted)] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", _commands(), ids=lambda pasted: str(pasted.line))
def test_each_pasted_command_works(command: Pasted, folder: Path, tmp_path: Path) -> None:
    reason = why_not("docs/coming-from.md", command)
    if reason is not None:
        pytest.skip(reason)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    problem = run_pasted(command, tmp_path, tmp_path / "cache")
    assert not problem, problem
    if "--backward" in command.command:
        store = Store(tmp_path / ".runs")
        rows = [row for row in store.runs()[-1].load() if row.direction == "backward"]
        assert any(row.status == "ok" for row in rows), [row.error for row in rows]


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()[:10]
OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?:tmp|home|root|work|usr|opt|var|Users)/")


def outputs_of(notebook: dict[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    return [
        (cell["id"], output["output_type"], {kind: "".join(data) for kind, data in output.get("data", {}).items()})
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
    ]


def pictures_in(notebook: dict[str, Any]) -> list[str]:
    return [
        cell
        for cell, _, data in outputs_of(notebook)
        if data.get("image/png", "").startswith(PNG) or f"data:image/png;base64,{PNG}" in data.get("text/html", "")
    ]


def check(notebook: dict[str, Any]) -> None:
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in codes)
    # neither errors nor anything printed, such as warnings
    assert {kind for _, kind, _ in outputs_of(notebook)} == {"execute_result"}
    assert len(pictures_in(notebook)) >= 6
    for cell, _, data in outputs_of(notebook):
        output = " ".join(text for kind, text in data.items() if not kind.startswith("image/"))
        assert OF_A_MACHINE.findall(re.sub(r"base64,[\w+/=]*", "", output)) == [], cell


def test_shipped_notebook_has_run_and_shows_its_plots() -> None:
    check(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert NOTEBOOK.stat().st_size < 600_000


@pytest.mark.slow
@needs("nbclient", "nbformat", "ipykernel")
def test_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    run_python(ROOT / "docs" / "run_notebook.py", tmp_path / "n.ipynb", fresh=True, status=0)
    shipped, notebook = (json.loads(path.read_text(encoding="utf-8")) for path in (NOTEBOOK, tmp_path / "n.ipynb"))
    check(notebook)
    assert pictures_in(notebook) == pictures_in(shipped)
    for name in ("cell_type", "id", "source"):
        assert [cell[name] for cell in notebook["cells"]] == [cell[name] for cell in shipped["cells"]]


# addresses of what a browser loads to show a page
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?((?:https?:)?//[^\s\">]+)|<link\b[^>]*\bhref=\"?((?:https?:)?//[^\s\">]+)"
)


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    documents = [path.name for path in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"))]
    assert sorted(pages) == sorted("index.md" if name == "README.md" else name for name in documents)
    parts = re.findall(r"^  - (.+):$", navigation, re.MULTILINE)
    assert parts == ["Tutorials", "How-to guides", "Reference", "Explanation"]


@pytest.mark.slow
@needs("mkdocs", "material", "mkdocstrings")
def test_site_builds_without_warnings_and_external_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    done = run_python("-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", tmp_path, fresh=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert "records the operator calls" in pages["index.html"]
    assert 'href="modes.html"' in pages["index.html"]
    for name in (
        "capture.Capture",
        "replay.replay",
        "replay.Results",
        "replay.benchmark",
        "traces.load",
        "traces.Trace",
    ):
        assert f'id="opgrip.{name}"' in pages["python-api.html"]
    assert {name: found for name, page in pages.items() if (found := LOADED.findall(page))} == {}
    # files outside docs/ that pages link to
    for target in set(re.findall(r'href="?(repository/[^\s">#]+)', "".join(pages.values()))):
        assert os.path.getsize(tmp_path / target) > 0
    assert (tmp_path / "repository/traces/schema.json").read_bytes() == (ROOT / "traces/schema.json").read_bytes()
