"""Training steps of models, and a detector's inference, at sizes for a GPU or, in tests, small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.step import NotHereError, Place
from opgrip.capture.models.sources import ModelOptions, load_program

DTYPE = torch.bfloat16
SMALL_SHAPE = (2, 16)
SMALL_HEADS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}


def make_step(name: str, place: Place) -> Callable[[], object]:
    """Return a function that runs one step of the model `name`, a key of `MODELS`, on the device of `place`.

    Raises NotHereError if the model's package is not installed.
    """
    torch.manual_seed(0)
    try:
        return MODELS[name](place)
    except ModuleNotFoundError as error:
        raise NotHereError(str(error)) from error


def train_resnet(place: Place) -> Callable[[], object]:
    """Return a function that runs a training step of ResNet-50 on 256 images.

    place : device of the step; with its `is_small`, model and inputs are smaller
    """
    import torchvision

    model = torchvision.models.resnet18() if place.is_small else torchvision.models.resnet50()
    model = model.to(place.device, DTYPE).to(memory_format=torch.channels_last).train()
    shape = (2, 3, 64, 64) if place.is_small else (256, 3, 224, 224)
    images = torch.randn(*shape, device=place.device, dtype=DTYPE).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (len(images),), device=place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return _train(optimizer, lambda: torch.nn.functional.cross_entropy(model(images).float(), labels))


def run_detector(place: Place) -> Callable[[], object]:
    """Return inference of the built-in Faster R-CNN on 8 images; `place` as in `train_resnet`."""
    batch_size, size = (1, 64) if place.is_small else (8, 512)
    options = ModelOptions(run="predict", device=place.device, batch_size=batch_size, input_size=(size, size))
    program = load_program("builtin:faster_rcnn", options)
    inputs = program.inputs()

    def step() -> object:
        torch.manual_seed(1)
        return program.step(inputs)

    return step


def train_bert(place: Place) -> Callable[[], object]:
    """Return a training step of BERT-base on 32 sequences of 512 words; `place` as in `train_resnet`."""
    import transformers

    config = transformers.BertConfig(**SMALL_HEADS if place.is_small else {})
    return _train_language_model(place, transformers.BertForMaskedLM(config), (32, 512))


def train_gpt2(place: Place) -> Callable[[], object]:
    """Return a training step of GPT-2 on 16 sequences of 1,024 words; `place` as in `train_resnet`."""
    import transformers

    config = transformers.GPT2Config(**{"n_layer": 2, "n_embd": 64, "n_head": 2} if place.is_small else {})
    return _train_language_model(place, transformers.GPT2LMHeadModel(config), (16, 1024))


def train_llama(place: Place) -> Callable[[], object]:
    """Return a training step of a Llama, with 8 layers of width 2,048, on 4 sequences of 2,048 words.

    place : as in `train_resnet`
    """
    import transformers

    large = {"num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5632}
    heads, words = (1, 500) if place.is_small else (4, 32_000)
    sizes = SMALL_HEADS if place.is_small else large
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=heads, vocab_size=words)
    return _train_language_model(place, transformers.LlamaForCausalLM(config), (4, 2048))


MODELS = {
    "bert": train_bert,
    "llama": train_llama,
    "resnet": train_resnet,
    "detector": run_detector,
    "gpt2": train_gpt2,
}


def _train_language_model(place: Place, model: Any, shape: tuple[int, int]) -> Callable[[], object]:
    model = model.to(place.device, DTYPE).train()
    shape = SMALL_SHAPE if place.is_small else shape
    words = torch.randint(0, model.config.vocab_size, shape, device=place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=place.kind == "cuda")
    return _train(optimizer, lambda: model(input_ids=words, labels=words).loss)


def _train(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step
