import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, sequences: int, length: int, vocabulary: int, mask_token: int) -> Arguments:
    tokens = draw.integers(sequences, length, low=1000, high=vocabulary)
    special = torch.zeros(sequences, length, dtype=torch.bool)
    special[:, [0, -1]] = True
    return tokens, special, mask_token, vocabulary


@sample(
    inputs,
    {
        "BERT base, pretraining, 32 sequences of 128 tokens": (32, 128, 30522, 103),
        "RoBERTa base, pretraining, 64 sequences of 512 tokens": (64, 512, 50265, 50264),
    },
    tags="DataDependentShape AdvancedIndexing InPlace BuiltInDataStructure Random",
    project="Transformers",
    url="https://arxiv.org/abs/1810.04805",
    random=True,
)
def mask_tokens(
    tokens: Tensor,
    special: Tensor,
    mask_token: int,
    vocabulary: int,
    probability: float = 0.15,
    masked: float = 0.8,
    replaced: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Choose random tokens, and replace most of them by a mask and some by a random token.

    Parameters
    ----------
    tokens : (N, T) int64
    special : (N, T) bool, tokens that are never chosen
    mask_token : token that replaces the masked ones
    vocabulary : number of tokens
    probability : probability of a token to be chosen
    masked, replaced : shares of the chosen tokens that are masked, and replaced by a random token; masked < 1

    Returns
    -------
    hidden : (N, T) int64
    labels : (N, T) int64, the chosen tokens; -100 elsewhere

    Source: Devlin et al. 2019 (BERT), section 3.1; order of the draws as in Transformers.
    """
    chosen = _chance(tokens, probability).masked_fill_(special, 0.0).bernoulli().bool()
    labels, hidden = tokens.clone(), tokens.clone()
    labels[~chosen] = -100
    to_mask = _chance(tokens, masked).bernoulli().bool() & chosen
    hidden[to_mask] = mask_token
    to_replace = _chance(tokens, replaced / (1 - masked)).bernoulli().bool() & chosen & ~to_mask
    others = torch.randint_like(tokens, vocabulary)
    hidden[to_replace] = others[to_replace]
    return hidden, labels


def _chance(tokens: Tensor, probability: float) -> Tensor:
    return torch.full(tokens.shape, probability, device=tokens.device)
