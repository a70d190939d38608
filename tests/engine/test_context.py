"""How long the context becomes, and what is said when it does not fit."""

from __future__ import annotations

import pytest

from apu_engine.engine.context import choose_context
from apu_engine.errors import BudgetError

MB = 1_000_000
GB = 1000 * MB


def need(ctx: int) -> int:
    return 10 * MB + ctx * 20_000


def test_the_trained_length_when_it_is_least() -> None:
    choice = choose_context(0, 8192, need, 16 * GB, 100 * MB)
    assert (choice.tokens, choice.reason, choice.notices) == (8192, "trained length", ())


def test_32k_when_the_model_could_more() -> None:
    assert choose_context(0, 131072, need, 16 * GB, 100 * MB).tokens == 32768


def test_what_fits_when_memory_is_short() -> None:
    choice = choose_context(0, 131072, need, 500 * MB, 100 * MB)
    assert choice.tokens % 128 == 0
    assert need(choice.tokens) <= 0.9 * 400 * MB < need(choice.tokens + 128)
    assert "fits in" in choice.reason


def test_weights_larger_than_memory_leave_a_quarter() -> None:
    choice = choose_context(0, 8192, need, 400 * MB, 80 * GB)
    assert 0 < need(choice.tokens) <= 90 * MB


def test_nothing_fits() -> None:
    with pytest.raises(BudgetError, match=r"ctx 512 needs 19\.3 MiB .* 19\.1 MiB is available"):
        choose_context(0, 8192, need, 20 * MB, 80 * GB)


def test_the_least_of_what_would_run_when_it_is_asked_for() -> None:
    """Beside weights that are larger than all of it."""
    assert choose_context(512, 8192, need, 40 * MB, 80 * GB, budget=True).tokens == 512
    choice = choose_context(0, 8192, need, 40 * MB, 80 * GB, budget=True)
    assert (choice.tokens, choice.reason, choice.notices) == (512, "the least", ())


def test_a_short_model_is_no_failure() -> None:
    assert choose_context(0, 64, need, 16 * GB, 100 * MB).tokens == 64


def test_asked_for_above_trained_is_a_notice() -> None:
    choice = choose_context(16384, 8192, need, 16 * GB, 100 * MB)
    assert choice.tokens == 16384
    assert "16384" in choice.notices[0] and "8192" in choice.notices[0]


def test_asked_for_above_memory_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(BudgetError) as info:
        choose_context(100_000, 131072, need, 1 * GB, 100 * MB)
    message = str(info.value)
    for words in ("ctx 100000 needs 1.9 GiB", "953.7 MiB is available", "use ctx 49408", "kv_type f16", "parallel"):
        assert words in message, message
    with pytest.raises(BudgetError, match=r"memory_budget leaves 95.4 MiB.*raise memory_budget"):
        choose_context(100_000, 131072, need, 100 * MB, 0, budget=True)


def test_force_turns_refusals_into_notices() -> None:
    choice = choose_context(100_000, 131072, need, 1 * GB, 100 * MB, force=True)
    assert choice.tokens == 100_000 and choice.notices[0].startswith("--force: ctx 100000 needs 1.9 GiB")
    choice = choose_context(0, 8192, need, 20 * MB, 80 * GB, force=True)
    assert choice.tokens == 512 and "--force" in choice.notices[0]


def test_asked_for_beside_large_weights_is_a_notice() -> None:
    choice = choose_context(4096, 8192, need, 200 * MB, 150 * MB)
    assert "read from disk again" in choice.notices[0]
