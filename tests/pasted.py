"""Commands as documents show them, and the files that they speak of."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from programs import ROOT

PROGRAMS = ("opcapture", "opreplay", "opgrip", "pytest", "torchrun")
CONFIG = re.compile(r"[\w.-]+_coco\.py\b")
"""A config that mmdet carries."""
STAND_IN = "builtin:faster_rcnn"
FORM = re.compile(r"\[|\bSOURCE\b|\bPATTERN\b")
"""What a line has that tells how a command is written."""
SMALL = {"opcapture": "--input-size 96 --batch-size 1", "opreplay": "--iterations 1 --warmup 0 --top 2"}
"""What is added to commands whose output is not shown, so that they do not take long; what they say themselves counts."""
VOLATILE = re.compile(r"\d[\d,.]*(?= (?:ms|us|s|kB|MB|GB)\b)")
MODULES_OF_MODES = {
    "onnxruntime": "onnxruntime",
    "tvm": "tvm",
    "xla": "torchax",
    "jax": "jax",
    "tensorflow": "tensorflow",
}

TRAIN = """
import sys
import torch


def bbox2delta(proposals, gt):
    return (gt - proposals) / (proposals[:, 2:] - proposals[:, :2]).repeat(1, 2)


layer = torch.nn.Linear(4, 2)
boxes = torch.rand(3, 4) + torch.tensor([0.0, 0.0, 2.0, 2.0])
layer(bbox2delta(boxes, boxes + 1)).sum().backward()
"""
OWN_FILES = {
    "train.py": TRAIN,
    "my_package/__init__.py": "",
    "my_package/models.py": """
import torch


def small_unet(batch_size: int = 2):
    return torch.nn.Conv2d(3, 4, 3), torch.rand(batch_size, 3, 16, 16)
""",
}
"""What documents take as a user's own, without showing it."""


@dataclass(frozen=True, slots=True)
class Pasted:
    """A command of a document.

    Attributes
    ----------
    line : its number in the document
    command : as a shell takes it
    shown : the lines that it prints, as far as the document shows them; a line `...` stands for any
    """

    line: int
    command: str
    shown: list[str] = field(default_factory=list)


def commands_in(text: str) -> list[Pasted]:
    """The commands of a document in their order: lines of indented blocks that begin with `$` or a program's name."""
    commands: list[Pasted] = []
    for first, block in _blocks(text):
        is_output = False
        for number, line in enumerate(block, first):
            words = line.removeprefix("$ ").split()
            if line.startswith("$ ") or (not is_output and words and Path(words[0]).name in PROGRAMS):
                is_output = line.startswith("$ ")
                if not FORM.search(line.partition(" #")[0]):
                    commands.append(Pasted(number, line.removeprefix("$ ").replace(".venv/bin/", "")))
            elif is_output and commands and (line or commands[-1].shown):
                commands[-1].shown.append(line)
    return commands


def files_in(text: str) -> dict[str, str]:
    """The files that a document shows: blocks of code that begin with a comment of their name."""
    files = {}
    for _, block in _blocks(text):
        named = re.fullmatch(r"# (\w+\.py)", block[0])
        if named is not None:
            code = [line for line in block[1:]]
            end = next((place for place, line in enumerate(code) if line.startswith("$ ")), len(code))
            files[named[1]] = "\n".join(code[:end]) + "\n"
    return files


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """The indented blocks of a document: the number of the first line, and the lines."""
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


def prepare_folder(folder: Path, text: str) -> None:
    """Let a folder hold what a document's commands name."""
    (folder / "traces").symlink_to(ROOT / "traces")
    for name, content in (OWN_FILES | files_in(text)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def why_not(pasted: Pasted) -> str | None:
    """Why a command cannot run here; None where it can."""
    words = shlex.split(pasted.command, comments=True)
    options = dict(zip(words, [*words[1:], ""], strict=True))
    if any(word.startswith("mmdet.") for word in words) and find_spec("mmdet") is None:
        return "mmdet is not installed: make openmmlab"
    if any(value.startswith("cuda") for value in options.values()) and not torch.cuda.is_available():
        return "there is no GPU"
    for program in ("nsys", "ncu"):
        if f"--{program}" in options and shutil.which(program) is None:
            return f"{program} is not installed"
    lacking = [mode for mode in options.get("--mode", "").split(",") if _is_lacking(mode)]
    return f"{', '.join(lacking)} cannot run here: make runtimes" if lacking else None


def _is_lacking(mode: str) -> bool:
    return mode in MODULES_OF_MODES and find_spec(MODULES_OF_MODES[mode]) is None


def in_small(pasted: Pasted) -> str:
    """A command as it is run: quickly where nothing is compared, on a stand-in for configs that are not installed."""
    command = re.sub(r"\bTRACE\b", "traces/faster_rcnn.jsonl", pasted.command)
    if find_spec("mmdet") is None:
        command = CONFIG.sub(STAND_IN, command)
        command = re.sub(r"--cfg-options \S+", "", command)
    name, _, rest = command.partition(" ")
    small = "" if pasted.shown else SMALL.get(name, "")
    if name == "opcapture" and ("--model" not in rest or "nets.py" in rest or " -- " in rest):
        small = ""
    if "--sequence" in rest:
        small = "--iterations 1"
    return f"{name} {small} {rest}"


def compare(shown: list[str], printed: list[str]) -> str:
    """Where what is shown is not what is printed; empty where it is, numbers with units aside."""
    shown, printed = ([VOLATILE.sub("N", line.rstrip()) for line in lines] for lines in (shown, printed))
    expected = [line for line in shown if line]
    actual = [line for line in printed if line]
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
    return "" if any_lines or place == len(actual) or not expected else f"printed, and not shown: {actual[place]}"
