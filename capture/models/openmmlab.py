"""Models from OpenMMLab configs (paths, or names of configs in installed packages), and random inputs for them."""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.capture.models.program import ModelProgram, load_weights
from opgrip.capture.models.sources import PREFIX, ModelOptions, builtin_models
from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError
from opgrip.platform.machine import check_device

BATCH_SIZE = 1
FRAMES = 2  # number of frames in a generated video
LEAST_CLASSES = 2  # minimum number of classes for which mmdet can generate labels, because it leaves out the first
DETECTION_SIZE = (800, 1333)
SEGMENTATION_SIZE = (512, 1024)


def make_inputs(model: Any, config: Any, scope: str, options: ModelOptions) -> dict[str, Any]:
    maker = _MAKERS.get(scope)
    if maker is None:
        supported_scopes = ", ".join(sorted(_MAKERS))
        raise UserError(
            f"inputs for models of {scope} cannot be generated",
            "give your own function that returns the model and its inputs (--model file.py:function), or use a config "
            f"of {supported_scopes}",
        )
    return maker(model, config, options)


def _detection(model: Any, config: Any, options: ModelOptions) -> dict[str, Any]:
    from mmdet.testing import demo_mm_inputs

    height, width = options.input_size or _resized_to(config) or DETECTION_SIZE
    classes = min(_numbers_of_classes(config.model), default=10)
    if type(model.data_preprocessor).__name__ == "TrackDataPreprocessor":
        return _videos(config, options, (3, height, width), classes)
    inputs: dict[str, Any] = demo_mm_inputs(
        batch_size=options.batch_size or BATCH_SIZE,
        image_shapes=[(3, height, width)] * (options.batch_size or BATCH_SIZE),
        num_classes=max(classes, LEAST_CLASSES),
        with_mask=_trains_on_masks(config),
        with_semantic="semantic_head" in config.model or "semantic_head" in config.model.get("roi_head", {}),
        device=options.device,
    )
    return inputs if classes >= LEAST_CLASSES else _of_one_class(inputs)


def _of_one_class(inputs: dict[str, Any]) -> dict[str, Any]:
    for sample in inputs["data_samples"]:
        for frame in getattr(sample, "video_data_samples", [sample]):
            frame.gt_instances.labels.zero_()
    return inputs


def _videos(config: Any, options: ModelOptions, shape: tuple[int, int, int], classes: int) -> dict[str, Any]:
    from mmdet.testing import demo_track_inputs

    batch_size = options.batch_size or BATCH_SIZE
    inputs: dict[str, Any] = demo_track_inputs(
        batch_size=batch_size,
        num_frames=FRAMES,
        key_frames_inds=None if options.run == "predict" else [0],
        image_shapes=[shape] * batch_size,
        num_classes=max(classes, LEAST_CLASSES),
        with_mask=_trains_on_masks(config),
    )
    return inputs if classes >= LEAST_CLASSES else _of_one_class(inputs)


def _trains_on_masks(config: Any) -> bool:
    steps = _dicts_in([config.get("train_pipeline"), config.get("train_dataloader")])
    loads = [step for step in steps if re.search("Load.*Annotations$", str(step.get("type")))]
    # loaders of panoptic annotations load masks by default
    return not loads or any(load.get("with_mask", "Panoptic" in str(load["type"])) for load in loads)


def _dicts_in(settings: Any) -> Iterator[dict[str, Any]]:
    if isinstance(settings, dict):
        yield settings
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _dicts_in(value)


def _segmentation(model: Any, config: Any, options: ModelOptions) -> dict[str, Any]:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    size = options.input_size or (None if options.run == "predict" else config.get("crop_size"))
    height, width = size or _resized_to(config) or SEGMENTATION_SIZE
    classes = min(_numbers_of_classes(config.model), default=2)
    shape = (height, width)
    inputs, samples = [], []
    for _ in range(options.batch_size or BATCH_SIZE):
        labels = torch.randint(0, classes, (1, height, width), device=options.device)
        meta = {"img_shape": shape, "ori_shape": shape, "pad_shape": shape}
        samples.append(SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=meta))
        inputs.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, device=options.device))
    if options.run != "predict":
        model.data_preprocessor.size = shape
    return {"inputs": inputs, "data_samples": samples}


def _resized_to(config: Any) -> tuple[int, int] | None:
    for step in config.get("test_pipeline") or ():
        scale = step.get("scale")
        if step.get("type") == "Resize" and isinstance(scale, tuple | list) and len(scale) == 2:
            # scales are (long, short) or (width, height)
            return min(scale), max(scale)
    return None


def _numbers_of_classes(settings: Any) -> list[int]:
    return [item["num_classes"] for item in _dicts_in(settings) if isinstance(item.get("num_classes"), int)]


_MAKERS: dict[str, Callable[[Any, Any, ModelOptions], dict[str, Any]]] = {"mmdet": _detection, "mmseg": _segmentation}


SUFFIXES = (".py", ".yaml", ".yml", ".json")
INSTALL = (
    "run `make openmmlab` in a checkout of opgrip, or `MMCV_WITH_OPS=1 pip install --no-build-isolation mmengine mmcv`"
    " and `pip install --no-deps mmdet mmsegmentation`"
)


def load_config_model(text: str, options: ModelOptions) -> ModelProgram:
    """Build the program of the model in an OpenMMLab config, without downloading weights."""
    if not text.endswith(SUFFIXES) and not Path(text).is_file():
        raise _no_model(text)
    path = find_config(text)
    if path.suffix == ".py" and not _may_be_config(path):
        raise _no_config(path)
    _need("mmengine", text)
    config = _read_config(path, options.cfg_options)
    scope = str(config.get("default_scope") or "mmdet")
    _need(scope, text)
    device = check_device(options.device)
    model = _build(config, scope, path)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.to(device)
    inputs = make_inputs(model, config, scope, options)
    return ModelProgram(
        name=path.stem,
        model=model,
        inputs=lambda: copy.deepcopy(inputs),
        step=_step(model, config, options.run),
        details={
            "source": text,
            "class": type(model).__name__,
            "cfg_options": list(options.cfg_options),
            "packages": {
                name: str(getattr(importlib.import_module(name), "__version__", "unknown"))
                for name in ("mmengine", "mmcv", scope)
            },
        },
    )


def find_config(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    if path.name != text:
        raise UserError(f"no config {text}", "give the path of a file, or a bare file name to look up")
    configs = list(_carried_configs())
    if not configs:
        raise UserError(
            f"no config {text} here, and no installed package contains configs", f"to get those of mmdet: {INSTALL}"
        )
    matching_configs = [config for config in configs if config.name == text]
    if len(matching_configs) == 1:
        return matching_configs[0]
    if matching_configs:
        raise UserError(
            f"{len(matching_configs)} configs are named {text}", "give a path: " + ", ".join(map(str, matching_configs))
        )
    hint = did_you_mean(text, {config.name for config in configs}, "give the path of a file")
    raise UserError(f"no config {text} here or among the {len(configs)} configs of the installed packages", hint)


def _no_model(text: str) -> UserError:
    if text == "opinfo":
        return UserError(f"no model {text!r}", "opinfo:all runs all operators, opinfo:unary those of one category")
    if Path(f"{text}.py").is_file():
        return UserError(f"no model {text!r}", f"for a config, name the file {text}.py; for a factory, {text}.py:NAME")
    configs = {path.name for path in _carried_configs()}
    if f"{text}.py" in configs:
        return UserError(f"no model {text!r}", f"did you mean {text}.py?")
    otherwise = "name a config, which ends in .py, or builtin:NAME, or package.module:factory"
    near = did_you_mean(text, builtin_models(), form=f"{PREFIX}{{}}")
    return UserError(f"no model {text!r}", near or did_you_mean(text, configs, otherwise))


def _no_config(path: Path) -> UserError:
    hint = (
        f"it does not set `model`; run a script with: opcapture -- {path}; use a factory in it with: "
        f"--model {path}:NAME"
    )
    return UserError(f"{path} is not a config of a model", hint)


def _may_be_config(path: Path) -> bool:
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    targets = [target for item in body if isinstance(item, ast.Assign) for target in item.targets]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    # `with read_base():` imports from other configs
    return bool(names & {"model", "_base_"}) or any(isinstance(item, ast.With | ast.AnnAssign) for item in body)


def _carried_configs() -> Iterator[Path]:
    # OpenMMLab's packages ship them in `.mim/configs`
    for folder in dict.fromkeys(sys.path):
        for configs in sorted(Path(folder or ".").glob("*/.mim/configs")):
            yield from sorted(configs.rglob("*.py"))


def _read_config(path: Path, cfg_options: tuple[str, ...]) -> Any:
    from mmengine.config import Config, DictAction

    try:
        config = Config.fromfile(path)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not an OpenMMLab config", f"{type(error).__name__}: {reason}") from error
    if not isinstance(config.get("model"), dict):
        raise _no_config(path)
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    try:
        parsed = parser.parse_args(["--cfg-options", *cfg_options]).cfg_options if cfg_options else {}
        config.merge_from_dict(parsed)
    except (ValueError, KeyError, TypeError, AssertionError, IndexError) as error:
        raise UserError(
            f"--cfg-options cannot be applied to {path.name} ({error})", "write them as key=value"
        ) from error
    return config


def _build(config: Any, scope: str, path: Path) -> nn.Module:
    importlib.import_module(f"{scope}.utils").register_all_modules(init_default_scope=True)
    from mmengine.logging import MMLogger
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import MODELS

    # otherwise mmengine lists how every weight was initialized
    MMLogger.get_current_instance().setLevel("WARNING")
    settings = copy.deepcopy(config.model)
    for item in list(_dicts_in(settings)):
        for name in ("init_cfg", "pretrained"):
            if _names_a_checkpoint(item.get(name)):
                item[name] = None
    try:
        model: nn.Module = MODELS.build(settings)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path.name} cannot be built", f"{type(error).__name__}: {reason}") from error
    model.init_weights()  # type: ignore[operator]
    # synchronized batch norm requires a process group
    return revert_sync_batchnorm(model)  # type: ignore[no-any-return]


def _names_a_checkpoint(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("type") == "Pretrained" or "checkpoint" in value
    return isinstance(value, str)


def _step(model: Any, config: Any, run: str) -> Callable[[Any], Any]:
    if run == "predict":
        model.eval()
        return torch.no_grad()(model.test_step)  # type: ignore[no-any-return]
    model.train()
    from mmengine.logging import MessageHub
    from mmengine.optim import build_optim_wrapper

    # as mmengine's loops do; some label assigners and random resizes of a batch read them
    for name in ("epoch", "iter"):
        MessageHub.get_current_instance().update_info(name, 0)
    if run == "loss":

        def loss(inputs: Any) -> Any:
            data = model.data_preprocessor(inputs, True)
            return model.parse_losses(model(**data, mode="loss"))

        return loss

    settings = config.get("optim_wrapper") or {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.01}}
    optimizer = build_optim_wrapper(model, settings)
    return lambda inputs: model.train_step(inputs, optimizer)


def _need(package: str, text: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise UserError(f"{text} needs {package}, and {missing} is not installed", INSTALL) from error
