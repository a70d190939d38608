"""Facts of a machine from small files below a folder: memory and cgroups, limits, GPUs; absent files are no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from apu_engine.memory.machine import AmdGpu, Machine, gfx_name, kfd_limit

GIB = 1 << 30


def machine(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> Machine:
    """16 of 32 GiB available, and these cgroups."""
    proc, sys = root / "proc", root / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    if cgroup:
        (proc / "self/cgroup").write_text(cgroup)
    for folder, files in groups.items():
        (sys / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (sys / folder / name).write_text(content)
    return Machine(root)


def v2(limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {cache}\nactive_file 0\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


def v1(limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": f"cache 1\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}\n",
    }


CASES = {
    "no cgroups": ("", {}, 16 * GIB),
    "unlimited": ("0::/a\n", {"a": v2("max", 1)}, 16 * GIB),
    "v2 limit": ("0::/a/b\n", {"a/b": v2(str(8 * GIB), 3 * GIB)}, 5 * GIB),
    "v2 limit of a parent": ("0::/a/b\n", {"a": v2(str(4 * GIB), 3 * GIB), "a/b": v2("max", 1)}, GIB),
    "v2 limit above MemAvailable": ("0::/a\n", {"a": v2(str(30 * GIB), GIB)}, 16 * GIB),
    "v2 cached pages count as available": ("0::/a\n", {"a": v2(str(8 * GIB), 7 * GIB, 6 * GIB)}, 7 * GIB),
    "v2 in a container": ("0::/\n", {"": v2(str(2 * GIB), GIB)}, GIB),
    "v2 over its limit": ("0::/a\n", {"a": v2(str(GIB), 2 * GIB)}, 0),
    "v1 limit": ("5:cpu:/a\n4:memory:/a\n", {"memory/a": v1(8 * GIB, 3 * GIB)}, 5 * GIB),
    "v1 cached pages": ("4:memory:/a\n", {"memory/a": v1(8 * GIB, 8 * GIB, 5 * GIB)}, 5 * GIB),
    "v1 path of the host, seen in a container": ("4:cpuset,memory:/docker/x\n", {"memory": v1(2 * GIB, GIB)}, GIB),
    "v1 no limit": ("4:memory:/\n", {"memory": v1(9223372036854771712, GIB)}, 16 * GIB),
}


@pytest.mark.parametrize("name", CASES)
def test_available(name: str, tmp_path: Path) -> None:
    cgroup, groups, expected = CASES[name]
    assert machine(tmp_path, cgroup, groups).available == expected


def test_no_meminfo_line(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="has no MemAvailable"):
        _ = Machine(tmp_path).available


def test_files_of_garbage(tmp_path: Path) -> None:
    noise = bytes(range(256)) * 4
    for name in ("proc/meminfo", "proc/self/cgroup", "proc/self/limits", f"{NODE}/1/properties", "dev/kfd"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(noise)
    with pytest.raises(OSError, match="meminfo has no MemTotal"):
        _ = Machine(tmp_path).memory_total
    assert Machine(tmp_path).amd_gpus() == () and Machine(tmp_path).memlock_limit is None
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\nMemFree: \u00b2 kB\n", "utf-8")
    assert Machine(tmp_path).available == 4096
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {"memory.max": "9", "memory.current": "1", "memory.stat": "active_file x\n"}.items():
        (group / name).write_text(text)
    assert Machine(tmp_path).available == 4096


def write(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


NODE = "sys/class/kfd/kfd/topology/nodes"
CPU = "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\nlocation_id 0\n"
GPU = (
    "cpu_cores_count 0\nsimd_count 80\nsimd_per_cu 2\ngfx_target_version 110501\nlocation_id 50432\ndomain 0\n"
    "drm_render_minor 128\nlocal_mem_size 0\n"
)
CARD = "sys/class/drm/card1/device"


def test_a_gpu(tmp_path: Path) -> None:
    machine = write(
        tmp_path,
        {
            f"{NODE}/0/properties": CPU,
            f"{NODE}/1/properties": GPU,
            "sys/class/drm/card0/device/vendor": "0x10de",
            "sys/class/drm/card1-DP-1/status": "connected",
            f"{CARD}/vendor": "0x1002\n",
            f"{CARD}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c5:00.0\n",
            f"{CARD}/mem_info_vram_total": "536870912\n",
            f"{CARD}/mem_info_vram_used": "1000\n",
            f"{CARD}/mem_info_gtt_total": "67000000000\n",
            f"{CARD}/fw_version/mes_fw_version": "0x00000083\n",
            f"{CARD}/fw_version/pfp_fw_version": "none\n",
        },
    )
    gpu = AmdGpu(
        node=1,
        gfx="gfx1151",
        pci="0000:c5:00.0",
        render_node=tmp_path / "dev/dri/renderD128",
        device=tmp_path / CARD,
        compute_units=40,
        vram_total=512 << 20,
        vram_used=1000,
        gtt_total=67_000_000_000,
        firmware={"mes": 0x83},
    )
    assert machine.amd_gpus() == (gpu,)
    assert gpu.integrated
    assert not machine.has_kfd


def test_the_card_of_several(tmp_path: Path) -> None:
    """By PCI address, else by the render node below the card."""
    files = {f"{NODE}/1/properties": GPU}
    for card, slot in (("card0", "0000:03:00.0"), ("card1", "0000:c5:00.0")):
        files[f"sys/class/drm/{card}/device/vendor"] = "0x1002"
        files[f"sys/class/drm/{card}/device/uevent"] = f"PCI_SLOT_NAME={slot}"
    assert write(tmp_path / "a", files).amd_gpus()[0].device == tmp_path / "a" / CARD
    files = {name: text for name, text in files.items() if "uevent" not in name}
    files[f"{CARD}/drm/renderD128/dev"] = "226:128"
    assert write(tmp_path / "b", files).amd_gpus()[0].device == tmp_path / "b" / CARD
    del files[f"{CARD}/drm/renderD128/dev"]
    assert write(tmp_path / "c", files).amd_gpus()[0].device is None


def test_limits_and_kernel(tmp_path: Path) -> None:
    machine = write(
        tmp_path,
        {
            "proc/self/limits": "Limit Soft Hard Units\nMax locked memory         8388608     16777216     bytes\n",
            "proc/sys/kernel/osrelease": "6.18.4-arch\n",
            "proc/cmdline": "quiet amdgpu.gttsize=1\n",
            "sys/module/ttm/parameters/pages_limit": "16384000\n",
            "etc/group": "root:x:0:\nrender:x:992:me\nodd\n",
        },
    )
    assert machine.memlock_limit == 16 << 20
    assert (machine.kernel_release, machine.cmdline) == ("6.18.4-arch", "quiet amdgpu.gttsize=1")
    assert machine.ttm_pages_limit == 16_384_000
    assert machine.groups == {0: "root", 992: "render"}
    assert not machine.real


def test_nothing_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert machine.amd_gpus() == () and not machine.has_kfd and machine.groups == {}
    assert (machine.memlock_limit, machine.ttm_pages_limit, machine.kernel_release) == (None, None, "")


def test_the_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(tmp_path))
    assert Machine().root == tmp_path
    monkeypatch.setenv("APU_SYSROOT", "")
    assert Machine().real


def test_numbers() -> None:
    assert [gfx_name(n) for n in (110501, 110500, 90402, 90012)] == ["gfx1151", "gfx1150", "gfx942", "gfx90c"]
    assert kfd_limit(128 * GIB) == 128 * GIB - 2 * GIB - 3 * GIB // 2
    assert kfd_limit(GIB) == (GIB - GIB // 64) // 2


def test_stock_strix_halo() -> None:
    """The fixture's numbers, and that KFD's limit is above GTT's by far: file pages need no kernel parameter."""
    machine = Machine(Path(__file__).parent.parent / "fixtures/machines/strix-halo-128-stock")
    (gpu,) = machine.amd_gpus()
    assert (gpu.gfx, gpu.compute_units, gpu.integrated, gpu.firmware["mes"]) == ("gfx1151", 40, True, 0x80)
    assert machine.kfd_limit is not None and gpu.gtt_total is not None
    assert machine.kfd_limit > 120 * GIB > 64 * GIB > gpu.gtt_total
    assert machine.ttm_module == "ttm" and machine.ttm_pages_limit == gpu.gtt_total // 4096
    assert machine.has_kfd and machine.cgroup_limit is None and machine.memlock_limit == 8 << 20


def test_other_drivers(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 1000 kB\n", "sys/module/amdttm/parameters/pages_limit": "7"}
    machine = write(tmp_path, {**files, "sys/module/amdgpu/parameters/no_system_mem_limit": "Y\n"})
    assert (machine.ttm_module, machine.ttm_pages_limit, machine.kfd_limit) == ("amdttm", 7, None)
