import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, examples: int, features: int, fields: int = 26, numbers: int = 13, width: int = 9) -> Arguments:
    """Return `examples` random examples of clicks, and weights as large as after some training.

    Parameters
    ----------
    features : number of categorical features
    fields : number of categorical features of an example
    numbers : number of numeric features of an example
    width : length of an embedding
    """
    std = 0.1 / width**0.5
    return (
        [draw.integers(examples, 1, high=features) for _ in range(fields)],
        draw.uniform(examples, numbers),
        draw.normal(features, 1, std=std, grad=True),
        draw.normal(features, width, std=std, grad=True),
        draw.uniform(numbers, low=0.5, high=1.5, grad=True),
        draw.uniform(1, numbers, width, low=0.5, high=1.5, grad=True),
    )


@sample(
    inputs,
    {
        "FM, Criteo, training, batch 512, 10001 features": (512, 10001),
        "FM, Criteo, training, batch 4096, 1000001 features": (4096, 1000001),
    },
    tags="Reduce Broadcast ViewAttribute AdvancedIndexing BuiltInDataStructure",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/0aabcd30d5678d05181e6edea47c7948ef7baf12/models/rank/fm/net.py#L21",
    rtol=1e-4,
)
def factorization_machine(
    fields: list[Tensor],
    numbers: Tensor,
    weights: Tensor,
    embeddings: Tensor,
    number_weights: Tensor,
    number_embeddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the features' weights, and the sum of the products of all pairs of embeddings.

    Parameters
    ----------
    fields : categorical features of the examples, each (B, 1) int64
    numbers : (B, M) float, numeric features
    weights, embeddings : (V, 1) and (V, D) float, of the categorical features
    number_weights, number_embeddings : (M,) and (1, M, D) float, multiplied by the numeric features

    Returns the terms of first and second order, each (B, 1) float
    Source: Rendle 2010, "Factorization Machines", lemma 3.1: half of the square of the sum minus the sum of squares.
    """
    features = torch.cat(fields, dim=1)
    scaled = (numbers * number_weights)[..., None]
    first = functional.embedding(features, weights).sum(dim=1) + scaled.sum(dim=1)

    vectors = torch.cat(
        [functional.embedding(features, embeddings), numbers[..., None] * number_embeddings],
        dim=1,
    )
    pairs = vectors.sum(dim=1).square() - vectors.square().sum(dim=1)
    return first, 0.5 * pairs.sum(dim=1, keepdim=True)
