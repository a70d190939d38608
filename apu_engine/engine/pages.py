"""Which KV pages a sequence owns: one free list per page-table group, one table per (sequence, group).

A page spans 128 tokens in every state of its group. Entry p of a table holds tokens [128 p, 128 p + 128), or
NO_PAGE once a sliding window has passed it: those pages go back to the free list at once. A sequence is
admitted only when the most pages it can ever hold are reserved in every group, so a running sequence never
waits for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import NO_PAGE, PAGE_TOKENS
from apu_engine.plan.spec import most_pages


class GroupLike(Protocol):
    """What an architecture says about a group: `window` tokens a query looks back (0: all), `page_count`
    pages.
    """

    @property
    def window(self) -> int: ...
    @property
    def page_count(self) -> int: ...


class PageGroup:
    """The free pages of one group. `reserved` counts pages promised to admitted sequences."""

    __slots__ = ("_free", "page_count", "reserved", "window")

    def __init__(self, page_count: int, window: int = 0) -> None:
        self.page_count = page_count
        self.window = window
        self.reserved = 0
        self._free = list(range(page_count - 1, -1, -1))  # the lowest page first: memory is touched late

    @property
    def free_count(self) -> int:
        return len(self._free)

    def most_pages(self, tokens: int, rows: int) -> int:
        """The most pages a sequence of `tokens` holds at once when a step adds at most `rows` of them."""
        return most_pages(tokens, self.window, rows)

    def take(self) -> int:
        return self._free.pop()

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)


class PageTable:
    """One sequence's pages in one group; `entries` is the (pages,) u32 table that a step carries."""

    __slots__ = ("_array", "_count", "_first", "group")

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self._array: NDArray[np.uint32] = np.full(8, NO_PAGE, np.uint32)
        self._count = 0
        self._first = 0  # entries before it were freed

    @property
    def entries(self) -> NDArray[np.uint32]:
        return self._array[: self._count]

    @property
    def live(self) -> int:
        return self._count - self._first

    def cover(self, start: int, end: int) -> None:
        """Make positions [start, end) writable; free the pages that no query at `start` or later reaches."""
        window = self.group.window
        if window:
            passed = min(max(start - window + 1, 0) // PAGE_TOKENS, self._count)
            if passed > self._first:
                self.group.give(self._array[self._first : passed].tolist())
                self._array[self._first : passed] = NO_PAGE
                self._first = passed
        needed = -(-end // PAGE_TOKENS)
        if needed > len(self._array):
            grown = np.full(max(needed, 2 * len(self._array)), NO_PAGE, np.uint32)
            grown[: self._count] = self._array[: self._count]
            self._array = grown
        while self._count < needed:
            self._array[self._count] = self.group.take()
            self._count += 1

    def release(self) -> None:
        """Give all pages back."""
        self.group.give(self._array[self._first : self._count].tolist())
        self._array[: self._count] = NO_PAGE
        self._first = self._count = 0


class PagePool:
    """All groups of a model, and admission: `reserve` promises a sequence its most pages in every group."""

    __slots__ = ("groups",)

    def __init__(self, groups: Sequence[GroupLike]) -> None:
        self.groups = tuple(PageGroup(group.page_count, group.window) for group in groups)

    def reserve(self, tokens: int, rows: int) -> tuple[int, ...] | None:
        """Pages per group now promised to a sequence of `tokens`, or None when they are not there."""
        wanted = tuple(group.most_pages(tokens, rows) for group in self.groups)
        if any(g.reserved + n > g.page_count for g, n in zip(self.groups, wanted, strict=True)):
            return None
        for group, count in zip(self.groups, wanted, strict=True):
            group.reserved += count
        return wanted

    def unreserve(self, reserved: Sequence[int]) -> None:
        for group, count in zip(self.groups, reserved, strict=True):
            group.reserved -= count

    def tables(self) -> tuple[PageTable, ...]:
        """Empty tables of a new sequence, one per group."""
        return tuple(PageTable(group) for group in self.groups)
