"""A double of the native library's mapping guards: needs no build, and can stage a fault."""

from __future__ import annotations

import types


class NativeDouble(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("apu_engine._native")
        self.guarded: dict[int, tuple[int, str]] = {}
        self.fault: str | None = None

    def guard(self, address: int, nbytes: int, path: str) -> None:
        assert address not in self.guarded
        self.guarded[address] = (nbytes, path)

    def unguard(self, address: int) -> None:
        del self.guarded[address]

    def faulted(self) -> str | None:
        return self.fault
