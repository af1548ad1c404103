import torch
from torch import Tensor

from opgrip.samples.sample import Draw, sample

JOINTS = 17
PEOPLE = 30


def inputs(draw: Draw, images: int, people: int, side: int = 128) -> tuple[Tensor, Tensor]:
    """Tags of a heatmap, and where each person's joints are in it; of the slots for people the first few are in use."""
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
    project="MMPose",
    url="https://github.com/open-mmlab/mmpose/blob/c0d5e4c2b39a1ebeca4be2c6c6358c33a9a5012d/mmpose/models/losses/multi_loss_factory.py#L68",
)
def aeloss(tags: Tensor, joints: Tensor, loss_type: str = "exp") -> tuple[Tensor, Tensor]:
    """How close the tags of different people are, and how far apart those of one person's joints.

    Parameters
    ----------
    tags : (N, K * H * W, 1) float, of each image's K heatmaps of joints
    joints : (N, M, K, 2) int64, of each of M people and K joints the index among the tags, and whether it is seen
    loss_type : "exp" pushes tags apart by a Gaussian of their difference, "max" by a hinge at 1

    Returns Two (N,) float: push and pull, zero where an image has no two people, or none
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
        raise ValueError(f"loss_type is exp or max, not {loss_type}")
    # each tag is at no distance from itself
    push = (closeness.sum() - count) / (count * (count - 1)) * 0.5
    return push, pull / count
