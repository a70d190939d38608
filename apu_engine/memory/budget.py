"""What a model needs of a machine under each memory strategy, held against the limits, before anything is allocated.

In place (`registered`, `direct`), the weights are file pages: they count against KFD's limit, MemAvailable and the
cgroup, and only KV cache and scratch are device allocations. `staged` allocates everything. MemAvailable counts page
cache as available, so a model that is cached already does not count against itself; its locked pages, which
MemAvailable leaves out, and pages charged to another cgroup are credited. A refusal gives the numbers and what
helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apu_engine.memory.limits import Limits
from apu_engine.memory.machine import GIB, PAGES_PER_GIB, Machine
from apu_engine.options import format_size

IN_PLACE = ("registered", "direct")
STAGING_RING = 128 << 20  # pinned bytes of a load that copies
RUNTIME_BYTES = 256 << 20  # a GPU's queues, code, step slots, partial sums: what the plan's own scratch leaves out


def memory_available() -> int:
    """Bytes that can be used, page cache included, before the machine or this cgroup runs short."""
    return Machine().available


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one model at one context length. `cached`: of its files, in the page cache now."""

    weights: int
    kv: int
    scratch: int
    tokens: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """One limit and what is asked of it: `fixed` bytes whatever the context, and `growing` ones."""

    limit: str  # what it is, for messages
    fixed: int
    growing: int
    available: int

    @property
    def needed(self) -> int:
        return self.fixed + self.growing

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def room(self) -> int:
        """Bytes for what grows with the context."""
        return self.available - self.fixed

    def __str__(self) -> str:
        return f"{format_size(self.needed)} needed, {self.limit} is {format_size(max(self.available, 0))}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A strategy on a machine: what it asks of each limit, and what would make it fit."""

    strategy: str
    demands: tuple[Demand, ...]
    pages_limit: int = 0  # ttm.pages_limit that would do, where GTT alone is too small
    ttm_module: str = "ttm"

    @property
    def fits(self) -> bool:
        return all(demand.fits for demand in self.demands)

    @property
    def missing(self) -> tuple[Demand, ...]:
        """The limits that are too low."""
        return tuple(demand for demand in self.demands if not demand.fits)

    @property
    def remedy(self) -> str:
        """The kernel parameter that would make it fit, or ""."""
        if not self.pages_limit:
            return ""
        size = format_size(self.pages_limit // PAGES_PER_GIB * GIB)
        return f"boot with {self.ttm_module}.pages_limit={self.pages_limit} ({size} of GTT)"

    @property
    def reason(self) -> str:
        """Why it does not fit, and its remedy; "" where it fits."""
        if self.fits:
            return ""
        parts = ["; ".join(str(demand) for demand in self.missing)]
        return ", ".join([*parts, self.remedy] if self.remedy else parts)


def estimate(strategy: str, needs: Needs, limits: Limits, budget: int = 0) -> Estimate:
    """`needs` under `strategy` against `limits`; `budget` bounds everything together (0: no bound)."""
    if limits.kind == "cpu":
        return Estimate(strategy, tuple(_on_the_cpu(needs, limits, budget)))
    copied = strategy not in IN_PLACE
    fixed = needs.scratch + RUNTIME_BYTES
    weights = needs.weights + (STAGING_RING if copied else 0)
    demands = []
    if limits.kfd_limit is not None:
        system = weights if not copied or limits.shares_memory else STAGING_RING
        own = (fixed, needs.kv) if limits.shares_memory else (0, 0)
        demands.append(Demand("KFD's limit on what GPUs map", system + own[0], own[1], limits.kfd_limit))
    host = (weights if limits.shares_memory else STAGING_RING) if copied else weights - _locked(needs, limits)
    own = (fixed, needs.kv) if limits.shares_memory else (0, 0)
    available = limits.memory_available - limits.headroom
    demands.append(Demand("memory available", host + own[0], own[1], available))
    if limits.cgroup_available is not None:
        charged = STAGING_RING if copied else weights - max(0, needs.cached - limits.cgroup_cached)
        demands.append(Demand("what the memory cgroup leaves", max(charged, 0), 0, limits.cgroup_available))
    allocated = fixed + (weights if copied else 0)
    demands += [Demand(name, allocated, needs.kv, most) for name, most in limits.allocatable]
    if budget:
        demands.append(Demand("memory_budget", weights + fixed, needs.kv, budget))
    return Estimate(strategy, tuple(demands), _pages_limit(demands, limits), limits.ttm_module)


def estimates(strategies: Sequence[str], needs: Needs, limits: Limits, budget: int = 0) -> tuple[Estimate, ...]:
    """One estimate per strategy, in their order."""
    return tuple(estimate(strategy, needs, limits, budget) for strategy in strategies)


def _on_the_cpu(needs: Needs, limits: Limits, budget: int) -> list[Demand]:
    """KV cache and scratch are anonymous memory and must fit; weights are pages that can be read again."""
    available = limits.memory_available
    if limits.cgroup_available is not None:
        available = min(available, limits.cgroup_available)
    demands = [Demand("memory available", needs.scratch, needs.kv, available)]
    return [*demands, Demand("memory_budget", needs.scratch, needs.kv, budget)] if budget else demands


def _locked(needs: Needs, limits: Limits) -> int:
    """Bytes of this file that some process has locked: no new demand, and not in MemAvailable."""
    return min(needs.cached, limits.unevictable, needs.weights)


def _pages_limit(demands: Sequence[Demand], limits: Limits) -> int:
    """ttm.pages_limit in whole GiB that makes the allocations fit; 0 where GTT is not all that is missing."""
    short = {demand.limit for demand in demands if not demand.fits}
    gtt = next((demand for demand in demands if demand.limit == "free GTT"), None)
    follows = {"free GTT", "what the runtime reports as free"}  # the runtime's figure follows GTT's
    if gtt is None or gtt.fits or not short <= follows:
        return 0
    return -(-(gtt.needed + limits.gtt_used) // GIB) * PAGES_PER_GIB
