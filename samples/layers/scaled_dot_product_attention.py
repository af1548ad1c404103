from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, examples: int, heads: int, length: int, width: int, dropout: float, scale: float) -> Arguments:
    query, key, value = (draw.normal(examples, heads, length, width, std=0.3, grad=True) for _ in range(3))
    return query, key, value, dropout, scale


@sample(
    inputs,
    {
        "BST, Amazon, predicting, batch 5, sequences of 21": (5, 6, 21, 48, 0.0, 1.0),
        "BST, Amazon, training, batch 256, sequences of 21": (256, 6, 21, 48, 0.2, 1.0),
        "BERT base, training, one sequence of 512": (1, 12, 512, 64, 0.1, 0.125),
    },
    tags="IfElseBranch ViewAttribute InPlace Random",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/1f1d93eba5503bec87c11acc8203c2266c63c285/models/rank/bst/net.py#L362",
    random=True,
)
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float = 1.0
) -> Tensor:
    """Return the values weighted by a softmax of the products of queries and keys.

    Parameters
    ----------
    query, key : (B, heads, L, D) float
    value : (B, heads, L, E) float
    dropout : probability of a weight to become zero; the others are scaled up
    scale : factor of the products: 1 / sqrt(D) in the paper, 1 in PaddleRec

    Returns (B, heads, L, E) float
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; Chen et al. 2019, "BST".
    """
    weights = (query @ key.transpose(-1, -2) * scale).softmax(dim=-1)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return weights @ value
