"""Vocabularies small enough to read, as GGUF metadata; and a plain BPE that knows nothing of any library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

P = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_alphabet() -> list[str]:
    """Character of each byte, by GPT-2's rule: keep what prints in Latin-1, move the rest up from U+0100."""
    out, moved = [], 0
    for byte in range(256):
        if byte in range(0x21, 0x7F) or (byte in range(0xA1, 0x100) and byte != 0xAD):
            out.append(chr(byte))
        else:
            out.append(chr(256 + moved))
            moved += 1
    return out


ALPHABET = byte_alphabet()


def spelled(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode())


def learn_merges(words: Sequence[str], count: int) -> list[tuple[str, str]]:
    """The `count` most frequent adjacent pairs, one after the other, as BPE training finds them."""
    texts = [list(spelled(word)) for word in words]
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs: dict[tuple[str, str], int] = {}
        for text in texts:
            for pair in pairwise(text):
                pairs[pair] = pairs.get(pair, 0) + 1
        if not pairs:
            break
        best = max(sorted(pairs), key=pairs.__getitem__)
        merges.append(best)
        texts = [apply_merge(text, best) for text in texts]
    return merges


def apply_merge(text: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(text):
        joined = tuple(text[at : at + 2]) == pair
        out.append(text[at] + text[at + 1] if joined else text[at])
        at += 2 if joined else 1
    return out


def bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Joins the best-ranked adjacent pair, leftmost first, until none is left."""
    symbols = list(word)
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            return symbols
        _, at = min(found)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def bpe_metadata(
    pre: str | None, merges: Sequence[tuple[str, str]], extra: Sequence[tuple[str, int]] = ()
) -> dict[str, Any]:
    """All bytes, the products of the merges, then `extra` tokens with their types."""
    tokens = [*ALPHABET]
    tokens += dict.fromkeys(left + right for left, right in merges)
    types = [NORMAL] * len(tokens) + [kind for _, kind in extra]
    tokens += [token for token, _ in extra]
    meta: dict[str, Any] = {
        P + "model": "gpt2",
        P + "tokens": tokens,
        P + "token_type": np.array(types, np.int32),
        P + "merges": [f"{left} {right}" for left, right in merges],
    }
    if pre is not None:
        meta[P + "pre"] = pre
    return meta


def spm_metadata(pieces: Sequence[tuple[str, float, int]], **extra: Any) -> dict[str, Any]:
    """`<unk> <s> </s>`, 256 byte pieces, then (piece, score, type)."""
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    rows += list(pieces)
    meta: dict[str, Any] = {
        P + "model": "llama",
        P + "tokens": [row[0] for row in rows],
        P + "scores": np.array([row[1] for row in rows], np.float32),
        P + "token_type": np.array([row[2] for row in rows], np.int32),
        P + "bos_token_id": 1,
        P + "eos_token_id": 2,
        P + "unknown_token_id": 0,
    }
    meta |= {P + key: value for key, value in extra.items()}
    return meta
