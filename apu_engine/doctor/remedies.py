"""Remedies that differ between distributions: kernel parameters, module options, packages, firmware.

Each function gives lines in the order to do them. A line is a command, or says which line to put into which file.
`on_host` begins the first line where a container has to be left for it. What a start needs as well is in access.py.
"""

from __future__ import annotations

from apu_engine.doctor.context import Context
from apu_engine.memory.machine import PAGES_PER_GIB

_GRUB = {
    "debian": "sudo update-grub",
    "ubuntu": "sudo update-grub",
    "arch": "sudo grub-mkconfig -o /boot/grub/grub.cfg",
    "suse": "sudo grub2-mkconfig -o /boot/grub2/grub.cfg",
}
_INITRAMFS = {
    "debian": "sudo update-initramfs -u -k all",
    "ubuntu": "sudo update-initramfs -u -k all",
    "fedora": "sudo dracut --regenerate-all --force",
    "suse": "sudo dracut --regenerate-all --force",
    "arch": "sudo mkinitcpio -P",
}
REBOOT = "sudo reboot"


def parameters(ctx: Context, add: str = "", remove: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Adding to, or removing from the kernel's command line."""
    host, family = ctx.on_host, ctx.host.family
    if family == "fedora":
        words = [f'--args="{add}"'] if add else []
        words += [f'--remove-args="{" ".join(remove)}"'] if remove else []
        return f"{host}sudo grubby --update-kernel=ALL {' '.join(words)}", REBOOT
    changes = [f"set {add}"] if add else []
    changes += [f"remove {', '.join(remove)}"] if remove else []
    change = " and ".join(changes)
    if family == "nixos":
        return f"{host}in configuration.nix {change} in boot.kernelParams", "sudo nixos-rebuild boot", REBOOT
    first = f"{host}in /etc/default/grub {change} in GRUB_CMDLINE_LINUX_DEFAULT"
    update = _GRUB.get(family, "sudo update-grub (or grub-mkconfig -o /boot/grub/grub.cfg)")
    if family in ("arch", ""):
        first += " (with systemd-boot: the options line of /boot/loader/entries/*.conf)"
    return first, update, REBOOT


def module_option(ctx: Context, module: str, option: str) -> tuple[str, ...]:
    """An option of a kernel module, for the next boot."""
    host, family = ctx.on_host, ctx.host.family
    line = f"options {module} {option}"
    if family == "nixos":
        return f'{host}in configuration.nix: boot.extraModprobeConfig = "{line}";', "sudo nixos-rebuild boot", REBOOT
    rebuild = _INITRAMFS.get(family, "rebuild the initramfs (update-initramfs -u, dracut --force or mkinitcpio -P)")
    return f"{host}echo '{line}' | sudo tee /etc/modprobe.d/{module}.conf", rebuild, REBOOT


def joined(*remedies: tuple[str, ...]) -> tuple[str, ...]:
    """Several remedies in one go, with one boot at the end."""
    lines = [line for remedy in remedies for line in remedy]
    return (*dict.fromkeys(line for line in lines if line != REBOOT), *((REBOOT,) if REBOOT in lines else ()))


def pages_limit(ctx: Context, gib: int) -> tuple[str, ...]:
    """GTT's ceiling in GiB; where the command line sets it, that wins over a file of options."""
    module = ctx.machine.ttm_module
    pages = gib * PAGES_PER_GIB
    if f"{module}.pages_limit" in ctx.parameters:
        return parameters(ctx, f"{module}.pages_limit={pages} {module}.page_pool_size={pages}")
    return module_option(ctx, module, f"pages_limit={pages} page_pool_size={pages}")


def newer_kernel(ctx: Context) -> tuple[str, ...]:
    """How a newer kernel comes."""
    host, distro = ctx.on_host, ctx.host
    backports = f"{distro.codename or 'stable'}-backports"
    commands = {
        "ubuntu": ("sudo apt update && sudo apt full-upgrade", "sudo do-release-upgrade"),
        "debian": (f"sudo apt install -t {backports} linux-image-amd64 (with {backports} in the apt sources)",),
        "fedora": ("sudo dnf upgrade --refresh 'kernel*'",),
        "arch": ("sudo pacman -Syu",),
        "suse": ("sudo zypper dup",),
        "nixos": (
            "in configuration.nix: boot.kernelPackages = pkgs.linuxPackages_latest;",
            "sudo nixos-rebuild boot",
        ),
    }
    lines = commands.get(distro.family, ("install Linux 6.18.4 or newer",))
    return f"{host}{lines[0]}", *lines[1:], REBOOT


def firmware(ctx: Context) -> tuple[str, ...]:
    """How linux-firmware's files for AMD GPUs are renewed; they are copied into the initramfs."""
    host, family = ctx.on_host, ctx.host.family
    commands = {
        "ubuntu": "sudo apt update && sudo apt install --only-upgrade linux-firmware",
        "debian": "sudo apt update && sudo apt install --only-upgrade firmware-amd-graphics",
        "fedora": "sudo dnf upgrade --refresh amd-gpu-firmware",
        "arch": "sudo pacman -Syu linux-firmware-amdgpu",
        "suse": "sudo zypper update kernel-firmware-amdgpu",
        "nixos": "sudo nix-channel --update",
    }
    first = commands.get(family, "install a linux-firmware of 2026")
    rebuild = "sudo nixos-rebuild boot" if family == "nixos" else _INITRAMFS.get(family, "rebuild the initramfs")
    return f"{host}{first}", rebuild, REBOOT
