"""Speech recognizer: spectrogram, convolutions over time and frequency, recurrent layers, and CTC loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

RATE = 16_000
WINDOW, HOP = 320, 160
"""Samples per frame of 20 ms, and between the starts of frames."""
LETTERS = 29
"""The blank, 26 letters, the apostrophe and the space."""
WIDTH, LAYERS = 512, 3
HIGHEST = 20.0
"""Upper limit of hidden units."""
LEARNING_RATE, DECAY = 3e-4, 1e-5


class SpeechRecognizer(nn.Module):
    """Recognizer of letters in recordings of speech.

    Parameters
    ----------
    width : number of hidden units of a recurrent layer in each direction
    layers : number of recurrent layers

    Source: Amodei et al. 2016, sections 3.1 to 3.4; Graves et al. 2006 for the loss; Park et al. 2019, section 2, for
    the masks in training.
    """

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(WINDOW))
        self.front = nn.Sequential(
            *(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0.0, HIGHEST)),
            *(nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0.0, HIGHEST)),
        )
        frequencies = (WINDOW // 2 + 4) // 4
        self.recurrent = nn.LSTM(32 * frequencies, width, layers, bidirectional=True)
        self.letters = nn.Linear(2 * width, LETTERS)

    def forward(
        self, sounds: Tensor, lengths: Tensor, texts: Tensor | None = None, text_lengths: Tensor | None = None
    ) -> Tensor | list[Tensor]:
        """Return the letters of each recording, (T,) int64, or the loss if `texts` is given.

        Parameters
        ----------
        sounds : (B, N) float, 16,000 values per second
        lengths : (B,) int64, number of values of each recording, descending
        texts : (B, T) int64, the true letters, from 1 on, since 0 is the blank of the CTC loss
        text_lengths : (B,) int64, number of letters of each text
        """
        spectrogram = self._spectrogram(sounds)
        if self.training:
            spectrogram = masked(spectrogram)
        hidden = self.front(spectrogram.unsqueeze(1))
        frames = torch.div(torch.div(lengths, HOP, rounding_mode="floor"), 2, rounding_mode="floor") + 1
        packed = pack_padded_sequence(hidden.flatten(1, 2).permute(2, 0, 1), frames.cpu())
        heard, frames = pad_packed_sequence(self.recurrent(packed)[0])
        scores = functional.log_softmax(self.letters(heard), dim=-1)
        if texts is None:
            return read(scores, frames)
        return functional.ctc_loss(scores, texts, frames, text_lengths, zero_infinity=True)  # type: ignore[arg-type]

    def _spectrogram(self, sounds: Tensor) -> Tensor:
        """Return logarithmic spectrograms, (B, 161, N / 160 + 1) float, of recordings (`sounds`), (B, N) float.

        Each spectrogram is scaled to mean 0 and standard deviation 1.
        """
        waves = torch.stft(sounds, WINDOW, HOP, WINDOW, self.window, return_complex=True)  # type: ignore[arg-type]
        loudness = torch.log1p(waves.abs())
        deviation, mean = torch.std_mean(loudness, dim=(1, 2), keepdim=True)
        return (loudness - mean) / (deviation + 1e-5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer that updates all weights with one operator."""
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=DECAY, fused=True)


def masked(spectrogram: Tensor, widest: int = 20) -> Tensor:
    """Return spectrograms in which a random band of frequencies and a random span of time are set to 0.

    Parameters
    ----------
    spectrogram : (B, F, T) float
    widest : width that all bands and spans stay below, in frequencies and frames
    """
    batch, *sizes = spectrogram.shape
    for axis, size in enumerate(sizes, 1):
        width = torch.randint(0, widest, (batch, 1), device=spectrogram.device)
        first = (torch.rand(batch, 1, device=spectrogram.device) * (size - width)).floor()
        places = torch.arange(size, device=spectrogram.device)
        hidden = torch.logical_and(places >= first, places < first + width)
        spectrogram = spectrogram.masked_fill(hidden.unsqueeze(3 - axis), 0.0)
    return spectrogram


def read(scores: Tensor, frames: Tensor) -> list[Tensor]:
    """Return the letters of each recording: the best one of each frame, without repetitions and blanks.

    Parameters
    ----------
    scores : (T, B, letters) float, scores of the letters by frame
    frames : (B,) int64, number of frames of each recording; later ones are padding
    """
    letters = []
    for best, count in zip(scores.argmax(dim=-1).unbind(1), frames.tolist(), strict=True):
        runs = torch.unique_consecutive(best[:count])
        letters.append(torch.masked_select(runs, runs != 0))
    return letters


def speech(batch_size: int = 4, run: str = "predict") -> tuple[SpeechRecognizer, dict[str, Any]]:
    """Return the recognizer with random weights, and arguments for it by name; the recordings are noise of one to two
    seconds.

    Parameters
    ----------
    batch_size : number of recordings
    run : `predict`, `loss` or `train`; the latter two also need texts, which have five letters per second
    """
    lengths = torch.randint(RATE, 2 * RATE + 1, (batch_size,)).sort(descending=True).values
    inputs: dict[str, Any] = {"sounds": torch.randn(batch_size, int(lengths[0])), "lengths": lengths}
    if run != "predict":
        inputs["text_lengths"] = torch.div(lengths * 5, RATE, rounding_mode="floor")
        inputs["texts"] = torch.randint(1, LETTERS, (batch_size, int(inputs["text_lengths"].max())))
    return SpeechRecognizer(), inputs
