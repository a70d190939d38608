"""How far logits are from float32's: KL divergence and argmax agreement on real model files, row by row.

The oracle is transformers' own model in float32 on the weights that the file holds, dequantised by the gguf package.
Logits of a thousand rows are gigabytes, so everything goes by blocks of rows: the oracle's final hidden states are
kept (T, D), and for each block its logits, ours in every variant and a recorded peer's are made, compared and
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reference
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from harness import running
from numpy.typing import NDArray

from apu_engine._native import Device
from apu_engine.weights.model_file import ModelFile
from apu_engine.weights.opening import open_model
from models import TinyModel

VARIANTS: dict[str, dict[str, str]] = {"default": {}, "fine": {"precision": "fine"}, "exact": {"precision": "exact"}}
BLOCK = 128  # rows compared at a time: 134 MB of logits per source for a vocabulary of 262,144


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of T rows: KL(oracle || other) in nats, and whether the likeliest token is the same."""

    kl: NDArray[np.float64]  # (T,)
    same: NDArray[np.bool_]  # (T,)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def error(self) -> float:
        """Standard error of `mean_kl`."""
        return float(self.kl.std() / len(self.kl) ** 0.5)

    @property
    def argmax(self) -> float:
        """Share of rows with the same likeliest token, 0 to 1."""
        return float(self.same.mean())


def divergence(expected: torch.Tensor, found: torch.Tensor) -> Agreement:
    """Of logits (T, V) float32. With a, b = rows less their maxima: KL = sum(p(a) * (a - b)) - log(sum e^a / sum e^b).

    One row at a time, which stays in the cache. A shift of all logits of a row changes nothing.
    """
    kl = np.empty(len(expected))
    same = np.empty(len(expected), bool)
    for row in range(len(expected)):
        (a_max, a_at), (b_max, b_at) = expected[row].max(-1), found[row].max(-1)
        a, b = expected[row] - a_max, found[row] - b_max
        weights = torch.exp(a)
        a_sum = float(weights.sum(dtype=torch.float64))
        b_sum = float(torch.exp(b).sum(dtype=torch.float64))
        kl[row] = float(torch.dot(weights, a - b)) / a_sum - math.log(a_sum / b_sum)
        same[row] = a_at == b_at
    return Agreement(kl, same)


class Oracle:
    """transformers' float32 model over the dequantised weights of a llama or gemma3 file, run once over `ids`."""

    def __init__(self, path: Path, ids: Sequence[int]) -> None:
        model: Any = _model(open_model(path))
        assert getattr(model.config, "final_logit_softcapping", None) is None, "the head below has no softcap"
        self._head = model.lm_head
        with torch.no_grad():
            self._hidden = model.model(torch.tensor([list(ids)])).last_hidden_state[0]  # (T, D)

    def logits(self, first: int, last: int) -> torch.Tensor:
        """(last - first, V) float32."""
        with torch.no_grad():
            out: torch.Tensor = self._head(self._hidden[first:last])
        return out


def compare(
    path: Path,
    ids: Sequence[int],
    device: Device,
    variants: Mapping[str, Mapping[str, str]] = VARIANTS,
    peers: Mapping[str, NDArray[np.float32]] | None = None,
) -> dict[str, Agreement]:
    """Agreement with the oracle of each variant of ours (plan options) and each peer's logits (T or more, V), by name.

    Blocks of `BLOCK` rows are prefilled one after the other into the same sequence, from position 0.
    """
    names = [*variants, *(peers or {})]
    parts: dict[str, list[Agreement]] = {name: [] for name in names}
    with ExitStack() as stack:
        oracle = Oracle(path, ids)
        ctx = -(-len(ids) // BLOCK) * BLOCK
        ours = {
            name: stack.enter_context(running(path, device, ctx=ctx, **options)) for name, options in variants.items()
        }
        for first in range(0, len(ids), BLOCK):
            last = min(first + BLOCK, len(ids))
            expected = oracle.logits(first, last)
            for name, model in ours.items():
                found = torch.from_numpy(model.logits([(0, first, ids[first:last])]))
                parts[name].append(divergence(expected, found))
            for name, rows in (peers or {}).items():
                found = torch.from_numpy(np.array(rows[first:last], np.float32))
                parts[name].append(divergence(expected, found))
    return {
        name: Agreement(np.concatenate([p.kl for p in found]), np.concatenate([p.same for p in found]))
        for name, found in parts.items()
    }


def _model(file: ModelFile) -> torch.nn.Module:
    """The file's metadata and dequantised tensors in the classes that also check the tiny models."""
    arch = file.architecture
    metadata = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items() if k.startswith(f"{arch}.")}
    build = {"llama": reference.llama, "gemma3": reference.gemma3}.get(arch)
    odd = [key for key in metadata if "scaling" in key or "softcapping" in key or "expert" in key]
    odd += [name for name in file.tensors if name == "rope_freqs.weight" or name.endswith(".bias")]
    if build is None or odd:
        raise ValueError(f"{file.path}: the oracle knows llama and gemma3 in their plain form, found {arch} {odd}")
    tensors = _dequantized(file)
    H, D = metadata["attention.head_count"], metadata["embedding_length"]
    shape = {
        "V": len(tensors["token_embd.weight"]),
        "D": D,
        "F": metadata["feed_forward_length"],
        "layers": metadata["block_count"],
        "H": H,
        "K": metadata.get("attention.head_count_kv", H),
        "d": metadata.get("attention.key_length", D // H),
        "context": metadata["context_length"],
        "eps": metadata["attention.layer_norm_rms_epsilon"],
        "rope_base": metadata["rope.freq_base"],
        "window": metadata.get("attention.sliding_window"),
        "tied": "output.weight" not in tensors,
        "bias": False,
    }
    return build(TinyModel(file.path, arch, shape, dict(file.metadata), tensors))


def _dequantized(file: ModelFile) -> dict[str, NDArray[np.float32]]:
    """All tensors in float32, by name."""
    shards = [np.memmap(path, np.uint8, "r") for path in file.files]
    out = {}
    for name, ref in file.tensors.items():
        kind = GGMLQuantizationType(ref.dtype)
        rows = shards[ref.shard][ref.offset : ref.offset + ref.nbytes].reshape(-1, ref.row_bytes)
        values = np.empty((len(rows), ref.shape[-1]), np.float32)
        for at in range(0, len(rows), 1024):  # the temporaries of a whole embedding table would be slow
            values[at : at + 1024] = dequantize(rows[at : at + 1024], kind)
        out[name] = values.reshape(ref.shape)
    return out
