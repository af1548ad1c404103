from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, shape: (draw.normal(*shape, grad=True),),
    {
        "MIND, AmazonBook, training, batch 128, 4 interests": ((128, 4, 64),),
        "CapsNet, MNIST, training, primary capsules of 128 images": ((128, 1152, 8),),
    },
    tags="Reduce Broadcast",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/8ce9dbdbc5d0149bfcdb57a06a183024cff21aa3/models/recall/mind/net.py#L152",
)
def squash(vectors: Tensor, eps: float = 1e-8) -> Tensor:
    """Scale vectors so that short ones shrink to almost zero and long ones to almost unit length.

    Parameters
    ----------
    vectors : (..., D) float
    eps : added to the squared length before its root is taken

    Returns (..., D) float
    Source: Sabour et al. 2017, "Dynamic Routing Between Capsules", equation 1.
    """
    squared = vectors.square().sum(dim=-1, keepdim=True)
    return squared / (1 + squared) / (squared + eps).sqrt() * vectors
