"""Made-up inputs for OpenMMLab models: random images, with random annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from opgrip.capture.models.program import ModelOptions
from opgrip.errors import UserError

BATCH_SIZE = 1
FRAMES = 2
"""Of a video."""
LEAST_CLASSES = 2
"""Of labels that mmdet can make up: it leaves out the first class."""
DETECTION_SIZE = (800, 1333)
SEGMENTATION_SIZE = (512, 1024)


def make_inputs(model: Any, config: Any, scope: str, options: ModelOptions) -> dict[str, Any]:
    """What a data loader would hand to `test_step` and `train_step`.

    Parameters
    ----------
    model : what they are for; a segmentor in training is told that their size is the one to pad to
    scope : the package that the model is of
    options : `batch_size`, else 1; `input_size`, else the size that the config's test pipeline resizes to

    Raises
    ------
    UserError : for a package whose inputs are not known here
    """
    maker = _MAKERS.get(scope)
    if maker is None:
        supported_scopes = ", ".join(sorted(_MAKERS))
        raise UserError(
            f"no inputs are known for models of {scope}", f"use a factory, or a config of {supported_scopes}"
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
    """Videos of a few frames for trackers; in training the first is the one that others are held against."""
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
    """Whether a detector is trained on masks; also where its config does not say how annotations are loaded."""
    loads = [*_annotation_loads(config.get("train_pipeline")), *_annotation_loads(config.get("train_dataloader"))]
    # what loads panoptic annotations loads their masks where it is not told otherwise
    return not loads or any(load.get("with_mask", "Panoptic" in str(load["type"])) for load in loads)


def _annotation_loads(settings: Any) -> Iterator[Any]:
    """The steps of pipelines that load annotations."""
    if isinstance(settings, dict):
        if str(settings.get("type")).endswith("Annotations") and "Load" in str(settings["type"]):
            yield settings
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _annotation_loads(value)


def _segmentation(model: Any, config: Any, options: ModelOptions) -> dict[str, Any]:
    import torch
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


def _numbers_of_classes(settings: Any) -> Iterator[int]:
    if isinstance(settings, dict):
        if isinstance(settings.get("num_classes"), int):
            yield settings["num_classes"]
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _numbers_of_classes(value)


_MAKERS: dict[str, Callable[[Any, Any, ModelOptions], dict[str, Any]]] = {
    "mmdet": _detection,
    "mmseg": _segmentation,
}
