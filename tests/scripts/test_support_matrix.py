"""docs/models.md is what the registries, the tests and the budget say; evidence exists for each tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import support_matrix
from published_models import published
from support_matrix import KNOWN, PAGE, REPORTS, RUNS, fitted, keys_of, page, rows

from apu_engine import arch
from apu_engine.weights.families import FAMILIES
from apu_engine.weights.ggml_types import GGML_TYPES


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert PAGE.read_text() == page(), "run scripts/support_matrix.py"
    monkeypatch.setattr(support_matrix, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr("sys.argv", ["support_matrix.py", "--check"])
    assert support_matrix.main() == 1
    monkeypatch.setattr("sys.argv", ["support_matrix.py"])
    assert support_matrix.main() == 0
    monkeypatch.setattr("sys.argv", ["support_matrix.py", "--check"])
    assert support_matrix.main() == 0


def test_every_registered_architecture_and_family_has_a_row() -> None:
    found = list(rows())
    assert [row[0] for row in found if row[0]] == list(arch.ARCHITECTURES)
    assert all(sum(f"`{kind}`" in row[1] for row in found) == 1 for kind in FAMILIES)
    assert {row[2] for row in found} == {"tested"}, "an architecture or a family without a test"


def test_evidence_names_what_exists() -> None:
    assert set(RUNS) | set(REPORTS) <= set(arch.ARCHITECTURES)
    assert keys_of("tests/folders.py", "KINDS") <= set(FAMILIES)
    assert keys_of("tests/gpu/test_folders_on_gpu.py", "KINDS") <= keys_of("tests/folders.py", "KINDS")
    assert set(arch.ARCHITECTURES) <= keys_of("tests/gpu/test_plan_models.py", "MODELS")
    with pytest.raises(LookupError, match="no dictionary or list NOTHING"):
        keys_of("tests/folders.py", "NOTHING")


def test_memory_is_the_budgets() -> None:
    """V4 Flash's weights are the published file's, byte for byte; Qwen3-8B's are two bytes a parameter."""
    known = {item.title: item for item in KNOWN}
    flash = published("deepseek-v4-flash-q2")
    types = {block.name: block for block in GGML_TYPES.values()}
    expected = 0
    for dtype, shape in flash.tensors.values():
        count = 1
        for size in shape:
            count *= size
        expected += count // types[dtype].elements * types[dtype].nbytes
    found = fitted(known["DeepSeek V4 Flash, Q2 (IQ2_XXS, Q2_K, Q8_0)"], "strix-halo-128")
    assert found.needs.weights == expected
    qwen = fitted(known["Qwen3-8B, BF16"], "strix-halo-64")
    assert qwen.needs.kv == support_matrix.CTX * 36 * 2 * 8 * 128 * 2
    assert qwen.strategies == ("registered", "staged")
