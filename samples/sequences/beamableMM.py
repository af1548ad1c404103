import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, sentences: int, source: int, width: int, beam_size: int | None = None, steps: int = 1
) -> Arguments:
    """Return decoder states, and encoder outputs repeated for each beam of a sentence.

    Parameters
    ----------
    sentences, width : number of sentences, and length of a state
    source : number of tokens of a source sentence
    beam_size : number of beams of a sentence; None for arguments as in training
    steps : number of decoder states of each beam
    """
    training = beam_size is None
    beams = 1 if beam_size is None else beam_size
    queries = draw.normal(sentences * beams, steps, width, grad=training)
    encoded = draw.normal(sentences, width, source).repeat_interleave(beams, dim=0)
    return queries, encoded.requires_grad_(training), beam_size


@sample(
    inputs,
    {
        "fconv IWSLT14 de-en, generation with 5 beams, 32 sentences of up to 30 tokens": (32, 30, 256, 5),
        "fconv WMT14 en-de, generation with 5 beams, 128 sentences of up to 50 tokens": (128, 50, 768, 5),
        "fconv IWSLT14 de-en, training, 4000 tokens": (133, 30, 256, None, 30),
    },
    tags="IfElseBranch ViewAttribute",
    url="https://github.com/facebookresearch/fairseq/blob/b5a039c292facba9c73f59ff34621ec131d82341/fairseq/modules/beamable_mm.py#L10",
)
def beamableMM(input1: Tensor, input2: Tensor, beam_size: int | None = None) -> Tensor:
    """Return a batched matrix product; beams that share the second matrix are multiplied in one larger product.

    Parameters
    ----------
    input1 : (N, T, H) float, such as the decoder's states; N is a multiple of `beam_size`, beams vary fastest
    input2 : (N, H, S) float, such as encoder outputs, equal for all beams of a sentence
    beam_size : beams per sentence; None in training, where rows differ

    Returns (N, T, S) float
    Source: fairseq, `BeamableMM`, for Gehring et al. 2017 (convolutional sequence to sequence learning).
    """
    if beam_size is None or input1.dim() != 3 or input1.shape[1] != 1:
        return input1.bmm(input2)
    rows = input1.shape[0]
    queries = input1.reshape(rows // beam_size, beam_size, -1)
    shared = input2[::beam_size]
    product = torch.mm(queries[0], shared[0]) if rows == beam_size else queries.bmm(shared)
    return product.view(rows, 1, -1)
