"""Checks of the GPU: driver, devices and rights, target, kernels, runtime, firmware, carve-out, GTT and KFD's limit.

All from files; no runtime is loaded. Without an AMD GPU each says so. Advice on firmware and memory comes from users'
reports on public trackers up to November 2026 (docs/doctor.md); none of it was measured by us on AMD.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from apu_engine.access import node, tier
from apu_engine.doctor import gtt as gtt_users
from apu_engine.doctor import remedies
from apu_engine.doctor.context import Context
from apu_engine.doctor.machine_checks import has_dkms
from apu_engine.doctor.report import Check, absent
from apu_engine.memory.machine import AMD, GIB, PAGE, PAGES_PER_GIB
from apu_engine.options import format_size

BAD_MES = {0x83: "hangs and memory faults (linux-firmware 20251125)"}
MES_VERSION = 0xFFF  # AMDGPU_MES_VERSION_MASK
LARGE_CARVE_OUT = 2 * GIB
HEADROOM = 8 * GIB  # of RAM that is left to the system when GTT's ceiling is advised
LEAK_CERTAIN = GIB  # unowned GTT that is told when all processes could be looked at
LEAK_LIKELY = 4 * GIB  # and when some belong to other users
_SVM = 1 << 27  # HSA_CAP_SVMAPI_SUPPORTED in a node's capability


def driver(ctx: Context) -> Check:
    """The amdgpu kernel module."""
    machine = ctx.machine
    if ctx.gpus:
        version = machine.text("sys/module/amdgpu/version")
        value = f"amdgpu-dkms {version or ''}".strip() if has_dkms(ctx) else "amdgpu of the kernel"
        return Check("driver", "ok", value, data={"dkms": has_dkms(ctx), "version": version})
    if not ctx.wanted or not _amd_on_bus(machine.path("sys/bus/pci/devices")):
        return absent("driver", ctx.no_gpu)
    if "nomodeset" in ctx.parameters:
        remedy = remedies.parameters(ctx, remove=("nomodeset",))
        return Check("driver", "bad", "an AMD GPU is there, but nomodeset keeps amdgpu from it", remedy)
    if not machine.path("sys/module/amdgpu").exists():
        remedy = (f"{ctx.on_host}sudo modprobe amdgpu", "where that fails: sudo dmesg | grep amdgpu")
        return Check("driver", "bad", "an AMD GPU is there, but the amdgpu module is not loaded", remedy)
    value = "amdgpu is loaded, but the kernel has no KFD, or KFD does not know this GPU"
    return Check("driver", "bad", value, remedies.newer_kernel(ctx))


def kfd(ctx: Context) -> Check:
    """/dev/kfd: there, and open to this user."""
    return _device(ctx, "kfd", ctx.machine.path("dev/kfd"))


def render(ctx: Context) -> Check:
    """The GPU's render node: there, and open to this user."""
    node = ctx.gpu.render_node if ctx.gpu is not None else None
    if ctx.gpu is not None and node is None:
        return Check("render", "info", "the kernel shows none for this GPU")
    return _device(ctx, "render", node)


def _device(ctx: Context, id_: str, path: Path | None) -> Check:
    if ctx.gpu is None or path is None:
        return absent(id_, ctx.no_gpu)
    found = node(ctx.machine, ctx.rights, ctx.container, path)
    if not found.group:
        return Check(id_, "bad", "absent" if id_ == "kfd" else found.value, found.remedy)
    return Check(id_, "bad" if found.remedy else "ok", found.value, found.remedy, {"group": found.group})


def gpu(ctx: Context) -> Check:
    """The target's name and how well it is supported."""
    if ctx.gpu is None:
        if not ctx.gpus:
            return absent("gpu", ctx.no_gpu)
        return Check(
            "gpu", "bad", ctx.no_gpu, tuple(f"--device hip:{n} is {gpu.gfx}" for n, gpu in enumerate(ctx.gpus))
        )
    target, units = ctx.gpu.gfx, ctx.gpu.compute_units
    data = {"gfx": target, "compute_units": units, "pci": ctx.gpu.pci, "tier": tier(target), "count": len(ctx.gpus)}
    value = f"{target}, {units} CU; {tier(target)}"
    if override := os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        value = f"{target}, but HSA_OVERRIDE_GFX_VERSION={override[:20]} makes the runtime take it for another"
        return Check("gpu", "warn", value, ("unset HSA_OVERRIDE_GFX_VERSION",), data)
    if len(ctx.gpus) > 1:
        value += f"; {len(ctx.gpus)} GPUs, --device hip:N chooses"
    if tier(target) == "not supported":
        return Check("gpu", "bad", value, ("run with --device cpu",), data)
    return Check("gpu", "ok", value, data=data)


def kernels(ctx: Context) -> Check:
    """The code object for this GPU."""
    if ctx.gpu is None:
        return absent("kernels", ctx.no_gpu)
    from apu_engine._native.library import kernels_folder

    target = ctx.gpu.gfx
    folder = ctx.request.kernels or kernels_folder()
    family = f"{target[:5]}-generic" if re.fullmatch(r"gfx1[12]\d\w", target) else target
    for name in dict.fromkeys((target, family)):
        file = folder / f"{name}.co"
        if file.is_file():
            return Check("kernels", "ok", str(file), data={"file": str(file)})
    return Check("kernels", "bad", f"none for {target}; looked in {folder}", (f"./build.sh --targets {target}",))


def svm(ctx: Context) -> Check:
    """Whether the kernel can map file pages for this GPU through its SVM interface."""
    if ctx.gpu is None:
        return absent("svm", ctx.no_gpu)
    path = f"sys/class/kfd/kfd/topology/nodes/{ctx.gpu.node}/properties"
    found = re.search(r"^capability (\d{1,20})$", ctx.machine.text(path) or "", re.M)
    if found is None:
        return Check("svm", "info", "not shown")
    supported = bool(int(found[1]) & _SVM)
    data = {"svm": supported}
    if not supported:
        value = "the kernel has no SVM for this GPU: ways A and B of --memory registered are missing"
        return Check("svm", "warn", value, remedies.newer_kernel(ctx), data)
    if os.environ.get("HSA_USE_SVM") == "0":
        value = "HSA_USE_SVM=0 switches the runtime's use of SVM off"
        return Check("svm", "warn", value, ("unset HSA_USE_SVM",), data)
    return Check("svm", "ok", "SVM: file pages can be given to the GPU in place", data=data)


def mes(ctx: Context) -> Check:
    """Firmware of the scheduler."""
    if ctx.gpu is None:
        return absent("mes", ctx.no_gpu)
    raw = ctx.gpu.firmware.get("mes")
    if raw is None:
        value = "version is not shown (Linux 6.6 and newer do)"
        return Check("mes", "info", value, ("sudo grep MES /sys/kernel/debug/dri/*/amdgpu_firmware_info",))
    version = raw & MES_VERSION
    if not version:
        return Check("mes", "ok", "none on this GPU")
    data = {"version": version}
    if problem := BAD_MES.get(version):
        return Check("mes", "bad", f"{version:#04x}: {problem}", remedies.firmware(ctx), data)
    return Check("mes", "ok", f"{version:#04x}", data=data)


def carve_out(ctx: Context) -> Check:
    """Memory that the firmware keeps for the GPU alone."""
    if ctx.gpu is None:
        return absent("carve_out", ctx.no_gpu)
    total, used = ctx.gpu.vram_total, ctx.gpu.vram_used
    if total is None:
        return Check("carve_out", "info", "not shown")
    data = {"total": total, "used": used}
    if not ctx.gpu.integrated:
        return Check("carve_out", "info", f"{format_size(total)} of the card's own", data=data)
    if total > LARGE_CARVE_OUT:
        value = f"{format_size(total)}: lost to file pages, which are what the weights are"
        remedy = ("in the BIOS set the UMA frame buffer (GPU memory) to its smallest value, 512 MB or auto",)
        return Check("carve_out", "warn", value, remedy, data)
    return Check("carve_out", "ok", format_size(total), data=data)


def kfd_limit(ctx: Context) -> Check:
    """Most memory that KFD lets a process give to the GPU in place."""
    if ctx.gpu is None:
        return absent("kfd_limit", ctx.no_gpu)
    limit, size = ctx.machine.kfd_limit, ctx.model_bytes
    data = {"limit": limit, "model": size or None}
    if limit is None:
        return Check("kfd_limit", "ok", "lifted (amdgpu.no_system_mem_limit)", data=data)
    value = f"{format_size(limit)} of file pages in place"
    if size > limit:
        remedy = ("use a smaller quantisation, or --device cpu",)
        return Check("kfd_limit", "bad", f"{value}; the model has {format_size(size)}", remedy, data)
    return Check("kfd_limit", "ok", value, data=data)


def gtt(ctx: Context) -> Check:
    """Memory that the GPU may allocate, how much is allocated, and by whom."""
    if ctx.gpu is None:
        return absent("gtt", ctx.no_gpu)
    total, used = ctx.gpu.gtt_total, ctx.gpu.gtt_used
    if total is None or used is None:
        return Check("gtt", "info", "not shown")
    data: dict[str, object] = {"total": total, "used": used, "owners": [], "unowned": None}
    value = f"{format_size(used)} of {format_size(total)} used"
    if used < LEAK_CERTAIN:
        return Check("gtt", "ok", value, data=data)
    number = ctx.machine.number(f"sys/class/kfd/kfd/topology/nodes/{ctx.gpu.node}/gpu_id")
    users = gtt_users.users(ctx.machine, ctx.gpu.pci, number, ctx.request.deadline_s)
    owned = sum(user.bytes for user in users.found)
    unowned = max(0, used - owned)
    data["owners"] = [{"pid": user.pid, "name": user.name, "bytes": user.bytes} for user in users.found]
    data["unowned"] = unowned if users.complete else None
    if shown := ", ".join(f"{user.name} ({user.pid}) {format_size(user.bytes)}" for user in users.found[:3]):
        value += f": {shown}"
    if not users.finished:
        return Check("gtt", "info", f"{value}; by whom was not looked up", data=data)
    if unowned < (LEAK_CERTAIN if users.complete else LEAK_LIKELY):
        return Check("gtt", "ok", value, data=data)
    leak = f"{format_size(unowned)} without an owner: left behind by processes that died, until the next boot"
    if users.complete:
        return Check("gtt", "bad", f"{leak}; {value}", (remedies.REBOOT,), data)
    leak += f", or held by one of {users.hidden} processes of other users"
    again = f"to look at them too: sudo {sys.executable} -m apu_engine doctor"
    return Check("gtt", "warn", f"{leak}; {value}", (again, remedies.REBOOT), data)


def ttm(ctx: Context) -> Check:
    """GTT's ceiling, and parameters that do not set it."""
    if ctx.gpu is None:
        return absent("ttm", ctx.no_gpu)
    machine = ctx.machine
    module, pages = machine.ttm_module, machine.ttm_pages_limit
    total = machine.memory_total
    advised = max(1, (total - HEADROOM) // GIB // 4 * 4)
    data: dict[str, object] = {"module": module, "pages": pages, "advised_pages": advised * PAGES_PER_GIB, "stale": []}
    value = "not shown" if pages is None else f"{pages} pages, {format_size(pages * PAGE)}"
    stale: list[str] = [name for name in ("amdgpu.gttsize", "amdgpu.gtt_size") if name in ctx.parameters]
    given = machine.number("sys/module/amdgpu/parameters/gttsize")
    elsewhere = given is not None and given >= 0 and "amdgpu.gttsize" not in stale
    stale += ["gttsize"] if elsewhere else []
    other = {"ttm": "amdttm", "amdttm": "ttm"}[module]
    stale += [f"{other}.{name}" for name in ("pages_limit", "page_pool_size") if f"{other}.{name}" in ctx.parameters]
    if stale:
        data["stale"] = stale
        told = {
            "gttsize": "as an option of amdgpu is deprecated",
            "amdgpu.gttsize": "is deprecated",
            "amdgpu.gtt_size": "does not exist and is ignored",
        }
        unused = f"is of a module that is not in use ({module} is)"
        words = ", ".join(f"{name} {told.get(name, unused)}" for name in stale)
        named = tuple(name for name in stale if "." in name)
        remedy = remedies.parameters(ctx, remove=named) if named else ()
        if elsewhere:
            remedy = (f"{ctx.on_host}remove gttsize from: grep -l gttsize /etc/modprobe.d/*", *remedy)
        wanted = _asked_gib(ctx, stale) or advised
        remedy = remedies.joined(remedies.pages_limit(ctx, wanted), remedy)
        return Check("ttm", "warn", f"{words}; {value}", remedy, data)
    if pages is None:
        return Check("ttm", "info", value, data=data)
    if pages * PAGE > total:
        value += f"; more than the memory ({format_size(total)}), so that allocations of the GPU can exhaust it"
        return Check("ttm", "warn", value, remedies.pages_limit(ctx, advised), data)
    if ctx.gpu.integrated and pages * PAGE < total * 5 // 8:
        value += "; file pages in place need none of it, a copy (--memory staged) must fit into it"
        return Check("ttm", "info", value, remedies.pages_limit(ctx, advised), data)
    return Check("ttm", "ok", value, data=data)


def _asked_gib(ctx: Context, stale: list[str]) -> int:
    """The GTT that a deprecated parameter asked for, in GiB: amdgpu's count MiB, ttm's pages."""
    for name in stale:
        text = ctx.parameters.get(name, "")
        if text.isdigit() and len(text) < 12:
            size = int(text) << (20 if name.startswith("amdgpu") else 12)
            if GIB <= size <= ctx.machine.memory_total:
                return size // GIB
    return 0


def _amd_on_bus(devices: Path) -> bool:
    """Whether PCI has a display controller of AMD's."""
    try:
        folders = list(devices.iterdir())
    except OSError:
        return False
    for folder in folders:
        try:
            kind, vendor = ((folder / name).read_text() for name in ("class", "vendor"))
            if kind.startswith("0x03") and int(vendor, 16) == AMD:
                return True
        except (OSError, ValueError):
            continue
    return False
