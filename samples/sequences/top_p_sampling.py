import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, batch, vocabulary, top_p, temperature=1.0: (
        draw.normal(batch, vocabulary, std=3.0),
        top_p,
        temperature,
    ),
    {
        "GPT-2 large, generation at 0.95": (1, 50257, 0.95),
        "Llama 3 8B, generation at 0.9 and temperature 0.6, batch of 4": (4, 128256, 0.9, 0.6),
    },
    tags="AdvancedIndexing InPlace Reduce ViewAttribute Random",
    project="Transformers",
    url="https://arxiv.org/abs/1904.09751",
    random=True,
)
def top_p_sampling(logits: Tensor, top_p: float = 0.9, temperature: float = 1.0) -> Tensor:
    """Draw a token from the nucleus: the most probable tokens that together reach a probability.

    Parameters
    ----------
    logits : (B, V) float, of the next token
    top_p : probability of the nucleus, 0 to 1
    temperature : values below 1 favour probable tokens

    Returns (B,) int64
    Source: Holtzman et al. 2020 (neural text degeneration), section 3.1.
    """
    logits = logits / temperature
    falling, order = logits.softmax(dim=1).sort(dim=1, descending=True)
    # the tokens before already reach `top_p`; never True for the first token
    outside = falling.cumsum(dim=1) - falling >= top_p
    outside[:, 0] = False
    nucleus_logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return torch.multinomial(nucleus_logits.softmax(dim=1), 1).squeeze(1)
