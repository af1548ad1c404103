"""Losses of single pixels, pairs and classes in loops over numpy arrays, as references for the samples."""

from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

Array = NDArray[Any]


def softmax(scores: Array) -> Array:
    grown = np.exp(scores - scores.max())
    return grown / grown.sum()


def resized(maps: Array, like: Array, align_corners: bool = False) -> Array:
    size = like.shape[-2:]
    return F.interpolate(torch.from_numpy(maps), size, mode="bilinear", align_corners=align_corners).numpy()


def pixels(labels: Array, counted: bool = True) -> list[tuple[int, ...]]:
    """Return the indices of an image's pixels; with `counted`, without those whose label 255 means ignored."""
    return [index for index in np.ndindex(*labels.shape) if not counted or labels[index] != 255]


def aeloss(tags: Array, joints: Array, loss_type: str = "exp") -> tuple[Array, Array]:
    pushes, pulls = [], []
    for own, people in zip(tags[..., 0], joints, strict=True):
        groups = [[own[index] for index, seen in person if seen] for person in people]
        groups = [group for group in groups if group]
        means = [np.mean(group) for group in groups]
        spread = [np.mean((np.array(group) - mean) ** 2) for group, mean in zip(groups, means, strict=True)]
        pulls.append(np.mean(spread) if spread else 0.0)
        near = [
            np.exp(-((one - other) ** 2)) if loss_type == "exp" else max(1 - abs(one - other), 0)
            for (i, one), (j, other) in product(enumerate(means), repeat=2)
            if i != j
        ]
        pushes.append(np.mean(near) / 2 if near else 0.0)
    return np.array(pushes), np.array(pulls)


def associative_pull_loss(embeddings: list[Array], mask: Array) -> float:
    total = 0.0
    for first, second, present in zip(*embeddings, mask, strict=True):
        for one, other in zip(first[present, 0], second[present, 0], strict=True):
            total += ((one - other) / 2) ** 2 * 2 / (present.sum() + 1e-4)
    return total


def associative_push_loss(embeddings: list[Array], mask: Array) -> float:
    total = 0.0
    for first, second, present in zip(*embeddings, mask, strict=True):
        count = present.sum()
        middles = (first[present, 0] + second[present, 0]) / 2
        for one, other in product(middles, repeat=2):
            total += (max(1 - abs(one - other), 0) - 1 / (count + 1e-4)) / (count * (count - 1) + 1e-4)
    return total


def coeff_diversity_loss(coeffs: Array, instances: Array) -> float:
    total = 0.0
    for i, j in product(range(len(coeffs)), repeat=2):
        cosine = coeffs[i] @ coeffs[j] / np.linalg.norm(coeffs[i]) / np.linalg.norm(coeffs[j])
        total += (1 - cosine) / 2 if instances[i] == instances[j] else (1 + cosine) / 2
    return total / len(coeffs)


def dice_loss(
    pred: Array, gt: Array, smooth: float = 1e-5, act: str = "softmax", squared: bool = True, jaccard: bool = True
) -> float:
    ratios = []
    for scores, labels in zip(pred, gt, strict=True):
        shares = 1 / (1 + np.exp(-scores)) if act == "sigmoid" else np.apply_along_axis(softmax, 0, scores)
        for index, share in enumerate(shares):
            truth = labels[index] if gt.ndim == pred.ndim else (labels == index).astype(float)
            overlap = (share * truth).sum()
            power = 2 if squared else 1
            size = (share**power).sum() + (truth**power).sum() - (overlap if jaccard else 0)
            ratios.append((2 * overlap + smooth) / (size + smooth))
    return 1 - float(np.mean(ratios))


def edge_smoothloss(
    logit: Array,
    edge_logit: Array,
    edges: Array,
    beta: float = 10.0,
    kernel: int = 3,
    limit: float = 3.0,
    weight_type: str = "gs",
) -> float:
    images, _, height, width = logit.shape
    across, down = [], []
    for image, row, column in product(range(images), range(height), range(width)):
        reach = kernel // 2
        around = edges[image, max(row - reach, 0) : row + reach + 1, max(column - reach, 0) : column + reach + 1]
        count = min((around == 1).sum(), limit)
        predicted = 1 / (1 + np.exp(-edge_logit[image, 0, row, column]))
        strength = {"gs": count, "ps": predicted, "gps": (count + predicted) / 2}[weight_type]
        here = softmax(logit[image, :, row, column])
        right = softmax(logit[image, :, row, min(column + 1, width - 1)])
        below = softmax(logit[image, :, min(row + 1, height - 1), column])
        across.extend(np.exp(-beta * strength) * abs(right - here))
        down.extend(np.exp(-beta * strength) * abs(below - here))
    return 10 * float(np.mean(across) + np.mean(down))


def edge_wbceloss(scores: Array, edges: Array, ignored: int = 255, reduction: str = "mean") -> float:
    truth = (edges == 1).astype(float)
    costs = [
        -np.log(1 / (1 + np.exp(-score))) * (1 - truth.mean())
        if true
        else -np.log(1 / (1 + np.exp(score))) * truth.mean()
        for score, true in zip(scores.ravel(), truth.ravel(), strict=True)
    ]
    return 10 * float(np.mean(costs) if reduction == "mean" else np.sum(costs))


def focal_loss(cls_score: Array, label: Array, alpha: float = 1.0, gamma: float = 2.0) -> float:
    costs = [0.0] * label.size
    for place, (image, *where) in enumerate(pixels(label, counted=False)):
        kind = label[(image, *where)]
        if kind != 255:
            sure = softmax(cls_score[(image, slice(None), *where)])[kind]
            costs[place] = -alpha * (1 - sure) ** gamma * np.log(sure)
    return float(np.mean(costs))


def gaussian_sigmoid_focalloss(scores: Array, target: Array, gamma: float = 2.0, beta: float = 4.0) -> float:
    total, points = 0.0, 0
    for score, truth in zip(scores.ravel(), target.ravel(), strict=True):
        sure = min(max(1 / (1 + np.exp(-score)), 1e-4), 1 - 1e-4)
        if truth == 1:
            points += 1
            total -= np.log(sure) * (1 - sure) ** gamma
        else:
            total -= np.log(1 - sure) * sure**gamma * (1 - truth) ** beta
    return total / max(points, 1)


def gradient_loss(student: Array, teacher: Array, label: Array) -> float:
    sobel = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    student = resized(student, teacher)
    step = label.shape[-1] // teacher.shape[-1]
    label = label[:, ::step, ::step]
    costs: list[list[float]] = [[], []]
    for image, row, column in pixels(label):
        for channel in range(teacher.shape[1]):
            directions = []
            for maps in (student, teacher):
                around = np.pad(maps[image, channel], 1)[row : row + 3, column : column + 3]
                across, down = (sobel * around).sum(), (sobel.T * around).sum()
                directions.append(np.array([across, down]) / np.sqrt(across**2 + down**2 + 1e-5))
            for axis in range(2):
                costs[axis].append((directions[0] - directions[1])[axis] ** 2)
    return float(np.mean(costs[0]) + np.mean(costs[1]))


def _cosine(one: Array, other: Array) -> float:
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / lengths) if lengths else 0.0


def ifv_loss(student: Array, teacher: Array, target: Array, classes: int, per_image: bool = True) -> float:
    step = target.shape[-1] // teacher.shape[-1]
    labels = target[:, 0, ::step, ::step]
    costs = []
    for image, row, column in pixels(labels):
        likeness = []
        for maps in (resized(student, teacher), teacher):
            some = [image] if per_image else range(len(maps))
            alike = [maps[i][:, labels[i] == labels[image, row, column]] for i in some]
            likeness.append(_cosine(maps[image, :, row, column], np.concatenate(alike, axis=1).mean(axis=1)))
        costs.append((likeness[0] - likeness[1]) ** 2)
    return float(np.mean(costs))


def inter_region_loss(student: Array, teacher: Array, target: Array, classes: int) -> float:
    step = target.shape[-1] // teacher.shape[-1]
    costs = []
    for image, labels in enumerate(target[:, 0, ::step, ::step]):
        affinities = []
        for maps in (resized(student, teacher), teacher):
            groups = [maps[image][:, labels == kind] for kind in range(classes)]
            centres = [group.mean(axis=1) if group.size else np.zeros(len(group)) for group in groups]
            affinities.append([_cosine(one, other) for one, other in product(centres, repeat=2)])
        costs.extend((np.array(affinities[0]) - np.array(affinities[1])) ** 2)
    return float(np.mean(costs))


def knowledge_gap_loss(cls_score: Array, label: Array, teacher: Array, temperature: float = 1.0) -> float:
    teacher = resized(teacher, cls_score, align_corners=True)
    costs = []
    for image, row, column in pixels(label):
        mine = softmax(cls_score[image, :, row, column] / temperature)
        other = softmax(teacher[image, :, row, column] / temperature)
        kind = label[image, row, column]
        costs.append(max(other[kind] - mine[kind], 0) * (other * np.log(other / mine)).sum())
    return float(np.mean(costs))


def sce_loss(
    cls_score: Array, label: Array, teacher: Array, temperature: float = 1.0, channel_sum: bool = False
) -> float:
    teacher = resized(teacher, cls_score, align_corners=True)
    costs = []
    for image, row, column in pixels(label):
        mine = softmax(cls_score[image, :, row, column] / temperature)
        other = softmax(teacher[image, :, row, column] / temperature)
        kind = label[image, row, column]
        if other.argmax() != kind:
            truth = np.full(len(other), 0.05 / len(other))
            truth[kind] = 0.95
            second, best = np.sort(other)[-2:]
            other = other * (best - second) + truth * (1 - (best - second))
        divergence = other * np.log(other / mine)
        costs.append(divergence.sum() if channel_sum else divergence.mean())
    return float(np.mean(costs))


def get_softgauss_loss_weight(logit: Array, target: Array, sigma: float = 7.0) -> Array:
    """Return the weights of pixels, (B, H, W), which decrease with the distance from edges, found by OpenCV."""
    import cv2

    weights = []
    for scores, labels in zip(logit, target, strict=True):
        known = np.where(labels == 255, 0, labels)
        edges = cv2.Canny(known.astype(np.uint8), 1, 1)
        edges[known != np.where(labels == 255, 0, scores.argmax(axis=0))] = 255
        distance = cv2.distanceTransform(255 - edges, cv2.DIST_L2, cv2.DIST_MASK_PRECISE).astype(float)
        weight = (1 + np.exp(-(distance**2) / (2 * sigma**2))) * (labels != 255)
        weights.append(weight / max(weight.sum(), 1e-10))
    return np.stack(weights)


def softgbw_loss(cls_score: Array, label: Array, sigma: float = 7.0) -> float:
    weight = get_softgauss_loss_weight(cls_score, label, sigma)
    costs = [
        -weight[image, row, column] * np.log(softmax(cls_score[image, :, row, column])[label[image, row, column]])
        for image, row, column in pixels(label)
    ]
    return float(np.sum(costs) / len(label))


def margin_loss(cls_score: Array, label: Array, margin: float = 0.85, sigma: float = 7.0) -> float:
    costs = []
    for image, row, column in pixels(label):
        scores = cls_score[image, :, row, column]
        second, best = np.sort(scores)[-2:]
        costs.append(max(margin - best + second, 0) if scores.argmax() == label[image, row, column] else 0.0)
    return softgbw_loss(cls_score, label, sigma) + float(np.sum(costs) / label.size)
