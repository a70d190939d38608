"""Page tables: growth, sliding windows, reservation, and that nothing is ever lost or shared."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from apu_engine._native import NO_PAGE, PAGE_TOKENS
from apu_engine.engine.pages import PageGroup, PagePool, PageTable


@dataclass(frozen=True)
class Spec:
    window: int
    page_count: int


def test_a_table_grows_by_pages_of_128_tokens() -> None:
    group = PageGroup(10)
    table = PageTable(group)
    table.cover(0, 1)
    assert len(table.entries) == 1
    table.cover(1, 128)
    assert len(table.entries) == 1
    table.cover(128, 129)
    assert table.entries.tolist() == [0, 1]
    table.release()
    assert group.free_count == 10


def test_a_window_frees_pages_that_no_query_reaches() -> None:
    group = PageGroup(10, window=128)
    table = PageTable(group)
    table.cover(0, 256)
    # A query at 254 still sees 127; one at 255 sees 128 and later.
    table.cover(254, 255)
    assert table.entries.tolist() == [0, 1]
    table.cover(255, 256)
    assert table.entries.tolist() == [NO_PAGE, 1]
    assert group.free_count == 9
    table.cover(256, 257)
    assert table.entries.tolist()[:2] == [NO_PAGE, 1]
    assert table.live == 2
    table.release()
    assert group.free_count == 10


@pytest.mark.parametrize("window", [0, 1, 2, 100, 128, 129, 512])
@pytest.mark.parametrize("rows", [1, 2, 16, 128, 300])
def test_no_sequence_holds_more_than_was_reserved(window: int, rows: int) -> None:
    tokens = 1500
    group = PageGroup(64, window)
    most = group.most_pages(tokens, rows)
    random_ = random.Random(window * 1000 + rows)
    table, position, seen = PageTable(group), 0, 0
    while position < tokens:
        count = min(random_.randint(1, rows), tokens - position)
        table.cover(position, position + count)
        assert table.live <= most
        seen = max(seen, table.live)
        first = max(position - window + 1, 0) if window else 0
        for token in range(first, position + count):
            assert table.entries[token // PAGE_TOKENS] != NO_PAGE
        position += count
    assert seen >= min(most, -(-tokens // PAGE_TOKENS)) - 2
    table.release()
    assert sorted(group.take() for _ in range(64)) == list(range(64))


def test_reserving_is_all_or_nothing() -> None:
    pool = PagePool([Spec(0, 4), Spec(128, 3)])
    assert pool.reserve(300, 16) == (3, 3)
    assert pool.reserve(128, 16) is None  # the second group is full
    assert [group.reserved for group in pool.groups] == [3, 3]
    pool.unreserve((3, 3))
    assert pool.reserve(512, 1) == (4, 2)


def test_tables_never_share_pages() -> None:
    pool = PagePool([Spec(0, 12), Spec(200, 12)])
    tables = [pool.tables() for _ in range(3)]
    random_ = random.Random(1)
    positions = [0, 0, 0]
    for _ in range(60):
        i = random_.randrange(3)
        count = random_.randint(1, 20)
        if positions[i] + count > 512:
            for table in tables[i]:
                table.release()
            tables[i], positions[i] = pool.tables(), 0
        for table in tables[i]:
            table.cover(positions[i], positions[i] + count)
        positions[i] += count
        for g in range(2):
            held = [int(p) for t in tables for p in t[g].entries if p != NO_PAGE]
            assert len(held) == len(set(held))
            assert len(held) + pool.groups[g].free_count == 12
