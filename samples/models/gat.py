"""Graph attention network: each node takes a weighted mean of its neighbours."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES, CLASSES = 128, 40
WIDTH, HEADS = 32, 8
NODES, NEIGHBOURS = 20_000, 7
LEARNING_RATE = 0.005


class GraphAttention(nn.Module):
    """A layer that computes, for each node of a graph, a weighted mean of the features of its neighbours.

    The weight of a neighbour is computed from the features of both nodes.

    Parameters
    ----------
    inputs : features per node
    outputs : features per head and node

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
        """Return the new features of the nodes, (N, heads * outputs) float.

        Parameters
        ----------
        x : (N, inputs) float, features of the nodes
        edges : (2, E) int64, source and target nodes
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
    """Classifier of the nodes of graphs, and of whole graphs.

    Parameters
    ----------
    inputs : features per node
    width : features per head and node inside the network

    Source: Velickovic et al. 2018, section 3.3, for the layers; Corso et al. 2020, section 2, for the pooling of
    graphs.
    """

    def __init__(self, inputs: int = FEATURES, width: int = WIDTH, heads: int = HEADS, classes: int = CLASSES) -> None:
        super().__init__()
        hidden = heads * width
        self.layers = nn.ModuleList([GraphAttention(inputs, width, heads), GraphAttention(hidden, width, heads)])
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in self.layers)
        self.nodes = GraphAttention(hidden, classes, 1)
        self.graphs = nn.Linear(4 * classes, classes)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor | None = None) -> Any:
        """Return the classes of nodes (N,) and graphs (G,), or the loss of the nodes' classes if labels are given.

        Parameters
        ----------
        x : (N, inputs) float, features of the nodes
        edges : (2, E) int64, source and target nodes
        graph : (N,) int64, index of each node's graph, ascending
        labels : (N,) int64, class of each node, -1 if unknown
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
        """Return an optimizer that updates weights with operators on lists of tensors, as is usual on accelerators."""
        return torch.optim.RMSprop(self.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=True)


def with_loops(edges: Tensor, nodes: int) -> Tensor:
    """Return the edges, (2, E) int64, without duplicates, ordered by target, and with one edge from each node to
    itself.

    nodes : number of nodes
    """
    itself = torch.arange(nodes, device=edges.device)
    keys = torch.unique(torch.cat([edges[1] * nodes + edges[0], itself * nodes + itself]))
    return torch.stack([torch.remainder(keys, nodes), torch.div(keys, nodes, rounding_mode="floor")])


def softmax_by(scores: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the softmax of scores within each group of edges, (E, heads) float.

    Parameters
    ----------
    scores : (E, heads) float, scores of the edges
    group : (E,) int64, index of the group of each edge, such as its target node
    groups : number of groups
    """
    places = group.unsqueeze(-1).expand_as(scores)
    highest = scores.new_full((groups, scores.shape[1]), -torch.inf).scatter_reduce(0, places, scores.detach(), "amax")
    powers = torch.exp(scores - highest.gather(0, places))
    sums = torch.zeros_like(highest).scatter_add(0, places, powers)
    return powers / sums.gather(0, places)


def pooled(x: Tensor, graph: Tensor) -> Tensor:
    """Return the mean, minimum, maximum and standard deviation of the features of each graph's nodes, (G, 4 * width)
    float.

    Parameters
    ----------
    x : (N, width) float, features of the nodes
    graph : (N,) int64, index of each node's graph, ascending
    """
    sizes = torch.bincount(graph)
    mean, least, most = (torch.segment_reduce(x, name, lengths=sizes, axis=0) for name in ("mean", "min", "max"))
    squares = torch.segment_reduce(x.square(), "mean", lengths=sizes, axis=0)
    deviation = torch.clamp_min(squares - mean.square(), 0.0).sqrt()
    return torch.nan_to_num(torch.cat([mean, least, most, deviation], dim=-1))


def gat(batch_size: int = 8, run: str = "predict") -> tuple[GAT, dict[str, Any]]:
    """Return the network with random weights, and arguments for it by name.

    The graphs have 20,000 nodes in total, with about seven neighbours each.

    Parameters
    ----------
    batch_size : number of graphs
    run : `predict`, `loss` or `train`; the latter two also need labels, which half of the nodes have
    """
    graph = torch.randint(0, batch_size, (NODES,)).sort().values
    ends = torch.cumsum(torch.bincount(graph, minlength=batch_size), 0)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    source = torch.randint(0, NODES, (NODES * NEIGHBOURS,))
    # a neighbour is in the same graph
    mine = graph[source]
    target = (ends - sizes)[mine] + (torch.rand(len(source)) * sizes[mine]).long()
    inputs: dict[str, Any] = {"x": torch.randn(NODES, FEATURES), "edges": torch.stack([source, target]), "graph": graph}
    if run != "predict":
        labels = torch.randint(0, CLASSES, (NODES,))
        inputs["labels"] = torch.where(torch.rand(NODES) < 0.5, labels, -1)
    return GAT(), inputs
