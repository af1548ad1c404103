from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, joints: int, size: tuple[int, int]) -> Arguments:
    predicted = draw.normal(images, joints, *size, std=0.1, grad=True)
    return predicted, draw.uniform(images, joints, *size), draw.mask(images, joints, 1, share=0.8).float()


@sample(
    inputs,
    {
        "HRNet-W32, COCO 256x192, training, 4 people": (4, 17, (64, 48)),
        "HRNet-W32, COCO 256x192, training, 64 people": (64, 17, (64, 48)),
        "HRNet-W32, MPII 256x256, training, 64 people": (64, 16, (64, 64)),
    },
    tags="ForLoop IfElseBranch InPlace Reduce Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmpose/blob/c85159da60f25bc6bbab763c37c2be1e49e4052f/mmpose/models/losses/mse_loss.py#L9",
)
def joints_mse_loss(predicted: Tensor, target: Tensor, target_weight: Tensor | None = None) -> Tensor:
    """Return the mean squared difference of heatmaps, over all joints.

    Parameters
    ----------
    predicted, target : (B, K, H, W) float
    target_weight : (B, K, 1) float, factor of both heatmaps of a joint, or None

    Returns () float
    Source: Xiao et al. 2018, as in MMPose.
    """
    images, joints = predicted.shape[:2]
    predicted_heatmaps = predicted.reshape(images, joints, -1).split(1, dim=1)
    target_heatmaps = target.reshape(images, joints, -1).split(1, dim=1)
    loss = predicted.new_zeros(())
    for joint in range(joints):
        heatmap, truth = predicted_heatmaps[joint].squeeze(1), target_heatmaps[joint].squeeze(1)
        if target_weight is not None:
            heatmap, truth = heatmap * target_weight[:, joint], truth * target_weight[:, joint]
        loss += functional.mse_loss(heatmap, truth)
    return loss / joints
