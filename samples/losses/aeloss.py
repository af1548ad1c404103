import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

JOINTS = 17
PEOPLE = 30


def inputs(draw: Draw, images: int, people: int, side: int = 128) -> Arguments:
    """Return tags of heatmaps, and the positions of the joints of `people` people in each image; the other slots for
    people are empty.

    images : number of images
    side : height and width of a heatmap in cells
    """
    tags = draw.normal(images, JOINTS * side * side, 1, grad=True)
    where = draw.integers(images, PEOPLE, JOINTS, high=side * side) + side * side * torch.arange(JOINTS)
    is_visible = draw.mask(images, PEOPLE, JOINTS, share=0.7)
    is_visible[:, people:] = False
    return tags, torch.stack([where, is_visible.long()], dim=-1)


@sample(
    inputs,
    {
        "HigherHRNet-W32, 512x512, training, one image with 2 people": (1, 2),
        "HigherHRNet-W32, 512x512, training, 24 images with 4 people each": (24, 4),
    },
    tags="ForLoop IfElseBranch InputAware BuiltInDataStructure ViewAttribute Reduce Broadcast",
    url="https://github.com/open-mmlab/mmpose/blob/c0d5e4c2b39a1ebeca4be2c6c6358c33a9a5012d/mmpose/models/losses/multi_loss_factory.py#L68",
)
def aeloss(tags: Tensor, joints: Tensor, loss_type: str = "exp") -> tuple[Tensor, Tensor]:
    """Return the push loss between the tags of different people, and the pull loss within one person's tags.

    Parameters
    ----------
    tags : (N, K * H * W, 1) float, heatmaps of K joints per image
    joints : (N, M, K, 2) int64, for M people and K joints: index into the tags, and whether the joint is visible
    loss_type : "exp" for a Gaussian of the difference of tags, "max" for a hinge at 1

    Returns push, pull : (N,) float each; push is zero for images with fewer than two people, pull for images without
    people
    Source: Newell et al. 2017, "Associative Embedding", section 3.3, as in MMPose.
    """
    losses = [_of_image(own, people, loss_type) for own, people in zip(tags, joints.tolist(), strict=True)]
    pushes, pulls = zip(*losses, strict=True)
    return torch.stack(pushes), torch.stack(pulls)


def _of_image(tags: Tensor, people: list[list[list[int]]], loss_type: str) -> tuple[Tensor, Tensor]:
    means: list[Tensor] = []
    pull = tags.new_zeros(())
    for joints in people:
        visible_tags = [tags[index] for index, visible in joints if visible > 0]
        if not visible_tags:
            continue
        own = torch.stack(visible_tags)
        means.append(own.mean(dim=0))
        pull = pull + (own - means[-1]).square().mean()
    count = len(means)
    if count < 2:
        return tags.new_zeros(()), pull
    centres = torch.stack(means).expand(count, count)
    difference = centres - centres.t()
    if loss_type == "exp":
        closeness = (-difference.square()).exp()
    elif loss_type == "max":
        closeness = (1 - difference.abs()).clamp(min=0)
    else:
        raise ValueError(f"unknown loss_type {loss_type}: choose exp or max")
    # each tag has distance 0 from itself
    push = (closeness.sum() - count) / (count * (count - 1)) * 0.5
    return push, pull / count
