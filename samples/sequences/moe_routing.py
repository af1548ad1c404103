import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, tokens: int, width: int, hidden: int, experts: int, top_k: int = 2, training: bool = False
) -> Arguments:
    states = draw.normal(tokens, width, grad=training)
    router = draw.normal(experts, width, std=0.05, grad=training)
    gate_up = draw.normal(experts, 2 * hidden, width, std=0.02, grad=training)
    down = draw.normal(experts, width, hidden, std=0.02, grad=training)
    return states, router, gate_up, down, top_k


@sample(
    inputs,
    {
        "Mixtral 8x7B at a 64th of its widths, training, 128 tokens": (128, 64, 224, 8, 2, True),
        "Granite 3.0 1B-A400M, prompt of 32 tokens": (32, 1024, 512, 32, 8),
    },
    tags="ForLoop InputAware DataDependentShape AdvancedIndexing InPlace Reduce Broadcast ViewAttribute",
    project="Transformers",
    url="https://arxiv.org/abs/2401.04088",
)
def moe_routing(hidden_states: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int = 2) -> Tensor:
    """Return the outputs of each token's chosen experts, weighted by a softmax over the chosen ones.

    Parameters
    ----------
    hidden_states : (T, W) float, one row per token
    router : (E, W) float, weights that score E experts
    gate_up : (E, 2 H, W) float, weights of the experts' gate and up projections
    down : (E, W, H) float, weights of the experts' down projections
    top_k : experts per token

    Returns (T, W) float
    Source: Jiang et al. 2024 (Mixtral of experts), section 2.1; a loop over experts as in Mixtral of Transformers.
    """
    chances = functional.linear(hidden_states, router).softmax(dim=1, dtype=torch.float32)
    weights, chosen = chances.topk(top_k, dim=1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    output = torch.zeros_like(hidden_states)
    for expert in chosen.unique().tolist():
        token, rank = torch.nonzero(chosen == expert, as_tuple=True)
        gate, up = functional.linear(hidden_states[token], gate_up[expert]).chunk(2, dim=1)
        answer = functional.linear(functional.silu(gate) * up, down[expert])
        output.index_add_(0, token, (answer * weights[token, rank, None]).to(output.dtype))
    return output
