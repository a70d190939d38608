"""Small plans made by hand, straight from the contract's structs, so that tests can also break every field.

A Rig collects weights (numpy arrays in place), scratch, states and ops; `spec` holds plain dicts until `build`, which
is where a test changes one value. On a GPU `build` copies weights and states to its memory, addresses as odd as they
are here. Inputs of an op are made by EMBED from a float32 table whose rows are the wanted
rows: `rig.input(x)`; logits come from `rig.logits(l)`, exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apu_engine._native import (
    NO_PAGE,
    NONE,
    PAGE_TOKENS,
    Device,
    InvalidError,
    Region,
    UnsupportedError,
    check,
    ffi,
    lib,
)

Array = NDArray[Any]
Q8_0 = "q8_0"
KEY_TILE, KEY_TILE_Q8, VALUE_TILE_Q8 = 64, 16, 32
DTYPES: dict[Any, int] = {np.dtype(np.float32): lib.APU_F32, np.dtype(np.float16): lib.APU_F16}
STEP: int = lib.APU_ROWS_STEP
OUTPUT: int = lib.APU_ROWS_OUTPUT


@dataclass
class Rig:
    """What an apu_plan_desc is made of. Operand lists of ops hold tensor or state ids."""

    rows: int = 16
    sequences: int = 4
    outputs: int = 16
    vocabulary: int = 64
    positions: int = 4096
    groups: int = 0
    tensors: list[dict[str, Any]] = field(default_factory=list)
    planes: list[dict[str, Any]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)  # overrides of apu_plan_desc's own fields
    arena: int = 0
    keep: list[Any] = field(default_factory=list)

    def weight(
        self, name: str, data: Array, *, dtype: int | None = None, shape: tuple[int, ...] = (), cuts: int = 1
    ) -> int:
        """A weight read from `data` in place; in `cuts` segments. Quantised: bytes (N, row bytes), dtype and shape."""
        assert data.flags.c_contiguous
        shape = shape or data.shape
        count = int(np.prod(shape[:-1]))
        row_bytes = data.nbytes // count
        begins = [count * i // cuts for i in range(cuts)]
        plane = {
            "kind": lib.APU_PLANE_DATA,
            "dtype": DTYPES[data.dtype] if dtype is None else dtype,
            "segment_begin": len(self.segments),
            "segment_count": cuts,
        }
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            self.segments.append(
                {
                    "address": data.ctypes.data + begin * row_bytes,
                    "row_begin": begin,
                    "row_count": end - begin,
                    "row_stride": row_bytes,
                    "padding": 0,
                }
            )
        self.planes.append(plane)
        self.keep.append(data)
        self.tensors.append(
            {
                "kind": lib.APU_TENSOR_WEIGHT,
                "dtype": plane["dtype"],
                "rows": lib.APU_ROWS_FIXED,
                "shape": shape,
                "plane_begin": len(self.planes) - 1,
                "plane_count": 1,
                "offset": 0,
                "name": name,
            }
        )
        return len(self.tensors) - 1

    def scales(self, values: Array, block: tuple[int, int], counts: Sequence[int], *, dtype: int = lib.APU_F32) -> None:
        """The last weight's scale plane, read in place from `values` (segments' rows of blocks, blocks of a row); its
        segments have `counts` rows of the weight.
        """
        assert values.flags.c_contiguous
        plane = {
            "kind": lib.APU_PLANE_SCALE,
            "dtype": dtype,
            "segment_begin": len(self.segments),
            "segment_count": len(counts),
            "block_rows": block[0],
            "block_columns": block[1],
        }
        row_bytes, at, row = values.nbytes // len(values), 0, 0
        for count in counts:
            self.segments.append(
                {
                    "address": values.ctypes.data + at * row_bytes,
                    "row_begin": row,
                    "row_count": count,
                    "row_stride": row_bytes,
                    "padding": 0,
                }
            )
            at, row = at - (-count // block[0]), row + count
        assert at == len(values)
        self.planes.append(plane)
        self.keep.append(values)
        self.tensors[-1]["plane_count"] = 2

    def scratch(self, name: str, inner: int | tuple[int, ...], rows: int = STEP, dtype: int = lib.APU_F32) -> int:
        shape = (self.rows if rows == STEP else self.outputs, *((inner,) if isinstance(inner, int) else inner))
        self.tensors.append(
            {
                "kind": lib.APU_TENSOR_SCRATCH,
                "dtype": dtype,
                "rows": rows,
                "shape": shape,
                "plane_begin": 0,
                "plane_count": 0,
                "offset": self.arena,
                "name": name,
            }
        )
        self.arena += -(-int(np.prod(shape)) * 4 // 64) * 64
        return len(self.tensors) - 1

    def state(
        self,
        name: str,
        heads: int,
        size: int,
        pages: int,
        *,
        dtype: Any = np.float32,
        window: int = 0,
        group: int = 0,
        keys: bool = False,
    ) -> int:
        """A paged state of keys or values; its memory is `memory(id)`, poisoned with NaN."""
        data = blank(pages, heads, size, dtype)
        self.keep.append(data)
        self.groups = max(self.groups, group + 1)
        self.states.append(
            {
                "kind": lib.APU_STATE_PAGED,
                "dtype": lib.APU_Q8_0 if dtype == Q8_0 else DTYPES[data.dtype],
                "layer": 0,
                "group": group,
                "rows_per_page": PAGE_TOKENS,
                "window": window,
                "heads": heads,
                "head_size": size,
                "address": data.ctypes.data,
                "page_bytes": data[0].nbytes,
                "page_count": pages,
                "versions": 1,
                "name": name,
                "data": data,
                "keys": keys,
                "type": dtype,
            }
        )
        return len(self.states) - 1

    def memory(self, state: int) -> Array:
        out: Array = self.states[state]["data"]
        return out

    def held(self, state: int) -> Array:
        """What a state holds, (pages, heads, 128, d) float64."""
        item = self.states[state]
        return decode(item["data"], item["head_size"], item["keys"])

    def fill(self, state: int, values: Array) -> Array:
        """Stores plain rows (pages, heads, 128, d) and returns what of them is held."""
        item = self.states[state]
        item["data"][...] = encode(values, item["type"], item["keys"])
        return self.held(state)

    def op(
        self,
        kind: int,
        *,
        ins: Sequence[int] = (),
        outs: Sequence[int] = (),
        weights: Sequence[int] = (),
        states: Sequence[int] = (),
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        layer: int = -1,
    ) -> None:
        def pad(values: Sequence[Any], size: int, blank: Any) -> list[Any]:
            return [*values, *[blank] * (size - len(values))]

        self.ops.append(
            {
                "kind": kind,
                "layer": layer,
                "in": pad(ins, 4, NONE),
                "out": pad(outs, 4, NONE),
                "w": pad(weights, 10, NONE),
                "state": pad(states, 4, NONE),
                "i": pad(ints, 8, 0),
                "f": pad(floats, 8, 0.0),
            }
        )

    def input(self, x: Array, name: str = "x") -> int:
        """Scratch whose row for token t is x[t]; x is (vocabulary, D)."""
        assert x.shape[0] == self.vocabulary
        table = self.weight(f"{name}_table", np.ascontiguousarray(x, np.float32))
        out = self.scratch(name, x.shape[1])
        self.op(lib.APU_OP_EMBED, outs=(out,), weights=(table,), floats=(1.0,))
        return out

    def logits(self, values: Array) -> int:
        """(O, V) scratch in which an output of a row with token t < 16 has exactly values[t]; then SAMPLE over it."""
        assert values.shape[1] == self.vocabulary and len(values) <= 16
        one_hot = np.zeros((self.vocabulary, 16), np.float32)
        one_hot[np.arange(len(values)), np.arange(len(values))] = 4.0  # its rms is 1
        hidden, out = self.scratch("hidden", 16, OUTPUT), self.scratch("logits", self.vocabulary, OUTPUT)
        matrix = np.zeros((self.vocabulary, 16), np.float32)
        matrix[:, : len(values)] = values.T / 4.0
        self.op(lib.APU_OP_GATHER_NORM, ins=(self.input(one_hot, "row"),), outs=(hidden,))
        self.op(lib.APU_OP_MATMUL, ins=(hidden,), outs=(out,), weights=(NONE, self.weight("head", matrix)))
        self.op(lib.APU_OP_SAMPLE, ins=(out,))
        return out

    def build(self, device: Device) -> Plan:
        return Plan(self, device)


class Plan:
    """A native plan made from a Rig; close it (`with`)."""

    def __init__(self, rig: Rig, device: Device) -> None:
        self.rig, self.device, self.handle = rig, device, None
        self._regions: list[Region] = []
        self._placed: list[tuple[int, int, int]] = []  # host address, bytes, device address
        try:
            if device.props.kind != "cpu":
                for array in rig.keep:
                    self._place(array)
            self._create()
        except BaseException:
            self.__exit__()
            raise

    def _create(self) -> None:
        rig = self.rig
        names, offsets = bytearray(), {}
        for name in {item["name"] for item in (*rig.tensors, *rig.states)}:
            offsets[name] = len(names)
            names += name.encode() + b"\0"

        def resolve(item: dict[str, Any]) -> dict[str, Any]:
            out = {key: value for key, value in item.items() if key not in ("data", "keys", "type")}
            if "address" in out:
                out["address"] = self.address(out["address"])
            if "name" in out:
                out["name"] = item.get("name_offset", offsets[item["name"]])
                out.pop("name_offset", None)
            if "shape" in out:
                out.setdefault("ndim", len(out["shape"]))
                out["shape"] = [*out["shape"], *[1] * (4 - len(out["shape"]))]
            return out

        arrays = {
            plural: ffi.new(f"apu_{kind}[]", [resolve(item) for item in items])
            for kind, plural, items in (
                ("tensor", "tensors", rig.tensors),
                ("plane", "planes", rig.planes),
                ("segment", "segments", rig.segments),
                ("state", "states", rig.states),
                ("op", "ops", rig.ops),
            )
        }
        text = ffi.new("char[]", bytes(names))
        fields = {
            **arrays,
            "names": text,
            "names_bytes": len(names),
            "tensor_count": len(rig.tensors),
            "plane_count": len(rig.planes),
            "segment_count": len(rig.segments),
            "state_count": len(rig.states),
            "op_count": len(rig.ops),
            "group_count": rig.groups,
            "arena_bytes": rig.arena,
            "max_rows": rig.rows,
            "max_sequences": rig.sequences,
            "max_outputs": rig.outputs,
            "vocabulary": rig.vocabulary,
            "max_positions": rig.positions,
            "flags": 0,
            **rig.limits,
        }
        out = ffi.new("apu_plan **")
        check(lib.apu_plan_create(self.device.handle, ffi.new("apu_plan_desc *", fields), out))
        self.handle = out[0]

    def _place(self, array: Array) -> None:
        """Copies an array to the device, with room before and after it that kernels may read."""
        room = 256
        region = Region.alloc(self.device, array.nbytes + 3 * room)
        self._regions.append(region)
        address = region.address + room + array.ctypes.data % room
        check(lib.apu_memory_copy(self.device.handle, address, array.ctypes.data, array.nbytes, 0, 1))
        self._placed.append((array.ctypes.data, array.nbytes, address))

    def address(self, host: int) -> int:
        """Where the device has what lies at a host address of the rig."""
        for begin, size, device in self._placed:
            if begin <= host < begin + size:
                return device + host - begin
        return host

    def fetch(self, array: Array) -> None:
        """Brings an array of the rig (`memory(state)`) up to date with the device's."""
        if self._placed:
            address = self.address(array.ctypes.data)
            check(lib.apu_memory_copy(self.device.handle, array.ctypes.data, address, array.nbytes, 1, 0))

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle is not None:
            lib.apu_plan_destroy(self.handle)
            self.handle = None
        for region in self._regions:
            region.free()
        self._regions.clear()

    def submit(self, step: Step, first: int = 0, last: int | None = None) -> Any:
        out = ffi.new("apu_event **")
        check(lib.apu_plan_submit(self.handle, step.struct(), first, len(self.rig.ops) if last is None else last, out))
        return out[0]

    def run(self, step: Step, first: int = 0, last: int | None = None) -> None:
        check(lib.apu_event_wait(self.submit(step, first, last), 60_000_000))

    def read(self, tensor: int, rows: int) -> Array:
        found = self.rig.tensors[tensor]
        out = np.empty((rows, *found["shape"][1:]), np.int32 if found["dtype"] == lib.APU_I32 else np.float32)
        check(lib.apu_plan_read(self.handle, tensor, ffi.from_buffer("char[]", out), out.nbytes))
        return out


SAMPLING = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 0,
    "draw": 0,
    "top_n": 0,
}


class Step:
    """Rows and outputs of one step; `rows`, `slots`, `outputs` hold plain dicts until `struct`."""

    def __init__(self, groups: int = 0) -> None:
        self.groups = groups
        self.rows: list[dict[str, int]] = []
        self.sequences: list[dict[str, int]] = []
        self.slots: list[dict[str, int]] = []
        self.pages: list[int] = []
        self.outputs: list[dict[str, Any]] = []
        self.results: list[dict[str, Array]] = []
        self._keep: list[Any] = []

    def sequence(
        self, tokens: Sequence[int], position: int = 0, tables: Sequence[Sequence[int]] = (), previous: int = -1
    ) -> Step:
        index, begin = len(self.sequences), len(self.rows)
        for i, token in enumerate(tokens):
            row = {"token": token, "previous": previous, "position": position + i, "sequence": index}
            self.rows.append(row)
        self.sequences.append({"row_begin": begin, "row_count": len(tokens)})
        for table in tables:
            self.slots.append(
                {"page_begin": len(self.pages), "page_count": len(table), "read_slot": 0, "write_slot": 0}
            )
            self.pages += table
        return self

    def output(
        self,
        row: int,
        want: int = lib.APU_OUT_SAMPLE,
        *,
        vocabulary: int = 0,
        history: dict[int, int] | None = None,
        bias: dict[int, float] | None = None,
        mask: Array | None = None,
        hidden: int = 0,
        **sampling: Any,
    ) -> dict[str, Array]:
        """Adds an output and returns the arrays its results go to. `mask` is (V) bool."""
        n = sampling.get("top_n", 0)
        result = {
            "token": np.full(1, -7, np.int32),
            "logprob": np.zeros(1, np.float32),
            "top_ids": np.zeros(n, np.int32),
            "top_logprobs": np.zeros(n, np.float32),
            "logits": np.zeros(vocabulary, np.float32),
            "hidden": np.zeros(hidden, np.float32),
        }
        fields = {**SAMPLING, "row": row, "want": want, **sampling}
        inputs = {
            "history_ids": np.array(list(history or {}), np.int32),
            "history_counts": np.array(list((history or {}).values()), np.int32),
            "bias_ids": np.array(list(bias or {}), np.int32),
            "bias_values": np.array(list((bias or {}).values()), np.float32),
        }
        fields["history_count"], fields["bias_count"] = len(history or {}), len(bias or {})
        if mask is not None:
            bits = np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").view(np.uint32)
            inputs["mask"] = bits
        for name, array in {**result, **inputs}.items():
            if array.size:
                kind = {"i": "int32_t[]", "f": "float[]", "u": "uint32_t[]"}[array.dtype.kind]
                fields[name] = ffi.from_buffer(kind, array)
                self._keep.append((array, fields[name]))
        self.outputs.append(fields)
        self.results.append(result)
        return result

    def struct(self) -> Any:
        arrays = {
            name: ffi.new(f"{kind}[]", items)
            for name, kind, items in (
                ("rows", "apu_row", self.rows),
                ("sequences", "apu_sequence", self.sequences),
                ("slots", "apu_slot", self.slots),
                ("pages", "uint32_t", self.pages),
                ("outputs", "apu_output", self.outputs),
            )
        }
        self._keep.append(arrays)
        return ffi.new(
            "apu_step *",
            {
                **arrays,
                "row_count": len(self.rows),
                "sequence_count": len(self.sequences),
                "page_count": len(self.pages),
                "output_count": len(self.outputs),
            },
        )


# ---- pages of keys and values ----
# The layouts of native/cpu/attention_kernels.h, to and from plain rows (pages, heads, 128, d). F32 and F16 pages are
# arrays of that shape whose elements stand in the layout's order; Q8_0 pages bytes (pages, heads, 128 * d / 32 * 34).


def blank(pages: int, heads: int, size: int, dtype: Any) -> Array:
    """Pages in which every number is NaN."""
    if dtype == Q8_0:
        return np.full((pages, heads, PAGE_TOKENS * size // 32 * 34), 0xFF, np.uint8)
    return np.full((pages, heads, PAGE_TOKENS, size), np.nan, dtype)


def quantize(x: Array) -> tuple[Array, Array]:
    """Of rows (..., d): int8 (..., d) and F16 scales (..., d/32), rounded as the stores are."""
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    scales = np.minimum(np.abs(blocks).max(-1) / np.float32(127), np.float32(65504)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, 0, np.float32(1) / scales.astype(np.float32))[..., None]
    return np.clip(np.rint(blocks * inverse), -127, 127).astype(np.int8).reshape(x.shape), scales


def dequantize(q: Array, scales: Array) -> Array:
    """(..., d) float64."""
    out: Array = q.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, -1)
    return out


def encode(x: Array, dtype: Any, keys: bool) -> Array:
    """Pages of plain float rows x."""
    pages, heads, rows, size = x.shape
    if dtype != Q8_0:
        x = x.astype(dtype)
        if not keys:
            return x
        tiles = x.reshape(pages, heads, -1, KEY_TILE, size).swapaxes(3, 4)
        return np.ascontiguousarray(tiles).reshape(x.shape)
    tile = KEY_TILE_Q8 if keys else VALUE_TILE_Q8
    q, scales = (a.reshape(pages, heads, rows // tile, tile, -1) for a in quantize(x))
    if keys:
        q = q.reshape(*q.shape[:-1], -1, 4).swapaxes(3, 4)
    flat = np.ascontiguousarray(q).reshape(pages, heads, rows // tile, -1).view(np.uint8)
    tail = np.ascontiguousarray(scales.swapaxes(3, 4)).reshape(pages, heads, rows // tile, -1).view(np.uint8)
    return np.concatenate([flat, tail], -1).reshape(pages, heads, -1)


def decode(data: Array, size: int, keys: bool) -> Array:
    """Plain rows (pages, heads, 128, d) in float64 of pages of head size `size`."""
    pages, heads = data.shape[:2]
    shape = (pages, heads, PAGE_TOKENS, size)
    if data.dtype != np.uint8:
        if keys:
            data = data.reshape(pages, heads, -1, size, KEY_TILE).swapaxes(3, 4).reshape(shape)
        return data.astype(np.float64)
    tile = KEY_TILE_Q8 if keys else VALUE_TILE_Q8
    tiles = data.reshape(pages, heads, PAGE_TOKENS // tile, -1)
    q = np.ascontiguousarray(tiles[..., : tile * size]).view(np.int8)
    if keys:
        q = q.reshape(*q.shape[:3], size // 4, tile, 4).swapaxes(3, 4)
    scales = np.ascontiguousarray(tiles[..., tile * size :]).view(np.float16).reshape(*q.shape[:3], -1, tile)
    return dequantize(q.reshape(shape), scales.swapaxes(3, 4).reshape(*shape[:3], -1))


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """float64 reference over the last axis."""
    x = x.astype(np.float64)
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return out if weight is None else out * weight.astype(np.float64)


def put(op: int, field: str, index: int, value: Any) -> Callable[[Rig], None]:
    """Sets one entry of a list of an op, to what `value` makes of the rig where it is a function."""

    def change(rig: Rig) -> None:
        rig.ops[op][field][index] = value(rig) if callable(value) else value

    return change


def pages(state: int, key: str, value: Any) -> Callable[[Rig], None]:
    """Sets a field of a state."""

    def change(rig: Rig) -> None:
        rig.states[state][key] = value

    return change


def refused(rig: Rig, device: Device, change: Callable[[], None], message: str) -> None:
    """Asserts that the rig makes a plan, and none after `change`: then `message` says why."""
    with rig.build(device):
        pass
    change()
    with pytest.raises((InvalidError, UnsupportedError)) as error:
        rig.build(device)
    assert re.search(message, str(error.value)), str(error.value)


__all__ = [
    "NONE",
    "NO_PAGE",
    "OUTPUT",
    "PAGE_TOKENS",
    "Q8_0",
    "STEP",
    "Plan",
    "Rig",
    "Step",
    "decode",
    "encode",
    "pages",
    "put",
    "refused",
    "rms_norm",
]
