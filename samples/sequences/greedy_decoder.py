import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, utterances: int, frames: int, classes: int, longest: int) -> Arguments:
    """Return scores by which most frames are blank and labels last for two frames, and random true labels.

    utterances, frames : number of utterances, and of the frames of each
    classes : number of labels with the blank, which is the last one
    longest : largest number of true labels of an utterance
    """
    half = (frames + 1) // 2
    spoken = draw.integers(utterances, half, high=classes - 1)
    path = spoken.masked_fill(draw.mask(utterances, half, share=0.6), classes - 1)
    path = path.repeat_interleave(2, dim=1)[:, :frames]
    peaks = torch.nn.functional.one_hot(path, classes) * 8.0
    scores = (draw.normal(utterances, frames, classes) + peaks).log_softmax(dim=2)
    lengths = draw.integers(utterances, low=longest // 4, high=longest + 1).tolist()
    return scores, draw.integers(utterances, longest, high=classes - 1), lengths


@sample(
    inputs,
    {
        "Deep Speech 2 on LibriSpeech, testing, one utterance of 10 s": (1, 400, 29, 180),
        "Deep Speech 2 on LibriSpeech, testing, 20 utterances of up to 15 s": (20, 600, 29, 270),
    },
    tags="ForLoop IfElseBranch InputAware Reduce ViewAttribute BuiltInDataStructure",
    project="AssemblyAI",
    url="https://colab.research.google.com/drive/1IPpwx4rX32rqHKpLz7dc8sOKspUa-YKO#scrollTo=RVJs4Bk8FjjO",
)
def greedy_decoder(
    output: Tensor, labels: Tensor, label_lengths: list[int], blank_label: int = 28, collapse_repeated: bool = True
) -> tuple[list[list[int]], list[list[int]]]:
    """Decode each utterance by its best path, and remove the padding of the true labels.

    Parameters
    ----------
    output : (N, T, C) float, scores of labels by frame
    labels : (N, L) int64, the truth, padded
    label_lengths : length of each truth, up to L
    blank_label : index of the blank label
    collapse_repeated : True to merge equal labels of consecutive frames

    Returns decoded, true : labels of each utterance, up to T and L of them; the original then converts them to
    characters
    Source: Graves et al. 2006 (connectionist temporal classification), section 3.2, best path decoding.
    """
    decoded, true = [], []
    for best, truth, length in zip(output.argmax(dim=2), labels, label_lengths, strict=True):
        true.append(truth[:length].tolist())
        said: list[int] = []
        for frame, label in enumerate(best):
            if label == blank_label:
                continue
            if collapse_repeated and frame > 0 and label == best[frame - 1]:
                continue
            said.append(int(label))
        decoded.append(said)
    return decoded, true
