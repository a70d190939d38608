"""What plans made by hand need, without a model file: arrays as weights in a device's own memory, states, a Plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import Device, Region, check, ffi, lib
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.plan import Plan, reserve_states
from apu_engine.plan.spec import Segment
from apu_engine.weights.model_file import TensorRef

DTYPES = {np.dtype(np.float32): lib.APU_F32, np.dtype(np.float16): lib.APU_F16}
PADDING = 64  # readable bytes around each array, as kernels may use


class DeviceArrays:
    """A Binder. `add` gives a reference to use with PlanBuilder.weight; free it after the plan."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._regions: dict[str, Region] = {}

    def add(
        self, name: str, values: NDArray[Any], dtype: int | None = None, shape: tuple[int, ...] | None = None
    ) -> TensorRef:
        """Copies values (N, K) or (K), float32 or float16, to the device, or the bytes of a `dtype` and `shape`."""
        region = Region.alloc(self._device, values.nbytes + 2 * PADDING)
        self._regions[name] = region
        data = ffi.from_buffer("char[]", np.ascontiguousarray(values))
        host = int(ffi.cast("uintptr_t", data))
        check(lib.apu_memory_copy(self._device.handle, region.address + PADDING, host, values.nbytes, 0, 1))
        number = DTYPES[values.dtype] if dtype is None else dtype
        return TensorRef(name, number, values.shape if shape is None else shape, 0, 0, values.nbytes)

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        address = self._regions[ref.name].address + PADDING
        return (Segment(address, 0, ref.nbytes // ref.row_bytes, ref.row_bytes, 0),)

    def free(self) -> None:
        for region in self._regions.values():
            region.free()
        self._regions.clear()

    def __enter__(self) -> DeviceArrays:
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()


@contextmanager
def planned(device: Device, builder: PlanBuilder) -> Iterator[Plan]:
    """The plan that `builder` holds, with memory for its states."""
    spec = builder.finish()
    regions = reserve_states(device, spec)
    plan = None
    try:
        plan = Plan(device, spec)
        yield plan
    finally:
        if plan is not None:
            plan.destroy()
        for region in regions:
            region.free()
