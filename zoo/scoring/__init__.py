"""The score: one number for how fast a device or compiler runs real models, relative to a baseline."""

from opgrip.zoo.scoring.baselines import (
    Baseline,
    BaselineCase,
    BaselineTrace,
    added,
    baseline_of,
    read_baselines,
    write_baseline,
)
from opgrip.zoo.scoring.distilled import distilled_scores, standing_of
from opgrip.zoo.scoring.score_table import print_scores
from opgrip.zoo.scoring.scores import ModelScore, Score, TraceScore, score_of

__all__ = [
    "Baseline",
    "BaselineCase",
    "BaselineTrace",
    "ModelScore",
    "Score",
    "TraceScore",
    "added",
    "baseline_of",
    "distilled_scores",
    "print_scores",
    "read_baselines",
    "score_of",
    "standing_of",
    "write_baseline",
]
