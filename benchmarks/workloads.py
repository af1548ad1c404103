"""Define the programs that the benchmarks run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from opgrip.capture.models import load_program
from opgrip.capture.models.sources import ModelOptions
from opgrip.replay.operators.devices import is_accelerator, synchronizer

Workload = Callable[[], object]
MISSING = "transformers is not installed: pip install '.[transformers]'"  # reason if a program is None


def tiny_operators() -> Workload:
    """Make operators so small that the observer's cost dominates: 64 boxes, layers 32 wide."""
    torch.manual_seed(0)
    boxes, deltas = torch.rand(64, 4), torch.rand(64, 4)
    layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    hidden = torch.rand(64, 32)

    def run() -> None:
        with torch.no_grad():
            for _ in range(150):
                size = boxes[:, 2:] - boxes[:, :2]
                centre = boxes[:, :2] + size * 0.5 + deltas[:, :2] * size
                half = size * deltas[:, 2:].exp() * 0.5
                torch.cat([centre - half, centre + half], dim=1).clamp(min=0.0, max=100.0)
                layers(hidden)

    return run


def detector_predict() -> Workload:
    """Make one prediction of the built-in two-stage detector."""
    return _detector("predict")


def detector_train() -> Workload:
    """Make a training step of the built-in two-stage detector."""
    return _detector("train")


def _detector(run: str) -> Workload:
    torch.manual_seed(0)
    program = load_program("builtin:faster_rcnn", ModelOptions(run=run, device=str(torch.get_default_device())))
    inputs = program.inputs()

    def step() -> None:
        # the same proposals and samples each time
        torch.manual_seed(1)
        program.step(inputs)

    return step


def bert_train() -> Workload | None:
    """Make a training step of a BERT of 4 layers, 128 wide, from transformers; None if that is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForMaskedLM(BertConfig(vocab_size=1000, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(0, 1000, (4, 64))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()

    return step


class Decoding:
    """A GPT-2 of 4 layers, 128 wide, that generates one token per step with a growing cache.

    No two steps have the same shapes, until it is restarted.
    """

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=1000, n_positions=512, n_embd=128, n_layer=4, n_head=4)
        ).eval()
        self.prompt = torch.randint(0, 1000, (2, 16))
        self.restart()

    def restart(self) -> None:
        """Begin again with the prompt."""
        self.words, self.cache = self.prompt, None

    @torch.no_grad()
    def __call__(self) -> None:
        given = self.model(input_ids=self.words, past_key_values=self.cache, use_cache=True)
        self.words, self.cache = given.logits[:, -1:].argmax(-1), given.past_key_values


def gpt2_decode() -> Workload | None:
    """Make steps of one token each; None if transformers is not installed."""
    return Decoding() if importlib.util.find_spec("transformers") is not None else None


def gpt2_generate() -> Workload | None:
    """Make steps of 24 tokens by `generate`; None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    program = Decoding()

    def step() -> None:
        program.model.generate(program.prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)

    return step


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Workload on an accelerator, each step of which ends when the device has done its work."""

    step: Workload
    synchronize: Callable[[], None]

    def __call__(self) -> None:
        self.step()
        self.synchronize()


def make_on(device: str, make: Callable[[], Workload | None]) -> Workload | None:
    """Make a workload whose tensors are on a device; None if its package is not installed."""
    if not is_accelerator(device):
        return make()
    with torch.device(device):
        step = make()
    return None if step is None else OnDevice(step, synchronizer(device))


def restart(workload: Workload) -> None:
    """Restart a workload whose steps differ."""
    workload = workload.step if isinstance(workload, OnDevice) else workload
    if isinstance(workload, Decoding):
        workload.restart()


WORKLOADS: dict[str, Callable[[], Workload | None]] = {
    "tiny operators": tiny_operators,
    "Faster R-CNN predict": detector_predict,
    "Faster R-CNN train": detector_train,
    "BERT train": bert_train,
    "GPT-2 generate": gpt2_generate,
    "GPT-2 decode": gpt2_decode,
}


def segmentor_train() -> Workload | None:
    """Make a training step of a small SegFormer; None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(0)
    config = SegformerConfig(num_labels=19, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128], decoder_hidden_size=64)
    model = SegformerForSemanticSegmentation(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = torch.rand(2, 3, 128, 128), torch.randint(0, 19, (2, 128, 128))
    labels[:, :8] = 255

    def step() -> None:
        optimizer.zero_grad()
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()

    return step


def products() -> Workload:
    """Make eight products in a row, each with weights of 4 MB, which together no core's cache holds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    hidden = torch.randn(2, 1024)

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            model(hidden)

    return step


def llama_decode() -> Workload | None:
    """Make decode steps of a Llama of 4 layers, 256 wide; None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4000, max_position_embeddings=256, **sizes)).eval()
    prompt, word = torch.randint(0, 4000, (2, 20)), torch.randint(0, 4000, (2, 1))

    @torch.no_grad()
    def step() -> None:
        cache = model(input_ids=prompt, use_cache=True).past_key_values
        for _ in range(8):
            model(input_ids=word, past_key_values=cache, use_cache=True)

    return step


def recommender() -> Workload:
    """Make predictions for 256 users, with rows from eight embedding tables of 64 MB."""
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.EmbeddingBag(250_000, 64, mode="sum") for _ in range(8))
    layers = nn.Sequential(nn.Linear(8 * 64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            bags = torch.randint(0, 250_000, (8, 256, 20), generator=generator)
            layers(torch.cat([table(rows) for table, rows in zip(tables, bags, strict=True)], dim=1)).sigmoid()

    return step


# programs that are replayed
REPLAYED: dict[str, Callable[[], Workload | None]] = {
    "Faster R-CNN predict": detector_predict,
    "Faster R-CNN train": detector_train,
    "SegFormer train": segmentor_train,
    "BERT train": bert_train,
    "GPT-2 generate": gpt2_generate,
    "eight products": products,
    "Llama decode": llama_decode,
    "recommender": recommender,
}
