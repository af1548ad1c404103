from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, users: int, interests: int, width: int, power: float) -> Arguments:
    keys = draw.normal(users, interests, width, std=width**-0.5, grad=True)
    return keys, draw.normal(users, 1, width, std=0.1, grad=True), power


@sample(
    inputs,
    {
        "MIND, AmazonBook, training, batch 128, 4 interests": (128, 4, 64, 1.0),
        "MIND, batch 4096, squared products": (4096, 4, 64, 2.0),
    },
    tags="Reduce Broadcast BuiltInDataStructure",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/8ce9dbdbc5d0149bfcdb57a06a183024cff21aa3/models/recall/mind/net.py#L267",
)
def label_aware_attention(keys: Tensor, query: Tensor, power: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return one vector per user: the interests, weighted by a softmax of powers of their products with the item.

    Parameters
    ----------
    keys : (B, K, D) float, the interests
    query : (B, 1, D) float, the item
    power : larger powers favour the nearest interest; negative products give NaN unless it is an integer

    Returns the vectors, (B, D) float, and the weights, (B, K, 1) float
    Source: Li et al. 2019, "Multi-Interest Network with Dynamic Routing" (MIND), its label-aware attention layer.
    """
    products = (keys * query).sum(dim=-1, keepdim=True)
    weights = products.pow(power).softmax(dim=1)
    return (keys * weights).sum(dim=1), weights
