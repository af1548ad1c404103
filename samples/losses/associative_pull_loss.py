from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

CONFIGURATIONS = {
    "CornerNet Hourglass-104, 511x511, training, 6 images with about 7 objects each": (6, 7),
    "CornerNet Hourglass-104, 511x511, training, 5 images with about 60 objects each": (5, 60),
}


def inputs(draw: Draw, images: int, objects: int, slots: int = 128) -> Arguments:
    mask = draw.mask(images, slots, share=objects / slots)
    return [draw.normal(images, slots, 1, grad=True), draw.normal(images, slots, 1, grad=True)], mask


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ForLoop BuiltInDataStructure ViewAttribute AdvancedIndexing DataDependentShape Reduce Broadcast",
    project="CornerNet",
    url="https://arxiv.org/abs/1808.01244",
)
def associative_pull_loss(embeddings: list[Tensor], mask: Tensor) -> Tensor:
    """Return the squared distance of both corners' embeddings from their mean, averaged over an image's objects.

    Parameters
    ----------
    embeddings : two (N, K, 1) or (N, K) float, of the top left and the bottom right corners
    mask : (N, K) bool, which slots hold an object

    Returns () float, a sum over the images
    Source: Law and Deng 2018, equation 4, as in CornerNet's code.
    """
    first, second = (embedding.float().squeeze(-1) for embedding in embeddings)
    middle = (first + second) / 2
    count = mask.float().sum(dim=1, keepdim=True) + 1e-4
    pulls = [((corner - middle).square() / count)[mask].sum() for corner in (first, second)]
    return pulls[0] + pulls[1]
