import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, drafted: int, vocabulary: int, disagreement: float) -> Arguments:
    """Return tokens drawn from a draft model, the logits of the draft model, and those of the large model.

    Parameters
    ----------
    drafted : number of drafted tokens
    vocabulary : number of different tokens
    disagreement : standard deviation of the difference between the logits of both models
    """
    draft = draw.normal(drafted, vocabulary, std=4.0)
    last = draw.normal(1, vocabulary, std=4.0)
    tokens = torch.multinomial(draft.softmax(dim=1), 1, generator=draw.generator).squeeze(1)
    noise = draw.normal(drafted + 1, vocabulary, std=disagreement)
    return tokens, draft, torch.cat([draft, last]) + noise


@sample(
    inputs,
    {
        "T5-XXL with drafts of T5-small, 7 tokens, as in the paper": (7, 32128, 0.5),
        "Llama 3 70B with drafts of Llama 3 8B, 5 tokens": (5, 128256, 0.2),
    },
    tags="IfElseBranch InputAware DataDependentShape AdvancedIndexing Reduce ViewAttribute Random",
    project="Transformers",
    url="https://arxiv.org/abs/2211.17192",
    random=True,
)
def speculative_sampling(drafted: Tensor, draft_logits: Tensor, logits: Tensor) -> Tensor:
    """Accept drafted tokens up to the first rejected one, and draw one more token.

    Parameters
    ----------
    drafted : (G,) int64, tokens drawn by the small model
    draft_logits : (G, V) float, logits of the small model
    logits : (G + 1, V) float, of the large model at the same positions and the next one

    Returns (N + 1,) int64, the N accepted tokens and the drawn one, distributed as if drawn by the large model
    Source: Leviathan et al. 2023 (speculative decoding), algorithm 1.
    """
    draft, target = draft_logits.softmax(dim=1), logits.softmax(dim=1)
    place = torch.arange(len(drafted), device=drafted.device)
    ratio = target[place, drafted] / draft[place, drafted]
    accepted = torch.rand_like(ratio) <= ratio
    count = int(accepted.long().cumprod(dim=0).sum())
    remaining = target[count]
    if count < len(drafted):
        remaining = (remaining - draft[count]).clamp(min=0)
        remaining = remaining / remaining.sum()
    return torch.cat([drafted[:count], torch.multinomial(remaining, 1)])
