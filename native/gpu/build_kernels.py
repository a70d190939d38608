#!/usr/bin/env python3
"""Builds native/gpu/kernels/*.hip into one code object per GPU target: OUT/gfx1151.co, OUT/sm_90.cubin, ...

No ROCm is needed: any clang from 18 on with the AMDGPU target will do, hipcc's, a distribution's, or the one in PyPI's
ziglang package, which is fetched where nothing else is found (--no-fetch: it is an error then). NVIDIA targets need
nvcc. Each file is compiled on its own (AMD: assembly, which tests read, then an ELF object; NVIDIA: an extensible
cubin) and the linker joins a target's objects, so that files compile in parallel and only what changed compiles again:
an object is current while compiler, flags and the contents of all its sources are. Code is the same as from one file.

Code objects in OUT that are not asked for stay while they are current and go when they are not: a stale one would be
worse than none. Needs nothing but Python's standard library, since CMake and build.sh run it in a bare environment.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "native/gpu/kernels"
WORK = ROOT / "build/gpu"
ZIGLANG = ROOT / "build/ziglang"
KFD = Path("/sys/class/kfd/kfd/topology/nodes")

AMD = ("gfx1151", "gfx1150", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1200", "gfx1201", "gfx90a")
GENERIC = ("gfx11-generic", "gfx12-generic")  # for processors of the family that have no object of their own
NVIDIA = ("sm_90", "sm_120")
DEFAULT = "gfx1151"  # where there is no GPU to look at
OLDEST_CLANG = 18
OBJECT_FORMAT = "2"  # of what WORK keeps: another number, and everything is made again

# No contraction: a row's result must not depend on how many rows a kernel has. Kernels say fma_f32 where they mean it.
AMD_FLAGS = (
    *("-x", "hip", "-std=c++20", "-O3", "-ffp-contract=off", "--cuda-device-only", "--no-gpu-bundle-output"),
    *("-nogpulib", "-nogpuinc", "-Wall", "-Wextra"),
    "-fno-slp-vectorize",  # on gfx90a it pairs floats through scratch memory; elsewhere it changes nothing
)
NVIDIA_FLAGS = ("-x", "cu", "-std=c++20", "-O3", "-fmad=false", "-ewp")


# Its kernels, and the target and version, which are a target's files' alike.
_METADATA = re.compile(
    r"^\t\.amdgpu_metadata\n---\namdhsa\.kernels:(?: *\[\])?\n((?: .*\n)*)((?:.*\n)*?)"
    r"\.\.\.\n\s*\.end_amdgpu_metadata\n",
    re.M,
)


class BuildError(Exception):
    """What is wrong, and what to do about it."""


def is_amd(target: str) -> bool:
    return target.startswith("gfx")


def object_name(target: str) -> str:
    return target + (".co" if is_amd(target) else ".cubin")


def run(command: list[str], what: str, text: str | None = None) -> str:
    """The command's warnings. Raises BuildError with its output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what}: {' '.join(command)}\n{done.stderr or done.stdout}")
    return done.stderr


# Compilers


@dataclass(frozen=True)
class Clang:
    clang: tuple[str, ...]
    lld: tuple[str, ...]
    version: str

    @property
    def name(self) -> str:
        return f"{' '.join(self.clang)} ({self.version})"

    def flags(self, target: str) -> list[str]:
        return [f"--offload-arch={target}", f"-mcode-object-version={6 if target in GENERIC else 5}"]

    def compile(self, source: Path, target: str, into: Path, deps: Path) -> str:
        assembly = into.with_suffix(".s")
        flags = [*AMD_FLAGS, *self.flags(target), f"-I{KERNELS}", f"-cuid={source.stem}"]
        for word in (
            "-dependency-file",
            str(deps),
            "-MT",
            "object",
        ):  # clang 22 ignores -MF when compiling for a device
            flags += ["-Xclang", word]
        warnings = run([*self.clang, *flags, "-S", str(source), "-o", str(assembly)], f"{target}: {source.name}")
        self.assemble(_METADATA.sub("", assembly.read_text()), target, into)
        lines = [line for line in warnings.splitlines() if "code object v6" not in line]  # clang 19, of generic targets
        return "\n".join(lines)

    def assemble(self, text: str, target: str, into: Path) -> None:
        machine = ["--target=amdgcn-amd-amdhsa", f"-mcpu={target}", self.flags(target)[1]]
        run([*self.clang, *machine, "-x", "assembler", "-c", "-", "-o", str(into)], f"{target}: {into}", text)

    def link(self, objects: list[Path], target: str, into: Path) -> None:
        """A runtime reads the first note of a code object, so all kernels' metadata goes into one."""
        kernels, rest = "", ""
        for file in objects:
            metadata = _METADATA.search(file.with_suffix(".s").read_text())
            if metadata is None:
                raise BuildError(f"{file.with_suffix('.s')} has no kernel metadata")
            kernels += metadata[1] or ""
            rest = metadata[2]
        notes = into.with_suffix(".notes.o")
        text = f"\t.amdgpu_metadata\n---\namdhsa.kernels:\n{kernels}{rest}...\n\t.end_amdgpu_metadata\n"
        self.assemble(text, target, notes)
        files = [*map(str, objects), str(notes)]
        run([*self.lld, "-shared", "--no-undefined", *files, "-o", str(into)], f"{target}: link")


@dataclass(frozen=True)
class Nvcc:
    nvcc: str
    nvlink: str
    version: str

    @property
    def name(self) -> str:
        return f"{self.nvcc} ({self.version})"

    def flags(self, target: str) -> list[str]:
        return [f"-arch={target}"]

    def compile(self, source: Path, target: str, into: Path, deps: Path) -> str:
        flags = [*NVIDIA_FLAGS, *self.flags(target), f"-I{KERNELS}", "-MMD", "-MF", str(deps)]
        return run([self.nvcc, *flags, "-cubin", str(source), "-o", str(into)], f"{target}: {source.name}")

    def link(self, objects: list[Path], target: str, into: Path) -> None:
        run([self.nvlink, f"-arch={target}", *map(str, objects), "-o", str(into)], f"{target}: link")


def clang_candidates() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(clang, lld) in the order of preference: ROCm's, the system's, ziglang's."""
    roots = [
        os.environ.get("ROCM_PATH"),
        os.environ.get("HIP_PATH"),
        "/opt/rocm",
        *sorted(map(str, Path("/opt").glob("rocm-*"))),
    ]
    if hipcc := shutil.which("hipcc"):
        roots.append(str(Path(hipcc).resolve().parents[1]))
    wheel = importlib.util.find_spec("_rocm_sdk_core")
    if wheel is not None and wheel.origin is not None:
        roots.append(str(Path(wheel.origin).parent))
    for root in dict.fromkeys(r for r in roots if r):
        for folder in (Path(root) / "llvm/bin", Path(root) / "lib/llvm/bin"):
            if (folder / "clang++").exists():
                yield (str(folder / "clang++"),), (str(folder / "ld.lld"),)
    for name in ("clang++", *(f"clang++-{n}" for n in range(30, OLDEST_CLANG - 1, -1))):
        if found := shutil.which(name):
            said = subprocess.run([found, "-print-prog-name=ld.lld"], capture_output=True, text=True).stdout.strip()
            suffix = name.removeprefix("clang++")
            for lld in (said if Path(said).is_absolute() else "", shutil.which(f"ld.lld{suffix}"), "ld.lld"):
                if lld and shutil.which(lld):
                    yield (found,), (lld,)
                    break
            else:
                yield (found,), ("ld.lld",)
    for zig in zig_candidates():
        yield (zig, "clang"), (zig, "ld.lld")


def zig_candidates() -> Iterator[str]:
    module = importlib.util.find_spec("ziglang")
    folders = [ZIGLANG / "ziglang"]
    if module is not None and module.origin is not None:
        folders.insert(0, Path(module.origin).parent)
    yield from (str(folder / "zig") for folder in folders if (folder / "zig").exists())
    if found := shutil.which("zig"):
        yield found


def compiles(compiler: Clang | Nvcc, target: str) -> str:
    """Why the compiler cannot make code for the target; empty where it can."""
    folder = WORK / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "probe.hip"
    text = 'extern "C" __attribute__((global)) void apu_probe(int *p) { *p = 1; }\n'
    source.write_text(text if isinstance(compiler, Clang) else text.replace("__attribute__((global))", "__global__"))
    try:
        compiler.compile(source, target, folder / "probe.o", folder / "probe.d")
        compiler.link([folder / "probe.o"], target, folder / "probe.co")
    except (BuildError, OSError) as error:
        return next((line for line in str(error).splitlines()[1:] if line.strip()), str(error))
    return ""


@cache
def find_clang() -> tuple[Clang | None, str]:
    """The first compiler that makes AMD code, or None and what is wrong with those that were found."""
    reasons = []
    for clang, lld in dict.fromkeys(clang_candidates()):
        said = subprocess.run([*clang, "--version"], capture_output=True, text=True).stdout
        m = re.search(r"clang version (\d+)[^\s]*", said)
        if m is None or int(m[1]) < OLDEST_CLANG:
            reasons.append(f"{' '.join(clang)} is older than clang {OLDEST_CLANG}")
            continue
        found = Clang(clang, lld, m[0])
        reason = compiles(found, AMD[0])
        if not reason:
            return found, ""
        reasons.append(f"{found.name}: {reason}")
    return None, "; ".join(reasons)


@cache
def find_nvcc() -> Nvcc | None:
    for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc"):
        if path and Path(path).exists():
            said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"V(\d[\d.]*)", said)
            plan = subprocess.run([path, "-dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
            here = re.search(r"_HERE_=(.*)", plan)  # nvcc's folder, where its path may be a script's
            nvlink = Path(here[1] if here else Path(path).resolve().parent) / "nvlink"
            return Nvcc(path, str(nvlink), version[1] if version else "unknown version")
    return None


def apt_packages() -> list[str]:
    for n in (19, 20, 21, 18):
        packages = [f"clang-{n}", f"lld-{n}", f"llvm-{n}"]  # llvm: tests read its disassembly
        if subprocess.run(["apt-cache", "show", *packages], capture_output=True).returncode == 0:
            return packages
    return []


def fetch_clang(apt: bool) -> None:
    """The system's clang through apt-get where we may and it has one, else ziglang into build/ziglang."""
    if apt and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if not (packages := apt_packages()):
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True, env=environment)
            packages = apt_packages()
        if packages:
            say(f"no compiler for AMD GPUs: apt-get install {' '.join(packages)}")
            command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
            if subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode == 0:
                find_clang.cache_clear()
                return
    say("no compiler for AMD GPUs: fetching PyPI's ziglang (0.1 GB) into build/ziglang")
    partial = ZIGLANG.with_name("ziglang.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # -I: pip's own isolated build environments hide pip through PYTHONPATH.
    pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", str(partial), "ziglang>=0.14"], capture_output=True, text=True
    )
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        raise BuildError(f"could not fetch ziglang: {done.stderr.strip() or done.stdout.strip()}")
    shutil.rmtree(ZIGLANG, ignore_errors=True)
    partial.rename(ZIGLANG)
    find_clang.cache_clear()


def clang_or_fetch(fetch: bool, apt: bool) -> Clang:
    clang, reasons = find_clang()
    if clang is None and fetch:
        try:
            fetch_clang(apt)
        except BuildError as error:
            reasons = "; ".join(r for r in (reasons, str(error)) if r)
        else:
            clang, reasons = find_clang()
    if clang is None:
        raise BuildError(
            f"no compiler for AMD GPUs{': ' + reasons if reasons else ''}.\n"
            f"Needed: clang {OLDEST_CLANG} or newer with lld. Debian/Ubuntu: apt install clang-19 lld-19; Fedora: dnf "
            "install clang lld; Arch: pacman -S clang lld; anywhere: pip install ziglang; or ROCm's own (ROCM_PATH).\n"
            "Without GPU code objects: ./build.sh --cpu-only, or SKBUILD_CMAKE_DEFINE=APU_GPU_TARGETS=none before pip"
        )
    return clang


# Targets


def local_targets() -> list[str]:
    """Of this machine's GPUs, by the kernel driver's or NVIDIA's own word."""
    found = []
    for file in sorted(KFD.glob("*/properties")):
        with contextlib.suppress(OSError):
            if m := re.search(r"^gfx_target_version (\d+)$", file.read_text(), re.M):
                version = int(m[1])  # major, minor, stepping in two decimal digits each; 0 for processors
                if version:
                    found.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    if smi := shutil.which("nvidia-smi"):
        done = subprocess.run([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True)
        if done.returncode == 0:
            found += [f"sm_{line.strip().replace('.', '')}" for line in done.stdout.splitlines() if line.strip()]
    return list(dict.fromkeys(found))


def supported(target: str) -> bool:
    return target in GENERIC or re.fullmatch(r"gfx1[12]\d[0-9a-f]|gfx90a|sm_(8\d|9\d|1\d\d)a?", target) is not None


def resolve(spec: str, fetch: bool, apt: bool) -> list[tuple[str, Clang | Nvcc]]:
    """Targets with their compilers. "all": the nine AMD targets, and generic and NVIDIA ones where the compilers can;
    "auto": what this machine's GPUs need, or gfx1151 where it has none and a compiler is there; "none"; or a list."""
    names = [name.strip() for name in spec.split(",") if name.strip() and name.strip() != "none"]
    optional: set[str] = set()
    if names == ["all"]:
        names, optional = [*AMD, *GENERIC, *NVIDIA], {*GENERIC, *NVIDIA}
    elif names == ["auto"]:
        names = local_targets()
        for name in [n for n in names if not supported(n)]:
            say(f"this machine's {name} is not supported: no code objects for it")
            names.remove(name)
        if not names:
            if find_clang()[0] is None:
                say(f"no GPU here, and no compiler for one: no code objects ({DEFAULT}'s by --targets {DEFAULT})")
                return []
            names = [DEFAULT]
        elif not any(is_amd(n) for n in names) and find_nvcc() is None:
            say(f"{', '.join(names)} here, but no nvcc: no code objects for it")
            return []
    for name in names:
        if not supported(name):
            raise BuildError(f"unknown GPU target {name}; there are {', '.join((*AMD, *GENERIC, *NVIDIA))} and 'all'")
    made: list[tuple[str, Clang | Nvcc]] = []
    for name in dict.fromkeys(names):
        compiler: Clang | Nvcc | None = clang_or_fetch(fetch, apt) if is_amd(name) else find_nvcc()
        reason = "nvcc is missing" if compiler is None else ""
        if compiler is not None and name not in AMD:
            reason = compiles(compiler, name)
        if compiler is not None and not reason:
            made.append((name, compiler))
        elif name in optional:
            say(f"{name}: left out, {reason}")
        else:
            raise BuildError(f"{name} cannot be built: {reason}")
    return made


# Building


def say(text: str) -> None:
    print(f"kernels: {text}", flush=True)


@cache
def digest_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def compiler_key(compiler: Clang | Nvcc) -> str:
    program = shutil.which(compiler.clang[0] if isinstance(compiler, Clang) else compiler.nvcc) or ""
    stat = Path(program).resolve().stat()
    return f"{compiler.name} {stat.st_size} {stat.st_mtime_ns}"


def object_key(compiler: str, target: str, deps: list[str]) -> str:
    flags = AMD_FLAGS if is_amd(target) else NVIDIA_FLAGS
    parts = [OBJECT_FORMAT, compiler, target, *flags]
    for name in deps:
        parts += [name, digest_of(ROOT / name)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_deps(file: Path) -> list[str]:
    """Sources of a make rule, those of this tree relative to it; the compilers' own headers come with the compiler."""
    words = re.split(r"(?<!\\)\s+", file.read_text().replace("\\\n", " ").split(":", 1)[1].strip())
    paths = {Path(word.replace("\\ ", " ")).resolve() for word in words}
    return sorted(str(p.relative_to(ROOT)) for p in paths if p.is_relative_to(ROOT / "native"))


def load(file: Path) -> dict[str, object]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def sources() -> list[Path]:
    return sorted(KERNELS.glob("*.hip"))


class Target:
    """One target's objects in WORK/<target>: k.o, k.s (AMD), k.json (its key and sources)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = WORK / name

    def object(self, source: Path) -> Path:
        return self.folder / f"{source.stem}{'.o' if is_amd(self.name) else '.cubin'}"  # nvlink goes by names

    def key(self, source: Path) -> str:
        """Of the current object; empty where it is not current."""
        kept = load(self.folder / f"{source.stem}.json")
        deps, compiler = kept.get("deps"), kept.get("compiler")
        if not isinstance(deps, list) or not isinstance(compiler, str) or not self.object(source).exists():
            return ""
        key = object_key(compiler, self.name, deps)
        return key if key == kept.get("key") else ""

    def current(self, source: Path, compiler: Clang | Nvcc) -> bool:
        kept = load(self.folder / f"{source.stem}.json")
        return kept.get("compiler") == compiler_key(compiler) and self.key(source) != ""

    def seconds(self, source: Path) -> float:
        """How long the last compilation took; the size stands for it where there was none."""
        last = load(self.folder / f"{source.stem}.json").get("seconds")
        return float(last) if isinstance(last, int | float) else source.stat().st_size / 1000

    def compile(self, source: Path, compiler: Clang | Nvcc) -> tuple[float, str]:
        begin, started = time.monotonic(), time.time()
        self.folder.mkdir(parents=True, exist_ok=True)
        out, state = self.object(source), self.folder / f"{source.stem}.json"
        state.unlink(missing_ok=True)
        deps_file = self.folder / f"{source.stem}.d"
        warnings = compiler.compile(source, self.name, out, deps_file)
        seconds = time.monotonic() - begin
        deps, name = read_deps(deps_file), compiler_key(compiler)
        if any((ROOT / d).stat().st_mtime >= started for d in deps):
            return (
                seconds,
                warnings,
            )  # a source changed meanwhile: nobody knows what was read, the next build compiles it
        key = object_key(name, self.name, deps)
        state.write_text(json.dumps({"key": key, "compiler": name, "deps": deps, "seconds": round(seconds, 2)}))
        return seconds, warnings

    def linked_key(self) -> str:
        """What the code object is made of; empty where an object is not current."""
        keys = [self.key(source) for source in sources()]
        if not keys or not all(keys):
            return ""
        return hashlib.sha256("\0".join(keys).encode()).hexdigest()

    def is_linked(self, out: Path) -> bool:
        key, file = self.linked_key(), out / object_name(self.name)
        return key != "" and load(self.folder / "linked.json") == {"key": key, "digest": digest_of(file)}

    def link(self, compiler: Clang | Nvcc, out: Path) -> None:
        file = out / object_name(self.name)
        made = self.folder / file.name
        compiler.link([self.object(source) for source in sources()], self.name, made)
        shutil.copyfile(made, file.with_suffix(".partial"))
        file.with_suffix(".partial").replace(file)
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        made.unlink()
        (self.folder / "linked.json").write_text(json.dumps({"key": self.linked_key(), "digest": digest}))


def build(wanted: list[tuple[str, Clang | Nvcc]], out: Path, jobs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    if wanted and not sources():
        raise BuildError(f"no kernels in {KERNELS}")
    targets = [(Target(name), compiler) for name, compiler in wanted]
    work = [(t, s, c) for t, c in targets for s in sources() if not t.current(s, c)]
    work.sort(key=lambda item: -item[0].seconds(item[1]))  # long ones first
    for compiler in dict.fromkeys(c for _, _, c in work):
        files = sum(c == compiler for _, _, c in work)
        say(f"compiling {files} file{'s' * (files != 1)} with {compiler.name}")
    with ThreadPoolExecutor(jobs) as pool:
        for target, source, warnings in pool.map(lambda w: (w[0], w[1], w[0].compile(w[1], w[2])[1]), work):
            if warnings:
                print(f"{target.name}: {source.name}:\n{warnings}", file=sys.stderr)
    linked = 0
    for target, compiler in targets:
        if not target.is_linked(out):
            target.link(compiler, out)
            digest_of.cache_clear()
            linked += 1
    names = {name for name, _ in wanted}
    for file in sorted([*out.glob("*.co"), *out.glob("*.cubin")]):
        if file.stem not in names and not Target(file.stem).is_linked(out):
            say(f"{file.name} is stale: removed")
            file.unlink()
    made = ", ".join(name for name, _ in wanted)
    if linked or work:
        say(f"{made} in {out} ({time.monotonic() - begin:.1f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--targets", default="auto", help="auto, all, none, or a list: gfx1151,gfx1201,sm_90")
    parser.add_argument("--out", type=Path, default=ROOT / "build/editable/kernels", help="folder of the code objects")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-fetch", action="store_true", help="use what is installed, fetch no compiler")
    parser.add_argument(
        "--apt", action="store_true", help="as root: apt-get may install clang before ziglang is fetched"
    )
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        with (WORK / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wanted = resolve(args.targets, not args.no_fetch, args.apt)
            build(wanted, args.out.resolve(), max(1, args.jobs))
    except BuildError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
