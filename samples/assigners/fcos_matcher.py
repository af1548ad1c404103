from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opgrip.samples.assigners.priors import STRIDES, grid_points
from opgrip.samples.sample import Draw, sample

FAR = 1e10
"""Area of a truth that a point does not learn, in square pixels."""
RANGES = (-1.0, 64.0), (64.0, 128.0), (128.0, 256.0), (256.0, 512.0), (512.0, 100000.0)
"""Of the largest distance that the points of a level learn, in pixels."""


def inputs(
    draw: Draw, truths: int, size: tuple[int, int], center_sample: bool, pos_radius: float, ignored: int = 0
) -> tuple[Any, ...]:
    """Points of all levels, truths with their classes, and the distances that each point may learn."""
    levels = grid_points(size)
    ranges = [torch.tensor(reach).expand(len(points), 2) for points, reach in zip(levels, RANGES, strict=True)]
    gt = torch.cat([draw.boxes(truths), draw.integers(truths, 1, low=1, high=81).float()], dim=1)
    ignore = draw.boxes(ignored) if ignored else None
    counts = [len(points) for points in levels]
    return torch.cat(levels)[:, :2], gt, torch.cat(ranges), counts, STRIDES, ignore, center_sample, pos_radius


@sample(
    inputs,
    {
        "FCOS R50-FPN, 800x1333, training, 2 objects": (2, (832, 1344), True, 1.5),
        "FCOS R50-FPN, 800x1333, training, 7 objects and 1 to ignore": (7, (832, 1344), True, 1.5, 1),
        "FCOS of the paper, 800x1024, training, 7 objects": (7, (800, 1024), False, 1.0),
    },
    tags="IfElseBranch ForLoop AdvancedIndexing InPlace Reduce Broadcast ViewAttribute BuiltInDataStructure",
    project="United Perception",
    url="https://github.com/ModelTC/United-Perception/blob/1fdb7b20abc1d7f13cadf5fdacff2a6a8a5ae20f/up/tasks/det/plugins/fcos/models/postprocess/fcos_supervisor.py",
)
def fcos_matcher(
    points: Tensor,
    gt: Tensor,
    loc_ranges: Tensor,
    num_points_per: Sequence[int],
    strides: Sequence[int] = STRIDES,
    ig: Tensor | None = None,
    center_sample: bool = False,
    pos_radius: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Assign to each point the smallest truth that it is in and that is of a size for its level.

    Parameters
    ----------
    points : (N, 2) float, x y in pixels, level by level
    gt : (M, 5) float, x1 y1 x2 y2 in pixels and the class, from 1
    loc_ranges : (N, 2) float: least and largest distance from a truth's farthest edge, in pixels
    num_points_per, strides : points and their distance in pixels, of each level
    ig : (K, 4) float: boxes where nothing is learned
    center_sample : whether a truth is only learned near its centre
    pos_radius : how near, in strides

    Returns
    -------
    classes, (N,) float: 0 for nothing, -1 for what is not learned; and how far the left, top, right and bottom edge
    of the assigned truth are from the point, (N, 4) float, in pixels, of any truth where none is assigned

    Source: Tian et al. 2019 (FCOS), section 3.2, and its later sampling of centres; United Perception, which grew out
    of the POD that LongTail-Bench names.
    """
    if len(gt) == 0:
        return points.new_zeros(len(points)), points.new_zeros(len(points), 4)
    boxes, classes = gt[:, :4], gt[:, 4]
    targets = _distances(points, boxes)
    if center_sample:
        inside = _near_centre(points, boxes, num_points_per, [stride * pos_radius for stride in strides])
    else:
        inside = targets.amin(dim=2) > 0
    farthest = targets.amax(dim=2)
    in_range = (farthest >= loc_ranges[:, :1]) & (farthest <= loc_ranges[:, 1:])
    areas = ((boxes[:, 2] - boxes[:, 0] + 1) * (boxes[:, 3] - boxes[:, 1] + 1)).repeat(len(points), 1)
    areas[~inside] = FAR
    areas[~in_range] = FAR
    area, smallest = areas.min(dim=1)
    labels = classes[smallest]
    labels[area == FAR] = 0
    if ig is not None:
        labels[(_distances(points, ig).amin(dim=2) > 0).any(dim=1)] = -1
    return labels, targets[torch.arange(len(points), device=points.device), smallest]


def _distances(points: Tensor, boxes: Tensor) -> Tensor:
    """(N, M, 4): how far the left, top, right and bottom edges of boxes (M, 4) or (N, M, 4) are, positive inside."""
    return torch.cat([points[:, None] - boxes[..., :2], boxes[..., 2:] - points[:, None]], dim=2)


def _near_centre(points: Tensor, boxes: Tensor, num_points_per: Sequence[int], reaches: Sequence[float]) -> Tensor:
    """(N, M) bool: whether points are in boxes, and as near their centre as the point's level lets them be."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    regions = boxes.new_zeros(len(points), len(boxes), 4)
    begin = 0
    for count, reach in zip(num_points_per, reaches, strict=True):
        end = begin + count
        regions[begin:end, :, :2] = torch.maximum(centres - reach, boxes[:, :2])
        regions[begin:end, :, 2:] = torch.minimum(centres + reach, boxes[:, 2:])
        begin = end
    return _distances(points, regions).amin(dim=2) > 0
