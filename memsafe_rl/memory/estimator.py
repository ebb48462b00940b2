"""Bytes of activations, logits and caches from a network's geometry; rough by design, for choosing plans."""

from __future__ import annotations

from memsafe_rl.types import ModelGeometry, UpdatePlan

_WIDE_TENSORS = 8
"""Tensors of the hidden width that a transformer block saves for backward: two norms (input and normalised input
each), the attention output, its projection's input, and two residual sums."""
_HEAD_TENSORS = 2
"""Copies of queries, keys and values saved: before and after rotary embedding."""
_FEED_FORWARD_TENSORS = 4
"""Tensors of the feed-forward width saved: gate, up, activated gate, product."""
_LOGIT_TENSORS = 2
"""Tile-sized fp32 tensors alive in the log-prob function's backward: the logits and one temporary."""
_LOGIT_BYTES = 4


def block_activation_bytes(geometry: ModelGeometry) -> int:
    """Counts what one block saves for backward, per token.

    Args:
        geometry: sizes of the network.

    Returns:
        int, bytes per token.
    """
    heads = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    elements = (
        _WIDE_TENSORS * geometry.hidden_size
        + _HEAD_TENSORS * heads
        + _FEED_FORWARD_TENSORS * geometry.intermediate_size
    )
    return elements * geometry.compute_bytes


def update_bytes(geometry: ModelGeometry, plan: UpdatePlan) -> int:
    """Estimates the bytes of one micro-batch above weights, gradients and optimizer state.

    Without checkpointing every block keeps its activations; with it every block keeps its input and one block at a
    time is whole. The log-prob function holds one tile of logits and one temporary, and the gradient of a trained head.

    Args:
        geometry: sizes of the network.
        plan: how the step is cut.

    Returns:
        int, bytes.
    """
    block = block_activation_bytes(geometry)
    inputs = geometry.hidden_size * geometry.compute_bytes
    kept = block + geometry.layers * inputs if plan.checkpointing else geometry.layers * block
    logits = _LOGIT_TENSORS * _LOGIT_BYTES * plan.logprob_tile * geometry.vocab_size
    head = _LOGIT_BYTES * geometry.vocab_size * geometry.hidden_size if geometry.head_trainable else 0
    return plan.micro_batch_tokens * (kept + 2 * inputs) + logits + head
