"""Tests of transformers models that are built from their configs, run and captured."""

from pathlib import Path

import pytest
import torch
from optional import needs
from programs import flat_tensors

from opgrip.capture import Capture
from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions
from opgrip.capture.models.transformers import architectures, usual_class
from opgrip.traces import UserError, load

pytestmark = [needs("transformers"), pytest.mark.slow]
SMALL = ("small",)
KINDS = {
    "encoder": "bert",
    "decoder": "llama",
    "encoder-decoder": "t5",
    "mixture of experts": "mixtral",
    "state space": "mamba",
    "vision": "vit",
    "speech": "wav2vec2",
    "image and text": "clip",
}


def options(run: str, **others: object) -> ModelOptions:
    return ModelOptions(run=run, cfg_options=SMALL, batch_size=2, sequence_length=12, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "run"), [("decoder", "predict"), ("encoder-decoder", "loss"), *((kind, "train") for kind in KINDS)]
)
def test_models_of_all_kinds_run(kind: str, run: str) -> None:
    torch.manual_seed(0)
    program = load_program(f"transformers:{KINDS[kind]}", options(run))
    before = [parameter.detach().clone() for parameter in program.model.parameters()]
    outputs = list(flat_tensors(program.step(program.inputs())))
    changed = any(not torch.equal(a, b) for a, b in zip(before, program.model.parameters(), strict=True))
    assert outputs
    assert changed == (run == "train")
    assert all(output.isfinite().all() for output in outputs if output.is_floating_point())


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_text_is_generated_token_by_token(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = load_program(f"transformers:{name}", options("generate", new_tokens=3))
    decoded = []
    program.model.register_forward_hook(lambda *_: decoded.append(1))
    with Capture(tmp_path / "t.jsonl", model=program.model):
        text = program.step(program.inputs())
    assert len(decoded) == 3
    assert text.shape == (2, 4 if name == "t5" else 15)
    trace = load(tmp_path / "t.jsonl")
    assert len(trace.calls) > 100
    assert trace.labels.to_dict() == {"decode": 2, "prefill": 1}


def test_cfg_options_reach_nested_configs() -> None:
    settings = ("small", "text_config.num_hidden_layers=1", "projection_dim=32")
    model = load_program("transformers:CLIPModel", ModelOptions(cfg_options=settings)).model
    assert model.config.text_config.num_hidden_layers == 1
    assert model.config.vision_config.num_hidden_layers == 2
    assert model.config.projection_dim == 32


def test_autocast_applies_only_to_the_model(tmp_path: Path) -> None:
    program = load_program("transformers:bert", options("train", autocast="bfloat16"))
    with Capture(tmp_path / "t.jsonl", model=program.model):
        program.step(program.inputs())
    trace = load(tmp_path / "t.jsonl")
    dtypes = {item.op: item.args[-1].dtype for item in trace.signatures if item.op == "aten.addmm.default"}
    assert {str(dtype) for dtype in dtypes.values()} == {"torch.bfloat16"}
    assert all(parameter.dtype == torch.float32 for parameter in program.model.parameters())
    assert not torch.is_autocast_enabled("cpu")
    assert program.details["autocast"] == "bfloat16"


def test_each_model_type_has_a_default_head() -> None:
    assert {name: usual_class(name) for name in ("bert", "llama", "bart")} == {
        "bert": "BertForMaskedLM",
        "llama": "LlamaForCausalLM",
        "bart": "BartForConditionalGeneration",
    }
    assert len(architectures()) >= 60


@pytest.mark.parametrize(
    ("name", "request_", "problem"),
    [
        ("Bert", {}, "transformers has no model 'Bert'"),
        ("bert", {"run": "generate"}, "BertForMaskedLM cannot generate text"),
        ("bert", {"cfg_options": ("hiden_size=8",)}, "BertConfig has no setting 'hiden_size'"),
        ("bert", {"cfg_options": ("hidden_size=12000000",)}, "GB of memory are free"),
        ("bert", {"new_tokens": 3}, "--new-tokens is for --run generate"),
    ],
)
def test_usage_error_is_reported_in_one_line(name: str, request_: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_program(f"transformers:{name}", ModelOptions(**request_))  # type: ignore[arg-type]
