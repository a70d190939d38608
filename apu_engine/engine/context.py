"""How long the context is: the least of what the model was trained for, 32768 and what fits in memory.

KV cache and scratch are anonymous memory and have to fit beside the weights. Weights are file pages: they
count in full, but a file larger than memory still runs, so at least a quarter of what is free is left to the
KV cache. A context that was asked for is never shortened: above the trained length it is a notice, above
memory it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apu_engine._native import PAGE_TOKENS
from apu_engine.errors import BudgetError
from apu_engine.memory.budget import human_bytes

MOST = 32768
LEAST = 512  # a chosen context is never shorter; below this the machine is full
SHARE = 0.9  # of the memory that is left, for KV cache and scratch


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """`tokens`, why it is not longer, and notices for the user."""

    tokens: int
    reason: str
    notices: tuple[str, ...] = ()


def choose_context(
    requested: int,
    trained: int,
    need: Callable[[int], int],
    available: int,
    weight_bytes: int,
    limit: int = 0,
) -> ContextChoice:
    """The context for a model. `need(ctx)` is KV cache plus scratch in bytes, `limit` a bound on it (0:
    none).

    Raises BudgetError with the numbers and remedies when what was asked for, or the least context, does not
    fit.
    """
    if requested:
        bound = min(available, limit) if limit else available
        if need(requested) > bound:
            fits = _longest(requested, need, bound)
            raise BudgetError(_refusal(requested, need(requested), available, limit, fits))
        notices = []
        if requested > trained:
            notices.append(
                f"ctx {requested} is above the {trained} tokens that the model was trained for; "
                "answers may become incoherent beyond that"
            )
        if need(requested) + weight_bytes > available:
            notices.append(
                f"weights ({human_bytes(weight_bytes)}) and ctx {requested} ({human_bytes(need(requested))}) exceed "
                f"the memory available ({human_bytes(available)}); weights will be read from disk again and again"
            )
        return ContextChoice(requested, "as asked", tuple(notices))
    room = int(SHARE * max(available - weight_bytes, available // 4))
    bound = min(room, limit) if limit else room
    most = min(trained, MOST)
    if need(most) <= bound:
        return ContextChoice(most, "trained length" if most == trained else "default limit")
    fits = _longest(most, need, bound)
    least = min(LEAST, most)
    if fits < least:
        raise BudgetError(_refusal(least, need(least), bound, limit, fits))
    return ContextChoice(fits, f"fits in {human_bytes(bound)}")


def _longest(most: int, need: Callable[[int], int], bound: int) -> int:
    """The longest context of whole pages below `most` whose need is within `bound`; 0 when none is."""
    low, high = 0, most // PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if need(middle * PAGE_TOKENS) <= bound:
            low = middle
        else:
            high = middle - 1
    return low * PAGE_TOKENS


def _refusal(tokens: int, needed: int, available: int, limit: int, fits: int) -> str:
    what = f"memory_limit ({human_bytes(limit)})" if limit and limit <= available else human_bytes(available)
    remedies = [f"use ctx {fits}"] if fits else []
    remedies += ["use kv_type f16 where it is f32, q8_0 where it is f16", "lower parallel or batch", "free memory"]
    if limit:
        remedies.append("raise memory_limit")
    return (
        f"ctx {tokens} needs {human_bytes(needed)} for KV cache and scratch, but {what} is available; "
        + ", or ".join(remedies)
    )
