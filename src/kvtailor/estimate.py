"""What a plan would hold after a prompt, computed from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from kvtailor import _compat
from kvtailor.errors import ModelError
from kvtailor.formats import GROUP_TOKENS
from kvtailor.indexes.registry import index_class
from kvtailor.kernels import native
from kvtailor.layers.allowance import Allowance, Costs
from kvtailor.layers.base import Place
from kvtailor.layers.packing import Packing
from kvtailor.layers.tail import whole_blocks
from kvtailor.plan import Keep, LayerPlan, Plan, heads_in_words
from kvtailor.policies.base import Policy
from kvtailor.policies.registry import policy_class

POSITION_BYTES = MARK_BYTES = 4


@dataclass(frozen=True)
class LayerEstimate:
    """One layer after a prompt.

    Attributes
    ----------
    index, attention : which layer, of "self" or "cross" attention.
    kept_as : how it is kept, in words.
    tokens_kept : per KV head and sequence.
    bytes_held, bytes_default : bytes with the plan, and in the default cache.
    note : what the plan asks for and does not get, or "".
    """

    index: int
    attention: str
    kept_as: str
    tokens_kept: int
    bytes_held: int
    bytes_default: int
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """A whole cache after a prompt.

    Attributes
    ----------
    plan : the plan's name.
    tokens : tokens of the prompt.
    layers : layer by layer, self attention first.
    """

    plan: str
    tokens: int
    layers: list[LayerEstimate]

    @property
    def bytes_held(self) -> int:
        """Bytes of all layers with the plan."""
        return sum(layer.bytes_held for layer in self.layers)

    @property
    def bytes_default(self) -> int:
        """Bytes of all layers in the default cache."""
        return sum(layer.bytes_default for layer in self.layers)


@dataclass(frozen=True)
class Sizes:
    """What one token is made of in every layer.

    Attributes
    ----------
    heads, query_heads : KV heads and query heads.
    dim : channels of a head, of keys and of values.
    element : bytes of a number in the model's dtype.
    rows : sequences in the batch.
    """

    heads: int
    query_heads: int
    dim: int
    element: int
    rows: int

    def of_heads(self, heads: int) -> Sizes:
        """The same for some of the KV heads, and the query heads that read them."""
        return replace(self, heads=heads, query_heads=self.query_heads // self.heads * heads)

    @property
    def token(self) -> int:
        """Bytes of one token's keys and values over all KV heads."""
        return self.heads * 2 * self.dim * self.element


def estimate(
    config: PretrainedConfig, plan: Plan, tokens: int, dtype: torch.dtype = torch.float32, rows: int = 1
) -> Estimate:
    """Compute what the cache holds at the end of a prompt, as ``cache.report()`` would count it, spare room included.

    Parameters
    ----------
    config : configuration of the model; layers are taken to have heads of one size.
    plan : the plan.
    tokens : tokens of the prompt, per sequence. An encoder's output counts as many, unless its length is fixed.
    dtype : of the cached numbers.
    rows : sequences in the batch.

    Raises
    ------
    ModelError
        If the configuration does not tell the heads.
    PlanError
        If a budget in bytes is below the protected tokens, or a packed form does not fit the head.

    Notes
    -----
    Source: ours.
    """
    decoder = _compat.decoder_config(config)
    sizes = _sizes(decoder, dtype, rows)
    layers = _half(decoder, plan, tokens, sizes, "self")
    if config.is_encoder_decoder:
        layers += _half(decoder, plan, getattr(config, "max_source_positions", None) or tokens, sizes, "cross")
    return Estimate(plan.name, tokens, layers)


def length_limit(config: PretrainedConfig) -> int | None:
    """The most tokens that the decoder has positions for, or None where the configuration sets no limit."""
    decoder = _compat.decoder_config(config)
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    return next((int(limit) for name in names if (limit := getattr(decoder, name, None))), None)


def _sizes(decoder: PretrainedConfig, dtype: torch.dtype, rows: int) -> Sizes:
    query_heads = getattr(decoder, "decoder_attention_heads", None) or getattr(decoder, "num_attention_heads", None)
    heads = _compat.kv_heads(decoder)
    dim = _compat.head_dim(decoder)
    if not heads or not query_heads or not dim:
        raise ModelError(f"{type(decoder).__name__} does not tell the number and the size of its heads: no estimate")
    return Sizes(heads, query_heads, dim, dtype.itemsize, rows)


def _half(decoder: PretrainedConfig, plan: Plan, tokens: int, sizes: Sizes, attention: str) -> list[LayerEstimate]:
    stock = _compat.stock_layers(decoder)
    parts = {
        number: plan.parts(number, len(stock), attention, sizes.heads)
        for number, (layer_type, layer) in enumerate(stock)
        if _compat.is_plain_attention(layer_type, layer)
    }
    estimates = []
    for number, (layer_type, layer) in enumerate(stock):
        if number not in parts:
            estimates.append(_left_alone(number, layer_type, layer, tokens, sizes))
            continue
        found = []
        for heads, entry in parts[number]:
            peers = [other for other, own in parts.items() if any(one is entry for _, one in own)]
            place = Place(number, attention == "cross", peers.index(number), len(peers))
            found.append((heads, _tailored(entry, place, tokens, sizes.of_heads(len(heads)))))
        estimates.append(_together(found))
    return estimates


def _together(parts: Sequence[tuple[tuple[int, ...], LayerEstimate]]) -> LayerEstimate:
    """One layer of its parts: KV heads, and what they hold."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    return replace(
        first,
        kept_as=heads_in_words((heads, part.kept_as) for heads, part in parts),
        tokens_kept=round(sum(len(heads) * part.tokens_kept for heads, part in parts) / sum(len(h) for h, _ in parts)),
        bytes_held=sum(part.bytes_held for _, part in parts),
        bytes_default=sum(part.bytes_default for _, part in parts),
        note="; ".join(part.note for _, part in parts if part.note),
    )


def _left_alone(number: int, layer_type: str, layer: Any, tokens: int, sizes: Sizes) -> LayerEstimate:
    # Sliding windows hold their window; recurrent states and layers that reuse another's keys are not counted.
    window = getattr(layer, "sliding_window", None)
    kept = min(tokens, window - 1) if window else 0
    held = sizes.rows * kept * sizes.token
    return LayerEstimate(number, "self", f"left to Transformers ({layer_type})", kept, held, held)


def _tailored(entry: LayerPlan, place: Place, tokens: int, sizes: Sizes) -> LayerEstimate:
    if entry.holds_everything:
        kept, held, note = tokens, whole_blocks(tokens) * sizes.token, ""
    elif entry.find.index != "all":
        kept, held, note = tokens, _retrieving(entry, tokens, sizes), ""
    elif entry.keep.policy == "all":
        kept, held, note = tokens, int(_Packed(entry, sizes).held(tokens, dropped=0)), ""
    else:
        kept, held, note = _evicting(entry, place, tokens, sizes)
    return LayerEstimate(
        index=place.index,
        attention="cross" if place.cross else "self",
        kept_as=entry.in_words,
        tokens_kept=kept,
        bytes_held=sizes.rows * held,
        bytes_default=sizes.rows * tokens * sizes.token,
        note=note,
    )


def _retrieving(entry: LayerPlan, tokens: int, sizes: Sizes) -> int:
    """Bytes of one sequence in memory: sinks, newest tokens, the index, and host memory."""
    find = entry.find
    near = sizes.token + sizes.heads * POSITION_BYTES
    sinks = find.sinks if tokens >= find.sinks + find.recent + GROUP_TOKENS else 0
    far = max(0, (tokens - sinks - find.recent) // GROUP_TOKENS * GROUP_TOKENS) if sinks or not find.sinks else 0
    if far == 0:
        return whole_blocks(tokens) * near
    index = index_class(find.index).from_options(find.options)
    slow = 0 if entry.tier == "disk" else sizes.token
    each = index.token_bytes(sizes.heads, sizes.dim, sizes.element) + POSITION_BYTES + slow
    fixed = index.fixed_bytes(sizes.heads, sizes.dim)
    return int(sinks * sizes.token + far * each + fixed + whole_blocks(tokens - sinks - far + 1) * near)


def _evicting(entry: LayerPlan, place: Place, tokens: int, sizes: Sizes) -> tuple[int, int, str]:
    """Tokens kept and bytes held of one sequence, and a note."""
    policy = policy_class(entry.keep.policy).from_options(entry.keep.options)
    allowance = Allowance(entry.keep, policy, place)
    dense = sizes.token + sizes.heads * (POSITION_BYTES + _mark_bytes(policy))
    window = _window_bytes(policy, sizes)
    packed = None if entry.form.kind == "dense" else _Packed(entry, sizes, policy)
    costs = Costs(dense, window) if packed is None else packed.costs(dense, window)
    capacity = allowance.capacity(tokens, sizes.rows, costs)
    note = _raised(entry.keep, tokens, allowance.protected)
    always = policy.acts == "always" or entry.keep.is_hard
    fixed = window if always else 0  # a policy that acts on prompts alone lets go of its queries
    if packed is not None:
        due = -(-(tokens - capacity) // GROUP_TOKENS) if tokens > capacity else 0
        dropped = min(due, packed.blocks(tokens))
        return tokens - dropped * GROUP_TOKENS, int(packed.held(tokens, dropped)) + fixed, note
    if tokens <= capacity:
        room = min(whole_blocks(tokens), capacity) if entry.keep.is_hard else whole_blocks(tokens)
        return tokens, room * dense + fixed, note
    return capacity, (capacity if always else whole_blocks(capacity + 1)) * dense + fixed, note


def _mark_bytes(policy: Policy | None) -> int:
    return MARK_BYTES if policy is not None and policy.watches in ("mass", "use") else 0


def _window_bytes(policy: Policy, sizes: Sizes) -> int:
    if policy.watches != "window":
        return 0
    return policy.window_size * (sizes.query_heads * sizes.dim * sizes.element + 8)


def _raised(keep: Keep, tokens: int, protected: int) -> str:
    if keep.budget is None or keep.budget.kind != "fraction" or (asked := keep.budget.tokens(tokens, 1)) > protected:
        return ""
    return (
        f"budget {keep.budget} of {tokens} tokens is {asked}, not above the {protected} protected ones: "
        f"{protected + 1} are kept"
    )


class _Packed:
    """A packed layer's bytes: the first tokens exact, whole blocks of codes, the newest tokens exact."""

    def __init__(self, entry: LayerPlan, sizes: Sizes, policy: Policy | None = None) -> None:
        self.form, self.sizes, self.policy = entry.form, sizes, policy
        self.undroppable = entry.undroppable
        self.packing = Packing(entry.form, sizes.dim, sizes.dim, _path(sizes.dim))
        self.packed_token = self.packing.token_bytes(sizes.heads, (sizes.dim, sizes.dim), sizes.element)

    def blocks(self, tokens: int) -> int:
        """Blocks of codes that a prompt makes."""
        exact, residual = self.form.exact, self.form.residual
        if exact and tokens < exact + residual + GROUP_TOKENS:
            return 0
        return max(0, (tokens - exact - residual) // GROUP_TOKENS)

    def held(self, tokens: int, dropped: int) -> float:
        """Bytes of one sequence after a prompt of ``tokens`` from which ``dropped`` blocks went."""
        mark = self.sizes.heads * _mark_bytes(self.policy)
        dense = self.sizes.token + self.sizes.heads * POSITION_BYTES + mark
        blocks = self.blocks(tokens)
        if blocks == 0:
            return whole_blocks(tokens) * dense
        newest = tokens - self.form.exact - blocks * GROUP_TOKENS
        kept = (blocks - dropped) * GROUP_TOKENS
        positions = POSITION_BYTES if dropped else 0  # an unbroken run of positions is a range
        exact = self.form.exact * (self.sizes.token + mark)
        return exact + kept * (self.packed_token + positions + mark) + whole_blocks(newest + 1) * dense

    def costs(self, dense: int, window: int) -> Costs:
        """What the layer counts for a token when its budget is in bytes."""
        token = self.packed_token + self.sizes.heads * (POSITION_BYTES + _mark_bytes(self.policy))
        return Costs(token, window + int(self.packing.exact_room * (dense - token)), self.undroppable)


def _path(dim: int) -> str | None:
    return native.path_for(torch.device("cpu"), torch.float32, (dim, dim))
