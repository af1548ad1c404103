"""Small complete models of many kinds, each newly built, with a step of training and one of inference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from opgrip.samples.models.faster_rcnn import faster_rcnn

WORDS = 50
ADAM = partial(Adam, lr=0.01)


@dataclass(frozen=True, slots=True)
class SmallProgram:
    """Model with its optimizers and the functions that run its steps.

    train, predict : functions that run a step of training or of inference, and return its outputs
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    train: Callable[[], Any]
    predict: Callable[[], Any]


def usual(
    model: nn.Module,
    loss: Callable[[], Tensor],
    predict: Callable[[], Any],
    optimizer: Callable[..., Optimizer] = ADAM,
) -> SmallProgram:
    """Return a program whose training step zeroes the gradients, computes the loss and runs backward and optimizer."""
    updater = optimizer(model.parameters())

    def train() -> Tensor:
        updater.zero_grad()
        value = loss()
        value.backward()
        updater.step()
        return value

    return SmallProgram(model, (updater,), train, predict)


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(torch.cat([hidden[-2], hidden[-1]], dim=1))


def lstm() -> SmallProgram:
    model = LSTMClassifier()
    words, lengths = torch.randint(0, WORDS, (3, 7)), torch.tensor([4, 7, 2])
    labels = torch.tensor([0, 2, 1])
    return usual(model, lambda: cross_entropy(model(words, lengths), labels), lambda: model(words, lengths))


def gan() -> SmallProgram:
    maker = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2), nn.Tanh()
    )
    judge = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3, stride=2)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(36, 1),
    )
    makes, judges = (Adam(part.parameters(), lr=0.01, betas=(0.5, 0.999)) for part in (maker, judge))
    real = torch.randn(3, 1, 8, 8)

    def loss(images: Tensor, value: float) -> Tensor:
        scores = judge(images)
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, value))

    def train() -> list[Tensor]:
        made = maker(torch.randn(3, 4, 1, 1))
        judges.zero_grad()
        judged = loss(real, 1.0) + loss(made.detach(), 0.0)
        judged.backward()
        judges.step()
        makes.zero_grad()
        fooled = loss(made, 1.0)
        fooled.backward()
        makes.step()
        return [judged, fooled, made]

    both = nn.ModuleDict({"maker": maker, "judge": judge})
    return SmallProgram(both, (makes, judges), train, lambda: judge(maker(torch.randn(3, 4, 1, 1))))


def transformer_encoder() -> SmallProgram:
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=0.3, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x, target = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    run = lambda: model(x, src_key_padding_mask=padding)  # noqa: E731
    return usual(model, lambda: mse_loss(run()[:, :4], target[:, :4]), run)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, 6), self._block(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.merge = self._block(12, 6)
        self.head = nn.Conv2d(6, 4, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.ReLU(inplace=True))

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down1(images)
        coarse = self.down2(nn.functional.max_pool2d(fine, 2))
        merged = self.merge(torch.cat([fine, self.up(coarse)], dim=1))
        return nn.functional.interpolate(self.head(merged), scale_factor=2, mode="bilinear")


def unet() -> SmallProgram:
    model = UNet().to(memory_format=torch.channels_last)
    images, labels = torch.randn(2, 3, 12, 12), torch.randint(0, 4, (2, 24, 24))
    labels[0, 0] = 255
    return usual(
        model, lambda: cross_entropy(model(images), labels, ignore_index=255), lambda: model(images).argmax(dim=1)
    )


def mixed_precision_autoencoder() -> SmallProgram:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 128),
        nn.Unflatten(1, (8, 4, 4)),
        nn.ConvTranspose2d(8, 3, 2, stride=2),
    )
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0, growth_interval=2)
    images = torch.randn(2, 3, 8, 8)

    def train() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model(images)
            loss = mse_loss(made, images)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return [made, loss, norm, torch.tensor(scaler.get_scale())]

    def predict() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(images)

    return SmallProgram(model, (optimizer,), train, predict)


class Checkpointed(nn.Module):
    """Model that keeps only the inputs of its blocks, and runs the blocks again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(reentrant: bool) -> SmallProgram:
    model = Checkpointed(reentrant)
    x = torch.randn(4, 8, requires_grad=True)
    return usual(model, lambda: model(x).square().mean(), lambda: model(x))


def small_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def gradient_penalty() -> SmallProgram:
    model = small_mlp()
    x = torch.randn(4, 8, requires_grad=True)

    def loss() -> Tensor:
        scores = model(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.mean() + (slopes.norm(2, dim=1) - 1).square().mean()

    return usual(model, loss, lambda: model(x))


def classified(optimizer: Callable[..., Optimizer]) -> SmallProgram:
    model = small_mlp()
    x, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 1])
    return usual(model, lambda: cross_entropy(model(x), labels), lambda: model(x).softmax(dim=1), optimizer)


def per_sample_gradients() -> SmallProgram:
    model = small_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    x, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 1])

    def run(parameters: Mapping[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, parameters, (sample[None],))

    def loss(parameters: Mapping[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(run(parameters, sample), label[None])

    def parameters() -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def train() -> dict[str, Tensor]:
        found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(parameters(), x, labels)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].clamp(-1, 1).mean(dim=0)
        optimizer.step()
        return found

    return SmallProgram(model, (optimizer,), train, lambda: vmap(run, in_dims=(None, 0))(parameters(), x))


def detector() -> SmallProgram:
    model, inputs = faster_rcnn(batch_size=1, input_size=(64, 64), run="train")
    return usual(
        model,
        lambda: torch.stack(list(model(**inputs).values())).sum(),
        lambda: model(inputs["images"]),
        partial(SGD, lr=0.001, momentum=0.9),
    )


def bert() -> SmallProgram:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **sizes))
    words, labels = torch.randint(0, WORDS, (2, 9)), torch.tensor([2, 0])
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    inputs = {"input_ids": words, "attention_mask": mask}
    return usual(model, lambda: model(**inputs, labels=labels).loss, lambda: model(**inputs, output_hidden_states=True))


def gpt2() -> SmallProgram:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, **ends))
    words = torch.randint(1, WORDS, (2, 9))
    draw = lambda: model.generate(  # noqa: E731
        words, attention_mask=torch.ones_like(words), do_sample=True, max_new_tokens=4
    )
    return usual(model, lambda: model(words, labels=words).loss, draw)


SMALL_PROGRAMS: dict[str, Callable[[], SmallProgram]] = {
    "lstm with packed sequences": lstm,
    "gan": gan,
    "transformer encoder": transformer_encoder,
    "u-net": unet,
    "mixed precision autoencoder": mixed_precision_autoencoder,
    "activation checkpointing": partial(checkpointed, reentrant=False),
    "reentrant checkpointing": partial(checkpointed, reentrant=True),
    "gradient penalty": gradient_penalty,
    "fused AdamW": partial(classified, partial(AdamW, lr=0.01, fused=True)),
    "foreach SGD": partial(classified, partial(SGD, lr=0.1, momentum=0.9, foreach=True)),
    "per-sample gradients": per_sample_gradients,
    "detector": detector,
}
TRANSFORMERS_PROGRAMS: dict[str, Callable[[], SmallProgram]] = {"bert": bert, "gpt-2": gpt2}
