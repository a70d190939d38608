"""The four fixtures get the verdicts that such machines deserve, and remedies in the words of their distribution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clinic import ALL, CONTAINER, POINT, STOCK, TUNED, Someone, check, copy, look, verdicts, write

from apu_engine import access
from apu_engine.doctor.report import TITLES

GPU = [
    "gpu",
    "driver",
    "kfd",
    "render",
    "kernels",
    "rocm",
    "mes",
    "svm",
    "carve_out",
    "kfd_limit",
    "gtt",
    "ttm",
    "iommu",
]
NO_MODEL = {"model": "absent", "budget": "absent", "page_cache": "absent"}
ANYWHERE = {"disk"}  # depends on the machine that runs the tests


def rated(root: Path, tmp_path: Path) -> dict[str, str]:
    found = verdicts(look(root, tmp_path))
    return {key: verdict for key, verdict in found.items() if verdict != "ok" and key not in ANYWHERE}


def test_stock(tmp_path: Path) -> None:
    report = look(STOCK, tmp_path)
    assert rated(STOCK, tmp_path) == {
        "power": "info",
        "kernel": "warn",
        "iommu": "warn",
        "memlock": "warn",
        "ttm": "info",
        **NO_MODEL,
    }
    assert check(report, "gpu").data["gfx"] == "gfx1151" and check(report, "gpu").data["compute_units"] == 40
    assert check(report, "kfd").value == "/dev/kfd, group render"
    assert check(report, "kernel").remedy[0] == "sudo apt update && sudo apt full-upgrade"
    assert check(report, "iommu").remedy == (
        "in /etc/default/grub set iommu=pt in GRUB_CMDLINE_LINUX_DEFAULT",
        "sudo update-grub",
        "sudo reboot",
    )
    assert check(report, "memlock").remedy[0] == (
        "echo '*  -  memlock  unlimited' | sudo tee /etc/security/limits.d/99-memlock.conf"
    )
    pages = 116 << 18  # 125.4 GiB less 8, in steps of 4 GiB
    assert check(report, "ttm").remedy == (
        f"echo 'options ttm pages_limit={pages} page_pool_size={pages}' | sudo tee /etc/modprobe.d/ttm.conf",
        "sudo update-initramfs -u -k all",
        "sudo reboot",
    )
    assert check(report, "kfd_limit").value == "121.9 GiB of file pages in place"
    assert check(report, "gtt").data["total"] == 16435627 * 4096
    assert check(report, "rocm").value == "7.1.1, /opt/rocm-7.1.1/lib/libamdhip64.so.7"
    assert report.verdict == "warn"
    assert report.line() == (
        "doctor: 3 warnings (kernel 6.17.0-8-generic, IOMMU DMA-FQ, ...); `apu-engine doctor` shows the remedies"
    )


def test_tuned(tmp_path: Path) -> None:
    assert rated(TUNED, tmp_path) == {"file_system": "info", **NO_MODEL}
    report = look(TUNED, tmp_path, folder=Path("/srv/models/deep/below"))
    assert check(report, "file_system").value == "xfs at /srv/models: large folios"
    assert check(report, "ttm").value == "31457280 pages, 120 GiB"
    assert report.line() == "doctor: ok (gfx1151; CPU avx512)"


def test_point(tmp_path: Path) -> None:
    report = look(POINT, tmp_path)
    assert rated(POINT, tmp_path) == {
        "power": "warn",
        "kernel": "warn",
        "iommu": "warn",
        "mes": "bad",
        "memlock": "warn",
        "carve_out": "warn",
        "gtt": "bad",
        "ttm": "warn",
        "file_system": "info",
        **NO_MODEL,
    }
    assert check(report, "mes").value.startswith("0x83: ") and check(report, "mes").remedy == (
        "sudo pacman -Syu linux-firmware-amdgpu",
        "sudo mkinitcpio -P",
        "sudo reboot",
    )
    gtt = check(report, "gtt")
    assert gtt.value.startswith("9 GiB without an owner") and gtt.remedy == ("sudo reboot",)
    assert gtt.data["unowned"] == gtt.data["used"] == 9663676416
    ttm = check(report, "ttm")
    assert "amdgpu.gttsize is deprecated, amdgpu.gtt_size does not exist" in ttm.value
    assert "pages_limit=6291456" in ttm.remedy[0]  # the 24 GiB that gttsize asked for
    assert any("remove amdgpu.gttsize, amdgpu.gtt_size" in line for line in ttm.remedy)
    assert ttm.remedy.count("sudo reboot") == 1 and ttm.remedy[-1] == "sudo reboot"
    assert check(report, "power").remedy == ("plug the power supply in", "powerprofilesctl set performance")
    assert "BIOS" in check(report, "carve_out").remedy[0]
    assert report.line().startswith("doctor: 2 bad (MES firmware 0x83, GTT 9 GiB without an owner), 6 warnings;")


def test_container(tmp_path: Path) -> None:
    report = look(CONTAINER, tmp_path)
    assert rated(CONTAINER, tmp_path) == {
        "container": "bad",
        "kfd": "bad",
        "render": "bad",
        "rocm": "bad",
        "iommu": "warn",
        "memlock": "warn",
        "ttm": "info",
        "file_system": "warn",
        **NO_MODEL,
    }
    flags = "--device /dev/kfd --device /dev/dri --group-add $(getent group render | cut -d: -f3)"
    assert check(report, "container").value == "docker without /dev/kfd and /dev/dri; the host has a GPU (gfx1151)"
    for name in ("container", "kfd", "render"):
        assert check(report, name).remedy == (f"start the container with {flags}",)
    assert check(report, "iommu").remedy[:2] == (  # the host is an openSUSE, whatever the container is
        "on the host: in /etc/default/grub set iommu=pt in GRUB_CMDLINE_LINUX_DEFAULT",
        "sudo grub2-mkconfig -o /boot/grub2/grub.cfg",
    )
    assert check(report, "rocm").remedy[0] == "sudo apt install libamdhip64-dev"  # the container is a Debian
    assert check(report, "memlock").remedy == ("start the container with --ulimit memlock=-1:-1",)
    assert check(report, "memory").data["cgroup_limit"] == 32 << 30
    mounted = look(CONTAINER, tmp_path, folder=Path("/models"))
    assert check(mounted, "file_system").data["kind"] == "btrfs"


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    for name in ("proc/meminfo", "proc/self/limits", "proc/self/mountinfo", "proc/cpuinfo", "etc/os-release"):
        write(root, name, (STOCK / name).read_text())
    write(root, "proc/sys/kernel/osrelease", "6.8.0-31-generic\n")
    report = look(root, tmp_path)
    found = verdicts(report)
    assert [found[name] for name in GPU] == ["absent"] * len(GPU)
    assert check(report, "gpu").value == "no AMD GPU"
    assert found["kernel"] == "ok" and report.verdict == "warn"  # memlock
    write(root, "proc/self/limits", (TUNED / "proc/self/limits").read_text())
    assert look(root, tmp_path).line() == "doctor: ok (no AMD GPU; CPU avx512)"


def test_nothing_at_all(tmp_path: Path) -> None:
    report = look(tmp_path / "void", tmp_path)
    assert [item.id for item in report.checks] == [key for key in TITLES if key in verdicts(report)]
    assert report.verdict == "ok" and report.line() == "doctor: ok (no AMD GPU; CPU unknown)"


@pytest.mark.parametrize("root", ALL, ids=lambda root: root.name)
def test_the_schema(root: Path, tmp_path: Path) -> None:
    """The JSON is an interface: these names stay."""
    found = json.loads(json.dumps(look(root, tmp_path).as_dict()))
    assert list(found) == ["schema", "version", "full", "verdict", "line", "checks"]
    assert found["schema"] == 1 and found["full"] is False
    for item in found["checks"]:
        assert list(item) == ["group", "title", "id", "verdict", "value", "remedy", "data"]
        assert item["verdict"] in ("ok", "info", "warn", "bad", "absent")
        assert all(isinstance(line, str) and line for line in item["remedy"])
        assert item["value"] and "\n" not in item["value"]
        if item["verdict"] in ("warn", "bad"):
            assert item["remedy"], item["id"]
    groups = {"Machine": 5, "GPU": 8, "Memory": 6, "Files": 5}
    assert [item["group"] for item in found["checks"]] == [name for name, n in groups.items() for _ in range(n)]
    assert [item["id"] for item in found["checks"]] == list(TITLES)[:24]


# ---------------------------------------------------------------- single checks


def test_rights(tmp_path: Path) -> None:
    report = look(STOCK, tmp_path, Someone(992, allowed=False))
    for name in ("kfd", "render"):
        assert check(report, name).verdict == "bad" and "user may not open it" in check(report, name).value
        assert check(report, name).remedy == ("sudo usermod -aG render,video user", "log out and in again")
    again = look(TUNED, tmp_path, Someone(105, allowed=False))  # /etc/group has the user there already
    assert "log out and in again: user was put into group render" in check(again, "kfd").remedy[0]
    root = copy(CONTAINER, tmp_path)
    for name in ("dev/kfd", "dev/dri/renderD128"):
        write(root, name, "")
    inside = look(root, tmp_path, Someone(992, allowed=False))
    assert check(inside, "kfd").remedy == (
        "start the container with --device /dev/kfd --device /dev/dri --group-add 992",  # nameless there
    )
    assert check(inside, "container").verdict == "ok"


@pytest.mark.parametrize(
    ("release", "maker", "dkms", "verdict", "words"),
    [
        ("6.17.0-20-generic", "Ubuntu", True, "bad", "amdgpu-dkms"),
        ("6.17.0-20-generic", "Ubuntu", False, "warn", "6.18.4"),
        ("7.0.0-28-generic", "Ubuntu", False, "bad", "7.0.0-30"),
        ("7.0.0-29-generic", "Ubuntu", False, "bad", "7.0.0-30"),
        ("7.0.0-30-generic", "Ubuntu", False, "ok", "7.0.0-30"),
        ("7.0.12-arch1-1", "archlinux", False, "bad", "stalls"),
        ("7.0.12-070012-generic", "Ubuntu", False, "bad", "stalls"),  # a mainline build
        ("7.0.13-arch1-1", "archlinux", False, "ok", ""),
        ("7.1.0-rc6-1-mainline", "archlinux", False, "bad", "stalls"),
        ("7.1.0-0.rc6.260514g.42.fc45.x86_64", "Red Hat", False, "bad", "stalls"),
        ("7.1.0-rc7", "", False, "ok", ""),
        ("6.18.4-1-default", "SUSE", False, "ok", ""),
        ("6.18.3-1-default", "SUSE", False, "warn", "6.18.4"),
        ("6.8.0-60-generic", "Ubuntu", False, "warn", "SVM"),
    ],
)
def test_kernels(release: str, maker: str, dkms: bool, verdict: str, words: str, tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    write(root, "proc/sys/kernel/osrelease", release + "\n")
    write(root, "proc/version", f"Linux version {release} (someone@{maker})\n")
    write(root, "etc/os-release", "ID=linux\n")
    if dkms:
        write(root, "sys/module/amdgpu/version", "6.14.14\n")
    found = check(look(root, tmp_path), "kernel")
    assert found.verdict == verdict and words in found.value
    if dkms:
        assert "amdgpu-dkms" in found.remedy[0]


@pytest.mark.parametrize(
    ("os_release", "parameter", "module", "firmware"),
    [
        ("ID=fedora", 'sudo grubby --update-kernel=ALL --args="iommu=pt"', "dracut", "amd-gpu-firmware"),
        ("ID=ubuntu\nID_LIKE=debian", "/etc/default/grub", "update-initramfs", "linux-firmware"),
        ("ID=linuxmint\nID_LIKE='ubuntu debian'", "/etc/default/grub", "update-initramfs", "linux-firmware"),
        ("ID=debian\nVERSION_CODENAME=trixie", "/etc/default/grub", "update-initramfs", "firmware-amd-graphics"),
        ("ID=cachyos\nID_LIKE=arch", "/boot/loader/entries", "mkinitcpio", "linux-firmware-amdgpu"),
        ('ID="opensuse-tumbleweed"\nID_LIKE="opensuse suse"', "GRUB_CMDLINE", "dracut", "kernel-firmware-amdgpu"),
        ("ID=nixos", "boot.kernelParams", "extraModprobeConfig", "nix-channel"),
        ("ID=void", "GRUB_CMDLINE_LINUX_DEFAULT", "initramfs", "linux-firmware of 2026"),
    ],
)
def test_remedies_by_distribution(os_release: str, parameter: str, module: str, firmware: str, tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    write(root, "etc/os-release", os_release + "\n")
    write(root, "sys/class/drm/card1/device/fw_version/mes_fw_version", "0x00006083\n")  # other bits: an API's version
    report = look(root, tmp_path)
    assert parameter in check(report, "iommu").remedy[0]
    assert module in " ".join(check(report, "ttm").remedy)
    assert check(report, "mes").data["version"] == 0x83 and firmware in check(report, "mes").remedy[0]


def test_iommu_modes(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    mode = root / "sys/class/drm/card1/device/iommu_group/type"
    for text, verdict in (("identity", "ok"), ("DMA", "warn"), ("unmanaged", "info")):
        mode.write_text(text + "\n")
        assert check(look(root, tmp_path), "iommu").verdict == verdict
    mode.unlink()
    assert check(look(root, tmp_path), "iommu").value == "mode is not shown"
    mode.parent.rmdir()
    assert check(look(root, tmp_path), "iommu").value == "off"


def test_pages_limit_of_the_packaged_driver_and_of_the_command_line(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    write(root, "sys/module/amdttm/parameters/pages_limit", "16435627\n")
    write(root, "proc/cmdline", "ro ttm.pages_limit=31457280\n")
    found = check(look(root, tmp_path), "ttm")
    assert found.verdict == "warn" and "ttm.pages_limit is of a module that is not in use (amdttm is)" in found.value
    assert found.remedy[0].startswith(f"echo 'options amdttm pages_limit={120 << 18} ")
    root = copy(TUNED, tmp_path)
    write(root, "sys/module/ttm/parameters/pages_limit", f"{200 << 18}\n")
    found = check(look(root, tmp_path), "ttm")
    assert found.verdict == "warn" and "more than the memory" in found.value
    assert f'--args="ttm.pages_limit={116 << 18} ttm.page_pool_size={116 << 18}"' in found.remedy[0]


def test_a_gpu_that_the_driver_does_not_serve(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/1/properties").unlink()
    write(root, "sys/bus/pci/devices/0000:c5:00.0/vendor", "0x1002\n")
    write(root, "sys/bus/pci/devices/0000:c5:00.0/class", "0x038000\n")
    assert "KFD does not know" in check(look(root, tmp_path), "driver").value
    write(root, "proc/cmdline", "ro nomodeset quiet\n")
    found = check(look(root, tmp_path), "driver")
    assert found.verdict == "bad" and "remove nomodeset" in found.remedy[0]
    write(root, "proc/cmdline", "ro\n")
    (root / "sys/module/amdgpu").rename(root / "sys/module/other")
    assert check(look(root, tmp_path), "driver").remedy[0] == "sudo modprobe amdgpu"


def test_svm_kernels_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy(STOCK, tmp_path)
    properties = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    text = properties.read_text()
    capability = next(line for line in text.splitlines() if line.startswith("capability "))
    assert check(look(root, tmp_path), "svm").verdict == "ok"
    properties.write_text(text.replace(capability, f"capability {int(capability.split()[1]) & ~(1 << 27)}"))
    assert check(look(root, tmp_path), "svm").verdict == "warn"
    properties.write_text(text.replace("gfx_target_version 110501", "gfx_target_version 90012"))
    report = look(root, tmp_path)
    assert check(report, "gpu").verdict == "bad" and check(report, "gpu").remedy == ("run with --device cpu",)
    assert check(report, "kernels").remedy == ("./build.sh --targets gfx90c",)
    properties.write_text(text.replace("gfx_target_version 110501", "gfx_target_version 110502"))
    assert check(look(root, tmp_path), "kernels").verdict == "bad"
    (tmp_path / "kernels" / "gfx11-generic.co").touch()
    assert check(look(root, tmp_path), "kernels").verdict == "ok"
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert check(look(STOCK, tmp_path), "gpu").remedy == ("unset HSA_OVERRIDE_GFX_VERSION",)
    monkeypatch.setenv("HSA_USE_SVM", "0")
    assert check(look(STOCK, tmp_path), "svm").remedy == ("unset HSA_USE_SVM",)


def test_targets_are_those_that_are_built() -> None:
    import build_kernels

    assert access.BUILT_FOR == build_kernels.AMD


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("avx2 fma f16c bmi2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512vbmi gfni", "avx512"),
        ("avx2 fma f16c bmi2 avx512f avx512vl avx512_vnni", "avx2vnni"),
        ("avx2 fma f16c bmi2 avx_vnni", "avx2vnni"),
        ("avx2 fma f16c bmi2", "avx2"),
        ("sse4_2", "portable"),
    ],
)
def test_instruction_sets(flags: str, isa: str, tmp_path: Path) -> None:
    root = copy(TUNED, tmp_path)
    write(root, "proc/cpuinfo", f"model name\t: Some CPU\nflags\t\t: fpu {flags}\n")
    found = check(look(root, tmp_path), "cpu")
    assert found.data["isa"] == isa and found.verdict == ("warn" if isa == "portable" else "ok")


def test_power(tmp_path: Path) -> None:
    root = copy(TUNED, tmp_path)
    level = "sys/class/drm/card1/device/power_dpm_force_performance_level"
    write(root, level, "low\n")
    assert check(look(root, tmp_path), "power").remedy == (f"echo auto | sudo tee /{level}",)
    write(root, level, "auto\n")
    write(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", "acpi-cpufreq\n")
    write(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    assert check(look(root, tmp_path), "power").remedy == ("sudo cpupower frequency-set -g performance",)


def test_batteries(tmp_path: Path) -> None:
    root = copy(TUNED, tmp_path)
    write(root, "sys/class/power_supply/hidpp_battery_0/type", "Battery\n")
    write(root, "sys/class/power_supply/hidpp_battery_0/scope", "Device\n")
    write(root, "sys/class/power_supply/hidpp_battery_0/status", "Discharging\n")
    write(root, "sys/class/power_supply/ucsi-source-psy-1/type", "USB\n")
    write(root, "sys/class/power_supply/ucsi-source-psy-1/online", "0\n")
    assert check(look(root, tmp_path), "power").data["mains"] is None  # a mouse and an empty socket
    write(root, "sys/class/power_supply/BAT0/type", "Battery\n")
    for status, mains in (("Charging", True), ("Not charging", True), ("Discharging", False)):
        write(root, "sys/class/power_supply/BAT0/status", status + "\n")
        assert check(look(root, tmp_path), "power").data["mains"] is mains


def test_another_device_is_asked_for(tmp_path: Path) -> None:
    """What ails the GPU does not matter to who uses the CPU."""
    report = look(POINT, tmp_path, device="cpu")
    assert {check(report, name).value for name in GPU} == {"not used with --device cpu"}
    assert check(report, "kernel").verdict == "ok"
    assert "bad" not in verdicts(report).values()
    report = look(POINT, tmp_path, device="hip:1")
    gpu = check(report, "gpu")
    assert "(GPU no GPU hip:1 among 1" in report.line()
    assert (gpu.verdict, gpu.value, gpu.remedy) == ("bad", "no GPU hip:1 among 1", ("--device hip:0 is gfx1150",))
    assert check(look(POINT, tmp_path, device="hip:0"), "gpu").data["gfx"] == "gfx1150"


def test_firmware_that_is_not_there(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    mes = root / "sys/class/drm/card1/device/fw_version/mes_fw_version"
    mes.write_text("0x00000000\n")
    assert check(look(root, tmp_path), "mes").value == "none on this GPU"
    mes.unlink()
    assert check(look(root, tmp_path), "mes").verdict == "info"


def test_gttsize_of_a_file(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    write(root, "sys/module/amdgpu/parameters/gttsize", "98304\n")
    found = check(look(root, tmp_path), "ttm")
    assert found.verdict == "warn" and "gttsize as an option of amdgpu is deprecated" in found.value
    assert "remove gttsize from: grep -l gttsize /etc/modprobe.d/*" in found.remedy


def test_file_systems(tmp_path: Path) -> None:
    root = copy(STOCK, tmp_path)
    line = "28 1 0:9 / / rw,relatime shared:1 - {} server:/x rw\n"
    for kind, verdict in (
        ("xfs", "ok"),
        ("ext4", "ok"),
        ("btrfs", "info"),
        ("zfs", "warn"),
        ("nfs4", "warn"),
        ("fuse.sshfs", "warn"),
        ("tmpfs", "info"),
        ("ramfs", "info"),
    ):
        write(root, "proc/self/mountinfo", line.format(kind))
        assert check(look(root, tmp_path), "file_system").verdict == verdict, kind
    write(root, "proc/self/mountinfo", line.format("ext4") + r"29 28 0:9 / /my\040disk rw - zfs pool/models rw")
    found = check(look(root, tmp_path, folder=Path("/my disk/m")), "file_system")
    assert found.remedy == ("sudo zfs set primarycache=metadata pool/models",)
    write(root, "proc/sys/kernel/osrelease", "6.14.0\n")
    assert "6.16" in check(look(root, tmp_path), "file_system").value


def test_a_model_of_true_size(tmp_path: Path) -> None:
    """Limits are held against a named model; a broken one is a finding."""
    big = tmp_path / "big.gguf"
    with big.open("wb") as file:
        file.truncate(100 << 30)
    report = look(POINT, tmp_path, model=big)
    assert check(report, "kfd_limit").verdict == "bad" and "the model has 100 GiB" in check(report, "kfd_limit").value
    assert check(report, "model").verdict == "bad" and "big.gguf" in check(report, "model").value
    assert check(report, "budget").value == "the model cannot be read"
    assert "the model's 100 GiB" in check(look(STOCK, tmp_path, model=big), "memlock").value
    assert "read again and again" in check(look(CONTAINER, tmp_path, model=big), "memory").value
    quick = look(POINT, tmp_path, model=big, quick=True)
    assert check(quick, "model").verdict == "absent" and check(quick, "kfd_limit").verdict == "bad"
