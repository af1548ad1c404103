import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, layers: int, batch: int, length: int, experts: int, top_k: int, padded: bool = False
) -> Arguments:
    gate_logits = tuple(draw.normal(batch * length, experts, grad=True) for _ in range(layers))
    lengths = draw.integers(batch, low=length // 2, high=length + 1)
    return gate_logits, top_k, torch.arange(length) < lengths[:, None] if padded else None


@sample(
    inputs,
    {
        "Switch-Base with 8 experts, encoder, training, 4 sequences of 512 tokens": (6, 4, 512, 8, 1),
        "Mixtral 8x7B, training, 1024 tokens": (32, 1, 1024, 8, 2),
        "Mixtral 8x7B, fine-tuning, 4 padded sequences of 512 tokens": (32, 4, 512, 8, 2, True),
    },
    tags="IfElseBranch DataDependentShape AdvancedIndexing Reduce ViewAttribute BuiltInDataStructure",
    project="Transformers",
    url="https://arxiv.org/abs/2101.03961",
)
def moe_load_balancing_loss(
    gate_logits: tuple[Tensor, ...], top_k: int = 2, attention_mask: Tensor | None = None
) -> Tensor:
    """Return E times the sum over E experts of their share of tokens times their mean probability.

    Parameters
    ----------
    gate_logits : scores of experts, (B * L, E) float for each layer
    top_k : experts per token
    attention_mask : (B, L), not zero for tokens; None without padding

    Returns () float, `top_k` if tokens are spread evenly
    Source: Fedus et al. 2021 (Switch Transformers), equations 4 to 6; over all layers at once as in Transformers.
    """
    chances = torch.cat(gate_logits).softmax(dim=1)
    chosen = torch.zeros_like(chances).scatter(1, chances.topk(top_k, dim=1).indices, 1.0)
    if attention_mask is not None:
        real = attention_mask.bool().flatten().repeat(len(gate_logits))
        chances, chosen = chances[real], chosen[real]
    return chances.shape[1] * (chosen.mean(dim=0) * chances.mean(dim=0)).sum()
