from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, words: int, vocabulary: int, width: int, negatives: int = 5) -> Arguments:
    """Return `words` centre words, a context word and `negatives` random words for each, and weights as large as after
    some training.

    vocabulary : number of different words
    width : length of an embedding
    """
    bound = 0.5 / width
    return (
        [draw.integers(words, count, high=vocabulary) for count in (1, 1, negatives)],
        draw.uniform(vocabulary, width, low=-bound, high=bound, grad=True),
        draw.normal(vocabulary, width, std=0.1, grad=True),
        draw.normal(vocabulary, 1, std=0.1, grad=True),
    )


@sample(
    inputs,
    {
        "Skip-gram, batch 100, 300 wide, vocabulary cut to 10000": (100, 10000, 300),
        "Skip-gram, batch 1024, 200 wide, vocabulary of 70000": (1024, 70000, 200),
    },
    tags="Reduce ViewAttribute AdvancedIndexing BuiltInDataStructure",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/1ac73236e94197621e1468018436e42b62d4bd59/models/recall/word2vec/net.py",
)
def word2vec(words: list[Tensor], embedding: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of context words and of random words: skip-gram with negative sampling.

    Parameters
    ----------
    words : int64, centre words, (B, 1), context words, (B, 1), and random words, (B, N)
    embedding : (V, D) float, of the centre words
    weight, bias : (V, D) and (V, 1) float, of the context and random words

    Returns the logits, (B, 1) and (B, N) float
    Source: Mikolov et al. 2013, "Distributed Representations of Words and Phrases", equation 4.
    """
    middle, near, drawn = words
    vectors = functional.embedding(middle, embedding).squeeze(1)
    products = vectors * functional.embedding(near, weight).squeeze(1)
    positive = products.sum(dim=1, keepdim=True) + functional.embedding(near, bias).squeeze(1)
    others = vectors[:, None] @ functional.embedding(drawn, weight).transpose(1, 2)
    negative = others.reshape(drawn.shape) + functional.embedding(drawn, bias).reshape(drawn.shape)
    return positive, negative
