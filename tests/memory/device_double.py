"""A device and its memory in the native library's place, for tests of placement without a GPU runtime.

`Memory` stands for apu_memory_* and the stager: device addresses are host addresses, unless `shift` moves registered
ranges. Faults are attributes: what each way does wrong, by its name.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from apu_engine._native import (
    Chunk,
    DeviceError,
    DeviceProps,
    OutOfMemoryError,
    RegionInfo,
    StagerInfo,
    UnsupportedError,
)
from apu_engine.errors import MappingError
from apu_engine.memory.verify import checksum

WAYS = ("svm", "advise", "lock", "register")


@dataclass
class Memory:
    """All that exists, and what goes wrong. Rates are in GB/s."""

    ways: tuple[str, ...] = WAYS
    pageable: bool = False
    integrated: bool = True
    kind: str = "hip"
    device_rate: float = 200.0
    rates: dict[str, float] = field(default_factory=dict)  # of ways; 200 unless named
    grains: dict[str, str] = field(default_factory=dict)  # of ways; coarse unless named
    refuse: dict[str, str] = field(default_factory=dict)  # ways that fail, and with what
    largest: int | None = None  # bytes of one registration
    shift: int = 0  # of registered addresses
    wrong: set[str] = field(default_factory=set)  # ways whose pages read as something else
    copying: set[str] = field(default_factory=set)  # ways that leave anonymous memory behind
    allocations_left: int = 1 << 30
    largest_allocation: int = 1 << 60
    log: list[str] = field(default_factory=list)
    regions: list[Any] = field(default_factory=list)  # alive
    stagers: int = 0
    most_regions: int = 0

    def device(self) -> Any:
        props = DeviceProps(
            kind=self.kind,
            name="double",
            arch="gfx0",
            integrated=self.integrated,
            threads=2,
            isa="auto",
            wave_size=32,
            pageable=self.pageable,
            ways=self.ways,
            memory_bytes=1 << 40,
            driver_version=7,
        )
        return SimpleNamespace(
            props=props, checksum=self.checksum, read_rate=self.read_rate, free_memory=lambda: 1 << 40
        )

    def install(self, monkeypatch: Any) -> Any:
        """Puts this in the place of Region and Stager; the device."""
        from apu_engine.memory import probe, strategies

        memory = self

        class Region(_Region):
            owner = memory

        class Stager(_Stager):
            owner = memory

        monkeypatch.setattr(strategies, "Region", Region)
        monkeypatch.setattr(strategies, "Stager", Stager)
        monkeypatch.setattr(probe, "Region", Region)
        return self.device()

    def find(self, address: int) -> Any:
        return next(r for r in self.regions if r.device <= address < r.device + r.nbytes)

    def checksum(self, address: int, nbytes: int) -> int:
        region = self.find(address)
        assert address + nbytes <= region.device + region.nbytes, "read behind the range"
        data = np.frombuffer(ctypes.string_at(address - region.device + region.host, nbytes), np.uint8)
        return checksum(data) ^ (region.way in self.wrong)

    def read_rate(self, address: int, nbytes: int, passes: int = 1) -> float:
        way = self.find(address).way
        return 1e9 * (self.device_rate if way is None else self.rates.get(way, 200.0))


class _Region:
    owner: Memory

    def __init__(self, host: int, nbytes: int, way: str | None, keep: Any = None) -> None:
        self.host, self.nbytes, self.way, self._keep = host, nbytes, way, keep
        self.device = host + (self.owner.shift if way not in (None, "direct") else 0)
        self.owner.regions.append(self)
        self.owner.most_regions = max(self.owner.most_regions, len(self.owner.regions))

    @classmethod
    def register(cls, device: Any, address: int, nbytes: int, strategy: str = "auto", way: str = "auto") -> _Region:
        owner = cls.owner
        name = "direct" if strategy == "direct" else way
        owner.log.append(f"register {name} {nbytes}")
        if strategy == "registered" and (address % 4096 or nbytes % 4096):
            raise AssertionError("registered ranges are whole pages")
        if name in owner.refuse:
            raise DeviceError(4, f"device hip: {owner.refuse[name]}")
        if name != "direct" and name not in owner.ways:
            raise UnsupportedError(3, f"device hip: no way {name}")
        if owner.largest is not None and nbytes > owner.largest:
            raise DeviceError(4, "device hip: hipErrorOutOfMemory (2) registering")
        for region in owner.regions:
            if region.way is not None and region.host < address + nbytes and address < region.host + region.nbytes:
                raise DeviceError(4, "device hip: a page is registered twice")
        return cls(address, nbytes, name)

    @classmethod
    def alloc(cls, device: Any, nbytes: int) -> _Region:
        owner = cls.owner
        owner.log.append(f"alloc {nbytes}")
        if owner.allocations_left <= 0 or nbytes > owner.largest_allocation:
            raise OutOfMemoryError(2, "device hip: hipErrorOutOfMemory (2) allocating")
        owner.allocations_left -= 1
        data = np.zeros(nbytes + 256, np.uint8)
        return cls(-(-data.ctypes.data // 256) * 256, nbytes, None, data)

    @property
    def address(self) -> int:
        return self.device

    def chunks(self) -> tuple[Chunk, ...]:
        return (Chunk(self.host, self.device, self.nbytes),)

    def info(self) -> RegionInfo:
        way = self.way or "auto"
        grain = self.owner.grains.get(way, "coarse") if way in WAYS else "unknown"
        return RegionInfo("registered", way if way in WAYS else "auto", grain, 0, self.nbytes)

    def free(self) -> None:
        if self in self.owner.regions:
            self.owner.regions.remove(self)
            self.owner.log.append("free")


class _Stager:
    owner: Memory

    def __init__(self, device: Any, ring_bytes: int) -> None:
        self.owner.stagers += 1

    def __enter__(self) -> _Stager:
        return self

    def __exit__(self, *_: object) -> None:
        self.owner.stagers -= 1

    def read(self, fd: int, path: str, offset: int, nbytes: int, to: int) -> None:
        region = self.owner.find(to)
        assert to + nbytes <= region.device + region.nbytes, "copy behind the allocation"
        data = os.pread(fd, nbytes, offset)
        if len(data) != nbytes:
            raise MappingError(path, f"ends at {offset + len(data):,}")
        ctypes.memmove(to, data, nbytes)

    def wait(self) -> None:
        pass

    def info(self) -> StagerInfo:
        return StagerInfo(0, 0, 0)
