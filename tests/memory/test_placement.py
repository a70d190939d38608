"""Where the files are cut, which mapping holds which pages, and where tensors are found again."""

from __future__ import annotations

import random

import pytest

from apu_engine.errors import ModelError
from apu_engine.memory.placement import GAP, PAGE, Part, Placed, Places, cut
from apu_engine.weights.model_file import TensorRef

F32 = 0


def tensor(name: str, offset: int, rows: int, columns: int, shard: int = 0) -> TensorRef:
    return TensorRef(name, F32, (rows, columns), shard, offset, rows * columns * 4)


def test_tensors_that_fit_are_never_cut() -> None:
    limit = 12 * PAGE
    refs = [tensor("a", 32, 4, 1024), tensor("b", 4 * PAGE + 32, 5, 1024), tensor("c", 9 * PAGE + 32, 3, 1024)]
    parts = cut(refs, limit)
    assert parts == [Part(0, 32, 9 * PAGE + 32), Part(0, 9 * PAGE + 32, 12 * PAGE + 32, layer=1)]
    assert all(part.last - part.first <= limit for part in parts)


def test_parts_that_share_a_page_lie_in_different_mappings() -> None:
    refs = [tensor(str(i), 100 + 3 * PAGE * i, 3, 1024) for i in range(20)]
    parts = cut(refs, 6 * PAGE)
    assert len(parts) == 20
    assert [part.layer for part in parts] == [i % 2 for i in range(20)]
    taken: set[tuple[int, int]] = set()
    for part in parts:
        pages = {(part.layer, page) for page in range(part.first, part.last, PAGE)}
        assert not pages & taken
        taken |= pages


def test_small_parts_take_as_many_mappings_as_they_need() -> None:
    """Three parts within one page."""
    refs = [tensor("a", 0, 1, 8), tensor("b", GAP + 64, 1, 8), tensor("c", 2 * GAP + 128, 1, 8)]
    assert [part.layer for part in cut(refs, 1 << 20)] == [0, 0, 0]
    tight = [tensor(name, at, 1, 2040) for name, at in (("a", 16), ("b", 8176), ("c", 16336))]
    assert [part.layer for part in cut(tight, 4 * PAGE)] == [0, 1, 0]


def test_a_large_tensor_is_cut_on_pages_where_its_rows_allow() -> None:
    even = tensor("even", 8 * PAGE, 100, 256)  # rows of 1024 bytes
    parts = cut([even], 6 * PAGE)
    assert all(part.begin % PAGE == 0 and part.layer == 0 for part in parts)
    placed = [Placed(part, 1 << 40 | part.begin) for part in parts]
    assert Places(placed).segments(even) == ((1 << 40 | 8 * PAGE, 0, 100, 1024, 0),)
    odd = tensor("odd", 36, 100, 257)  # rows of 1028 bytes, never on a page boundary
    parts = cut([odd], 6 * PAGE)
    assert {part.layer for part in parts} == {0, 1}
    found = Places([Placed(part, 1 << 30 | i << 24) for i, part in enumerate(parts)]).segments(odd)
    assert len(found) == len(parts) and sum(segment.row_count for segment in found) == 100
    assert [segment.row_begin for segment in found] == [
        sum(segment.row_count for segment in found[:i]) for i in range(len(found))
    ]


def test_rows_longer_than_a_part() -> None:
    with pytest.raises(ModelError, match=r"tensor wide: a row has 39.1 KiB, expected at most 24 KiB"):
        cut([tensor("wide", 0, 2, 10_000)], 8 * PAGE)


def test_shards_and_gaps() -> None:
    refs = [tensor("b", 64, 2, 8, shard=1), tensor("far", 4 * GAP, 2, 8), tensor("a", 64, 2, 8)]
    parts = cut(refs, 1 << 30)
    assert [(part.shard, part.begin) for part in parts] == [(0, 64), (0, 4 * GAP), (1, 64)]
    assert cut([], 1 << 30) == []


def test_a_tensor_that_was_not_placed() -> None:
    ref = tensor("lost", 64, 4, 8)
    with pytest.raises(ModelError, match="tensor lost: row 0 of 4"):
        Places([Placed(Part(0, 4096, 8192), 1 << 20)]).segments(ref)
    with pytest.raises(ModelError, match="tensor lost: row 2 of 4"):
        Places([Placed(Part(0, 64, 64 + 70), 1 << 20)]).segments(ref)


def test_every_row_is_found_once_whatever_the_layout() -> None:
    rng = random.Random(5)
    for _ in range(200):
        at, refs = rng.randrange(0, 5000), []
        for i in range(rng.randrange(1, 12)):
            refs.append(tensor(str(i), at, rng.randrange(1, 60), rng.randrange(1, 700), rng.randrange(2)))
            at = refs[-1].offset + refs[-1].nbytes + rng.choice((0, 0, 4, 32, 5000))
        parts = cut(refs, rng.randrange(4, 40) * PAGE)
        address = {part: rng.randrange(1, 1 << 30) * PAGE + part.begin % PAGE for part in parts}
        for ref in refs:
            row = 0
            for segment in Places([Placed(part, address[part]) for part in parts]).segments(ref):
                assert segment.row_begin == row and segment.row_stride == ref.row_bytes
                first = ref.offset + row * ref.row_bytes
                inside = [p for p in parts if p.shard == ref.shard and p.begin <= first < p.end]
                assert segment.address == address[inside[0]] + first - inside[0].begin
                row += segment.row_count
            assert row == ref.shape[0]
