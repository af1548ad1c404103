from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw,
    sequences: int,
    longest: int,
    vocabulary: int,
    eos_idx: int | None = None,
    left_pad: bool = False,
    move_eos_to_beginning: bool = False,
    pad_to_multiple: int = 1,
) -> Arguments:
    """Return sequences of 5 or more tokens; token 1 is padding.

    sequences, longest : number of sequences, and their largest length in tokens
    vocabulary : number of different tokens
    Other parameters are passed to `collate_tokens`.
    """
    lengths = draw.integers(sequences, low=5, high=longest + 1).tolist()
    values = [draw.integers(length, low=4, high=vocabulary) for length in lengths]
    return values, 1, eos_idx, left_pad, move_eos_to_beginning, None, pad_to_multiple


@sample(
    inputs,
    {
        "fconv IWSLT14 de-en, training, target shifted by its end": (160, 50, 6632, 2, False, True),
        "fconv IWSLT14 de-en, training, source padded on the left": (160, 50, 8848, None, True),
        "RoBERTa, pretraining, 512 tokens, padded to a multiple of 8": (32, 512, 50265, None, False, False, 8),
    },
    tags="ForLoop IfElseBranch InPlace ViewAttribute BuiltInDataStructure",
    url="https://github.com/facebookresearch/fairseq/blob/b5a039c292facba9c73f59ff34621ec131d82341/fairseq/data/data_utils.py#L37",
)
def collate_tokens(
    values: list[Tensor],
    pad_idx: int,
    eos_idx: int | None = None,
    left_pad: bool = False,
    move_eos_to_beginning: bool = False,
    pad_to_length: int | None = None,
    pad_to_multiple: int = 1,
    pad_to_bsz: int | None = None,
) -> Tensor:
    """Return several sequences in one padded tensor.

    Parameters
    ----------
    values : sequences, each (L,) int64 with L > 0
    pad_idx : padding token
    eos_idx : token written first by `move_eos_to_beginning`; None for the last token of the sequence
    left_pad : True to pad before the sequence, False to pad after it
    move_eos_to_beginning : True to move the last token to the start, as decoder inputs in training have it
    pad_to_length : least number of columns
    pad_to_multiple : divisor of the number of columns
    pad_to_bsz : least number of rows

    Returns (N, T) int64
    Source: fairseq, `data_utils.collate_tokens`.
    """
    columns = max(len(tokens) for tokens in values)
    if pad_to_length is not None:
        columns = max(columns, pad_to_length)
    columns += -columns % pad_to_multiple
    rows = len(values) if pad_to_bsz is None else max(len(values), pad_to_bsz)
    batch = values[0].new_full((rows, columns), pad_idx)
    for row, tokens in enumerate(values):
        first = columns - len(tokens) if left_pad else 0
        place = batch[row, first : first + len(tokens)]
        if move_eos_to_beginning:
            place[0] = tokens[-1] if eos_idx is None else eos_idx
            place[1:] = tokens[:-1]
        else:
            place.copy_(tokens)
    return batch
