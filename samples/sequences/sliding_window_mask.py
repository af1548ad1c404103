import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, batch: int, keys: int, window: int, queries: int | None = None) -> Arguments:
    """Return the mask of sequences that are padded on the left, (batch, keys) bool.

    queries, window : passed to `sliding_window_mask`; None for as many queries as keys
    """
    padding = draw.integers(batch, high=keys // 4)
    return torch.arange(keys) >= padding[:, None], keys if queries is None else queries, window


@sample(
    inputs,
    {
        "Mistral 7B, generation behind 8191 tokens, batch of 8": (8, 8192, 4096, 1),
        "Gemma 3 1B, prompt of 1024 tokens": (1, 1024, 512),
        "Gemma 3 1B, prompts of up to 1024 tokens, batch of 8": (8, 1024, 512),
    },
    tags="Broadcast ViewAttribute",
    project="Transformers",
    url="https://arxiv.org/abs/2310.06825",
)
def sliding_window_mask(attention_mask: Tensor, query_length: int, window: int) -> Tensor:
    """Return the mask added to attention scores: a token attends to itself and the `window - 1` tokens before it.

    Parameters
    ----------
    attention_mask : (B, S) bool, which of S keys are tokens
    query_length : Q, number of queries; they are the last of the S tokens
    window : number of keys that a token attends to

    Returns (B, 1, Q, S) float32, zero, or the lowest number for masked keys and padding
    Source: Jiang et al. 2023 (Mistral 7B), section 2; values as in eager attention of Transformers.
    """
    keys = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    queries = keys[len(keys) - query_length :, None]
    is_visible = (keys <= queries) & (keys > queries - window)
    is_visible = is_visible & attention_mask[:, None, None, :]
    return torch.where(is_visible, 0.0, torch.finfo(torch.float32).min)
