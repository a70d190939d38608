"""Reads what the compiler made of kernels for AMD: instructions and loops from the assembly that build_kernels.py
keeps, registers, LDS and scratch from the code object's own notes. As a script it prints what the main loops cost:

    .venv/bin/python tests/gpu/isa.py gfx1151

A matvec's cost is counted in its main loop, the innermost one with the most dot products: VALU operations of a lane
(a dual-issued pair is two) on the way through one iteration, divided by the weight bytes of a lane. The way is that of
a wave whose lanes all work: branches for "no lane is active" are not taken; where the code otherwise splits (aligned
rows or not, one segment or several) it is the one with the most dot products, then the fewest VALU operations.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOTS = ("v_dot", "v_wmma", "v_mfma")  # what a main loop is for


@dataclass
class Block:
    operations: list[str] = field(default_factory=list)  # mnemonics; of a dual-issued pair both
    next: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)  # of `next`, those taken when no lane is active

    def count(self, *prefixes: str) -> int:
        return sum(op.startswith(prefixes) for op in self.operations)


@dataclass
class Code:
    name: str
    blocks: list[Block]

    @property
    def operations(self) -> list[str]:
        return [op for block in self.blocks for op in block.operations]

    def loops(self) -> dict[int, set[int]]:
        """Natural loops: the blocks of each by its header."""
        state = [0] * len(self.blocks)
        back: list[tuple[int, int]] = []
        stack = [(0, iter(self.blocks[0].next))]
        state[0] = 1
        while stack:
            at, rest = stack[-1]
            for to in rest:
                if state[to] == 1:
                    back.append((at, to))
                elif state[to] == 0:
                    state[to] = 1
                    stack.append((to, iter(self.blocks[to].next)))
                    break
            else:
                state[at] = 2
                stack.pop()
        before: list[list[int]] = [[] for _ in self.blocks]
        for i, block in enumerate(self.blocks):
            for to in block.next:
                before[to].append(i)
        loops: dict[int, set[int]] = {}
        for tail, header in back:
            body = loops.setdefault(header, {header})
            work = [tail]
            while work:
                at = work.pop()
                if at not in body:
                    body.add(at)
                    work += before[at]
        return loops

    def main_loop(self) -> list[str]:
        """Operations on the way through one iteration of the main loop."""
        loops = self.loops()
        if not loops:
            return []
        dots = {header: sum(self.blocks[b].count(*DOTS) for b in loop) for header, loop in loops.items()}
        for header, loop in loops.items():  # only innermost ones: those around them prepare what they multiply with
            if any(dots[other] and loops[other] < loop for other in loops):
                dots[header] = 0
        most = max(dots.values())
        header, loop = min((item for item in loops.items() if dots[item[0]] == most), key=lambda item: len(item[1]))
        return [op for b in self._way(loop, header) for op in self.blocks[b].operations]

    def _way(self, loop: set[int], header: int) -> list[int]:
        return self._best_way(loop, header, idle=False) or self._best_way(loop, header, idle=True)

    def _best_way(self, loop: set[int], header: int, idle: bool) -> list[int]:
        """Blocks from the header back to it; `idle`: also by branches that are taken when no lane is active."""

        def after(at: int) -> list[int]:
            block = self.blocks[at]
            return [to for to in block.next if to in loop and (idle or to not in block.idle)]

        best: dict[
            int, tuple[int, int, int]
        ] = {}  # less the dots, VALU operations, next block; of blocks that get there
        edges: dict[int, list[int]] = {header: []}
        stack = [(header, iter(after(header)))]
        on_stack = {header}
        while stack:  # depth first; edges back to a block on the stack begin another iteration, here or inside
            at, rest = stack[-1]
            for to in rest:
                if to in on_stack:
                    continue
                edges[at].append(to)
                if to not in edges:
                    edges[to] = []
                    on_stack.add(to)
                    stack.append((to, iter(after(to))))
                    break
            else:
                stack.pop()
                on_stack.discard(at)
                ways = [(best[to][0], best[to][1], to) for to in edges[at] if to in best]
                if header in after(at):
                    ways.append((0, 0, -1))
                if ways:
                    dots, valu, to = min(ways)
                    block = self.blocks[at]
                    best[at] = (dots - block.count(*DOTS), valu + block.count("v_"), to)
        way, at = [], header
        while at in best:
            way.append(at)
            at = best[at][2]
        return way


def parse_assembly(text: str) -> dict[str, Code]:
    """Kernels of an assembly file by name."""
    codes: dict[str, Code] = {}
    names = set(re.findall(r"^\s*\.amdhsa_kernel (\w+)", text, re.M))
    lines = iter(text.splitlines())
    for line in lines:
        if (m := re.match(r"(\w+):", line)) and m[1] in names:
            codes[m[1]] = _parse_kernel(m[1], lines)
    return codes


def _parse_kernel(name: str, lines: Iterable[str]) -> Code:
    blocks, labels = [Block()], {}
    jumps: list[tuple[int, str, bool]] = []
    falls: list[tuple[int, bool]] = []  # (block, idle) that go on to the next one
    for line in lines:
        text = line.split(";")[0].strip()
        if line.strip().startswith("; %bb."):
            text = ""
            new = True
        else:
            new = False
        if m := re.match(r"(\.\w+):", text):
            labels[m[1]] = len(blocks)
            new = True
        if new:
            falls.append((len(blocks) - 1, False))
            blocks.append(Block())
            continue
        if text.startswith(".section") or line.startswith((".Lfunc_end",)):
            break
        if not text or text.startswith("."):
            continue
        operation = text.split()[0]
        blocks[-1].operations += [operation] if "::" not in text else [part.split()[0] for part in text.split("::")]
        if operation.startswith(("s_cbranch", "s_branch")):
            idle, busy = operation.endswith("execz"), operation.endswith("execnz")
            jumps.append((len(blocks) - 1, text.split()[1], idle))
            if operation.startswith("s_cbranch"):
                falls.append((len(blocks) - 1, busy))
            blocks.append(Block())
        elif operation in ("s_endpgm", "s_setpc_b64"):
            blocks.append(Block())
    for at, label, idle in jumps:
        blocks[at].next.append(labels[label])
        if idle:
            blocks[at].idle.append(labels[label])
    jumped = {at for at, _, _ in jumps}
    for at, idle in falls:
        ended = at in jumped and (at, idle) not in {(a, i) for a, i in falls if a in jumped}
        if at + 1 < len(blocks) and not ended and at + 1 not in blocks[at].next:
            blocks[at].next.append(at + 1)
            if idle:
                blocks[at].idle.append(at + 1)
    return Code(name, blocks)


# The notes of a code object


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One value of MessagePack, as far as code objects use it."""
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    fixed = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if tag in fixed:
        return struct.unpack_from(fixed[tag], data, at)[0], at + struct.calcsize(fixed[tag])
    sizes = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}
    if tag in sizes:
        size = struct.unpack_from(sizes[tag], data, at)[0]
        at += struct.calcsize(sizes[tag])
    else:
        size = tag & (0x1F if 0xA0 <= tag < 0xC0 else 0x0F)
    if 0xA0 <= tag < 0xC0 or tag in (0xD9, 0xDA, 0xDB):
        return data[at : at + size].decode(), at + size
    if 0x90 <= tag < 0xA0 or tag in (0xDC, 0xDD):
        items = []
        for _ in range(size):
            item, at = _unpack(data, at)
            items.append(item)
        return items, at
    if 0x80 <= tag < 0x90 or tag in (0xDE, 0xDF):
        pairs = {}
        for _ in range(size):
            key, at = _unpack(data, at)
            pairs[key], at = _unpack(data, at)
        return pairs, at
    raise ValueError(f"MessagePack tag {tag:#x}")


def notes(path: Path) -> dict[str, Any]:
    """The metadata of a code object: amdhsa.target, amdhsa.version and amdhsa.kernels."""
    data = path.read_bytes()
    if data[:4] != b"\x7fELF":
        raise ValueError(f"{path} is no ELF file")
    offset, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    for i in range(count):
        kind, _, at, _, _, nbytes = struct.unpack_from("<IIQQQQ", data, offset + i * size)
        if kind != 4:  # PT_NOTE
            continue
        end = at + nbytes
        while at + 12 <= end:
            name_size, data_size, note = struct.unpack_from("<III", data, at)
            body = at + 12 + (name_size + 3) // 4 * 4
            if note == 32 and data[at + 12 : at + 12 + 6] == b"AMDGPU":
                return dict(_unpack(data[body : body + data_size], 0)[0])
            at = body + (data_size + 3) // 4 * 4
    raise ValueError(f"{path} has no AMDGPU metadata")


# Matvec

BLOCKS = {  # elements and bytes of a block, by the name in kernels
    **{"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)},
    **{"q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24)},
    **{"q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210)},
    **{"iq2_xxs": (256, 66), "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17)},
}

GEMM_UNIT = {"small": 32, "large": 16}  # weights that a thread unpacks in a step: GemmShape of gemm_args.h


@dataclass
class MatvecCost:
    dots: int  # of a lane in one iteration
    valu: int
    weight_bytes: float

    @property
    def per_byte(self) -> float:
        return self.valu / self.weight_bytes


def matvec_cost(code: Code, kind: str, rows: int = 1) -> MatvecCost:
    """Of a quantised type. In one iteration a lane takes 64 columns of a set of two rows (matvec_args.h), or of one
    where `rows` of activations leave no registers for two; four weights to a dot product, and some types need more."""
    way = code.main_loop()
    dots = sum(op.startswith(DOTS) for op in way)
    elements, nbytes = BLOCKS[kind]
    weights = 128 if dots * 4 / rows >= 128 else 64
    return MatvecCost(dots, sum(op.startswith("v_") for op in way), weights * nbytes / elements)


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    for target in sys.argv[1:] or ["gfx1151"]:
        for file in sorted((root / "build/gpu" / target).glob("*.s")):
            for name, code in parse_assembly(file.read_text()).items():
                m = re.fullmatch(r"(?:expert_)?matvec_(\w+?)(?:_r(\d))?", name)
                if m and m[1] in BLOCKS:
                    cost = matvec_cost(code, m[1], int(m[2] or 1))
                    if cost.dots:
                        print(f"{target} {name}: {cost.dots} dots, {cost.valu} VALU, {cost.per_byte:.2f} a byte")
                m = re.fullmatch(r"(?:expert_)?gemm_(\w+)_(small|large)", name)
                if m and m[1] in BLOCKS:
                    way = code.main_loop()
                    tiles, valu = (sum(op.startswith(p) for op in way) for p in (("v_wmma", "v_mfma"), "v_"))
                    elements, nbytes = BLOCKS[m[1]]
                    unpacked = 32 * GEMM_UNIT[m[2]] * nbytes / elements  # bytes of a wave32 in a step
                    print(f"{target} {name}: {tiles} WMMA, {valu} VALU, {tiles / unpacked:.3f} WMMA an unpacked byte")


if __name__ == "__main__":
    main()
