import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, batch: int, length: int, vocabulary: int, penalty: float) -> Arguments:
    """Return previous tokens, (batch, length) int64, many of them repeated, and scores of the next one.

    vocabulary : number of different tokens
    penalty : passed to `repetition_penalty`
    """
    tokens = (draw.uniform(batch, length) ** 4 * vocabulary).long()
    return tokens, draw.normal(batch, vocabulary, std=3.0), penalty


@sample(
    inputs,
    {
        "CTRL, generation behind 256 tokens": (1, 256, 246534, 1.2),
        "Llama 2 7B, generation behind 1024 tokens, batch of 16": (16, 1024, 32000, 1.1),
    },
    tags="AdvancedIndexing",
    project="Transformers",
    url="https://arxiv.org/abs/1909.05858",
)
def repetition_penalty(input_ids: Tensor, scores: Tensor, penalty: float) -> Tensor:
    """Lower the scores of tokens that have occurred, once per token.

    Parameters
    ----------
    input_ids : (B, L) int64, previous tokens
    scores : (B, V) float, logits of the next token
    penalty : divisor of positive scores and factor of negative ones

    Returns (B, V) float
    Source: Keskar et al. 2019 (CTRL), section 4.1; negative scores as in Transformers.
    """
    token_scores = scores.gather(1, input_ids)
    token_scores = torch.where(token_scores < 0, token_scores * penalty, token_scores / penalty)
    return scores.scatter(1, input_ids, token_scores)
