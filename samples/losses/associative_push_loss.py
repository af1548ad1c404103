import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.associative_pull_loss import CONFIGURATIONS, inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ForLoop BuiltInDataStructure ViewAttribute AdvancedIndexing DataDependentShape Reduce Broadcast InPlace",
    project="CornerNet",
    url="https://arxiv.org/abs/1808.01244",
)
def associative_push_loss(embeddings: list[Tensor], mask: Tensor) -> Tensor:
    """Return 1 minus the distance of two objects' embeddings, at least 0, averaged over an image's pairs.

    Parameters
    ----------
    embeddings : two (N, K, 1) or (N, K) float, of the top left and the bottom right corners
    mask : (N, K) bool, which slots hold an object

    Returns () float, a sum over the images
    Source: Law and Deng 2018, equation 5, as in CornerNet's code.
    """
    first, second = (embedding.float().squeeze(-1) for embedding in embeddings)
    middle = (first + second) / 2
    present = mask.float()
    pairs = (present.unsqueeze(1) + present.unsqueeze(2)).eq(2)
    count = present.sum(dim=1, keepdim=True).unsqueeze(2)
    closeness = F.relu(1 - (middle.unsqueeze(1) - middle.unsqueeze(2)).abs(), inplace=True)
    # subtracts the pairs of an object with itself, which contribute 1 each
    closeness = closeness - 1 / (count + 1e-4)
    return (closeness / ((count - 1) * count + 1e-4))[pairs].sum()
