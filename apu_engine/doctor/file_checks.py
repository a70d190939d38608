"""Checks of the runtime and of files: where libamdhip64 is, the disk and file system of the models, one model.

Large folios decide how few translations the GPU needs for file pages in place; the kernel shows no switch for them, so
they follow from file system and version (Linux: xfs from 5.18, ext4 from 6.16).
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

from apu_engine import access
from apu_engine.doctor import remedies
from apu_engine.doctor.context import Context
from apu_engine.doctor.report import Check, Verdict, absent
from apu_engine.options import format_size

LOW_DISK = 16 << 30
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs")
_LARGE_FOLIOS = {"xfs": (5, 18, 0), "ext4": (6, 16, 0), "tmpfs": (5, 0, 0)}


def rocm(ctx: Context) -> Check:
    """Which copies of AMD's runtime are installed; --full opens the one that is used."""
    if ctx.gpu is None:
        return absent("rocm", ctx.no_gpu)
    if ctx.request.quick:
        return absent("rocm", "not looked at: opening the device says it")
    from apu_engine.config import hip_library_wanted
    from apu_engine.runtime import installed

    copies = sorted(installed(ctx.machine), key=lambda copy: copy.version, reverse=True)
    data = {"copies": [{"path": str(c.path), "version": c.version_text, "source": c.source} for c in copies]}
    if named := hip_library_wanted():
        return Check("rocm", "info", f"APU_HIP_LIBRARY names {named}", data=data)
    if not copies:
        return Check("rocm", "bad", "libamdhip64 is not installed", access.runtime(ctx.distro), data)
    newest = copies[0]
    others = f"; {len(copies) - 1} more" if len(copies) > 1 else ""
    value = f"{newest.version_text}, {ctx.machine.shown(newest.path)}{others}"
    return Check("rocm", "ok", value, data=data)


def file_system(ctx: Context) -> Check:
    """What the models lie on: whether pages can be large, and reads direct."""
    folder = ctx.request.folder
    mount = access.mount_of(ctx.machine, folder)
    if mount is None:
        return Check("file_system", "info", f"of {folder} is not shown")
    kind = mount.kind
    thp = re.search(r"\[(\w+)\]", ctx.machine.text("sys/kernel/mm/transparent_hugepage/enabled") or "")
    large = kind in _LARGE_FOLIOS and ctx.kernel >= _LARGE_FOLIOS[kind]
    data = {
        "folder": str(folder),
        "kind": kind,
        "mount": mount.point,
        "large_folios": large,
        "huge_pages": thp[1] if thp else None,
    }
    value = f"{kind} at {mount.point}"

    def found(verdict: Verdict, what: str, *remedy: str) -> Check:
        return Check("file_system", verdict, f"{value}: {what}", remedy, data)

    if kind == "overlay":
        return found(
            "warn", "a container's own layer", "mount the models' folder into the container: -v MODELS:/models:ro"
        )
    if kind in _REMOTE or kind.startswith("fuse"):
        return found("warn", "remote or in user space: slow starts, and a lost server stops the engine", _LOCAL)
    if kind == "zfs":
        cache = f"{ctx.on_host}sudo zfs set primarycache=metadata {mount.source}"
        return found("warn", "its ARC keeps a second copy of what is mapped", cache)
    if kind in ("tmpfs", "ramfs"):
        return found("info", "files lie in memory already, and are lost at the next boot")
    if large:
        return found("ok", "large folios")
    if kind == "ext4" and ctx.kernel != (0, 0, 0):
        return found("info", "small pages only; ext4 has large folios from Linux 6.16", *remedies.newer_kernel(ctx))
    return found("info", "large folios are not known of; the GPU may need more translations", _XFS)


_LOCAL = "copy the models to a local disk, best with xfs, or ext4 on Linux 6.16 or newer"
_XFS = "for models, a partition with xfs, or ext4 on Linux 6.16 or newer, is best"


def disk(ctx: Context) -> Check:
    """Free space where models are kept."""
    folder = ctx.request.folder
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), folder)
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return Check("disk", "info", f"{existing}: {error.strerror}")
    data = {"folder": str(existing), "free": usage.free, "total": usage.total}
    value = f"{format_size(usage.free)} of {format_size(usage.total)} for {existing}"
    if usage.free < LOW_DISK:
        remedy = ("make room, or name a model on another disk",)
        return Check("disk", "warn", f"{value}: too little for most models", remedy, data)
    return Check("disk", "ok", value, data=data)


# ---------------------------------------------------------------- one model


def model(ctx: Context) -> Check:
    """Whether the named model's header can be read."""
    opened = ctx.opened
    if isinstance(opened, str):
        if ctx.request.model is None or ctx.request.quick:
            return absent("model", opened)
        return Check("model", "bad", opened)
    size = sum(opened.file_sizes)
    files = f" in {len(opened.files)} files" if len(opened.files) > 1 else ""
    data = {"files": [str(file) for file in opened.files], "bytes": size}
    return Check("model", "ok", f"{opened.path}: {format_size(size)}{files}", data=data)


def budget(ctx: Context) -> Check:
    """Whether the model fits with its default context under each memory strategy, on this machine."""
    opened = ctx.opened
    if isinstance(opened, str):
        return absent("budget", _unread(ctx))
    from apu_engine.config import EngineConfig
    from apu_engine.engine.context import fit
    from apu_engine.errors import ApuError, BudgetError
    from apu_engine.memory.limits import of_machine

    limits = of_machine(ctx.machine)
    if ctx.request.device == "cpu" and limits.kind != "cpu":
        limits = replace(limits, kind="cpu", device="cpu")
    strategies = ("direct",) if limits.kind == "cpu" else ("registered", "staged")
    try:
        found = fit(EngineConfig(), opened, strategies=strategies, limits=limits)
    except BudgetError as error:
        return Check("budget", "bad", "does not fit", (str(error),), {"fits": [], "refused": {}, "tokens": 0})
    except ApuError as error:  # an architecture that is not there
        return Check("budget", "bad", str(error))
    data = {"fits": list(found.strategies), "refused": found.refused, "tokens": found.context.tokens}
    value = f"fits {' and '.join(found.strategies)} with ctx {found.context.tokens}"
    remedy = tuple(f"{name}: {reason}" for name, reason in found.refused.items())
    return Check("budget", "info" if remedy else "ok", value, remedy, data)


def page_cache(ctx: Context) -> Check:
    """How much of the model's files is in memory already."""
    opened = ctx.opened
    if isinstance(opened, str):
        return absent("page_cache", _unread(ctx))
    from apu_engine.errors import MappingError
    from apu_engine.memory.mapping import Mapping

    total = resident = 0
    for file, size in zip(opened.files, opened.file_sizes, strict=True):
        try:
            with Mapping.open(file, size) as mapping:
                pages = mapping.resident_bytes()
        except MappingError as error:
            return Check("page_cache", "bad", str(error))
        if pages is None:
            return Check("page_cache", "info", "the kernel hides it for files of other users")
        total, resident = total + size, resident + pages
    data = {"resident": resident, "bytes": total}
    share = 100 * resident // total if total else 0
    return Check("page_cache", "ok", f"{format_size(resident)} of {format_size(total)} ({share}%) in memory", data=data)


def _unread(ctx: Context) -> str:
    named = ctx.request.model is not None and not ctx.request.quick
    return "the model cannot be read" if named else str(ctx.opened)
