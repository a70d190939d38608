"""A plan on a device: native structs made from a PlanSpec, then submitted step by step.

The native side copies the description, so nothing of it is kept here but names and shapes. A plan belongs to
one thread (`cancel` may come from any); its memory regions are the caller's and must outlive it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import NONE, Device, Region, WaitTimeout, check, ffi, lib
from apu_engine.errors import ApuError
from apu_engine.plan.spec import PlanSpec, Tensor
from apu_engine.plan.step import MAX_TOP, Step

_SLICE_US = 100_000  # how long a wait stays away from Python, so that Ctrl-C is handled


def reserve_states(device: Device, spec: PlanSpec) -> list[Region]:
    """Memory of `device` for the states of `spec`, whose addresses it sets; free it after the plan.

    Raises NativeError when the device has too little; then nothing is kept.
    """
    regions: list[Region] = []
    try:
        for state in spec.states:
            regions.append(Region.alloc(device, state.page_bytes * state.page_count))
            state.address = regions[-1].address
    except BaseException:
        for region in regions:
            region.free()
        raise
    return regions


class Event:
    """A submission under way.

    Wait for it exactly once; the step and its buffers must stay untouched until then.
    """

    __slots__ = ("_handle", "_pending", "_step")

    def __init__(self, handle: Any, step: Step, pending: set[Event]) -> None:
        self._handle = handle
        self._step: Step | None = step
        self._pending = pending  # the plan's: an event that was dropped unwaited must not free its buffers
        pending.add(self)

    def wait(self, timeout: float | None = None) -> None:
        """Until the submission ended, or `timeout` seconds: then WaitTimeout, and the event stays valid.

        Raises CancelledError after Plan.cancel, MappingError when a weight page could not be read.
        """
        if self._handle is None:
            raise ApuError("this event was waited for already")
        left = -1 if timeout is None else int(timeout * 1e6)
        while True:
            part = _SLICE_US if left < 0 else min(left, _SLICE_US)
            status = lib.apu_event_wait(self._handle, part)
            if status != lib.APU_E_TIMEOUT:
                self._handle = self._step = None
                self._pending.discard(self)
                check(status)
                return
            if left >= 0:
                left -= part
                if left <= 0:
                    raise WaitTimeout(status, f"the step is still running after {timeout} s")


class Plan:
    """A validated plan, ready to run. `slices` maps "forward" and "sample" to op ranges.

    Raises InvalidError or UnsupportedError naming the tensor or op that the device refuses, OutOfMemoryError
    when the arena cannot be had. Without `graph` a GPU launches kernels one by one.
    """

    def __init__(self, device: Device, spec: PlanSpec, *, graph: bool = True) -> None:
        self.spec = spec
        self.slices = spec.slices
        self._handle: Any = None
        self._rows = self._outputs = 0
        self._pending: set[Event] = set()
        self._out = ffi.new("apu_event **")
        desc, keep = _describe(spec)
        desc.flags = 0 if graph else lib.APU_PLAN_NO_GRAPH
        out = ffi.new("apu_plan **")
        check(lib.apu_plan_create(device.handle, desc, out))
        del keep
        self._handle = out[0]
        self.scratch_bytes = int(lib.apu_plan_scratch_bytes(self._handle))

    def new_step(self, max_top: int = MAX_TOP) -> Step:
        """An empty step with buffers for this plan's limits and `max_top` log-probabilities of an output."""
        return Step(self.spec.limits, self.spec.group_count, self.spec.dims["D"], max_top)

    def submit(self, step: Step, first: int, last: int) -> Event:
        """Starts ops [first, last) on `step` and returns at once; submissions run in order.

        Raises InvalidError when the step breaks a limit or names a token, page or row that does not exist.
        """
        check(lib.apu_plan_submit(self._handle, step.prepared(), first, last, self._out))
        self._rows, self._outputs = step.rows, step.outputs
        return Event(self._out[0], step, self._pending)

    def run(self, step: Step) -> None:
        """Forward and sample, waited for."""
        events = [self.submit(step, *self.slices["forward"])]
        try:
            events.append(self.submit(step, *self.slices["sample"]))
        finally:
            errors = [error for event in events if (error := _outcome(event))]
        if errors:
            raise errors[0]

    def cancel(self) -> None:
        """Makes submissions that have not ended stop at their next op, with CancelledError.

        From any thread.
        """
        check(lib.apu_plan_cancel(self._handle))

    def read(self, tensor: Tensor | str) -> NDArray[Any]:
        """The current rows of a scratch tensor, float32 or int32; meaningful right after the op that wrote it."""
        found = tensor if isinstance(tensor, Tensor) else next(t for t in self.spec.tensors if t.name == tensor)
        rows = {lib.APU_ROWS_STEP: self._rows, lib.APU_ROWS_OUTPUT: self._outputs}.get(found.rows, found.shape[0])
        out = np.empty((rows, *found.shape[1:]), np.int32 if found.dtype == lib.APU_I32 else np.float32)
        check(lib.apu_plan_read(self._handle, found.id, ffi.from_buffer("char[]", out), out.nbytes))
        return out

    def profile(self, enable: bool = True) -> NDArray[np.uint64]:
        """Turns profiling on or off; nanoseconds per op of the last submission, (ops)."""
        out = np.zeros(len(self.spec.ops), np.uint64)
        check(lib.apu_plan_profile(self._handle, enable, ffi.from_buffer("uint64_t[]", out)))
        return out

    # ------------------------------------------------------------ states between steps

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copies one page of every state of the group."""
        check(lib.apu_state_copy(self._handle, group, source, target))

    def reset_page(self, group: int, page: int) -> None:
        check(lib.apu_state_reset(self._handle, group, page))

    def export_page(self, group: int, page: int) -> bytes:
        """The page's bytes of every state of the group, in state order."""
        size = sum(state.page_bytes for state in self.spec.states if state.group == group)
        out = bytearray(size)
        check(lib.apu_state_export(self._handle, group, page, ffi.from_buffer(out), size))
        return bytes(out)

    def import_page(self, group: int, page: int, data: bytes) -> None:
        check(lib.apu_state_import(self._handle, group, page, ffi.from_buffer(data), len(data)))

    def destroy(self) -> None:
        """Cancels what runs, waits, frees. Harmless twice."""
        if self._handle is not None:
            lib.apu_plan_destroy(self._handle)
            self._handle = None
            self._pending.clear()


def _outcome(event: Event) -> ApuError | None:
    try:
        event.wait()
    except ApuError as error:
        return error
    return None


def _describe(spec: PlanSpec) -> tuple[Any, list[Any]]:
    """(apu_plan_desc pointer, what must live as long as it)."""
    names = _Names()
    weights = [tensor for tensor in spec.tensors if tensor.is_weight]
    segments = [s for tensor in weights for s in (*tensor.segments, *(tensor.scales.segments if tensor.scales else ()))]
    native_segments = ffi.new("apu_segment[]", [tuple(segment) for segment in segments])
    native_planes = ffi.new("apu_plane[]", sum(2 if tensor.scales else 1 for tensor in weights))
    native_tensors = ffi.new("apu_tensor[]", len(spec.tensors))
    plane = segment_begin = 0
    for tensor, out in zip(spec.tensors, native_tensors, strict=True):
        out.kind = lib.APU_TENSOR_WEIGHT if tensor.is_weight else lib.APU_TENSOR_SCRATCH
        out.dtype = tensor.dtype
        out.rows = tensor.rows
        out.ndim = len(tensor.shape)
        out.shape = [*tensor.shape, *[1] * (4 - len(tensor.shape))]
        out.offset = tensor.offset
        out.name = names.add(tensor.name)
        if tensor.is_weight:
            planes = [(lib.APU_PLANE_DATA, tensor.dtype, len(tensor.segments), 0, 0)]
            if s := tensor.scales:
                planes.append((lib.APU_PLANE_SCALE, s.dtype, len(s.segments), s.block_rows, s.block_columns))
            out.plane_begin, out.plane_count = plane, len(planes)
            for kind, dtype, count, height, width in planes:
                native_planes[plane] = (kind, dtype, segment_begin, count, height, width)
                plane += 1
                segment_begin += count
    native_states = ffi.new("apu_state[]", len(spec.states))
    for state, out in zip(spec.states, native_states, strict=True):
        out.kind = lib.APU_STATE_PAGED
        out.dtype = state.dtype
        out.layer = state.layer
        out.group = state.group
        out.rows_per_page = state.rows_per_page
        out.window = state.window
        out.heads = state.heads
        out.head_size = state.head_size
        out.address = state.address
        out.page_bytes = state.page_bytes
        out.page_count = state.page_count
        out.versions = 1
        out.name = names.add(state.name)
    native_ops = ffi.new("apu_op[]", len(spec.ops))
    for op, out in zip(spec.ops, native_ops, strict=True):
        out.kind = op.kind
        out.layer = op.layer
        for field, values in (
            ("in", op.inputs),
            ("out", op.outputs),
            ("w", op.weights),
            ("state", op.states),
        ):
            array = getattr(out, field)
            for i in range(len(array)):
                array[i] = values[i] if i < len(values) else NONE
        for i, number in enumerate(op.ints):
            out.i[i] = number
        for i, value in enumerate(op.floats):
            out.f[i] = value
    text = ffi.new("char[]", bytes(names.text))
    limits = spec.limits
    desc = ffi.new("apu_plan_desc *")
    desc.tensors, desc.tensor_count = native_tensors, len(spec.tensors)
    desc.planes, desc.plane_count = native_planes, plane
    desc.segments, desc.segment_count = native_segments, len(segments)
    desc.states, desc.state_count = native_states, len(spec.states)
    desc.ops, desc.op_count = native_ops, len(spec.ops)
    desc.names, desc.names_bytes = text, len(names.text)
    desc.group_count = spec.group_count
    desc.arena_bytes = spec.arena_bytes
    desc.max_rows = limits.max_rows
    desc.max_sequences = limits.max_sequences
    desc.max_outputs = limits.max_outputs
    desc.vocabulary = limits.vocabulary
    desc.max_positions = limits.max_positions
    return desc, [native_segments, native_planes, native_tensors, native_states, native_ops, text]


class _Names:
    """NUL-terminated names one after another, addressed by offset."""

    def __init__(self) -> None:
        self.text = bytearray()

    def add(self, name: str) -> int:
        offset = len(self.text)
        self.text += name.encode() + b"\0"
        return offset
