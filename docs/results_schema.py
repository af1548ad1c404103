"""Generate `replay/schema.json`, the JSON Schema of the results that `opreplay -o FILE.json` writes.

Types and descriptions come from the declarations of columns and of the judgement of candidates.

    python docs/results_schema.py            # docs/tables.py writes it too
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trace_schema import object_of

from opgrip.replay.reports.cells import all_columns
from opgrip.replay.reports.fidelity import FIDELITY, HERE, Fidelity
from opgrip.replay.results.columns import Column, columns_in
from opgrip.replay.results.judgement import VERSION, MeanSaving, PartSaving, StepSaving
from opgrip.replay.results.results import Result

PATH = Path(__file__).resolve().parents[1] / "replay" / "schema.json"
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array"}
TEXT, FACTS = {"type": "string"}, {"type": "object"}
HEADER: dict[str, tuple[str, dict[str, Any]]] = {
    "trace": ("the trace as the command names it; of several traces, all names", TEXT),
    "trace_hash": ("hash of the trace's content; of several traces, of their hashes", {"type": ["string", "null"]}),
    "traces": ("of several traces: model, run and `trace_hash` of each, by name", FACTS),
    "torch": ("version of torch", TEXT),
    "device": ("device that ran the calls", TEXT),
    "environment": ("machine, processor, settings that affect times, and versions of packages", FACTS),
    "time": ("start of the replay, ISO 8601", TEXT),
    "command": ("command line", TEXT),
    "seed": ("random seed for generated inputs", {"type": "integer"}),
    "options_hash": ("hash of the options that affect rows", TEXT),
    "settings": ("options that differ from their defaults", FACTS),
    HERE: (
        "true if the trace was captured on a machine of the same kind, so that times can be compared",
        {"type": "boolean"},
    ),
    FIDELITY: ("on the machine of the capture: difference between replayed and captured times", object_of(Fidelity)),
    "confirmation": ("with `--confirm`: the saving measured in a replay of the whole step", FACTS),
    "judgement": ("with `--candidate`: what the candidates save", {"$ref": "#/$defs/judgement"}),
    "results": ("one object for each result", {"type": "array", "items": {"$ref": "#/$defs/row"}}),
}
REQUIRED = ("trace", "torch", "device", "results")


def results_schema() -> dict[str, Any]:
    """Return the schema of a results file."""
    columns = {about.name: _cell(about) for about in all_columns()}
    row = {"type": "object", "properties": columns, "required": [about.name for about in columns_in(Result)]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Results of opreplay",
        "type": "object",
        "properties": {name: {"description": about, **form} for name, (about, form) in HEADER.items()},
        "required": list(REQUIRED),
        "$defs": {"row": row, "judgement": _judgement()},
    }


def as_text() -> str:
    """Return the text of the file."""
    return json.dumps(results_schema(), indent=1, ensure_ascii=False) + "\n"


def _cell(about: Column) -> dict[str, Any]:
    unit = "" if about.unit in ("", "1") else f", in {about.unit}"
    kind = {} if about.kind is object else {"type": [TYPES[about.kind], "null"]}
    return {"description": f"{about.meaning}{unit}", **kind}


def _judgement() -> dict[str, Any]:
    step, part = object_of(StepSaving), object_of(PartSaving)
    for name in ("phases", "labels"):
        step["properties"][name]["additionalProperties"] = part
    properties = {
        "version": {"description": "version of this form; fields may be added without a new one", "const": VERSION},
        "mean": {"anyOf": [object_of(MeanSaving), {"type": "null"}]},
        "steps": {"description": "one object for each trace", "type": "array", "items": step},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


if __name__ == "__main__":
    PATH.write_text(as_text(), encoding="utf-8")
