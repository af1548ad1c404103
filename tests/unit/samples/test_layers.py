"""Layers and functions of sequences, compared with their originals, with formulas or with plain loops."""

import math
from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from implementations import compare, compare_with
from optional import optional
from torch import Tensor
from torch.nn import functional

from opgrip.samples import Draw, samples
from opgrip.samples.sequences.beam_search_step import beam_search_step
from opgrip.samples.sequences.beamableMM import beamableMM
from opgrip.samples.sequences.collate_tokens import collate_tokens
from opgrip.samples.sequences.greedy_decoder import greedy_decoder
from opgrip.samples.sequences.paged_kv_gather import paged_kv_gather
from opgrip.samples.sequences.sequence_mask import sequence_mask

Arguments = tuple[Any, ...]


def encoding(name: str) -> Callable[..., Any]:
    module = optional("mmseg.models.utils.encoding")
    function: Callable[..., Any] = getattr(module.Encoding, name)
    return function


def frozen_batchnorm2d(features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    module = optional("transformers.models.detr.modeling_detr").DetrFrozenBatchNorm2d(len(weight))
    module.load_state_dict({"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance})
    return module(features)


def position_embedding_learned(features: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    module = optional("mmdet.models.layers.positional_encoding").LearnedPositionalEncoding(
        rows.shape[1], len(rows), len(columns)
    )
    weights = {"row_embed.weight": rows, "col_embed.weight": columns}
    return torch.func.functional_call(module, weights, (features[:, 0],))


def position_embedding_sine(
    padding: Tensor, features: int, temperature: float, normalize: bool, scale: float | None = None
) -> Tensor:
    module = optional("mmdet.models.layers.positional_encoding").SinePositionalEncoding(
        features, temperature, normalize, 2 * math.pi if scale is None else scale
    )
    return module(padding)


def detr_postprocess(outputs: dict[str, Tensor], sizes: Tensor) -> list[dict[str, Tensor]]:
    processor = optional("transformers.models.detr.image_processing_pil_detr").DetrImageProcessorPil()
    modeling = optional("transformers.models.detr.modeling_detr")
    results = modeling.DetrObjectDetectionOutput(logits=outputs["pred_logits"], pred_boxes=outputs["pred_boxes"])
    found: list[dict[str, Tensor]] = processor.post_process_object_detection(results, -1.0, sizes)
    return found


def multi_scale_deformable_attention(*arguments: Tensor) -> Tensor:
    return optional("mmcv.ops.multi_scale_deform_attn").multi_scale_deformable_attn_pytorch(*arguments)


def window_partition_attention_mask(features: Tensor, window: int, shift: int) -> Tensor:
    block = optional("mmdet.models.backbones.swin").ShiftWindowMSA(features.shape[3], 1, window, shift)
    masks: list[Tensor] = []
    block.w_msa.register_forward_pre_hook(lambda _, inputs, named: masks.append(named["mask"]), with_kwargs=True)
    block(features.flatten(1, 2), features.shape[1:3])
    return masks[0]


def relative_position_bias(table: Tensor, window: tuple[int, int]) -> Tensor:
    swin = optional("transformers.models.swin.modeling_swin").SwinRelativePositionBias
    weights = {"relative_position_bias_table": table}
    return torch.func.functional_call(swin(table.shape[1], window), weights)[0]


def roi_masks_paste(masks: Tensor, boxes: Tensor, height: int, width: int, tight: bool) -> Arguments:
    head = optional("mmdet.models.roi_heads.mask_heads.fcn_mask_head")
    pasted, where = head._do_paste_mask(masks[:, None], boxes, height, width, tight)
    down, across = where or (slice(0, height), slice(0, width))
    return pasted, (int(across.start), int(down.start), int(across.stop), int(down.stop))


def deformable_reference_points(shapes: Tensor, ratios: Tensor) -> Tensor:
    layers = optional("mmdet.models.layers.transformer.deformable_detr_layers")
    return layers.DeformableDetrTransformerEncoder.get_encoder_reference_points(shapes, ratios, ratios.device)


def attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, scale=scale)


# Functions of other packages with the same arguments as the sample of that name.
ORIGINALS: dict[str, Callable[..., Any]] = {
    "aggregate": lambda *arguments: encoding("aggregate")(*arguments),
    "scaled_l2": lambda *arguments: encoding("scaled_l2")(*arguments),
    "scaled_dot_product_attention": attention,
    **{
        original.__name__: original
        for original in (
            frozen_batchnorm2d,
            position_embedding_learned,
            position_embedding_sine,
            detr_postprocess,
            multi_scale_deformable_attention,
            window_partition_attention_mask,
            relative_position_bias,
            roi_masks_paste,
            deformable_reference_points,
        )
    },
}

# Samples with the arguments of `inputs`.
LIKE_THE_ORIGINAL: list[tuple[str, dict[str, Any]]] = [
    ("aggregate", {"images": 2, "positions": 35, "channels": 8, "codes": 4}),
    ("aggregate", {"images": 1, "positions": 1, "channels": 3, "codes": 1}),
    ("scaled_l2", {"images": 2, "positions": 35, "channels": 8, "codes": 4}),
    ("scaled_l2", {"images": 1, "positions": 1, "channels": 3, "codes": 1}),
    ("scaled_dot_product_attention", {"examples": 2, "heads": 3, "length": 7, "width": 5, "dropout": 0, "scale": 1}),
    (
        "scaled_dot_product_attention",
        {"examples": 1, "heads": 1, "length": 9, "width": 4, "dropout": 0, "scale": 0.5},
    ),
    ("frozen_batchnorm2d", {"channels": 6, "height": 5, "width": 4, "images": 2}),
    ("position_embedding_learned", {"images": 2, "height": 7, "width": 9, "features": 6, "positions": 9}),
    ("position_embedding_learned", {"images": 1, "height": 50, "width": 50, "features": 2}),
    ("position_embedding_sine", {"sizes": [(7, 9), (4, 9), (7, 2)], "features": 8}),
    ("position_embedding_sine", {"sizes": [(7, 9), (4, 9), (7, 2)], "features": 8, "normalize": False}),
    ("position_embedding_sine", {"sizes": [(1, 1)], "features": 2}),
    ("detr_postprocess", {"images": 3, "queries": 11, "classes": 5}),
    ("detr_postprocess", {"images": 1, "queries": 4, "classes": 1}),
    ("detr_postprocess", {"images": 2, "queries": 0, "classes": 3}),
    ("multi_scale_deformable_attention", {"levels": [(6, 9), (3, 5)], "queries": 13, "images": 2, "heads": 3}),
    ("multi_scale_deformable_attention", {"levels": [(1, 1)], "queries": 1, "heads": 1, "points": 1}),
    ("window_partition_attention_mask", {"height": 14, "width": 21, "channels": 4, "window": 7}),
    ("window_partition_attention_mask", {"height": 13, "width": 5, "channels": 4, "window": 4}),
    ("window_partition_attention_mask", {"height": 7, "width": 7, "channels": 4, "window": 7}),
    ("relative_position_bias", {"window": (7, 7), "heads": 3}),
    ("relative_position_bias", {"window": (1, 1), "heads": 2}),
    ("roi_masks_paste", {"detections": 5, "tight": True, "size": (60, 90)}),
    ("roi_masks_paste", {"detections": 5, "tight": False, "size": (60, 90)}),
    ("roi_masks_paste", {"detections": 4, "tight": True, "without_area": 2, "side": 1, "size": (60, 90)}),
    ("deformable_reference_points", {"levels": [(6, 9), (3, 5), (1, 1)], "images": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), LIKE_THE_ORIGINAL)
def test_layer_equals_its_original(name: str, sizes: dict[str, Any]) -> None:
    sample = samples()[name]
    compare_with(ORIGINALS[name], sample.function, lambda: sample.inputs(Draw(0), **sizes), sample.rtol, sample.atol)


def channel_attention(channels: list[Any], matrix: Any, weights: Any) -> Arguments:
    users = len(channels[0])
    scores = np.array([[(channel[user] @ matrix) @ weights[0] for channel in channels] for user in range(users)])
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    mixed = [
        sum(share * channel[user] for share, channel in zip(shares[user], channels, strict=True))
        for user in range(users)
    ]
    return np.array(mixed), shares


def dec2bin(values: Any, bits: int) -> Any:
    return np.array([[digit == "1" for digit in f"{value:0{bits}b}"[-bits:]] for value in values])


def smooth_step(values: Any, gamma: float) -> Any:
    def step(value: float) -> float:
        share = min(max(value / gamma + 0.5, 0), 1)
        return share**2 * (3 - 2 * share)

    return np.vectorize(step)(values)


def squash(vectors: Any) -> Any:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * lengths / (1 + lengths**2)


def label_aware_attention(keys: Any, query: Any, power: float) -> Arguments:
    vectors, weights = [], []
    for interests, (item,) in zip(keys, query, strict=True):
        nearness = np.exp([float(interest @ item) ** power for interest in interests])
        weights.append(nearness / nearness.sum())
        vectors.append(weights[-1] @ interests)
    return np.array(vectors), np.array(weights)[..., None]


def factorization_machine(
    fields: list[Any], numbers: Any, weights: Any, embeddings: Any, number_weights: Any, number_embeddings: Any
) -> Arguments:
    first, second = [], []
    for example, known in enumerate(numbers):
        features = [int(field[example, 0]) for field in fields]
        first.append(sum(weights[feature, 0] for feature in features) + known @ number_weights)
        vectors = [embeddings[feature] for feature in features] + list(known[:, None] * number_embeddings[0])
        second.append(sum(one @ other for index, one in enumerate(vectors) for other in vectors[:index]))
    return np.array(first)[:, None], np.array(second)[:, None]


def word2vec(words: list[Any], embedding: Any, weight: Any, bias: Any) -> Arguments:
    def score(middle: int, other: int) -> float:
        return float(embedding[middle] @ weight[other] + bias[other, 0])

    pairs = [(int(middle), near, drawn) for (middle,), near, drawn in zip(*words, strict=True)]
    return tuple(
        np.array([[score(middle, other) for other in others[column]] for middle, *others in pairs]) for column in (0, 1)
    )


def split_heads_qkv(queries: Any, keys: Any, values: Any, heads: int, key_width: int, value_width: int) -> Arguments:
    def split(sequence: Any, width: int) -> Any:
        return np.stack([sequence[..., head * width : (head + 1) * width] for head in range(heads)], axis=1)

    return split(queries, key_width), split(keys, key_width), split(values, value_width)


def partialconv2d(
    features: Any, mask: Any, weight: Any, bias: Any, stride: int, padding: int, dilation: int, multi_channel: bool
) -> Arguments:
    around = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    features, mask = np.pad(features, around), np.pad(np.broadcast_to(mask, features.shape), around)
    kernel = weight.shape[2]
    reach = dilation * (kernel - 1) + 1
    side = (features.shape[2] - reach) // stride + 1
    output, valid = np.zeros((len(features), len(weight), side, side)), np.zeros((len(features), 1, side, side))
    for image, row, column in np.ndindex(len(features), side, side):
        rows, columns = (slice(at * stride, at * stride + reach, dilation) for at in (row, column))
        seen = mask[image, :, rows, columns]
        if seen.any():
            scale = seen.size / seen.sum()
            for number, kernels in enumerate(weight):
                product = (features[image, :, rows, columns] * seen * kernels).sum()
                output[image, number, row, column] = product * scale + (0 if bias is None else bias[number])
            valid[image, 0, row, column] = 1
    return output, np.repeat(valid, len(weight), axis=1) if multi_channel else valid


def mask_predictor(rois: Any, heatmaps: Any, images: list[Any], class_agnostic: bool) -> list[Any]:
    """Compute the prediction with OpenCV, as Mask R-CNN's authors resize masks."""
    cv2 = optional("cv2")
    masks = []
    for (number, *box, _, label), heatmap in zip(rois, heatmaps, strict=True):
        scale, height, width = images[int(number)]
        x1, y1, x2, y2 = (int(edge / scale) for edge in box)
        resized = cv2.resize(heatmap[0 if class_agnostic else int(label)], (max(x2 - x1 + 1, 1), max(y2 - y1 + 1, 1)))
        mask = np.zeros((height + 1, width + 1), np.uint8)
        mask[y1 : y2 + 1, x1 : x2 + 1] = resized > 0.5
        masks.append(mask[:height, :width])
    return masks


# Implementations as plain loops over numpy arrays.
REFERENCES: dict[str, Callable[..., Any]] = {
    reference.__name__: reference
    for reference in (
        channel_attention,
        dec2bin,
        smooth_step,
        squash,
        label_aware_attention,
        factorization_machine,
        word2vec,
        split_heads_qkv,
        partialconv2d,
        mask_predictor,
    )
}

LIKE_THE_FORMULA: list[tuple[str, dict[str, Any]]] = [
    ("channel_attention", {"users": 5, "width": 4}),
    ("channel_attention", {"users": 2, "width": 3, "channels": 1}),
    ("dec2bin", {"experts": 16, "bits": 4}),
    ("dec2bin", {"experts": 9, "bits": 2}),
    ("smooth_step", {"shape": (4, 3), "reach": 0.4}),
    ("smooth_step", {"shape": (40,), "reach": 2.0, "gamma": 2.5}),
    ("squash", {"shape": (3, 2, 4)}),
    ("label_aware_attention", {"users": 3, "interests": 4, "width": 5, "power": 1.0}),
    ("label_aware_attention", {"users": 2, "interests": 2, "width": 5, "power": 3.0}),
    ("factorization_machine", {"examples": 3, "features": 7, "fields": 4, "numbers": 2, "width": 3}),
    ("factorization_machine", {"examples": 1, "features": 1, "fields": 2, "numbers": 1, "width": 1}),
    ("word2vec", {"words": 4, "vocabulary": 6, "width": 3, "negatives": 2}),
    ("split_heads_qkv", {"examples": 2, "length": 3, "heads": 2, "width": 2}),
    ("partialconv2d", {"size": 6, "channels": 2, "filters": 3, "kernel": 3, "share": 0.3}),
    ("partialconv2d", {"size": 6, "channels": 2, "filters": 3, "kernel": 3, "share": 0.3, "multi_channel": False}),
    ("partialconv2d", {"size": 5, "channels": 1, "filters": 1, "kernel": 5, "share": 0.0}),
    ("mask_predictor", {"images": 2, "detections": 9, "classes": 3, "side": 14, "original": (60, 80)}),
    ("mask_predictor", {"images": 1, "detections": 3, "classes": 1, "side": 28, "original": (50, 40)}),
    ("mask_predictor", {"images": 1, "detections": 0, "classes": 2, "side": 7}),
]


def as_doubles(tree: Any) -> Any:
    """Return float64 tensors in place of float32, as numerical gradients need them."""
    if isinstance(tree, list | tuple):
        return type(tree)(map(as_doubles, tree))
    if isinstance(tree, Tensor) and tree.is_floating_point():
        return tree.detach().double().requires_grad_(tree.requires_grad)
    return tree


def as_arrays(tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)(map(as_arrays, tree))
    return tree.detach().numpy() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize(("name", "sizes"), LIKE_THE_FORMULA)
def test_layer_equals_plain_loops(name: str, sizes: dict[str, Any]) -> None:
    sample = samples()[name]
    arguments = sample.inputs(Draw(0), **sizes)
    arguments = arguments if name == "mask_predictor" else as_doubles(arguments)
    compare(sample.function(*arguments), REFERENCES[name](*as_arrays(arguments)), 1e-6, 1e-7)


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


FUNCTIONS: dict[str, Callable[..., Any]] = {
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


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_equals_that_of_transformers(name: str) -> None:
    sample = samples()[name]

    def drawn(sizes: dict[str, Any]) -> Callable[[], tuple[Any, ...]]:
        return lambda: sample.inputs(Draw(1), **sizes)

    for make in (sample.arguments, *map(drawn, SIZES.get(name, []))):
        compare_with(FUNCTIONS[name], sample.function, make, sample.rtol, sample.atol)


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


@pytest.mark.slow
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
