import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, objects: tuple[int, ...], queries: int, classes: int = 80, width: int = 256) -> Arguments:
    size = (800, 1333)
    boxes = [draw.boxes(count, size) for count in objects]
    labels = [draw.integers(count, high=classes) for count in objects]
    return boxes, labels, [size] * len(objects), draw.normal(classes, width, grad=True), queries


@sample(
    inputs,
    {
        "DINO R50 4-scale, COCO, 800x1333, training, 2 images of 7 and 3 objects": ((7, 3), 900),
        "DINO R50 4-scale, COCO, 800x1333, training, 2 images of 63 and 12 objects": ((63, 12), 900),
    },
    tags=(
        "ForLoop IfElseBranch BuiltInDataStructure ViewAttribute AdvancedIndexing DataDependentShape "
        "InPlace Broadcast Random"
    ),
    project="MMDetection",
    url="https://arxiv.org/abs/2203.03605",
    random=True,
)
def denoising_queries(
    boxes: list[Tensor],
    labels: list[Tensor],
    sizes: list[tuple[int, int]],
    embedding: Tensor,
    matching_queries: int,
    denoising: int = 100,
    label_noise: float = 0.5,
    box_noise: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return groups of queries for contrastive denoising, and the mask that hides each group from all others.

    For each object, a group has one query with little noise, to be restored, and one with more noise, to be rejected.

    Parameters
    ----------
    boxes : per image, (T, 4) float, x1 y1 x2 y2 in pixels
    labels : per image, (T,) int64, classes of the boxes
    sizes : height and width of each image in pixels
    embedding : (classes, D) float
    matching_queries : number of the queries that detect objects; they follow the denoising queries
    denoising : approximate number of query pairs
    label_noise : twice the share of labels that are replaced by random ones
    box_noise : largest shift of a corner with little noise, relative to half of the box's size

    Returns
    -------
    (N, Q, D) float, contents of the queries, zero in unused slots
    (N, Q, 4) float, boxes of the queries, cx cy w h relative to the image, before the sigmoid
    (Q + matching_queries, Q + matching_queries) bool, True if a row must not attend to a column
    number of groups; Q is twice this number times the largest number of objects of an image

    Source: Zhang et al. 2023, "DINO", section 3.3, as in MMDetection; Li et al. 2022, "DN-DETR".
    """
    counts = [len(own) for own in boxes]
    most = max(counts)
    groups = max(denoising // most, 1) if most else 1
    shares = [own / own.new_tensor([width, height] * 2) for own, (height, width) in zip(boxes, sizes, strict=True)]
    contents = _noised_labels(torch.cat(labels), embedding, groups, label_noise)
    places = _noised_boxes(torch.cat(shares), groups, box_noise)

    device = embedding.device
    image = torch.cat([torch.full((count,), index, device=device) for index, count in enumerate(counts)])
    within = torch.cat([torch.arange(count, device=device) for count in counts])
    slots = image.repeat(2 * groups), torch.cat([within + most * part for part in range(2 * groups)])
    queries = 2 * groups * most
    content = embedding.new_zeros(len(boxes), queries, embedding.shape[1])
    place = embedding.new_zeros(len(boxes), queries, 4)
    content[slots] = contents
    place[slots] = places
    return content, place, _hidden(groups, 2 * most, matching_queries, device), groups


def _noised_labels(labels: Tensor, embedding: Tensor, groups: int, noise: float) -> Tensor:
    repeated = labels.repeat(2 * groups)
    chosen = (torch.rand_like(repeated, dtype=torch.float32) < noise / 2).nonzero().view(-1)
    drawn = torch.randint_like(chosen, len(embedding))
    return embedding[repeated.scatter(0, chosen, drawn)]


def _noised_boxes(boxes: Tensor, groups: int, noise: float) -> Tensor:
    repeated = boxes.repeat(2 * groups, 1)
    sign = torch.randint_like(repeated, 0, 2) * 2 - 1
    part = torch.rand_like(repeated)
    # the second query of a pair is to be rejected: its corners move further than in any first query
    part.view(groups, 2, len(boxes), 4)[:, 1] += 1
    extent = (repeated[:, 2:] - repeated[:, :2]).repeat(1, 2)
    noised = (repeated + part * sign * extent * noise / 2).clamp(0, 1)
    low, high = noised[:, :2], noised[:, 2:]
    shares = torch.cat([(low + high) / 2, high - low], dim=1).clamp(0, 1)
    return (shares.clamp(min=1e-3) / (1 - shares).clamp(min=1e-3)).log()


def _hidden(groups: int, width: int, matching_queries: int, device: torch.device) -> Tensor:
    queries = groups * width
    hidden = torch.zeros(queries + matching_queries, queries + matching_queries, dtype=torch.bool, device=device)
    hidden[queries:, :queries] = True
    for group in range(groups):
        own = slice(group * width, (group + 1) * width)
        hidden[own, : own.start] = True
        hidden[own, own.stop : queries] = True
    return hidden
