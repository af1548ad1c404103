from collections import defaultdict

from torch import Tensor, inf

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, rows: int, length: int, vocabulary: int, ngram_size: int) -> Arguments:
    """Return `rows` rows of previous tokens, with repeated phrases of four tokens, and scores of the next token of each
    row.

    length, vocabulary : number of tokens of a row, and of different tokens
    ngram_size : passed to `no_repeat_ngram`
    """
    phrases = draw.integers(12, 4, high=vocabulary)
    tokens = phrases[draw.integers(rows, length // 4 + 1, high=12)].flatten(1)
    # so that the last tokens are within a phrase, not at its end
    return tokens[:, 2 : length + 2], draw.normal(rows, vocabulary, std=3.0), ngram_size


@sample(
    inputs,
    {
        "BART-large CNN/DailyMail, summary of an article, 4 beams, no trigram twice": (4, 60, 50264, 3),
        "BART-large CNN/DailyMail, summaries of 8 articles, 4 beams, no trigram twice": (32, 140, 50264, 3),
    },
    tags="ForLoop IfElseBranch InputAware AdvancedIndexing InPlace ViewAttribute",
    project="Transformers",
    url="https://arxiv.org/abs/1705.04304",
)
def no_repeat_ngram(input_ids: Tensor, scores: Tensor, ngram_size: int) -> Tensor:
    """Set the scores of tokens that would repeat an n-gram to minus infinity.

    Parameters
    ----------
    input_ids : (B, L) int64, previous tokens
    scores : (B, V) float, logits of the next token
    ngram_size : length of the n-grams

    Returns (B, V) float
    Source: Paulus et al. 2018 (deep reinforced model for summarization), section 2.5; as in Transformers before 5.
    """
    allowed_scores = scores.clone()
    for row, tokens in enumerate(input_ids.tolist()):
        followers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for start in range(len(tokens) - ngram_size + 1):
            *before, last = tokens[start : start + ngram_size]
            followers[tuple(before)].add(last)
        ending = tuple(tokens[len(tokens) - ngram_size + 1 :])
        if ending in followers:
            allowed_scores[row, sorted(followers[ending])] = -inf
    return allowed_scores
