"""The models that are tried: one config of each folder of mmdet and mmseg, each architecture of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("mmdet", "mmseg", "transformers")
RUNS = ("predict", "train")
SIZES = ("160x160", "320x320")
"""Of images: the next one, where a model does not run with the one before."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in one run.

    Attributes
    ----------
    name : the folder of its config, or its architecture
    model : as `opcapture --model` takes it
    cfg_options : as `opcapture` takes them
    sizes : of images, tried in turn; empty where the model has its own
    """

    library: str
    name: str
    model: str
    run: str
    cfg_options: tuple[str, ...] = ()
    sizes: tuple[str, ...] = SIZES

    @property
    def key(self) -> str:
        """What its result is found by."""
        return f"{self.library}/{self.name} {self.run}"


def subjects(libraries: tuple[str, ...]) -> Iterator[Subject]:
    """All models of some libraries, each in each run."""
    for library in libraries:
        find = _architectures if library == "transformers" else _configs
        for subject in find(library):
            for run in RUNS:
                yield Subject(library, *subject[:2], run, *subject[2:])


def _configs(library: str) -> Iterator[tuple[str, str]]:
    """One config of each folder."""
    package = importlib.util.find_spec(library)
    if package is None or package.origin is None:
        return
    for folder in sorted((Path(package.origin).parent / ".mim" / "configs").iterdir()):
        configs = [path for path in folder.rglob("*.py") if "_base_" not in str(path)]
        if folder.name != "_base_" and configs:
            ranked = sorted(configs, key=_cost)
            yield folder.name, str(next(filter(_has_model, ranked), ranked[0]))


def _has_model(path: Path) -> bool:
    """Whether a config is one of a model, and not a part of others that lies beside them."""
    from mmengine.config import Config

    try:
        return "model" in Config.fromfile(path)
    except Exception:
        # it asks for a package that is not there: the trial says so
        return True


def _cost(path: Path) -> tuple[bool, bool, int, str]:
    """Those that others are made of, and small ones, come first."""
    return "r50" not in path.name, "1x" not in path.name, len(path.name), path.name


def _architectures(library: str) -> Iterator[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    if importlib.util.find_spec(library) is None:
        return
    from opgrip.capture.models.transformers_configs import architectures

    for name in architectures():
        yield name, f"transformers:{name}", ("small",), ()
