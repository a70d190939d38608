#!/usr/bin/env python3
"""Measures the kernels of a GPU by themselves, as shares of what plain reads of its memory reach in the same run.

    scripts/gpu_bench.py                      the first GPU that opens, AMD or NVIDIA
    scripts/gpu_bench.py --device cuda:1      another; kernels for it must be built (./build.sh --targets ...)
    scripts/gpu_bench.py --quick              three types, two shapes, less memory
    scripts/gpu_bench.py --json report.json   the same numbers, to keep

Everything goes through libapu, its driver and its modules. Matvec: one row by matrices of every type; a graph holds
one product for each of so many copies of the matrix that they fill more than a GiB, so that no cache helps. GEMM: 512
rows, in TFLOP/s, beside torch's bf16 product where torch sees the GPU. Attention: one new token for each of 8
sequences over long contexts, as GB/s of keys and values read; what a step costs around its ops is measured and taken
off. The ops that choose and store compressed rows: one row. Streams and routing: one row, and many. docs/kernels.md has
the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from device_plans import DeviceArrays, planned
from gpu_bench_latent import latent_ops
from gpu_bench_sparse import CONTEXTS as SPARSE_CONTEXTS
from gpu_bench_sparse import sparse_ops
from gpu_bench_streams import ROWS as STREAM_ROWS
from gpu_bench_streams import stream_ops

from apu_engine._native import PAGE_TOKENS, Device, Region
from apu_engine.device import open_device
from apu_engine.errors import ApuError
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.plan import Plan
from apu_engine.plan.spec import Limits
from apu_engine.weights.ggml_types import GGML_TYPES

GIB = 1 << 30
ALIGN = 256
ROTATED = int(1.1 * GIB)  # bytes that a timed graph reads, at least
TYPES = (
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "MXFP4", "IQ4_NL",
    "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4", "F32",
)  # fmt: skip
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (128256, 4096))  # N, K
GEMM_TYPES = ("Q4_0", "Q4_K", "Q8_0", "BF16", "F16")
GEMM = (512, 14336, 4096)  # T, N, K
CONTEXTS = (8192, 32768)
SEQUENCES, HEADS, KV_HEADS, HEAD_SIZE = 8, 32, 8, 128
QUICK_TYPES = ("Q8_0", "Q4_0", "Q4_K")


@dataclass
class Figure:
    """One measurement.

    `share` is of a plain read of as many bytes that is launched and timed the same way, or of torch's product (gemm);
    `peak` of one plain read of some GiB.
    """

    kernel: str
    type: str
    shape: str
    microseconds: float
    rate: float
    unit: str
    share: float | None = None
    peak: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        device = open_gpu(args.device)
    except ApuError as error:
        print(f"gpu_bench: {error}", file=sys.stderr)
        return 2
    with device:
        report = measure(device, args.quick, args.types, args.attention)
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="hip[:N], cuda[:N] or auto (default)")
    parser.add_argument("--quick", action="store_true", help="few types, two shapes")
    parser.add_argument("--types", type=lambda text: text.upper().split(","), help="matvec types, comma separated")
    parser.add_argument("--no-attention", dest="attention", action="store_false", help="leave attention out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON too")
    return parser.parse_args(argv)


def open_gpu(name: str = "auto") -> Device:
    """The named device, or the first GPU that opens. Raises ApuError with what each kind said."""
    reasons = []
    for kind in ("hip", "cuda") if name == "auto" else (name,):
        try:
            return open_device(kind)[0]
        except ApuError as error:
            reasons.append(str(error))
    raise ApuError("; ".join(reasons))


def measure(device: Device, quick: bool = False, types: Sequence[str] | None = None, attention: bool = True) -> Any:
    """All figures as plain data."""
    read = plain_read(device, 1 if quick else 3)
    figures = matvecs(device, read, types or (QUICK_TYPES if quick else TYPES), SHAPES[:2] if quick else SHAPES)
    figures += gemms(device, GEMM_TYPES[1:3] if quick else GEMM_TYPES)
    for context in (CONTEXTS[:1] if quick else CONTEXTS) if attention else ():
        for kv in ("F16",) if quick else ("F16", "Q8_0"):
            figures.append(decode_attention(device, read, context, kv))
    for m in stream_ops(device, _timed, STREAM_ROWS[:1] if quick else STREAM_ROWS):
        figures.append(figure(m.kernel, "F16", m.shape, m.nbytes, m.seconds, same_read(device, m.nbytes), read))
    if attention:
        for m in sparse_ops(device, _timed, SPARSE_CONTEXTS[:1] if quick else SPARSE_CONTEXTS):
            figures.append(Figure(m.kernel, "F16", m.shape, m.seconds * 1e6, m.nbytes / m.seconds / 1e9, "GB/s"))
        figures += latents(device, read, quick)
    props = device.props
    return {
        "device": {"kind": props.kind, "name": props.name, "arch": props.arch, "driver": props.driver_version},
        "plain_read_gb_per_s": round(read / 1e9, 1),
        "figures": [asdict(figure) for figure in figures],
    }


def print_report(report: Any) -> None:
    device = report["device"]
    print(f"{device['kind']} {device['name']} ({device['arch']}); plain read {report['plain_read_gb_per_s']:.0f} GB/s")
    print(f"{'kernel':11}{'type':9}{'shape':>18}{'us':>10}{'rate':>17}{'share':>7}{'peak':>7}")
    for f in report["figures"]:
        share, peak = ("" if f[part] is None else f"{f[part]:.2f}" for part in ("share", "peak"))
        rate = f"{f['rate']:.0f} {f['unit']}"
        print(f"{f['kernel']:11}{f['type']:9}{f['shape']:>18}{f['microseconds']:10.1f}{rate:>17}{share:>7}{peak:>7}")


def plain_read(device: Device, gib: int) -> float:
    """Bytes per second."""
    region = Region.alloc(device, gib * GIB)
    try:
        return device.read_rate(region.address, gib * GIB, 5)
    finally:
        region.free()


def same_read(device: Device, nbytes: int) -> float:
    """Seconds of a plain read of as many bytes, launched as the products are."""
    row = 4 * 4096
    data = np.zeros((max(nbytes // row, 1), row), np.uint8)
    return device.read_time(data, copies=max(2, -(-ROTATED // data.nbytes)), passes=7) * nbytes / data.nbytes


def figure(kernel: str, name: str, shape: str, nbytes: int, seconds: float, same: float, read: float) -> Figure:
    rate = nbytes / seconds
    share, peak = round(same / seconds, 3), round(rate / read, 3)
    return Figure(kernel, name, shape, seconds * 1e6, rate / 1e9, "GB/s", share, peak)


def type_number(name: str) -> int:
    for number, block in GGML_TYPES.items():
        if block.name == name:
            return number
    raise ApuError(f"type {name!r}: expected one of {', '.join(TYPES)}")


def random_weights(dtype: int, n: int, k: int) -> Any:
    """(N, row bytes) of blocks whose scales, in whatever format, are small positive numbers."""
    block = GGML_TYPES[dtype]
    row = k // block.elements * block.nbytes
    some = np.random.default_rng(dtype).integers(1, 60, min(n * row, 1 << 22), dtype=np.uint8)
    out = np.empty(n * row + ALIGN, np.uint8)
    out = out[-out.ctypes.data % ALIGN :][: n * row]  # as files align tensors, or better
    for begin in range(0, len(out), len(some)):
        part = out[begin : begin + len(some)]
        part[:] = some[: len(part)]
    return out.reshape(n, row)


def matvecs(device: Device, read: float, types: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[Figure]:
    out = []
    for name in types:
        for n, k in shapes:
            weights = random_weights(type_number(name), n, k)
            x = np.random.default_rng(k).standard_normal((1, k)).astype(np.float32)
            copies = max(2, -(-ROTATED // weights.nbytes))
            seconds = device.matmul_time(type_number(name), weights, x, copies=copies, passes=7)
            out.append(
                figure("matvec", name, f"{n}x{k}", weights.nbytes, seconds, same_read(device, weights.nbytes), read)
            )
    return out


def gemms(device: Device, types: Sequence[str]) -> list[Figure]:
    rows, n, k = GEMM
    flops = 2.0 * rows * n * k
    reference = torch_matmul(device.props.kind)
    shape = f"{rows}x{n}x{k}"
    out = []
    if reference:
        out.append(Figure("gemm", "torch", shape, reference * 1e6, flops / reference / 1e12, "TFLOP/s"))
    for name in types:
        weights = random_weights(type_number(name), n, k)
        x = np.random.default_rng(k).standard_normal((rows, k)).astype(np.float32)
        copies = max(2, -(-(ROTATED // 4) // weights.nbytes))
        seconds = device.matmul_time(type_number(name), weights, x, copies=copies, passes=7)
        share = round(reference / seconds, 3) if reference else None
        out.append(Figure("gemm", name, shape, seconds * 1e6, flops / seconds / 1e12, "TFLOP/s", share))
    return out


def latents(device: Device, read: float, quick: bool) -> list[Figure]:
    """Few rows as shares of a plain read, many as shares of torch's product."""
    reference, peak = torch_matmul(device.props.kind), None
    if reference:
        rows, n, k = GEMM
        peak = 2.0 * rows * n * k / reference
    out = []
    for m in latent_ops(device, _timed, quick):
        if m.rows <= 8:
            out.append(figure(m.kernel, m.type, m.shape, m.nbytes, m.seconds, same_read(device, m.nbytes), read))
        else:
            rate = m.flops / m.seconds
            share = round(rate / peak, 3) if peak else None
            out.append(Figure(m.kernel, m.type, m.shape, m.seconds * 1e6, rate / 1e12, "TFLOP/s", share))
    return out


def torch_matmul(kind: str) -> float | None:
    """Seconds of torch's bf16 product of the same size, its weights rotated as ours are; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or (torch.version.hip is not None) != (kind == "hip"):
        return None
    rows, n, k = GEMM
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for w in weights * 8:
            torch.matmul(x, w.t())
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / 32)
    return float(np.median(times[2:]))


def decode_attention(device: Device, read: float, context: int, kv: str) -> Figure:
    """One row of each sequence at the end of its context; enough layers that their caches fill some GiB."""
    dims = {"D": HEADS * HEAD_SIZE, "H": HEADS, "K": KV_HEADS, "d": HEAD_SIZE, "V": SEQUENCES}
    pages = SEQUENCES * context // PAGE_TOKENS
    table = np.random.default_rng(1).standard_normal((SEQUENCES, dims["D"])).astype(np.float32)
    with DeviceArrays(device) as arrays:
        builder = PlanBuilder(arrays, Limits(SEQUENCES, SEQUENCES, SEQUENCES, context, SEQUENCES), dims)
        weight = builder.weight(arrays.add("table", table), "V D")
        norm = builder.weight(arrays.add("norm", table[0]), "D")
        q = builder.embed(weight)
        layers = 0
        dtype = type_number(kv)
        while layers < 4 or layers * 2 * pages * _page_bytes(dtype) < 4 * GIB:
            if (layers + 1) * 2 * pages * _page_bytes(dtype) > device.props.memory_bytes // 2:
                break
            builder.layer = layers
            builder.attention(q, builder.kv_cache(0, 0, pages, dtype), HEAD_SIZE**-0.5)
            layers += 1
        if layers < 2:
            raise ApuError(f"attention over {context} tokens: the device's memory is too small")
        builder.layer = -1
        builder.sample(builder.matmul(["logits"], builder.gather_norm(q, norm, 1e-5), [weight])[0])
        with planned(device, builder) as plan:
            step = plan.new_step()
            for s in range(SEQUENCES):
                own = np.arange(s, pages, SEQUENCES)
                step.add_sequence([s], context - 1, [own])
            _timed(plan, step, 0, 1)
            few, many = layers - layers // 2, layers
            seconds = (_timed(plan, step, 1, 1 + many) - _timed(plan, step, 1, 1 + few)) / (many - few)
    nbytes = 2 * pages * _page_bytes(dtype)
    return figure("attention", kv, f"{SEQUENCES} x {context}", nbytes, seconds, same_read(device, nbytes), read)


def _page_bytes(dtype: int) -> int:
    block = GGML_TYPES[dtype]
    return PAGE_TOKENS * KV_HEADS * HEAD_SIZE // block.elements * block.nbytes


def _timed(plan: Plan, step: Any, first: int, last: int) -> float:
    """Seconds of a slice with its graph captured, the median of several."""
    times = []
    for _ in range(13):
        begin = time.perf_counter()
        plan.submit(step, first, last).wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[3:]))


if __name__ == "__main__":
    sys.exit(main())
