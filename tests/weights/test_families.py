"""Names of tensors and hyperparameters against the gguf package's own tables."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from apu_engine import arch
from apu_engine.weights.families import FAMILIES, Parts, Rewritten

ARCHITECTURES = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
KEYS = {
    value.replace("{arch}.", "")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str)
}
_CONVERTED = {
    "self_attn.sinks": "self_attn.sinks.weight",
    "mlp.experts.down_proj_bias": "mlp.experts.down_proj.bias",
    "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias",
}  # before names are looked up


@pytest.mark.parametrize("kind", FAMILIES)
def test_tensor_names_are_those_of_the_gguf_package(kind: str) -> None:
    family = FAMILIES[kind]
    table = gguf.get_tensor_name_map(ARCHITECTURES[family.architecture], 2)

    def found(name: str) -> str | None:
        return table.get_name(name, try_suffixes=(".weight", ".bias"))

    for module, ours in family.names.items():
        if isinstance(ours, (Parts, Rewritten)) or module == "mlp.experts.down_proj":
            continue  # as transformers holds them in memory: no file that the package converts has them
        own = _CONVERTED.get(module, module).replace("experts.*.", "experts.")
        assert found(f"model.layers.1.{own}") == f"blk.1.{ours}", module
    for module, ours in family.outer.items():
        prefix = "" if module == "lm_head" else "model."
        assert table.get_name(prefix + module) == ours, module


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_are_those_of_the_gguf_package(kind: str) -> None:
    family = FAMILIES[kind]
    assert family.architecture in arch.ARCHITECTURES
    more = {"attention.sliding_window_pattern", "rope.freq_base_swa", "attn_logit_softcapping"}
    for key in family.keys:
        assert key in KEYS | more, key


def test_documentation_lists_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "safetensors.md").read_text()
    for kind, family in FAMILIES.items():
        (line,) = [line for line in text.splitlines() if line.startswith("| `") and f"`{kind}`" in line]
        assert family.architecture in line
