"""One step's input and results in buffers that are allocated once and filled again and again.

The same memory is seen twice: as cffi structs, which cost little per scalar, and as numpy arrays, which cost
little per array; a decode step of one sequence touches a dozen fields and one page table. The native side
copies everything at submit; results land in `tokens`, `logprobs` and the others by the time the event was
waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import PAGE_TOKENS, ffi, lib
from apu_engine.errors import ApuError
from apu_engine.plan.spec import Limits

SAMPLE: int = lib.APU_OUT_SAMPLE
TOP: int = lib.APU_OUT_TOP
LOGITS: int = lib.APU_OUT_LOGITS
HIDDEN: int = lib.APU_OUT_HIDDEN
MAX_TOP = 64  # log-probabilities per output, unless a step is made for more

_ROW = np.dtype([("token", "<i4"), ("previous", "<i4"), ("position", "<u4"), ("sequence", "<u4")])

Ids = Sequence[int] | NDArray[Any]


class Step:
    """Rows of sequences and the outputs wanted from them. `clear`, `add_sequence`..., `add_output`...,
    submit.

    Raises ApuError when a limit would be exceeded. Not for use from several threads.
    """

    def __init__(self, limits: Limits, group_count: int, hidden_size: int, max_top: int = MAX_TOP) -> None:
        self.limits = limits
        self.max_top = max_top
        self.group_count = group_count
        self.hidden_size = hidden_size
        pages = limits.max_sequences * group_count * -(-limits.max_positions // PAGE_TOKENS)
        self._row = ffi.new("apu_row[]", limits.max_rows)
        self._sequence = ffi.new("apu_sequence[]", limits.max_sequences)
        self._slot = ffi.new("apu_slot[]", limits.max_sequences * group_count)
        self._output = ffi.new("apu_output[]", limits.max_outputs)
        self._rows = np.frombuffer(ffi.buffer(self._row), _ROW)
        self._pages = np.zeros(pages, np.uint32)
        outputs = limits.max_outputs
        self.tokens: NDArray[np.int32] = np.zeros(outputs, np.int32)  # (O)
        self.logprobs: NDArray[np.float32] = np.zeros(outputs, np.float32)  # (O)
        self.top_ids: NDArray[np.int32] = np.zeros((outputs, max_top), np.int32)
        self.top_logprobs: NDArray[np.float32] = np.zeros((outputs, max_top), np.float32)
        self._results = (
            ffi.from_buffer("int32_t[]", self.tokens),
            ffi.from_buffer("float[]", self.logprobs),
            ffi.from_buffer("int32_t[]", self.top_ids),
            ffi.from_buffer("float[]", self.top_logprobs),
        )
        self._own: dict[str, NDArray[np.float32]] = {}
        self._keep: list[Any] = []
        self.struct = ffi.new(
            "apu_step *",
            {
                "rows": self._row,
                "sequences": self._sequence,
                "slots": self._slot,
                "pages": ffi.from_buffer("uint32_t[]", self._pages),
                "outputs": self._output,
            },
        )
        self.clear()

    @property
    def rows(self) -> int:
        return self._row_count

    @property
    def outputs(self) -> int:
        return self._output_count

    @property
    def logits(self) -> NDArray[np.float32]:
        """(O, V): where logits go that were asked for without a buffer; allocated at first use."""
        return self._buffer("logits", self.limits.vocabulary)

    @property
    def hidden(self) -> NDArray[np.float32]:
        """(O, D): the same for hidden states."""
        return self._buffer("hidden", self.hidden_size)

    def _buffer(self, name: str, width: int) -> NDArray[np.float32]:
        if name not in self._own:
            self._own[name] = np.zeros((self.limits.max_outputs, width), np.float32)
        return self._own[name]

    def clear(self) -> None:
        self._row_count = self._sequence_count = self._page_count = self._output_count = 0
        self._keep.clear()

    def add_sequence(self, tokens: Ids, position: int, pages: Sequence[Ids], *, previous: int = -1) -> int:
        """Adds rows of one sequence and returns the index of its first row.

        `tokens` are at `position`, `position + 1`, ...; `pages` has one page table per group, entry p holding
        tokens [128 p, 128 p + 128), NO_PAGE where a window has passed. With `previous` >= 0 the (only) token
        is the one sampled for that output of the step before, and `tokens` is [-1].
        """
        begin, count, index = self._row_count, len(tokens), self._sequence_count
        if begin + count > self.limits.max_rows or index >= self.limits.max_sequences or not count:
            raise ApuError(
                f"step: {begin + count} rows in {index + 1} sequences, at most {self.limits.max_rows} in "
                f"{self.limits.max_sequences}, at least one row each"
            )
        if len(pages) != self.group_count:
            raise ApuError(f"step: expected {self.group_count} page tables, found {len(pages)}")
        if count == 1:
            row = self._row[begin]
            row.token = int(tokens[0])
            row.previous = previous
            row.position = position
            row.sequence = index
        else:
            rows = self._rows[begin : begin + count]
            rows["token"] = tokens
            rows["previous"] = previous
            rows["position"] = np.arange(position, position + count, dtype=np.uint32)
            rows["sequence"] = index
        sequence = self._sequence[index]
        sequence.row_begin = begin
        sequence.row_count = count
        for group, table in enumerate(pages):
            first, size = self._page_count, len(table)
            if first + size > len(self._pages):
                raise ApuError(f"step: {first + size} page-table entries, at most {len(self._pages)}")
            self._pages[first : first + size] = table
            slot = self._slot[index * self.group_count + group]
            slot.page_begin = first
            slot.page_count = size
            self._page_count = first + size
        self._row_count = begin + count
        self._sequence_count = index + 1
        return begin

    def add_output(
        self,
        row: int,
        want: int = SAMPLE,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int = 0,
        draw: int = 0,
        history: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
        bias: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None,
        mask: NDArray[np.uint32] | None = None,
        top_n: int = 0,
        logprob: bool = True,
        logits: NDArray[np.float32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> int:
        """Asks for results of `row`; returns the output's index. `want` is a sum of SAMPLE, TOP, LOGITS,
        HIDDEN.

        `history` is (distinct ids, counts) for the penalties, `bias` (ids, values), `mask` (ceil(V / 32))
        words in which a set bit allows the token. `logits` (V) and `hidden` (D) are contiguous float32
        buffers to fill, this step's own when None. `draw` tells apart draws for one position. Without
        `logprob` the pass over the vocabulary that the drawn token's log-probability costs is saved.
        """
        index = self._output_count
        if index >= self.limits.max_outputs or top_n > self.max_top:
            most = self.limits.max_outputs
            raise ApuError(f"step: at most {most} outputs with {self.max_top} log-probabilities each")
        out = self._output[index]
        out.row = row
        out.want = want
        out.temperature = temperature
        out.top_k = top_k
        out.top_p = top_p
        out.min_p = min_p
        out.repeat_penalty = repeat_penalty
        out.frequency_penalty = frequency_penalty
        out.presence_penalty = presence_penalty
        out.top_n = top_n
        out.seed = seed
        out.draw = draw
        tokens, logprobs, top_ids, top_logprobs = self._results
        out.token = tokens + index
        out.logprob = logprobs + index if logprob else ffi.NULL
        out.top_ids = top_ids + index * self.max_top
        out.top_logprobs = top_logprobs + index * self.max_top
        out.history_count = out.bias_count = 0
        out.history_ids = out.history_counts = out.bias_ids = out.bias_values = out.mask = ffi.NULL
        out.logits = out.hidden = ffi.NULL
        if history is not None:
            out.history_ids, out.history_count = (
                self._pointer("int32_t[]", history[0], np.int32),
                len(history[0]),
            )
            out.history_counts = self._pointer("int32_t[]", history[1], np.int32, len(history[0]))
        if bias is not None:
            out.bias_ids, out.bias_count = self._pointer("int32_t[]", bias[0], np.int32), len(bias[0])
            out.bias_values = self._pointer("float[]", bias[1], np.float32, len(bias[0]))
        if mask is not None:
            out.mask = self._pointer("uint32_t[]", mask, np.uint32, -(-self.limits.vocabulary // 32))
        if want & LOGITS:
            buffer = self.logits[index] if logits is None else logits
            out.logits = self._pointer("float[]", buffer, np.float32, self.limits.vocabulary)
        if want & HIDDEN:
            buffer = self.hidden[index] if hidden is None else hidden
            out.hidden = self._pointer("float[]", buffer, np.float32, self.hidden_size)
        self._output_count = index + 1
        return index

    def _pointer(self, kind: str, array: NDArray[Any], dtype: type[Any], length: int | None = None) -> Any:
        if array.dtype != dtype or not array.flags.c_contiguous or (length is not None and array.size != length):
            raise ApuError(f"step: expected {length} contiguous {dtype.__name__}, found {array.size} of {array.dtype}")
        pointer = ffi.from_buffer(kind, array)
        self._keep.append(pointer)
        return pointer

    def prepared(self) -> Any:
        """The apu_step pointer, its counts up to date."""
        struct = self.struct
        struct.row_count = self._row_count
        struct.sequence_count = self._sequence_count
        struct.page_count = self._page_count
        struct.output_count = self._output_count
        return struct
