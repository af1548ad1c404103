"""A graph network: every node listens to its neighbours, to some more than to others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES, CLASSES = 128, 40
WIDTH, HEADS = 32, 8
NODES, NEIGHBOURS = 20_000, 7
LEARNING_RATE = 0.005


class GraphAttention(nn.Module):
    """What nodes say, weighed by the one who says it and the one who listens.

    Parameters
    ----------
    outputs : a head's numbers of a node

    Source: Velickovic et al. 2018, section 2.1.
    """

    def __init__(self, inputs: int, outputs: int, heads: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.heads, self.outputs, self.dropout = heads, outputs, dropout
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.speaking = nn.Parameter(torch.empty(heads, outputs))
        self.listening = nn.Parameter(torch.empty(heads, outputs))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))
        for weight in (self.speaking, self.listening):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """(N, inputs) to (N, heads * outputs).

        Parameters
        ----------
        edges : (2, E) int64, from whom and to whom
        """
        source, target = edges.unbind(0)
        said = self.project(x).view(-1, self.heads, self.outputs)
        spoken, heard = (said * self.speaking).sum(-1), (said * self.listening).sum(-1)
        scores = functional.leaky_relu(spoken.index_select(0, source) + heard.index_select(0, target), 0.2)
        weights = functional.dropout(softmax_by(scores, target, len(x)), self.dropout, self.training)
        messages = said.index_select(0, source) * weights.unsqueeze(-1)
        gathered = torch.zeros_like(said).index_add(0, target, messages)
        return gathered.flatten(1) + self.bias


class GAT(nn.Module):
    """Classes of nodes, or of whole graphs.

    Parameters
    ----------
    width : a head's numbers of a node

    Source: Velickovic et al. 2018, section 3.3, for the layers; Corso et al. 2020, section 2, for what a graph says.
    """

    def __init__(self, inputs: int = FEATURES, width: int = WIDTH, heads: int = HEADS, classes: int = CLASSES) -> None:
        super().__init__()
        hidden = heads * width
        self.layers = nn.ModuleList([GraphAttention(inputs, width, heads), GraphAttention(hidden, width, heads)])
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in self.layers)
        self.nodes = GraphAttention(hidden, classes, 1)
        self.graphs = nn.Linear(4 * classes, classes)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor | None = None) -> Any:
        """The class of each node (N,) and of each graph (G,); or the loss, where the labels of some nodes are known.

        Parameters
        ----------
        x : (N, inputs) float
        edges : (2, E) int64, from whom and to whom
        graph : (N,) int64, which graph each node is of, in ascending order
        labels : (N,) int64, -1 where unknown
        """
        edges = with_loops(edges, len(x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = functional.elu(norm(layer(x, edges)))
        scores = self.nodes(x, edges)
        if labels is not None:
            known = labels >= 0
            return functional.nll_loss(functional.log_softmax(scores[known], -1), labels[known])
        return scores.argmax(-1), self.graphs(pooled(scores, graph)).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """All weights by lists of tensors each step, as on accelerators."""
        return torch.optim.RMSprop(self.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=True)


def with_loops(edges: Tensor, nodes: int) -> Tensor:
    """Each edge once, in order of those that they lead to, and one from each node to itself."""
    itself = torch.arange(nodes, device=edges.device)
    keys = torch.unique(torch.cat([edges[1] * nodes + edges[0], itself * nodes + itself]))
    return torch.stack([torch.remainder(keys, nodes), torch.div(keys, nodes, rounding_mode="floor")])


def softmax_by(scores: Tensor, group: Tensor, groups: int) -> Tensor:
    """The softmax of scores (E, heads) over those of each group (E,) int64."""
    places = group.unsqueeze(-1).expand_as(scores)
    highest = scores.new_full((groups, scores.shape[1]), -torch.inf).scatter_reduce(0, places, scores.detach(), "amax")
    powers = torch.exp(scores - highest.gather(0, places))
    sums = torch.zeros_like(highest).scatter_add(0, places, powers)
    return powers / sums.gather(0, places)


def pooled(x: Tensor, graph: Tensor) -> Tensor:
    """Of each graph's nodes (N, width) the mean, the least, the most and the deviation, (G, 4 * width)."""
    sizes = torch.bincount(graph)
    mean, least, most = (torch.segment_reduce(x, name, lengths=sizes, axis=0) for name in ("mean", "min", "max"))
    squares = torch.segment_reduce(x.square(), "mean", lengths=sizes, axis=0)
    deviation = torch.clamp_min(squares - mean.square(), 0.0).sqrt()
    return torch.nan_to_num(torch.cat([mean, least, most, deviation], dim=-1))


def gat(batch_size: int = 8, run: str = "predict") -> tuple[GAT, dict[str, Any]]:
    """The network with random weights, and graphs of 20,000 nodes together, with some seven neighbours each.

    Parameters
    ----------
    batch_size : graphs
    run : `loss` and `train` take the labels of half of the nodes
    """
    graph = torch.randint(0, batch_size, (NODES,)).sort().values
    ends = torch.cumsum(torch.bincount(graph, minlength=batch_size), 0)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    source = torch.randint(0, NODES, (NODES * NEIGHBOURS,))
    # a neighbour is of the same graph
    mine = graph[source]
    target = (ends - sizes)[mine] + (torch.rand(len(source)) * sizes[mine]).long()
    inputs: dict[str, Any] = {"x": torch.randn(NODES, FEATURES), "edges": torch.stack([source, target]), "graph": graph}
    if run != "predict":
        labels = torch.randint(0, CLASSES, (NODES,))
        inputs["labels"] = torch.where(torch.rand(NODES) < 0.5, labels, -1)
    return GAT(), inputs
