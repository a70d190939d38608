"""What the compiler made of the kernels for AMD: every kernel of every code object against limits, instructions that
speed depends on, and rules of the sources. What CI builds is built here if it is not current; nothing is fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import build_kernels
import pytest
from isa import BLOCKS, Code, matvec_cost, notes, parse_assembly

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "native/gpu/kernels"
OUT = ROOT / "build/editable/kernels"
TARGETS = ("gfx1151", "gfx1201", "gfx90a")
FILES = sorted(path.stem for path in KERNELS.glob("*.hip"))

# Of every kernel with the prefix, first match: VGPRs and bytes of static LDS. A SIMD of gfx1151 has 1,536 VGPRs of 32
# lanes: 96 are 16 waves, the most there are; 128 are 12, 192 are 8, 256 are 6. gfx90a has twice as many of 64 lanes.
LIMITS = [
    (r"(expert_)?matvec_(any|exact)", 256, 8192),  # types without kernels of their own
    (r"matvec_(f32|f16|bf16)_r[12]", 256, 8192),  # rows are loaded in groups
    (r"(expert_)?matvec_\w+_r1", 128, 8192),
    (r"(expert_)?matvec_\w+_r2", 160, 8192),
    (r"((expert|head)_)?matvec_\w+_r4", 192, 8192),
    (r"(expert_)?matvec", 256, 8192),
    (r"(expert_)?gemm", 256, 32768),
    (r"attention", 256, 32768),
    (r"latent_tiles_\w+_16", 192, 16384),
    (r"(latent|sparse)_attention|heads", 256, 16384),
    (r"route", 192, 16384),
    (r"sample", 128, 36864),
    (r"index_choose", 64, 16384),
    (r"index_scores", 144, 1024),
    (r"", 128, 16384),
]
# Their main loops may keep few scalars in lanes of VGPRs: one operation of 25.
FEW_LANE_MOVES = r"(expert_)?(matvec|gemm)"
# VALU operations of a lane for each byte of weights; at about 29 an APU's memory would wait for its processors.
VALU = {"q8_0": 1.5, "q4_0": 2.5, "q4_k": 2.5, "q6_k": 3.0, "q2_k": 5.0, "mxfp4": 6.0, "iq2_xxs": 7.0}
TILED = r"(expert_)?gemm_(?!f32|rows|head_rows|reduce)|index_scores_tiles"  # on matrix tiles: not what prepares or adds

pytestmark = pytest.mark.timeout(900)  # where the code objects are not built yet


@cache
def build() -> str:
    command = [sys.executable, build_kernels.__file__, "--no-fetch", "--targets", ",".join(TARGETS), "--out", str(OUT)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def built() -> tuple[Path, ...]:
    if error := build():
        pytest.fail(error, pytrace=False)
    return tuple(sorted(OUT.glob("*.co")))  # and what else was asked for before: only current ones stay


@cache
def code(target: str, file: str) -> dict[str, Code]:
    built()
    return parse_assembly((ROOT / "build/gpu" / target / f"{file}.s").read_text())


def is_quantised_matvec(name: str) -> bool:
    m = re.fullmatch(r"(?:expert_)?matvec_(\w+?)_r\d", name)
    return m is not None and m[1] in BLOCKS and m[1] not in ("f32", "f16", "bf16")


def test_every_kernel_within_its_limits() -> None:
    wrong = []
    for file in built():
        metadata: dict[str, Any] = notes(file)
        target = metadata["amdhsa.target"].rpartition("--")[2].partition(":")[0]
        assert target == file.stem
        assert metadata["amdhsa.version"] == [1, 2]  # of code objects v5 and v6
        for kernel in metadata["amdhsa.kernels"]:
            name = kernel[".name"]
            vgprs, lds = next((v, b) for prefix, v, b in LIMITS if re.match(prefix, name))
            cdna = target == "gfx90a"
            found = {
                "bytes of scratch": (kernel[".private_segment_fixed_size"], 0),
                "VGPR spills": (kernel[".vgpr_spill_count"], 0),
                "VGPRs": (kernel[".vgpr_count"] + kernel.get(".agpr_count", 0), vgprs * (2 if cdna else 1)),
                "SGPRs": (kernel[".sgpr_count"], 108),
                "bytes of LDS": (kernel[".group_segment_fixed_size"], lds),
                "lanes in a wave": (kernel[".wavefront_size"], 64 if cdna else 32),
            }
            for what, (value, limit) in found.items():
                if value > limit:
                    wrong.append(f"{file.name}: {name} has {value} {what}, at most {limit} are allowed")
            assert not kernel.get(".uses_dynamic_stack"), f"{file.name}: {name}"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", TARGETS)
def test_code_object_holds_every_kernel_of_the_sources(target: str) -> None:
    built()
    names = {kernel[".name"] for kernel in notes(OUT / f"{target}.co")["amdhsa.kernels"]}
    threads = {k[".name"]: k[".max_flat_workgroup_size"] for k in notes(OUT / f"{target}.co")["amdhsa.kernels"]}
    assert names == {name for file in FILES for name in code(target, file)}
    assert all(n % (64 if target == "gfx90a" else 32) == 0 for n in threads.values())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("file", FILES)
def test_instructions(target: str, file: str) -> None:
    dot = {"gfx90a": "v_dot4_i32_i8"}.get(target, "v_dot4_i32_iu8")
    wide = {"gfx90a": "global_load_dwordx4"}.get(target, "global_load_b128")
    tile = {"gfx90a": "v_mfma_"}.get(target, "v_wmma_")
    for name, kernel in code(target, file).items():
        operations = kernel.operations
        assert operations, name
        assert not [op for op in operations if op.startswith(("scratch_", "buffer_store", "s_swappc"))], name
        loop = kernel.main_loop()
        if re.match(r"(expert_)?(matvec|gemm|attention|(latent|sparse)_attention|heads|index_scores)", name):
            # Flat loads count as LDS operations too: a wave that waits for LDS would wait for memory.
            assert not [op for op in loop if op.startswith("flat_")], name
        if re.match(FEW_LANE_MOVES, name) and target != "gfx90a":
            assert sum(op.startswith(("v_readlane", "v_writelane")) for op in loop) <= len(loop) / 25, name
        if is_quantised_matvec(name):
            assert sum(op.startswith((dot, "v_dot4c_i32_i8")) for op in operations) >= 16, name
            assert operations.count(wide) >= 4, name
        if re.match(TILED, name):
            assert [op for op in operations if op.startswith(tile)], name


@pytest.mark.parametrize("file", [file for file in FILES if "matvec" in file])
def test_valu_operations_for_each_weight_byte(file: str) -> None:
    over = []
    for name, kernel in code("gfx1151", file).items():
        m = re.fullmatch(r"(?:expert_)?matvec_(\w+?)(?:_r1)?", name)
        if m and m[1] in VALU:
            cost = matvec_cost(kernel, m[1])
            assert cost.dots >= 16, f"{name}: no main loop found"
            if cost.per_byte > VALU[m[1]]:
                over.append(f"{name}: {cost.per_byte:.2f}, at most {VALU[m[1]]}")
    assert not over, over


VENDOR_FILES = {"gpu.h", "tile.h", "amd.h", "nvidia.h"}  # and shim*.h, tile_*.h: parts of gpu.h


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted([*KERNELS.glob("*.h"), *KERNELS.glob("*.hip")])
        if path.name not in VENDOR_FILES and not path.name.startswith(("shim", "tile_"))
    ],
    ids=lambda path: path.name,
)
def test_sources_know_neither_vendor_nor_wave_size(path: Path) -> None:
    text = re.sub(r"//[^\n]*", "", path.read_text())
    vendor = r"__gfx\w*|__GFX\w*|__CUDA\w*|__HIP\w*|__AMD\w*|__NV\w*|APU_GPU_SHIM|\basm\b|__builtin_amdgcn\w*|__shfl\w*"
    assert (
        re.findall(vendor + r"|\b(?:threadIdx|blockIdx|__syncthreads|__shared__|__device__|__global__)\b", text) == []
    )
    # A lane's id against a wave size, and shuffle distances beyond what both wave sizes halve to.
    ids = r"(?:lane_id|wave_id)\(\)\s*(?:[%&/<]\s*(?:31|32|63|64)\b|>>\s*[56]\b)"
    shuffles = r"wave_shuffle\w*\([^;]*,\s*(?:16|32)u?\)"
    assert re.findall(rf"{ids}|{shuffles}|kWaveSize\s*==\s*\d+|0xffffffffu?\s*,\s*\w+\s*\)", text) == []
