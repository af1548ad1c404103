"""Tests with whole OpenMMLab models: their calls are in the trace, and their results are unchanged."""

import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openmmlab_models import BACKBONE, DEFORMABLE_DETR, FASTER_RCNN, MASK_RCNN, NARROW, RETINANET
from optional import needs
from programs import flat_tensors, refusal, succeed
from settings import rows_of, settings_of
from versions import Counting

from opgrip.capture import Capture
from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.results.results import OK, UNSUPPORTED
from opgrip.traces import Trace, load

MODELS = {
    "one-stage": RETINANET,
    "transformer": DEFORMABLE_DETR,
    "instance segmentation": MASK_RCNN,
}
SIZE = (160, 160)
EXTENSIONS = {
    ("transformer", "train"): set(),
    ("instance segmentation", "predict"): {"mmcv._ext:nms", "mmcv._ext:roi_align_forward"},
    ("one-stage", "train"): set(),
}
# argument that a trace cannot hold: the handle of a profiler's range
UNREPLAYABLE = {"profiler._RecordFunction"}

pytestmark = [needs("mmdet"), pytest.mark.slow]


@dataclass
class Run:
    kind: str
    run: str
    plain: list[torch.Tensor]
    captured: list[torch.Tensor]
    counts: Counter[str]
    trace: Trace


def one_step(kind: str, run: str, watch: Any) -> list[torch.Tensor]:
    """Build the model, run a step inside `watch`, and return outputs, parameters, gradients and RNG state."""
    options = ModelOptions(run=run, input_size=SIZE, cfg_options=NARROW[MODELS[kind]])
    torch.manual_seed(0)
    program = load_program(MODELS[kind], options)
    inputs = program.inputs()
    torch.manual_seed(1)
    with watch(program.model):
        outputs = program.step(inputs)
    found = list(flat_tensors(outputs))
    for parameter in program.model.parameters():
        found += [parameter.detach(), *([parameter.grad] if parameter.grad is not None else [])]
    return [*(tensor.detach().clone() for tensor in found), torch.get_rng_state()]


@pytest.fixture(scope="module", params=EXTENSIONS, ids=lambda param: " ".join(param))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    kind, mode = request.param
    path = tmp_path_factory.mktemp("openmmlab") / "t.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from contextlib import nullcontext

        counting = Counting()
        plain = one_step(kind, mode, lambda model: nullcontext())
        one_step(kind, mode, lambda model: counting)
        captured = one_step(kind, mode, lambda model: Capture(path, model=model))
    return Run(kind, mode, plain, captured, counting.counts, load(path, partial=False))


def test_outputs_gradients_parameters_and_random_numbers_are_identical(run: Run) -> None:
    assert len(run.plain) == len(run.captured)
    assert all(
        before.dtype == after.dtype and torch.equal(before, after)
        for before, after in zip(run.plain, run.captured, strict=True)
    )


def test_extension_functions_are_recorded_with_their_inner_calls(run: Run) -> None:
    calls = run.trace.calls
    functions = {op for op in calls["op"].unique() if op.startswith("mmcv.")}
    assert functions == EXTENSIONS[run.kind, run.run]
    inside = calls[calls["inside"].notna()]
    assert set(inside["inside"].unique()) <= functions
    for row in inside.itertuples():
        around = calls[
            (calls["op"] == row.inside)
            & (calls["start_ns"] <= row.start_ns)
            & (calls["start_ns"] + calls["duration_ns"] >= row.start_ns + row.duration_ns)
        ]
        assert len(around) == 1


def test_every_signature_replays_or_has_a_correct_reason(run: Run) -> None:
    settings = settings_of(warmup=0, iterations=1)
    for result in rows_of(make_cases(run.trace), settings):
        if result.status == UNSUPPORTED:
            assert result.error is not None
            assert any(result.error.endswith(name) for name in UNREPLAYABLE), result
        else:
            assert (result.status, result.error) == (OK, None), result


def test_opcapture_records_what_the_model_runs(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    options = ("--warmup", "1", "--steps", "1", "--cfg-options", *NARROW[FASTER_RCNN])
    done = succeed("opcapture", "--model", FASTER_RCNN, "--input-size", "160x160", "-o", path, *options)
    assert done.stdout == ""
    torch.manual_seed(0)
    program = load_program(FASTER_RCNN, ModelOptions(input_size=SIZE, cfg_options=NARROW[FASTER_RCNN]))
    inputs = [program.inputs(), program.inputs()]
    program.step(inputs.pop())
    (last,) = inputs
    with Counting() as counting:
        program.step(last)
    calls = load(path).calls
    operators = Counter(calls["op"].astype(str))
    functions = {op: count for op, count in operators.items() if op.startswith("mmcv.")}
    assert functions == {"mmcv._ext:nms": 2, "mmcv._ext:roi_align_forward": functions["mmcv._ext:roi_align_forward"]}
    assert Counter({op: count for op, count in operators.items() if op not in functions}) == counting.counts


def test_segmentation_model_is_captured_in_training(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    step = ("--run", "train", "--input-size", "64", "--batch-size", 2)
    narrow = (BACKBONE, "model.decode_head.in_channels=256", "model.auxiliary_head.in_channels=128")
    config = "fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py"
    succeed("opcapture", "--model", config, *step, "-o", path, "--cfg-options", *narrow)
    trace = load(path, partial=False)
    assert set(trace.calls["phase"]) == {"forward", "backward", "optimizer"}
    assert trace.header["model"]["class"] == "EncoderDecoder"


@pytest.mark.parametrize(
    ("config", "size", "options"),
    [
        # its assigner mistakes masks for tensors
        ("rtmdet_tiny_8xb32-300e_coco.py", 160, ()),
        # its assigner depends on the epoch, and the batch size on the iteration
        ("tood_r50_fpn_1x_coco.py", 160, (BACKBONE, "model.neck.in_channels=[32,64,128,256]")),
        # its inputs are videos
        ("qdtrack_faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval.py", 128, ()),
    ],
)
def test_model_with_additional_training_inputs_trains(config: str, size: int, options: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    settings = ModelOptions(run="train", batch_size=2, input_size=(size, size), cfg_options=options)
    program = load_program(config, settings)
    losses = program.step(program.inputs())
    assert all(torch.isfinite(torch.as_tensor(loss)).all() for loss in losses.values())


@pytest.mark.parametrize(("config", "has_masks"), [(FASTER_RCNN, False), (MASK_RCNN, True)])
def test_annotations_have_masks_if_the_config_loads_them(config: str, has_masks: bool) -> None:
    program = load_program(config, ModelOptions(run="train", input_size=SIZE, cfg_options=(BACKBONE,)))
    (sample,) = program.inputs()["data_samples"]
    assert ("masks" in sample.gt_instances) is has_masks


def test_checkpoint_named_in_a_config_is_never_downloaded() -> None:
    # `init_cfg=dict(checkpoint=...)`, without a type
    program = load_program("retinanet_pvtv2-b0_fpn_1x_coco.py", ModelOptions(input_size=(64, 64)))
    assert program.step(program.inputs())


def test_cfg_options_override_the_config(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    succeed(
        *("opcapture", "--model", MODELS["one-stage"], "--input-size", "64", "-o", path),
        *("--cfg-options", "model.test_cfg.nms_pre=7", "model.test_cfg.score_thr=0"),
    )
    topk = [signature for signature in load(path).signatures if signature.op.startswith("aten.sort")]
    assert topk
    assert load(path).header["model"]["cfg_options"] == ["model.test_cfg.nms_pre=7", "model.test_cfg.score_thr=0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("model = (", "is not an OpenMMLab config"), ("x = 1\n", "is not a config of a model")],
)
def test_file_that_is_not_a_config_is_reported_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.py").write_text(content, encoding="utf-8")
    error = refusal("opcapture", "--model", "config.py", cwd=tmp_path)
    assert message in error.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [tmp_path / "config.py"]
