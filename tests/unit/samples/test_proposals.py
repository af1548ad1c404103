"""Proposals and losses of the first stage, compared with a calculation by hand."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from opgrip.samples.models.proposals import AnchorPredictions, ProposalLoss, ProposalSelector


@pytest.fixture
def predictions() -> AnchorPredictions:
    """Return three anchors of a level, of which the second overlaps the first by more than 0.7, and one of another."""
    fine = torch.tensor([[0.0, 0, 40, 40], [2, 2, 42, 42], [50, 60, 110, 120]])
    coarse = torch.tensor([[0.0, 0, 41, 41]])
    deltas = torch.zeros(1, 4, 4)
    deltas[0, 2, 0] = 1 / 6  # ten pixels to the right
    return AnchorPredictions(torch.tensor([[0.5, 0.4, 0.9, 0.7]]), deltas, [fine, coarse])


def test_proposals_are_decoded_clipped_suppressed_and_sorted(predictions: AnchorPredictions) -> None:
    (found,) = ProposalSelector()(predictions, (90, 100))
    torch.testing.assert_close(found, torch.tensor([[60.0, 60, 100, 90], [0, 0, 41, 41], [0, 0, 40, 40]]))


def test_number_of_proposals_is_limited(predictions: AnchorPredictions) -> None:
    (best,) = ProposalSelector(limit=1)(predictions, (90, 100))
    torch.testing.assert_close(best, torch.tensor([[60.0, 60, 100, 90]]))
    (first,) = ProposalSelector(candidates=1)(predictions, (90, 100))
    torch.testing.assert_close(first, torch.tensor([[60.0, 60, 100, 90], [0, 0, 41, 41]]))


def test_anchor_losses_equal_a_manual_calculation() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    deltas = torch.zeros(2, 2, 4)
    deltas[0, 0, 0] = 0.5
    scores = torch.tensor([[2.0, -1.0], [2.0, -1.0]])
    # the second image is empty, so that both of its anchors are negatives
    truths = [torch.tensor([[0.0, 0, 10, 10]]), torch.zeros(0, 4)]
    losses = ProposalLoss()(AnchorPredictions(scores, deltas, [anchors]), truths)
    object_, nothing = (log(1 + exp(-2)) + log(1 + exp(-1))) / 2, (log(1 + exp(2)) + log(1 + exp(-1))) / 2
    assert float(losses["rpn_cls"]) == pytest.approx((object_ + nothing) / 2)
    assert float(losses["rpn_box"]) == pytest.approx((0.5 - 1 / 18) / 2 / 2)
