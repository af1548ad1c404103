"""A recommender that predicts clicks: large sparse tables, small dense networks, and products of all pairs of
embeddings.
"""

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
"""Rows of the 26 tables, as many as in public advertising data sets, with sizes that fit in memory."""
WIDTH = 64
BOTTOM, TOP = (512, 256, WIDTH), (512, 256, 1)
MOST = 8
"""Most categories of an example in one table."""
LEARNING_RATE = 0.01


class DLRM(nn.Module):
    """A network that predicts clicks from numeric and categorical features.

    Parameters
    ----------
    rows : number of categories of each table
    width : length of an embedding
    bottom, top : number of outputs of each layer before, and after, the products of embeddings

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
        """Return click probabilities (B,), or the loss if `clicks` is given.

        Parameters
        ----------
        dense : (B, 13) float
        categories : per table, (N,) int64: categories of all examples, one after the other
        offsets : per table, (B,) int64: start of each example's categories
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
        """Return one optimizer for the tables, which only updates rows that were read, and one for the dense layers."""
        dense = [*self.bottom.parameters(), *self.top.parameters()]
        return [
            torch.optim.SparseAdam(self.tables.parameters(), lr=LEARNING_RATE),
            torch.optim.SGD(dense, lr=LEARNING_RATE),
        ]


def perceptron(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Return linear layers with ReLU between them, followed by the module `last`.

    widths : number of inputs of the first layer, then the number of outputs of each layer
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


def dlrm(batch_size: int = 512, run: str = "predict") -> tuple[DLRM, dict[str, Any]]:
    """Return the recommender with random weights, and arguments for it by name.

    An example has one to eight categories in each table.

    Parameters
    ----------
    batch_size : number of examples
    run : `predict`, `loss` or `train`; the latter two also need clicks
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
