"""A recommender: large sparse tables, small dense networks, and the products of all pairs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DENSE = 13
ROWS = (400_000, 200_000, 100_000, 50_000, 20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100, 50, 20, 10, 10) + (
    (10_000,) * 10
)
"""Of the tables: 26, as the data sets of advertisements have, of sizes that fit in memory."""
WIDTH = 64
BOTTOM, TOP = (512, 256, WIDTH), (512, 256, 1)
MOST = 8
"""Categories of an example in one table, at most."""
LEARNING_RATE = 0.01


class DLRM(nn.Module):
    """Clicks from numbers and categories.

    Parameters
    ----------
    rows : categories of each table
    width : of what a table says of a category

    Source: Naumov et al. 2019.
    """

    def __init__(
        self,
        rows: Sequence[int] = ROWS,
        width: int = WIDTH,
        bottom: Sequence[int] = BOTTOM,
        top: Sequence[int] = TOP,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows)
        for table in self.tables:
            bound = table.num_embeddings**-0.5  # type: ignore[operator]
            nn.init.uniform_(table.weight, -bound, bound)  # type: ignore[arg-type]
        self.bottom = perceptron((DENSE, *bottom), last=nn.ReLU())
        vectors = len(rows) + 1
        self.top = perceptron((width + vectors * (vectors - 1) // 2, *top), last=nn.Identity())
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", torch.stack([first, second]))

    def forward(
        self, dense: Tensor, categories: list[Tensor], offsets: list[Tensor], clicks: Tensor | None = None
    ) -> Tensor:
        """Probabilities of clicks (B,); or the loss, where it is known which were clicked.

        Parameters
        ----------
        dense : (B, 13) float
        categories : for each table, (N,) int64: those of all examples in a row
        offsets : for each table, (B,) int64: where each example's begin
        clicks : (B,) float, 0 or 1
        """
        hidden = self.bottom(dense)
        bags = [table(words, starts) for table, words, starts in zip(self.tables, categories, offsets, strict=True)]
        vectors = torch.stack([hidden, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]  # type: ignore[index]
        scores = self.top(torch.cat([hidden, crossed], dim=1)).squeeze(1)
        if clicks is None:
            return scores.sigmoid()  # type: ignore[no-any-return]
        return functional.binary_cross_entropy_with_logits(scores, clicks)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """The tables learn from the rows alone that were read."""
        dense = [*self.bottom.parameters(), *self.top.parameters()]
        return [
            torch.optim.SparseAdam(self.tables.parameters(), lr=LEARNING_RATE),
            torch.optim.SGD(dense, lr=LEARNING_RATE),
        ]


def perceptron(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Linear layers of such widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


def dlrm(batch_size: int = 512, run: str = "predict") -> tuple[DLRM, dict[str, Any]]:
    """The recommender with random weights, and examples for it: one to eight categories in each table.

    Parameters
    ----------
    run : `loss` and `train` take clicks as well
    """
    model = DLRM()
    counts = [torch.randint(1, MOST + 1, (batch_size,)) for _ in ROWS]
    inputs: dict[str, Any] = {
        "dense": torch.randn(batch_size, DENSE),
        "categories": [torch.randint(0, rows, (int(count.sum()),)) for rows, count in zip(ROWS, counts, strict=True)],
        "offsets": [count.cumsum(0) - count for count in counts],
    }
    if run != "predict":
        inputs["clicks"] = torch.randint(0, 2, (batch_size,)).float()
    return model, inputs
