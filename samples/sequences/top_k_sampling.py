import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, batch, vocabulary, top_k, temperature=1.0: (
        draw.normal(batch, vocabulary, std=3.0),
        top_k,
        temperature,
    ),
    {
        "GPT-2, generation from the 40 best": (1, 50257, 40),
        "Llama 3 8B, generation from the 50 best at 0.7, batch of 8": (8, 128256, 50, 0.7),
    },
    tags="ViewAttribute Broadcast Random",
    project="Transformers",
    url="https://arxiv.org/abs/1805.04833",
    random=True,
)
def top_k_sampling(logits: Tensor, top_k: int = 50, temperature: float = 1.0) -> Tensor:
    """Draw a token from the `top_k` most probable ones, including all that tie with the last of them.

    Parameters
    ----------
    logits : (B, V) float, of the next token
    top_k : number of tokens to keep, without ties
    temperature : values below 1 favour probable tokens

    Returns (B,) int64
    Source: Fan et al. 2018 (hierarchical neural story generation); ties as in Transformers.
    """
    logits = logits / temperature
    least = logits.topk(min(top_k, logits.shape[1]), dim=1).values[:, -1:]
    candidate_logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(candidate_logits.softmax(dim=1), 1).squeeze(1)
