"""Checks of the machine itself: processor, power, kernel, IOMMU, container, memory and its limits.

Each function looks at one thing and returns a `Check`; what a file does not say is "not shown", never an error.
Versions that are known as bad come from users' reports on public trackers up to November 2026 (docs/doctor.md).
"""

from __future__ import annotations

import re
from pathlib import Path

from apu_engine import access
from apu_engine.doctor import remedies
from apu_engine.doctor.context import Context
from apu_engine.doctor.report import Check, Verdict, absent, worst
from apu_engine.options import format_size

ADVISED_KERNEL = (6, 18, 4)
SVM_KERNEL = (6, 10, 0)
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512vbmi",
    "gfni",
}
_EVEX_VNNI = _AVX2 | {"avx512f", "avx512vl", "avx512_vnni"}
_SLOW_PROFILES = ("low-power", "quiet", "cool")
_IPC_LOCK = 14  # CAP_IPC_LOCK: locks any amount of memory


def cpu(ctx: Context) -> Check:
    """Instruction sets, as native/cpu/dispatch.cpp asks for them."""
    text = ctx.machine.text("proc/cpuinfo") or ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    found = re.search(r"^flags\s*:\s*(.+)$", text, re.M)
    flags = frozenset(found[1].split()) if found else frozenset()
    shown = name[1].strip()[:80] if name else "unknown processor"
    data = {"model": shown, "isa": isa_level(flags) if flags else "unknown"}
    if not flags:
        return Check("cpu", "info", f"{shown}; instruction sets are not shown", data=data)
    value = f"{shown}, {data['isa']}"
    if data["isa"] == "portable":
        remedy = ("in a virtual machine: give it the host's processor (QEMU: -cpu host)",)
        return Check("cpu", "warn", f"{value}: no AVX2, so the CPU runs several times slower", remedy, data)
    return Check("cpu", "ok", value, data=data)


def isa_level(flags: frozenset[str]) -> str:
    """The level that the CPU backend picks for these flags of /proc/cpuinfo."""
    if flags >= _AVX512:
        return "avx512"
    if flags >= _AVX2 and ("avx_vnni" in flags or flags >= _EVEX_VNNI):
        return "avx2vnni"
    return "avx2" if flags >= _AVX2 else "portable"


def power(ctx: Context) -> Check:
    """Power profile, frequency governor, mains, and the GPU's forced level."""
    machine = ctx.machine
    cpufreq = "sys/devices/system/cpu/cpu0/cpufreq"
    data = {
        "profile": machine.text("sys/firmware/acpi/platform_profile"),
        "driver": machine.text(f"{cpufreq}/scaling_driver"),
        "governor": machine.text(f"{cpufreq}/scaling_governor"),
        "preference": machine.text(f"{cpufreq}/energy_performance_preference"),
        "gpu_level": _gpu_level(ctx),
        "mains": _on_mains(machine.path("sys/class/power_supply")),
    }
    value = ", ".join(f"{key} {text}" for key, text in data.items() if isinstance(text, str)) or "not shown"
    findings: list[tuple[Verdict, str, tuple[str, ...]]] = []
    if data["mains"] is False:
        findings.append(("warn", "on battery", ("plug the power supply in",)))
    performance = (f"{ctx.on_host}powerprofilesctl set performance",)
    if data["profile"] in _SLOW_PROFILES:
        findings.append(("warn", f"{data['profile']} limits the power of CPU and GPU", performance))
    elif data["profile"] == "balanced":
        findings.append(("info", "performance keeps higher clocks", performance))
    driver, governor = str(data["driver"] or ""), data["governor"]
    saving = data["preference"] == "power" if driver.endswith("-epp") else governor == "powersave"
    if saving and data["profile"] not in _SLOW_PROFILES:
        command = f"{ctx.on_host}sudo cpupower frequency-set -g performance"
        findings.append(("warn", "the governor keeps clocks low", (command,)))
    if data["gpu_level"] == "low" and ctx.gpu is not None and ctx.gpu.device is not None:
        file = ctx.machine.shown(ctx.gpu.device / "power_dpm_force_performance_level")
        findings.append(("warn", "the GPU is held at low clocks", (f"{ctx.on_host}echo auto | sudo tee {file}",)))
    if not findings:
        verdict: Verdict = "ok" if value != "not shown" else "info"
        return Check("power", verdict, value, data=data)
    told = "; ".join(text for _, text, _ in findings)
    lines = tuple(dict.fromkeys(line for _, _, remedy in findings for line in remedy))
    return Check("power", worst(v for v, _, _ in findings), f"{told}; {value}", lines, data)


def _gpu_level(ctx: Context) -> str | None:
    device = ctx.gpu.device if ctx.gpu else None
    return _text(device / "power_dpm_force_performance_level") if device else None


def _on_mains(supplies: Path) -> bool | None:
    """Whether no battery is being emptied; None where none is shown. A mouse's battery has the scope "Device"."""
    try:
        folders = sorted(supplies.iterdir())
    except OSError:
        return None
    batteries = [folder for folder in folders if _text(folder / "type") == "Battery"]
    states = [_text(folder / "status") for folder in batteries if _text(folder / "scope") != "Device"]
    return "Discharging" not in states if states else None


def kernel(ctx: Context) -> Check:
    """The kernel's version against those that users reported as bad."""
    release = ctx.machine.kernel_release
    data = {"release": release, "advised": ".".join(map(str, ADVISED_KERNEL))}
    if ctx.kernel == (0, 0, 0):
        return Check("kernel", "info", "not shown", data=data)
    if not ctx.gpus:
        return Check("kernel", "ok", release, data=data)
    if problem := bad_kernel(release, ctx.kernel, is_ubuntu(ctx), has_dkms(ctx)):
        remedy = remedies.newer_kernel(ctx)
        if "amdgpu-dkms" in problem:
            remedy = (f"{ctx.on_host}sudo apt remove amdgpu-dkms (the kernel's own driver suffices)", remedies.REBOOT)
        return Check("kernel", "bad", f"{release}: {problem}", remedy, data)
    if ctx.kernel < SVM_KERNEL:
        problem = "before 6.10 an APU cannot share file pages with the GPU through SVM"
        return Check("kernel", "warn", f"{release}; {problem}", remedies.newer_kernel(ctx), data)
    if ctx.strix and ctx.kernel < ADVISED_KERNEL:
        problem = f"{data['advised']} or newer is advised for this GPU"
        return Check("kernel", "warn", f"{release}; {problem}", remedies.newer_kernel(ctx), data)
    return Check("kernel", "ok", release, data=data)


def bad_kernel(release: str, version: tuple[int, int, int], ubuntu: bool, dkms: bool) -> str:
    """What is known against a kernel's amdgpu; "" for nothing."""
    build = re.match(r"\d+\.\d+\.\d+-(\d{1,6})", release)
    abi = int(build[1]) if build and ubuntu else -1
    if ubuntu and dkms and version == (6, 17, 0) and abi == 20:
        return "Ubuntu's 6.17.0-20 with amdgpu-dkms fails"
    if ubuntu and version == (7, 0, 0) and 28 <= abi < 30:
        return "stalls of one second (fixed in 7.0.0-30)"
    if version == (7, 0, 12):
        return "stalls of one second"
    if re.match(r"7\.1(\.0)?-?_?rc6(?!\d)", release) or re.match(r"7\.1\.0-0\.rc6\.", release):
        return "stalls of one second"
    return ""


def is_ubuntu(ctx: Context) -> bool:
    """Whether Ubuntu built the kernel: its third number is always 0, then comes the build."""
    return "ubuntu" in (ctx.machine.text("proc/version") or "").lower() or (
        not ctx.container and ctx.distro.family == "ubuntu"
    )


def has_dkms(ctx: Context) -> bool:
    """Whether amdgpu comes from AMD's package: that one has a version and a ttm module of its own."""
    modules = ctx.machine.path("sys/module")
    return (modules / "amdttm").exists() or (modules / "amdgpu" / "version").exists()


def container(ctx: Context) -> Check:
    """Whether this is a container, and whether it was given the GPU."""
    kind = ctx.container
    data = {"kind": kind}
    if "microsoft" in ctx.machine.kernel_release.lower():
        return Check("container", "info", "WSL: its kernel has no /dev/kfd; the CPU is used", data=data)
    if not kind:
        return Check("container", "ok", "none", data=data)
    missing = [name for name in ("/dev/kfd", "/dev/dri") if not ctx.machine.path(name).exists()]
    if not ctx.gpus:
        return Check("container", "info", f"{kind}; the host shows no AMD GPU", data=data)
    if missing:
        value = f"{kind} without {' and '.join(missing)}; the host has a GPU ({ctx.gpus[0].gfx})"
        return Check("container", "bad", value, access.devices(ctx.container), {**data, "missing": missing})
    return Check("container", "ok", f"{kind}, with the GPU's devices", data=data)


def iommu(ctx: Context) -> Check:
    """Mode of the IOMMU domain that the GPU is in."""
    if ctx.gpu is None:
        return absent("iommu", ctx.no_gpu)
    device = ctx.gpu.device
    mode = _text(device / "iommu_group" / "type") if device is not None else None
    groups = ctx.machine.path("sys/kernel/iommu_groups")
    if mode is None and device is not None:
        if not (device / "iommu_group").exists() and not _any(groups):
            return Check("iommu", "ok", "off", data={"mode": "off"})
        return Check("iommu", "info", "mode is not shown")
    if mode is None:
        return Check("iommu", "info", "not shown")
    data = {"mode": mode}
    if mode == "identity":
        return Check("iommu", "ok", "identity (passes addresses through)", data=data)
    if mode.startswith("DMA"):
        value = f"{mode[:20]}: translates the GPU's addresses, so that large pieces of memory are split"
        return Check("iommu", "warn", value, remedies.parameters(ctx, "iommu=pt"), data)
    return Check("iommu", "info", mode[:40], data=data)


def memory(ctx: Context) -> Check:
    """RAM, what of it is available, and the cgroup's limit."""
    machine = ctx.machine
    total, available, limit = machine.memory_total, machine.memory_available, machine.cgroup_limit
    data = {"total": total, "available": available, "cgroup_limit": limit}
    value = f"{format_size(total)}, {format_size(available)} available"
    if limit is None:
        return Check("memory", "ok", value, data=data)
    value += f"; this cgroup may use {format_size(limit)}"
    if 0 < limit < ctx.model_bytes:
        flag = "start the container with a higher --memory, or without" if ctx.container else "raise MemoryMax"
        value += f", the model has {format_size(ctx.model_bytes)}: its pages are read again and again"
        return Check("memory", "warn", value, (flag,), data)
    return Check("memory", "ok", value, data=data)


def memlock(ctx: Context) -> Check:
    """How much memory this process may lock: pages that are in use in place should not be reclaimed."""
    limits = ctx.machine.text("proc/self/limits") or ""
    data: dict[str, int | None] = {"limit": None, "needed": None}
    if "Max locked memory" not in limits:
        return Check("memlock", "info", "limit is not shown", data=data)
    limit = ctx.machine.memlock_limit
    needed = ctx.model_bytes or ctx.machine.memory_total // 4 * 3
    data = {"limit": limit, "needed": needed}
    if limit is None:
        return Check("memlock", "ok", "unlimited", data=data)
    if _may_lock(ctx):
        return Check("memlock", "ok", f"{format_size(limit)}, but CAP_IPC_LOCK lifts it", data=data)
    if limit >= needed:
        return Check("memlock", "ok", format_size(limit), data=data)
    what = f"the model's {format_size(needed)}" if ctx.model_bytes else "a large model"
    value = f"{format_size(limit)}: too little for {what}; its pages can be reclaimed while the GPU uses them"
    return Check("memlock", "warn", value, access.memlock(ctx.container, ctx.host.family), data)


def _may_lock(ctx: Context) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})$", ctx.machine.text("proc/self/status") or "", re.M)
    return bool(found and int(found[1], 16) >> _IPC_LOCK & 1)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()[:200]
    except OSError:
        return None


def _any(folder: Path) -> bool:
    try:
        return any(True for _ in folder.iterdir())
    except OSError:
        return False
