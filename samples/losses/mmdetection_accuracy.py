from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, count: int, classes: int, topk: int | tuple[int, ...] = 1, thresh: float | None = None
) -> Arguments:
    """Return random scores of `count` predictions, with rather high scores for their labels, and the labels.

    classes : number of classes
    topk, thresh : passed to `mmdetection_accuracy`
    """
    labels = draw.integers(count, high=classes)
    scores = draw.normal(count, classes)
    scores[range(count), labels] += 2
    return scores, labels, topk, thresh


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (1024, 81),
        "ResNet-50, ImageNet, training, 32 images": (32, 1000, (1, 5)),
    },
    tags="ForLoop IfElseBranch InPlace Reduce ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/models/losses/accuracy.py#L7",
)
def mmdetection_accuracy(
    scores: Tensor, labels: Tensor, topk: int | tuple[int, ...] = 1, thresh: float | None = None
) -> Tensor | list[Tensor]:
    """Return the percentage of predictions with the label among the `topk` classes.

    Parameters
    ----------
    scores : (N, C) float
    labels : (N,) int64
    topk : number of best classes that count as predicted, or several such numbers
    thresh : score above which a class counts, None for all

    Returns (1,) float, or a list with one such tensor for each number; () without predictions
    Source: MMDetection.
    """
    numbers = (topk,) if isinstance(topk, int) else topk
    if len(scores) == 0:
        accuracies = [scores.new_tensor(0.0) for _ in numbers]
    else:
        best, classes = scores.topk(max(numbers), dim=1)
        classes = classes.t()
        right = classes == labels.view(1, -1).expand_as(classes)
        if thresh is not None:
            right = right & (best > thresh).t()
        accuracies = []
        for number in numbers:
            hits = right[:number].reshape(-1).float().sum(0, keepdim=True)
            accuracies.append(hits.mul_(100.0 / len(scores)))
    return accuracies[0] if isinstance(topk, int) else accuracies
