"""Decoding, routing and bookkeeping of sequences, compared with their originals or plain loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from implementations import compare, compare_with
from optional import optional
from torch import Tensor

from opgrip.samples import Draw, samples
from opgrip.samples.sequences.beam_search_step import beam_search_step
from opgrip.samples.sequences.beamableMM import beamableMM
from opgrip.samples.sequences.collate_tokens import collate_tokens
from opgrip.samples.sequences.greedy_decoder import greedy_decoder
from opgrip.samples.sequences.paged_kv_gather import paged_kv_gather
from opgrip.samples.sequences.sequence_mask import sequence_mask


def transformers(module: str) -> Any:
    return optional(f"transformers.{module}")


def rotary_embedding(*arguments: Any) -> Any:
    return transformers("models.llama.modeling_llama").apply_rotary_pos_emb(*arguments)


def make_positions(tokens: Tensor, padding: int) -> Tensor:
    embeddings = transformers("models.roberta.modeling_roberta").RobertaEmbeddings
    return embeddings.create_position_ids_from_input_ids(tokens, padding)


def moe_routing(states: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    experts, width, hidden = down.shape
    config = transformers("models.mixtral.configuration_mixtral").MixtralConfig(
        hidden_size=width, intermediate_size=hidden, num_local_experts=experts, num_experts_per_tok=top_k
    )
    block = transformers("models.mixtral.modeling_mixtral").MixtralSparseMoeBlock(config)
    weights = {"gate.weight": router, "experts.gate_up_proj": gate_up, "experts.down_proj": down}
    return torch.func.functional_call(block, weights, states[None])[0]


def moe_load_balancing_loss(gate_logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> Tensor:
    module = transformers("models.mixtral.modeling_mixtral")
    return module.load_balancing_loss_func(gate_logits, gate_logits[0].shape[1], top_k, mask)


def group_query_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: Any = None) -> Any:
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = transformers("models.llama.modeling_llama").eager_attention_forward
    return attention(module, query, key, value, mask, scaling)


def alibi(mask: Tensor, heads: int) -> Tensor:
    return transformers("models.bloom.modeling_bloom").build_alibi_tensor(mask, heads, torch.float32)


def relative_position_bucket(*arguments: Any) -> Tensor:
    return transformers("models.t5.modeling_t5").T5Attention._relative_position_bucket(*arguments)


def sliding_window_mask(mask: Tensor, queries: int, window: int) -> Tensor:
    module = transformers("masking_utils")
    batch, keys = mask.shape
    seen = module.sliding_window_causal_mask_function(window)
    return module.eager_mask(batch, queries, keys, keys - queries, mask_function=seen, attention_mask=mask)


def kv_cache_update(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Any:
    layer = transformers("cache_utils").StaticLayer(keys.shape[2])
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    layer.cumulative_length = positions[:1].clone()
    return layer.update(key, value)


def repetition_penalty(tokens: Tensor, scores: Tensor, penalty: float) -> Tensor:
    return transformers("generation.logits_process").RepetitionPenaltyLogitsProcessor(penalty)(tokens, scores)


def ngrams(tokens: Tensor, scores: Tensor, size: int) -> Tensor:
    return transformers("generation.logits_process").NoRepeatNGramLogitsProcessor(size)(tokens, scores)


def sampling(warper: str) -> Callable[..., Tensor]:
    def draw(logits: Tensor, limit: float, temperature: float) -> Tensor:
        module = transformers("generation.logits_process")
        warped = getattr(module, warper)(limit)(None, module.TemperatureLogitsWarper(temperature)(None, logits))
        return torch.multinomial(warped.softmax(-1), 1).squeeze(1)

    return draw


def speculative(drafted: Tensor, draft_logits: Tensor, logits: Tensor) -> Tensor:
    sample = transformers("generation.utils")._speculative_sampling
    return sample(drafted[None], draft_logits[None], len(drafted), logits[None])[0][0]


def mask_tokens(tokens: Tensor, special: Tensor, mask_token: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    words = optional("tokenizers").models.WordLevel({str(word): word for word in range(vocabulary)}, "0")
    tokenizer = transformers("tokenization_utils_tokenizers").PreTrainedTokenizerFast(
        tokenizer_object=optional("tokenizers").Tokenizer(words), mask_token=str(mask_token)
    )
    collator = transformers("data.data_collator").DataCollatorForLanguageModeling(tokenizer)
    return collator.torch_mask_tokens(tokens, special)


def unpad_input(states: Tensor, mask: Tensor) -> Any:
    return transformers("modeling_flash_attention_utils")._unpad_input(states, mask)[:4]


ORIGINALS: dict[str, Callable[..., Any]] = {
    "rotary_embedding": rotary_embedding,
    "make_positions": make_positions,
    "moe_routing": moe_routing,
    "moe_load_balancing_loss": moe_load_balancing_loss,
    "group_query_attention": group_query_attention,
    "alibi_bias": alibi,
    "relative_position_bucket": relative_position_bucket,
    "sliding_window_mask": sliding_window_mask,
    "kv_cache_update": kv_cache_update,
    "repetition_penalty": repetition_penalty,
    "no_repeat_ngram": ngrams,
    "top_k_sampling": sampling("TopKLogitsWarper"),
    "top_p_sampling": sampling("TopPLogitsWarper"),
    "speculative_sampling": speculative,
    "mask_tokens": mask_tokens,
    "unpad_input": unpad_input,
}


def sized(names: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# arguments of the samples' `inputs`, in addition to their first configurations
SIZES: dict[str, list[dict[str, Any]]] = {
    "rotary_embedding": sized("batch heads key_heads width length", (2, 4, 2, 8, 6)),
    "moe_routing": sized("tokens width hidden experts top_k training", (3, 16, 8, 9, 3, True), (1, 16, 8, 4, 1, True)),
    "moe_load_balancing_loss": sized("layers batch length experts top_k padded", (3, 4, 10, 5, 2, True)),
    "group_query_attention": sized(
        "batch heads key_heads width queries keys", (2, 6, 2, 8, 5, None), (2, 3, 3, 8, 3, 7)
    ),
    "alibi_bias": sized("batch length heads", *[(3, 40, heads) for heads in (1, 8, 12, 14, 112)]),
    "relative_position_bucket": sized(
        "queries keys bidirectional num_buckets max_distance",
        (300, 400, True, 32, 128),
        (300, 400, False, 32, 128),
        (100, 100, True, 20, 64),
        (100, 120, False, 16, 100),
    ),
    "sliding_window_mask": sized("batch keys window queries", (3, 40, 7, None), (3, 40, 1, 9), (3, 12, 50, None)),
    "kv_cache_update": sized("batch heads size width past length", (2, 3, 9, 4, 5, 4)),
    "repetition_penalty": sized("batch length vocabulary penalty", (3, 20, 9, 0.7)),
    "no_repeat_ngram": sized("rows length vocabulary ngram_size", *[(5, 30, 60, size) for size in (1, 2, 3, 31, 33)]),
    "top_k_sampling": sized("batch vocabulary top_k temperature", (300, 50, 4, 1.5), (300, 50, 70, 3.0)),
    "top_p_sampling": sized(
        "batch vocabulary top_p temperature", *[(300, 50, top_p, 1.5) for top_p in (0.0, 0.3, 0.8, 1.0)]
    ),
    "speculative_sampling": sized("drafted vocabulary disagreement", *[(6, 80, step / 5) for step in range(20)]),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_function_equals_that_of_transformers(name: str) -> None:
    sample = samples()[name]

    def drawn(sizes: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        return lambda: sample.inputs(Draw(1), **sizes)

    for make in (sample.arguments, *map(drawn, SIZES.get(name, []))):
        compare_with(ORIGINALS[name], sample.function, make, sample.rtol, sample.atol)


def beams(*state: Any) -> tuple[Any, ...]:
    """Compute `beam_search_step` with the parts of transformers' search."""
    logits, sequences, scores, finished, finished_scores, is_finished, length, eos, prompt, penalty, early = state
    search = transformers("generation.utils").GenerationMixin()
    batch, count, _ = logits.shape
    total = (logits.log_softmax(2) + scores[:, :, None]).flatten(1)
    history = torch.full((batch, count, sequences.shape[2]), -1)
    best, candidates, origins = search._get_top_k_continuations(
        total, sequences, history, length, prompt, False, 2 * count, count, batch
    )
    ends = candidates[:, :, length] == eos
    running = search._get_running_beams_for_next_iteration(best, candidates, origins, ends, count)
    origin = running[2][:, :, length - prompt] - torch.arange(batch)[:, None] * count
    kept = search._update_finished_beams(
        finished,
        candidates,
        finished_scores,
        best,
        history,
        origins,
        torch.ones(batch, 1, dtype=torch.bool),
        is_finished,
        ends,
        torch.arange(2 * count) < count,
        count,
        length,
        prompt,
        penalty,
        early,
    )
    return running[0], running[1], origin, kept[0], kept[1], kept[3]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_beam_search_step_equals_that_of_transformers(seed: int, early: bool) -> None:
    inputs = samples()["beam_search_step"].inputs
    sizes = {"batch": 12, "beams": 3, "vocabulary": 40, "longest": 12, "length": 7, "length_penalty": 0.6}

    def in_use(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*state: Any) -> Any:
            *running, finished, scores, used = step(*state[:-1], early)
            return *running, finished * used[:, :, None], scores, used

        return run

    compare_with(in_use(beams), in_use(beam_search_step), lambda: inputs(Draw(seed), **sizes), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("rows", "steps", "beam_size"), [(6, 1, 3), (3, 1, 3), (4, 1, 1), (6, 2, 3), (5, 1, None), (5, 4, None)]
)
def test_beam_products_equal_those_of_each_row(rows: int, steps: int, beam_size: int | None) -> None:
    beams = beam_size or 1
    first = torch.randn(rows, steps, 4, dtype=torch.float64, requires_grad=True)
    second = torch.randn(rows // beams, 4, 5, dtype=torch.float64, requires_grad=True)

    def product(first: Tensor, second: Tensor) -> Tensor:
        return beamableMM(first, second.repeat_interleave(beams, dim=0), beam_size)

    compare(product(first, second), torch.einsum("nth,nhs->nts", first, second.repeat_interleave(beams, dim=0)))
    assert torch.autograd.gradcheck(product, (first, second))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[5, 6, 2], [7, 1, 1]]),
        ({"left_pad": True}, [[5, 6, 2], [1, 1, 7]]),
        ({"move_eos_to_beginning": True}, [[2, 5, 6], [7, 1, 1]]),
        ({"move_eos_to_beginning": True, "eos_idx": 9}, [[9, 5, 6], [9, 1, 1]]),
        ({"move_eos_to_beginning": True, "left_pad": True}, [[2, 5, 6], [1, 1, 7]]),
        ({"pad_to_length": 4, "pad_to_bsz": 3}, [[5, 6, 2, 1], [7, 1, 1, 1], [1, 1, 1, 1]]),
        ({"pad_to_length": 2, "pad_to_bsz": 1, "pad_to_multiple": 3}, [[5, 6, 2], [7, 1, 1]]),
        ({"pad_to_multiple": 5}, [[5, 6, 2, 1, 1], [7, 1, 1, 1, 1]]),
    ],
)
def test_sequences_are_padded(options: dict[str, Any], expected: list[list[int]]) -> None:
    assert collate_tokens([torch.tensor([5, 6, 2]), torch.tensor([7])], 1, **options).tolist() == expected


@pytest.mark.parametrize("collapse", [True, False])
def test_best_path_is_decoded(collapse: bool) -> None:
    scores, labels, lengths = samples()["greedy_decoder"].inputs(Draw(3), 5, 41, 6, 9)
    scores[4, :, 5] = 99.0
    decoded, true = greedy_decoder(scores, labels, lengths, 5, collapse)
    paths = [[max(range(6), key=frame.__getitem__) for frame in utterance] for utterance in scores.tolist()]
    if collapse:
        paths = [[label for label, _ in groupby(path)] for path in paths]
    assert decoded == [[label for label in path if label != 5] for path in paths]
    assert decoded[4] == []
    assert true == [row[:length] for row, length in zip(labels.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("longest", [None, 2, 6])
def test_mask_covers_positions_up_to_the_length(longest: int | None) -> None:
    lengths = [3, 0, 4]
    columns = range(4 if longest is None else longest)
    expected = [[place < length for place in columns] for length in lengths]
    assert sequence_mask(torch.tensor(lengths, dtype=torch.int32), longest).tolist() == expected


def test_pages_are_found_by_their_table() -> None:
    keys, values, table, _ = samples()["paged_kv_gather"].inputs(Draw(0), 4, 20, heads=2, width=3, block_size=8)
    lengths = [1, 8, 20, 16]
    found = paged_kv_gather(keys, values, table, torch.tensor(lengths))
    places = [
        (int(table[sequence, token // 8]), token % 8)
        for sequence, length in enumerate(lengths)
        for token in range(length)
    ]
    expected = [torch.stack([cache[place] for place in places]) for cache in (keys, values)]
    compare(found, (*expected, torch.tensor([0, 1, 9, 29, 45])), 0, 0)
