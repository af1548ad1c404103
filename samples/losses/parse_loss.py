from collections.abc import Mapping, Sequence

from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, counts: Mapping[str, int]) -> Arguments:
    """Return losses and other values by name: lists of the length in `counts`, or one tensor for length 0."""
    losses: dict[str, Tensor | list[Tensor]] = {}
    for name, count in counts.items():
        values = [draw.uniform(grad="loss" in name) for _ in range(max(count, 1))]
        losses[name] = values if count else values[0]
    return (losses,)


@sample(
    inputs,
    {
        "ST-GCN, NTU60, training": ({"top1_acc": 0, "top5_acc": 0, "loss_cls": 0},),
        "Faster R-CNN R50-FPN, training": (
            {"loss_rpn_cls": 5, "loss_rpn_bbox": 5, "loss_cls": 0, "acc": 0, "loss_bbox": 0},
        ),
        "GFL R50-FPN, training": ({"loss_cls": 5, "loss_bbox": 5, "loss_dfl": 5},),
    },
    tags="ForLoop IfElseBranch InputAware Reduce BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmaction2/blob/48ba0fb6dbceb0084f95f4ec288b23b244d2c360/mmaction/models/skeleton_gcn/base.py#L65",
)
def parse_loss(losses: Mapping[str, Tensor | Sequence[Tensor]]) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of the means of all losses, and all means as numbers.

    Parameters
    ----------
    losses : float tensors of any shape, or lists of them, by name

    Returns
    -------
    sum : () float, over entries with `loss` in their name
    numbers : by name; the last one is `loss`, the sum

    Raises
    ------
    TypeError : if a value is neither a tensor nor a list of tensors

    Source: MMAction2, without the mean over processes.
    """
    means: dict[str, Tensor] = {}
    for name, value in losses.items():
        if isinstance(value, Tensor):
            means[name] = value.mean()
        elif isinstance(value, list):
            means[name] = sum(each.mean() for each in value)
        else:
            raise TypeError(f"{name} is neither a tensor nor a list of tensors")
    total: Tensor = sum(mean for name, mean in means.items() if "loss" in name)  # type: ignore[assignment]
    means["loss"] = total
    return total, {name: mean.item() for name, mean in means.items()}
