"""Text to token ids and back, on the `tokenizers` library, from a GGUF's vocabulary.

The library's model holds only what text may turn into; control tokens are kept out of it and cut out of trusted text by
`specials.Splitter`. So no text, however it is spelled, becomes a control token unless the caller says that it may.
Decoding joins the bytes of tokens, which streaming needs anyway: a token may hold a part of a character.
Construction is most of the start-up cost of text, so nothing here is done per token that is not needed at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from apu_engine.collector import collector_paused
from apu_engine.errors import FormatError
from apu_engine.text import pretokenizers, spm
from apu_engine.text.errors import TextError
from apu_engine.text.specials import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Splitter
from apu_engine.text.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.models import BPE

# The library would start a thread per core for its batches, which hold one text here.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One vocabulary. Safe to use from several threads.

    Bytes that a vocabulary cannot express are dropped by byte-level BPE (SmolLM2's has no token for U+0004) and become
    the unknown token in SentencePiece without byte tokens; both as the published tokenizers do.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens = vocabulary.tokens
        self._spm = vocabulary.kind == "llama"
        default_bos = vocabulary.bos_id is not None
        with collector_paused():
            if self._spm:
                self._backend = _spm_backend(vocabulary)
            else:
                kind = pretokenizers.Kind(()) if vocabulary.pipeline else None
                kind = kind or pretokenizers.find_kind(vocabulary.pre, vocabulary.source)
                self._backend = _bpe_backend(vocabulary, kind)
                default_bos = default_bos and kind.add_bos
        self._splitter = Splitter(vocabulary.control)
        self._bytes: list[bytes | None] = [None] * len(self._tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.special_ids = vocabulary.special_ids
        self.add_bos = default_bos if vocabulary.add_bos is None else vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.add_space_prefix = self._spm and vocabulary.add_space_prefix

    @classmethod
    def from_metadata(cls, meta: Mapping[str, Any], source: str) -> Tokenizer:
        """The tokenizer that GGUF metadata describes; `source` is the file's name for errors.

        Raises ModelError when the keys are missing or state an unsupported kind, FormatError when a key lies.
        """
        return cls(read_vocabulary(meta, source))

    @property
    def vocab_size(self) -> int:
        """Number of ids, V."""
        return len(self._tokens)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The strings that only trusted text may turn into tokens, with their ids."""
        return self._vocabulary.control

    def token(self, token_id: int) -> str:
        """The entry as the vocabulary spells it."""
        return self._tokens[self._checked(token_id)]

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest tokens."""
        return max(map(len, self._tokens), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for: any bytes, not always whole characters."""
        found = self._bytes[token_id] if 0 <= token_id < len(self._bytes) else None
        if found is None:
            found = self._bytes[token_id] = self._spell(self._checked(token_id))
        return found

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`; with `add_special` framed by BOS and EOS where the model wants them, BOS exactly once.

        With `parse_special` control tokens in the text become their ids; without it they stay text.
        Raises TextError when the text holds a lone surrogate.
        """
        ids = self.encode_pieces(self.split(text) if parse_special else [text])
        if add_special:
            ids = self.with_bos(ids)
            if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
                ids.append(self.eos_id)
        return ids

    def split(self, text: str) -> list[str | int]:
        """`text` cut at its control tokens: strings, and ids where the control tokens were."""
        return self._splitter.split(text)

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of texts and of control tokens between them, in order. The texts are text: nothing in them is special."""
        out: list[int] = []
        sentence_start = True
        for piece in pieces:
            if isinstance(piece, int):
                out.append(piece)
                sentence_start = piece == self.bos_id
            elif piece:
                # SentencePiece encodes each sentence by itself, and each BOS starts one.
                spaced = self._vocabulary.prefix_joins and piece[0] in (" ", _SPACE)
                prefix = " " if sentence_start and self.add_space_prefix and not spaced else ""
                out += self._encode_text(prefix + piece)
                sentence_start = False
        return out

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with exactly one BOS in front, where the model wants one."""
        bos = self.bos_id
        if not self.add_bos or bos is None:
            return ids
        first = 0
        while first < len(ids) and ids[first] == bos:
            first += 1
        return [bos, *ids[first:]]

    def decode(self, ids: Sequence[int], skip_special: bool = False, continuation: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text is dropped again, unless the ids continue another text.
        """
        skipped = self.special_ids if skip_special else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        if self.add_space_prefix and not continuation and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def _encode_text(self, text: str) -> list[int]:
        try:
            # The batch call lets other threads run meanwhile and computes no offsets: half the time of `encode`.
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # what the library makes of a string that is not Unicode
            check_unicode(text, "the text")
            raise
        return ids

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._tokens):
            raise TextError(f"token id {token_id} is outside the vocabulary of {len(self._tokens)} tokens")
        return token_id

    def _spell(self, token_id: int) -> bytes:
        token, kind = self._tokens[token_id], self._vocabulary.types[token_id]
        if kind in (CONTROL, UNKNOWN):
            return token.encode()
        if self._spm:
            if kind == BYTE:
                return bytes([int(token[3:5], 16)])
            return token.replace(_SPACE, " ").encode()
        if kind == USER_DEFINED:
            return token.encode()
        try:
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            return token.encode()  # not written in the byte alphabet: a raw string


def check_unicode(text: str, what: str) -> None:
    """Raises TextError when `text` holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise TextError(
            f"{what} holds a lone surrogate, U+{code:04X}, at character {error.start}; it is not valid Unicode"
        ) from None


def _bpe_backend(vocabulary: Vocabulary, kind: pretokenizers.Kind) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    if vocabulary.merges is None:
        raise FormatError(vocabulary.source, "tokenizer.ggml.merges", "is missing; a BPE vocabulary needs it")
    ids = _text_ids(vocabulary, vocabulary.tokens)
    ignore = kind.ignore_merges or vocabulary.ignore_merges
    backend = Backend(_model_with_merges(vocabulary, ids, ignore_merges=ignore))
    if vocabulary.pipeline:
        _use_pipeline(backend, vocabulary)
    else:
        backend.pre_tokenizer, normalizer = pretokenizers.build(kind)
        if normalizer is not None:
            backend.normalizer = normalizer
    _add_whole(backend, vocabulary, ids)
    return backend


def _spm_backend(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import normalizers

    types, tokens = vocabulary.types, vocabulary.tokens
    for token_id in np.flatnonzero(types == BYTE).tolist():
        if not _BYTE_PIECE.fullmatch(tokens[token_id]):
            raise FormatError(
                vocabulary.source,
                f"tokenizer.ggml.tokens[{token_id}]",
                f"is typed as a byte but spelled {tokens[token_id]!r}, expected <0x00> to <0xFF>",
            )
    # Runs of spaces are stored as spaces but met as U+2581, because the normaliser has replaced them.
    defined = np.flatnonzero(types == USER_DEFINED).tolist()
    runs = [token_id for token_id in defined if tokens[token_id] and not tokens[token_id].strip(" ")]
    if runs:
        tokens = tokens.copy()
        for token_id in runs:
            tokens[token_id] = _SPACE * len(tokens[token_id])
    ids = _text_ids(vocabulary, tokens)
    unknown = vocabulary.unknown_id
    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None and tokens[unknown] in ids:
        options["unk_token"] = tokens[unknown]
    if vocabulary.merges is not None:
        model = _model_with_merges(vocabulary, ids, **options)
    else:
        model = _model_with_scores(vocabulary, tokens, ids, runs, options)
    backend = Backend(model)
    if vocabulary.pipeline:
        _use_pipeline(backend, vocabulary)
    else:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    _add_whole(backend, vocabulary, ids)
    return backend


def _use_pipeline(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    pre_tokenizer, normalizer = pretokenizers.build_pipeline(vocabulary.pipeline, vocabulary.source)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer


def _model_with_scores(
    vocabulary: Vocabulary, tokens: list[str], ids: dict[str, int], runs: list[int], options: dict[str, Any]
) -> BPE:
    from tokenizers.models import BPE

    types, scores = vocabulary.types, vocabulary.scores
    assert scores is not None
    made = (types == NORMAL) | (types == UNUSED)
    made[runs] = True
    products = np.flatnonzero(made)
    # SentencePiece matches user-defined pieces before anything else; scores rank the rest.
    products = products[np.lexsort((products, -scores[products], types[products] != USER_DEFINED))]
    pieces = [token if text else "" for token, text in zip(tokens, vocabulary.is_text.tolist(), strict=True)]
    try:
        return BPE(vocab=ids, merges=spm.derive_merges(pieces, products), **options)
    except BaseException as error:  # two hashes met: the library raises, or panics, which is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return BPE(vocab=ids, merges=spm.derive_merges(pieces, products, exact=True), **options)


def _model_with_merges(vocabulary: Vocabulary, ids: dict[str, int], **options: Any) -> BPE:
    from tokenizers.models import BPE

    field = "tokenizer.ggml.merges"
    assert vocabulary.merges is not None
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    for index, pair in enumerate(pairs):
        if len(pair) != 2 or not pair[0] or not pair[1]:
            raise FormatError(
                vocabulary.source,
                f"{field}[{index}]",
                f"is {vocabulary.merges[index]!r}, expected two tokens with one space between",
            )
    # The library raises for a merge whose parts or product it does not know, and panics for a product that is longer
    # than all that it knows.
    longest = max(map(len, ids), default=0)
    limit = max((len(token.encode()) for token in ids if 4 * len(token) >= longest), default=0)
    if all(len(merge.encode()) - 1 <= limit for merge in vocabulary.merges if 4 * len(merge) > limit):
        with suppress(Exception):
            return BPE(vocab=ids, merges=pairs, **options)
    control, kept = vocabulary.control, []
    for index, (left, right) in enumerate(pairs):
        absent = [token for token in (left, right, left + right) if token not in ids]
        if not absent:
            kept.append((left, right))
        elif any(token not in control for token in absent):
            token = next(token for token in absent if token not in control)
            raise FormatError(
                vocabulary.source,
                f"{field}[{index}]",
                f"joins {left!r} and {right!r}, but {token!r} is not a token",
            )
    return BPE(vocab=ids, merges=kept, **options)


def _text_ids(vocabulary: Vocabulary, tokens: list[str]) -> dict[str, int]:
    """The vocabulary of the library's model; of equal entries the last one encodes."""
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) == len(tokens):
        for token_id in np.flatnonzero(~vocabulary.is_text).tolist():
            del ids[tokens[token_id]]
    else:
        ids = {tokens[token_id]: token_id for token_id in np.flatnonzero(vocabulary.is_text).tolist()}
    ids.pop("", None)
    return ids


def _add_whole(backend: tokenizers.Tokenizer, vocabulary: Vocabulary, ids: dict[str, int]) -> None:
    """Have user-defined text, such as HTML tags in Gemma's vocabulary, matched before anything is cut."""
    from tokenizers import AddedToken

    defined = np.flatnonzero((vocabulary.types == USER_DEFINED) & vocabulary.is_text).tolist()
    whole = [vocabulary.tokens[token_id] for token_id in defined if vocabulary.tokens[token_id] in ids]
    if whole:
        backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])


def _alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()
