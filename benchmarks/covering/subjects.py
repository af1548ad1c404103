"""List the models to try: a config of each folder of mmdet and mmseg, each architecture of transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

LIBRARIES = ("mmdet", "mmseg", "transformers")
RUNS = ("predict", "train")
CONFIGS = 4  # configs to try per folder: the next one if a model does not run natively
# image settings: the next one if a model does not run natively
SETTINGS = (
    {"size": "160x160"},
    {"size": "320x320"},
    # batch normalization needs more than one value per channel
    {"size": "320x320", "batch_size": 2},
    # the config's own size: position weights match it
    {"size": ""},
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in one run.

    name : folder of the model's config, or its architecture
    models : values of `opcapture --model`, tried in turn
    cfg_options : settings of `opcapture --cfg-options`
    settings : sizes and batch sizes of the inputs, tried in turn
    """

    library: str
    name: str
    models: tuple[str, ...]
    run: str
    cfg_options: tuple[str, ...] = ()
    settings: tuple[dict[str, Any], ...] = SETTINGS

    @property
    def key(self) -> str:
        """Return the key of the subject's result in the file of outcomes."""
        return f"{self.library}/{self.name} {self.run}"

    def attempts(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each trial: each model with each of the settings."""
        for model, settings in product(self.models, self.settings):
            yield {"model": model, "run": self.run, "cfg_options": self.cfg_options, **settings}


def subjects(libraries: tuple[str, ...]) -> Iterator[Subject]:
    """Yield all models of the given libraries, each once for every kind of run in `RUNS`."""
    for library in libraries:
        find = _architectures if library == "transformers" else _configs
        for subject in find(library):
            for run in RUNS:
                yield Subject(library, *subject[:2], run, *subject[2:])


def _configs(library: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each folder of configs in a library, and some of its configs, the simplest first."""
    package = importlib.util.find_spec(library)
    if package is None or package.origin is None:
        return
    for folder in sorted((Path(package.origin).parent / ".mim" / "configs").iterdir()):
        configs = [path for path in folder.rglob("*.py") if "_base_" not in str(path)]
        if folder.name != "_base_" and configs:
            ranked = sorted(configs, key=_cost)
            of_models = islice(filter(_has_model, ranked), CONFIGS)
            yield folder.name, tuple(map(str, of_models)) or (str(ranked[0]),)


def _has_model(path: Path) -> bool:
    """Return True if a config defines a model, and is not a part of other configs."""
    from mmengine.config import Config

    try:
        return "model" in Config.fromfile(path)
    except Exception:
        # it needs a package that is missing: the trial reports that
        return True


def _cost(path: Path) -> tuple[bool, bool, int, str]:
    """Return a sort key: base configs and small ones come first."""
    return "r50" not in path.name, "1x" not in path.name, len(path.name), path.name


def _architectures(library: str) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...], tuple[dict[str, Any], ...]]]:
    if importlib.util.find_spec(library) is None:
        return
    from opgrip.capture.models.transformers import architectures

    for name in architectures():
        yield name, (f"transformers:{name}",), ("small",), ({"size": ""},)
