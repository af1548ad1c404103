from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, examples: int, length: int, heads: int, width: int) -> Arguments:
    queries, keys, values = (draw.normal(examples, length, heads * width, grad=True) for _ in range(3))
    return queries, keys, values, heads, width, width


@sample(
    inputs,
    {
        "BST, Amazon, training, batch 5, sequences of 21": (5, 21, 6, 48),
        "BST, Amazon, training, batch 256, sequences of 21": (256, 21, 6, 48),
    },
    tags="ViewAttribute BuiltInDataStructure",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/1f1d93eba5503bec87c11acc8203c2266c63c285/models/rank/bst/net.py#L339",
)
def split_heads_qkv(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split queries, keys and values into heads.

    Parameters
    ----------
    queries, keys : (B, L, heads * key_width) float
    values : (B, L, heads * value_width) float
    heads : number of heads
    key_width, value_width : width of one head

    Returns (B, heads, L, width) each, in the order of the arguments
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; Chen et al. 2019, "BST".
    """
    return _split(queries, heads, key_width), _split(keys, heads, key_width), _split(values, heads, value_width)


def _split(sequence: Tensor, heads: int, width: int) -> Tensor:
    examples, length, _ = sequence.shape
    return sequence.reshape(examples, length, heads, width).permute(0, 2, 1, 3)
