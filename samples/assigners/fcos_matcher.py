from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.samples.assigners.priors import STRIDES, grid_points
from opgrip.samples.sample import Arguments, Draw, sample

FAR = 1e10
"""Area, in square pixels, of a truth that a point cannot be assigned to."""
RANGES = (-1.0, 64.0), (64.0, 128.0), (128.0, 256.0), (256.0, 512.0), (512.0, 100000.0)
"""Least and largest distance of each level, in pixels; the last one has no limit in the paper."""


def inputs(
    draw: Draw, truths: int, size: tuple[int, int], center_sample: bool, pos_radius: float, ignored: int = 0
) -> Arguments:
    """Return the points of all levels, `truths` random boxes with their classes, and the range of distances of each
    point.

    Parameters
    ----------
    size : height and width of the image in pixels
    center_sample, pos_radius : passed to `fcos_matcher`
    ignored : number of boxes whose points are ignored
    """
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
    """Assign to each point the smallest truth that contains it and has a size suitable for its level.

    Parameters
    ----------
    points : (N, 2) float, x y in pixels, level by level
    gt : (M, 5) float, x1 y1 x2 y2 in pixels and the class, from 1
    loc_ranges : (N, 2) float: least and largest distance to the farthest edge of a truth, in pixels
    num_points_per, strides : number of points and their spacing in pixels, per level
    ig : (K, 4) float: boxes whose points are ignored
    center_sample : True to assign only points near the centre of a truth
    pos_radius : largest distance from the centre, in strides

    Returns
    -------
    classes, (N,) float: 0 for background, -1 for ignored points; and distances of the left, top, right and bottom edge
    of the assigned truth from the point, (N, 4) float, in pixels, undefined for unassigned points

    Source: Tian et al. 2019 (FCOS), section 3.2, and its later centre sampling; United Perception, the successor of the
    POD that LongTail-Bench names.
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
    """Return distances (N, M, 4) of points from the left, top, right and bottom edges of boxes, positive inside.

    `boxes` is (M, 4) or (N, M, 4).
    """
    return torch.cat([points[:, None] - boxes[..., :2], boxes[..., 2:] - points[:, None]], dim=2)


def _near_centre(points: Tensor, boxes: Tensor, num_points_per: Sequence[int], reaches: Sequence[float]) -> Tensor:
    """Return whether points are inside boxes and near their centres, (N, M) bool.

    Parameters
    ----------
    points : (N, 2) float, x y in pixels, level by level
    boxes : (M, 4) float, x1 y1 x2 y2 in pixels
    num_points_per : number of points of each level
    reaches : largest distance of a point from the centre of a box along x and along y, in pixels, for each level
    """
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    regions = boxes.new_zeros(len(points), len(boxes), 4)
    begin = 0
    for count, reach in zip(num_points_per, reaches, strict=True):
        end = begin + count
        regions[begin:end, :, :2] = torch.maximum(centres - reach, boxes[:, :2])
        regions[begin:end, :, 2:] = torch.minimum(centres + reach, boxes[:, 2:])
        begin = end
    return _distances(points, regions).amin(dim=2) > 0
