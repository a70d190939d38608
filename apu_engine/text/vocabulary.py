"""A vocabulary as a GGUF's metadata states it, checked once so that nothing later needs to doubt it.

Metadata is untrusted: ids may lie outside the vocabulary, arrays may differ in length, scores may be NaN. Each such lie
is a FormatError naming the key. Valid and accepted: duplicate entries (published Gemma 4 files have them; the last one
encodes, all decode), empty entries, a missing token_type array. Source of the keys: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import FormatError, ModelError
from apu_engine.text.specials import BYTE, CONTROL, EOG_NAMES, NORMAL, UNKNOWN, USER_DEFINED, is_markup

_KEY = "tokenizer.ggml."
KINDS = {"gpt2": "BPE", "llama": "SentencePiece BPE"}  # tokenizer.ggml.model -> what it is
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask")  # as the keys spell them
# Ids that sit at fixed places in old SentencePiece files, which lack the keys.
_SPM_DEFAULTS = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}


@dataclass(frozen=True)
class Vocabulary:
    """`tokens`, `types` and `scores` are indexed by token id; V entries each."""

    source: str
    kind: str  # tokenizer.ggml.model: "gpt2" or "llama"
    pre: str
    pipeline: str  # JSON of a tokenizer.json's own normaliser and pre-tokenizer, which then apply; "" for none
    tokens: list[str]
    types: NDArray[np.uint8]  # (V,) 1 to 6
    scores: NDArray[np.float64] | None  # (V,)
    merges: list[str] | None
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eog_ids: frozenset[int]
    control: dict[str, int]  # never made from untrusted text: CONTROL, UNKNOWN, and user-defined markup
    is_text: NDArray[np.bool_]  # (V,) entries that text may turn into; UNKNOWN stands for what nothing else does
    special_ids: frozenset[int]  # left out of text when special tokens are skipped
    add_bos: bool | None  # None: the file does not say
    add_eos: bool
    add_space_prefix: bool
    prefix_joins: bool  # a text that begins with a space gets no other one
    ignore_merges: bool


def read_vocabulary(meta: Mapping[str, Any], source: str) -> Vocabulary:
    """Checks and collects the `tokenizer.ggml.*` keys.

    Raises ModelError when the file has no tokenizer or one of an unsupported kind, FormatError when a key lies.
    """
    reader = _Reader(meta, source)
    kind = reader.string("model")
    if kind in ("none", "no_vocab"):
        raise ModelError(
            f"{source}: the file states that it has no tokenizer ({_KEY}model = {kind!r})", (f"{_KEY}model",)
        )
    if kind not in KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in KINDS.items())
        raise ModelError(f"{source}: {_KEY}model = {kind!r} is not supported; supported are {known}", (kind,))
    tokens = reader.strings("tokens", required=True)
    assert tokens is not None
    if not tokens:
        raise FormatError(source, f"{_KEY}tokens", "is empty")
    size = len(tokens)
    types = reader.types(size)
    scores = reader.scores(size)
    if kind == "llama" and scores is None and f"{_KEY}merges" not in meta:
        raise ModelError(
            f"{source}: a SentencePiece vocabulary needs {_KEY}scores, which is missing", (f"{_KEY}scores",)
        )

    ids = {name: reader.token_id(name, size) for name in _ROLES}
    if kind == "llama":
        for name, (default, spelling) in _SPM_DEFAULTS.items():
            if ids[name] is None and default < size and tokens[default] == spelling:
                ids[name] = default
    ends = [ids[name] for name in ("eos", "eot", "eom")]

    # Some files type their special tokens as normal ones; those that carry a role and look like markup are meant.
    for token_id in (ids["bos"], *ends):
        if token_id is not None and types[token_id] == NORMAL and is_markup(tokens[token_id]):
            types[token_id] = CONTROL

    is_text = types != CONTROL
    for token_id in np.flatnonzero(types == USER_DEFINED).tolist():
        is_text[token_id] = not is_markup(tokens[token_id])
    held = np.flatnonzero(~is_text | (types == UNKNOWN)).tolist()
    control = {tokens[token_id]: token_id for token_id in held if tokens[token_id]}

    eog = {token_id for token_id in ends if token_id is not None}
    eog |= set(reader.ids("eog_token_ids", size))
    eog |= {control[name] for name in EOG_NAMES & control.keys()}
    if "<|return|>" in control and "<|call|>" in control:  # harmony: <|end|> ends a message, not the turn
        eog -= {control.get("<|end|>", -1)} - {ids["eos"]}
    special = set(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist()) | eog
    if ids["bos"] is not None:
        special.add(ids["bos"])

    add_bos = reader.flag("add_bos_token")
    if add_bos and ids["bos"] is None:
        raise FormatError(source, f"{_KEY}add_bos_token", f"is true, but {_KEY}bos_token_id is missing")
    add_eos = reader.flag("add_eos_token") or False
    if add_eos and ids["eos"] is None:
        raise FormatError(source, f"{_KEY}add_eos_token", f"is true, but {_KEY}eos_token_id is missing")
    prefix = reader.flag("add_space_prefix")
    return Vocabulary(
        source=source,
        kind=kind,
        pre=reader.string("pre", default=""),
        pipeline=str(meta.get("tokenizer.pipeline", "")),
        tokens=tokens,
        types=types,
        scores=scores,
        merges=reader.strings("merges"),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        eog_ids=frozenset(eog),
        control=control,
        is_text=is_text,
        special_ids=frozenset(special),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=kind == "llama" if prefix is None else prefix,
        prefix_joins=reader.flag("space_prefix_joins") or False,
        ignore_merges=reader.flag("ignore_merges") or False,
    )


class _Reader:
    """Typed access to the keys under `tokenizer.ggml.`, with errors that name the key."""

    def __init__(self, meta: Mapping[str, Any], source: str) -> None:
        self.meta = meta
        self.source = source

    def fail(self, name: str, problem: str) -> FormatError:
        return FormatError(self.source, _KEY + name, problem)

    def missing(self, name: str) -> ModelError:
        key = _KEY + name
        return ModelError(
            f"{self.source}: no tokenizer: metadata key {key} is missing; token ids still work, text does not",
            (key,),
        )

    def string(self, name: str, default: str | None = None) -> str:
        value = self.meta.get(_KEY + name, default)
        if value is None:
            raise self.missing(name)
        if not isinstance(value, str):
            raise self.fail(name, f"expected a string, found {_what(value)}")
        return value

    def flag(self, name: str) -> bool | None:
        value = self.meta.get(_KEY + name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise self.fail(name, f"expected a boolean, found {_what(value)}")
        return None if value is None else bool(value)

    def strings(self, name: str, required: bool = False) -> list[str] | None:
        value = self.meta.get(_KEY + name)
        if value is None:
            if required:
                raise self.missing(name)
            return None
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise self.fail(name, f"expected an array of strings, found {_what(value)}")
        out: list[Any] = value.tolist() if hasattr(value, "tolist") else list(value)
        if out and set(map(type, out)) != {str}:
            raise self.fail(name, "expected an array of strings, found other values in it")
        return out

    def numbers(self, name: str, size: int) -> NDArray[Any] | None:
        value = self.meta.get(_KEY + name)
        if value is None:
            return None
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.fail(name, f"expected an array of numbers, found {_what(value)}")
        if len(array) != size:
            raise self.fail(name, f"has {len(array)} entries for {size} tokens; both must agree")
        return array

    def types(self, size: int) -> NDArray[np.uint8]:
        array = self.numbers("token_type", size)
        if array is None:
            return np.full(size, NORMAL, dtype=np.uint8)
        if bad := np.flatnonzero((array < 0) | (array > BYTE)).tolist():
            raise self.fail("token_type", f"entry {bad[0]} is {array[bad[0]]}, expected 1 to {BYTE}")
        types = array.astype(np.uint8)
        types[types == 0] = NORMAL  # "undefined" in old files
        return types

    def scores(self, size: int) -> NDArray[np.float64] | None:
        array = self.numbers("scores", size)
        if array is None:
            return None
        scores = array.astype(np.float64)
        if bad := np.flatnonzero(np.isnan(scores)).tolist():
            raise self.fail("scores", f"entry {bad[0]} is not a number")
        return scores

    def token_id(self, name: str, size: int) -> int | None:
        key = f"{name}_token_id"
        value = self.meta.get(_KEY + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.fail(key, f"expected an integer, found {_what(value)}")
        if not 0 <= int(value) < size:
            raise self.fail(key, f"is {value}, outside the vocabulary of {size} tokens")
        return int(value)

    def ids(self, name: str, size: int) -> list[int]:
        array = np.asarray(self.meta.get(_KEY + name, np.empty(0, np.int64)))
        if (
            array.ndim != 1
            or array.dtype.kind not in "iu"
            or (len(array) and not 0 <= array.min() <= array.max() < size)
        ):
            raise self.fail(name, f"expected ids below {size}, found {_what(array.tolist())}")
        return [int(token_id) for token_id in array]


def _what(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
