import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes: ([draw.boxes(count) for count in boxes],),
    {
        "Faster R-CNN R50-FPN, 800x1333, training, sampled of two images": ((512, 512),),
        "Mask R-CNN R50-FPN, 800x1333, prediction, detections of two images, one empty": ((100, 0),),
        "Cascade R-CNN R50-FPN, 800x1333, prediction, proposals of eight images": ((1000,) * 8,),
    },
    tags="ForLoop IfElseBranch BuiltInDataStructure ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/transforms.py",
)
def bbox2roi(bbox_list: list[Tensor]) -> Tensor:
    """Return the boxes of all images in one tensor, with the image's index in the first column.

    Parameters
    ----------
    bbox_list : per image, (N, 4 or more) float, x1 y1 x2 y2 in pixels; further columns are dropped

    Returns (sum of N, 5) float, image x1 y1 x2 y2
    Source: MMDetection 2, `core.bbox.transforms`.
    """
    regions = []
    for image, boxes in enumerate(bbox_list):
        if boxes.shape[0] > 0:
            number = boxes.new_full((boxes.shape[0], 1), image)
            regions.append(torch.cat([number, boxes[:, :4]], dim=1))
        else:
            regions.append(boxes.new_zeros((0, 5)))
    return torch.cat(regions)
