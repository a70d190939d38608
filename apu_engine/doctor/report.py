"""What doctor says: checks with a verdict and a remedy, as a table, as JSON, and as the one line of a start.

The JSON is an interface: names of fields, verdicts and checks stay, new ones may come. Every check of docs/doctor.md
is in every report, so that a reader never has to tell "absent" from "not looked at".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "info", "warn", "bad", "absent"]
_WORST: tuple[Verdict, ...] = ("bad", "warn", "ok")
SCHEMA = 1
TITLES = {  # every check's name for people, in the order of docs/doctor.md
    "cpu": "CPU",
    "power": "power profile",
    "kernel": "kernel",
    "container": "container",
    "iommu": "IOMMU",
    "gpu": "GPU",
    "driver": "driver",
    "kfd": "/dev/kfd",
    "render": "render node",
    "kernels": "GPU kernels",
    "rocm": "ROCm",
    "mes": "MES firmware",
    "svm": "shared memory",
    "memory": "memory",
    "memlock": "locked memory",
    "carve_out": "carve-out VRAM",
    "kfd_limit": "KFD's limit",
    "gtt": "GTT",
    "ttm": "ttm.pages_limit",
    "file_system": "file system",
    "disk": "free disk",
    "model": "model",
    "budget": "budget",
    "page_cache": "page cache",
    "cpu_bandwidth": "CPU reads",
    "runtime": "GPU runtime",
    "gpu_bandwidth": "GPU reads",
    "graph": "graph = eager",
    "strategies": "memory strategies",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` holds commands and lines of files in the order to do them, or is empty."""

    id: str  # of TITLES
    verdict: Verdict
    value: str
    remedy: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)  # numbers behind `value`: bytes, counts, names

    @property
    def title(self) -> str:
        return TITLES[self.id]

    def as_dict(self, group: str) -> dict[str, Any]:
        """For JSON."""
        return {"group": group, "title": self.title, **asdict(self), "remedy": list(self.remedy)}


@dataclass(frozen=True, slots=True)
class Report:
    """All checks by group, in the order of docs/doctor.md."""

    groups: tuple[tuple[str, tuple[Check, ...]], ...]
    full: bool

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(check for _, checks in self.groups for check in checks)

    @property
    def verdict(self) -> Verdict:
        """The worst: bad, warn or ok. What is absent or mere information is ok."""
        found = {check.verdict for check in self.checks}
        return next((verdict for verdict in _WORST if verdict in found), "ok")

    def line(self) -> str:
        """`doctor: 1 bad (MES firmware: 0x83), 2 warnings; `apu-engine doctor` shows the remedies`."""
        bad = [check for check in self.checks if check.verdict == "bad"]
        warned = [check for check in self.checks if check.verdict == "warn"]
        if not bad and not warned:
            found = {check.id: check for check in self.checks}
            gpu, cpu = found["gpu"], found["cpu"]
            return f"doctor: ok ({gpu.data['gfx'] if gpu.data else gpu.value}; CPU {cpu.data.get('isa', 'unknown')})"
        parts = []
        if bad:
            parts.append(f"{len(bad)} bad ({_brief(bad)})")
        if warned:
            count = f"{len(warned)} warning{'s' if len(warned) > 1 else ''}"
            parts.append(count if bad else f"{count} ({_brief(warned)})")
        return f"doctor: {', '.join(parts)}; `apu-engine doctor` shows the remedies"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        from apu_engine import __version__

        return {
            "schema": SCHEMA,
            "version": __version__,
            "full": self.full,
            "verdict": self.verdict,
            "line": self.line(),
            "checks": [check.as_dict(group) for group, checks in self.groups for check in checks],
        }


def _brief(checks: Sequence[Check]) -> str:
    """The first two by name and what comes first in their values."""
    shown = [f"{check.title} {re.split('[;(]|: ', check.value)[0].strip()[:60]}" for check in checks[:2]]
    return ", ".join([*shown, "..."] if len(checks) > 2 else shown)


def rounded(value: float) -> float:
    """Four digits, as many as a measurement has."""
    return float(f"{value:.4g}")


def absent(id_: str, value: str) -> Check:
    """A check of what this machine does not have."""
    return Check(id_, "absent", value)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several findings that make up one check; ok without any."""
    order: tuple[Verdict, ...] = ("bad", "warn", "info", "ok", "absent")
    found = set(verdicts)
    return next((verdict for verdict in order if verdict in found), "ok")
