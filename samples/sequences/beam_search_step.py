import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

NEVER = -1.0e9
"""Score of beams that must not be chosen; unlike infinity, it can be added to finite numbers."""


def inputs(
    draw: Draw, batch: int, beams: int, vocabulary: int, longest: int, length: int, length_penalty: float = 1.0
) -> Arguments:
    """Return the state of a search with beams of `length` tokens, some of them finished; token 1 ends a beam.

    batch, beams : number of searches, and of the beams of each
    vocabulary : number of different tokens
    longest : largest length of a beam in tokens
    length_penalty : passed to `beam_search_step`
    """
    logits = draw.normal(batch, beams, vocabulary, std=4.0)
    # an end that is likely for some beams
    logits[:, :, 1] += draw.mask(batch, beams, share=0.4) * 16.0
    sequences = draw.integers(batch, beams, longest, low=2, high=vocabulary)
    sequences[:, :, length:] = 0
    scores = draw.uniform(batch, beams, low=-length, high=0.0).sort(dim=1, descending=True).values
    is_finished = draw.mask(batch, beams, share=0.5).sort(dim=1, descending=True).values
    ended = draw.uniform(batch, beams, low=-2.0, high=0.0).sort(dim=1, descending=True).values
    ended = ended.masked_fill(~is_finished, NEVER)
    return logits, sequences, scores, sequences.flip(1), ended, is_finished, length, 1, 1, length_penalty, True


@sample(
    inputs,
    {
        "T5-small, translation, 4 beams": (1, 4, 32128, 300, 20),
        "BART-large CNN/DailyMail, summaries of 8 articles, 4 beams": (8, 4, 50264, 142, 60, 2.0),
    },
    tags="IfElseBranch AdvancedIndexing InPlace Reduce Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/huggingface/transformers/blob/main/src/transformers/generation/utils.py",
)
def beam_search_step(
    logits: Tensor,
    sequences: Tensor,
    scores: Tensor,
    finished: Tensor,
    finished_scores: Tensor,
    is_finished: Tensor,
    length: int,
    eos: int,
    prompt_length: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Extend the running beams by their best tokens, and keep the best finished beams.

    Parameters
    ----------
    logits : (B, K, V) float, of the next token of each of K beams
    sequences : (B, K, L) int64, tokens of the running beams
    scores : (B, K) float, their log-probabilities
    finished : (B, K, L) int64, tokens of the finished beams, best first
    finished_scores : (B, K) float, divided by length to the power of `length_penalty`
    is_finished : (B, K) bool, which rows of `finished` are in use
    length : number of tokens of the running beams
    eos : token that ends a beam
    prompt_length : number of leading tokens that the length does not include
    early_stopping : True to accept no more finished beams after the first K

    Returns sequences and scores of the running beams, best first; the beam that each extends, (B, K) int64, by which
    caches are reordered; and `finished`, `finished_scores` and `is_finished` after the step
    Source: Wu et al. 2016 (Google's neural machine translation), section 7; bookkeeping as in Transformers.
    """
    beams, vocabulary = logits.shape[1:]
    total = logits.log_softmax(dim=2) + scores[:, :, None]
    # twice as many, since up to half of them may end
    best, flat = total.flatten(1).topk(2 * beams, dim=1)
    origin, token = flat // vocabulary, flat % vocabulary
    candidates = _rows(sequences, origin)
    candidates[:, :, length] = token

    ends = token == eos
    running, order = best.masked_fill(ends, NEVER).topk(beams, dim=1)

    # of the candidates that end, only the best K could have become beams
    ends[:, beams:] = False
    closed = best / (length + 1 - prompt_length) ** length_penalty
    if early_stopping:
        closed.masked_fill_(is_finished.all(dim=1, keepdim=True), NEVER)
    merged = torch.cat([finished_scores, closed.masked_fill_(~ends, NEVER)], dim=1)
    # stable, since unused rows are equal
    keep = merged.argsort(dim=1, descending=True, stable=True)[:, :beams]
    return (
        _rows(candidates, order),
        running,
        origin.gather(1, order),
        _rows(torch.cat([finished, candidates], dim=1), keep),
        merged.gather(1, keep),
        torch.cat([is_finished, ends], dim=1).gather(1, keep),
    )


def _rows(sequences: Tensor, index: Tensor) -> Tensor:
    return sequences.gather(1, index[:, :, None].expand(-1, -1, sequences.shape[2]))
