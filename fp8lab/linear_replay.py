"""Doing a forward pass again with the scales and codes of the first time.

Activation checkpointing (`torch.utils.checkpoint`) runs a forward pass twice: once without keeping
activations, and again in the backward pass. The second run must not record an amax again, and must
cast as the first one did. A forward pass inside a backward pass records nothing; and as long as the
state moves on after the backward pass, as in every usual loop, its scales are still those of the
first run. Where it may move on in between, `recompute_contexts` keeps them:

    checkpoint(block, x, use_reentrant=False, context_fn=fp8lab.linear.recompute_contexts)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Kept = dict[int, deque[Any]]


class _Local(threading.local):
    """Backward passes run in threads of their own."""

    recording: Kept | None = None
    replaying: Kept | None = None


_LOCAL = _Local()


def in_backward() -> bool:
    """Whether a backward pass is running in this thread: a forward there is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def recorder() -> Callable[[object, Any], None] | None:
    """What keeps something for the recomputation of the running forward pass, if one may come."""
    kept = _LOCAL.recording
    if kept is None:
        return None
    return lambda owner, value: kept.setdefault(id(owner), deque()).append(value)


def replayed(owner: object) -> Any:
    """What `owner` kept next in the first run; None where there is nothing to replay."""
    kept = _LOCAL.replaying
    if kept is None or not kept.get(id(owner)):
        return None
    return kept[id(owner)].popleft()


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Two contexts for `context_fn` of `torch.utils.checkpoint.checkpoint`.

    In the first the scales and weight codes of every cast are kept, in the second they are used
    again in the same order.
    """
    kept: Kept = {}
    return _recording(kept), _replaying(kept)


@contextmanager
def _recording(kept: Kept) -> Iterator[None]:
    before, _LOCAL.recording = _LOCAL.recording, kept
    try:
        yield
    finally:
        _LOCAL.recording = before


@contextmanager
def _replaying(kept: Kept) -> Iterator[None]:
    # A copy of the queues: a graph that is kept can be recomputed more than once.
    queues = {owner: deque(values) for owner, values in kept.items()}
    before, _LOCAL.replaying = _LOCAL.replaying, queues
    try:
        yield
    finally:
        _LOCAL.replaying = before
