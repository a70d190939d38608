#!/usr/bin/env python3
"""Fills a long context and checks what long contexts break: recall, repeatability, attention, selection.

    scripts/long_context_smoke.py [MODEL]      the demo model when none is named, on the device that is found
    scripts/long_context_smoke.py --ctx 32768 --device hip:0 --json report.json MODEL

With the model: a text of --ctx tokens is read in chunks; time and memory are printed against the context; then it is
asked about numbers hidden at several depths (with --no-questions, or without a tokenizer, the text is random ids), and
all is read again, of which every bit of the last logits must be the same. Without it, on plans made here:
attention of one new token over 8,100 stored ones against numpy, F32 and F16 keys and values; and the 512 largest of
32,768 logits, 32 rows at once, in exact order, equal ones by ascending id.

Speeds are what this machine did, nothing is asserted about them. Exit status: 0 all hold, 1 a check failed, 2 it could
not be run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from device_plans import DeviceArrays, planned
from numpy.typing import NDArray

from apu_engine._native import PAGE_TOKENS, Device, lib
from apu_engine.cli import standard_streams
from apu_engine.errors import ApuError, ConfigError
from apu_engine.memory.footprint import Finding
from apu_engine.options import format_size
from apu_engine.plan import LOGITS, SAMPLE, TOP, Limits, Plan
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.operands import ROPE_HALVES, Rope

if TYPE_CHECKING:
    from apu_engine import LLM
    from apu_engine.engine.pages import PageTable

Floats = NDArray[np.float32]
ROWS, VOCABULARY, LARGEST = 32, 32768, 512  # of the selection
STORED = 8100  # tokens that attention looks back over
KV_ERROR = {lib.APU_F32: 1e-5, lib.APU_F16: 2e-3}  # of the largest value
DEFAULT_CTX = 8192
ANSWER_ROOM = 64  # tokens of a question and its answer
DECODED = 8  # timed steps of one row at each length
DEPTHS = (0.1, 0.5, 0.9)
NEEDLES = (  # a question, its answer, and how the sentence ends
    (" Margaret wrote on the kitchen wall the number", " 4821", " and left."),
    (" In his drawer the lighthouse keeper found exactly", " 7356", " matches."),
    (" From the harbour to the mill the old engine burned", " 1794", " sacks of coal."),
)
DECOYS = (" 6038", " 2567")
FILLER = (
    "The river was quiet that morning and nobody crossed the bridge.",
    "A merchant counted his coins twice and closed the shop.",
    "Rain fell on the roofs of the old town until the evening.",
    "Two children carried a basket of apples up the hill.",
    "The train left the station a little later than planned.",
)


@dataclass
class Point:
    """What the context had cost when it held `tokens`."""

    tokens: int
    seconds: float  # since the beginning
    read_per_s: float  # tokens, since the point before
    decode_ms: float  # of one step of one row here
    anonymous: int
    files: int  # resident pages of the model
    device: int | None  # bytes of a GPU's memory in use


def main(argv: Sequence[str] | None = None) -> int:
    standard_streams()
    args = arguments(argv)
    try:
        report = run(args)
    except ApuError as error:
        print(f"long_context_smoke: {error}", file=sys.stderr)
        return 2
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=asdict) + "\n")
    return 0 if all(check.ok for check in report["checks"]) else 1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", help="model file, shard or folder (default: the demo model)")
    parser.add_argument("--ctx", type=int, default=0, help="tokens (default: what the model was made for, up to 8192)")
    parser.add_argument("--device", default="auto", help="cpu, hip[:N], cuda[:N] or auto (default)")
    parser.add_argument("--kv-type", default="auto", help="f32, f16, q8_0 or auto (default)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step (default %(default)s)")
    parser.add_argument("--no-questions", dest="questions", action="store_false", help="for models of random weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")
    args = parser.parse_args(argv)
    if args.ctx and args.ctx < 2 * ANSWER_ROOM:
        parser.error(f"--ctx: expected at least {2 * ANSWER_ROOM}, found {args.ctx}")
    if args.chunk < 1:
        parser.error(f"--chunk: expected at least 1, found {args.chunk}")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    from apu_engine import LLM
    from apu_engine.arch import describe
    from apu_engine.catalog import DEMO, fetch
    from apu_engine.weights.opening import open_model

    model = args.model or str(fetch(DEMO, lambda line: print(line, file=sys.stderr)))
    ctx = args.ctx or min(DEFAULT_CTX, describe(open_model(Path(model)), args.kv_type).context_trained)
    with LLM(model, device=args.device, ctx=ctx, batch=args.chunk, kv_type=args.kv_type, parallel=1) as llm:
        return report_of(llm, model, args.questions and llm.runtime.tokenizer is not None)


def report_of(llm: LLM, model: str, questions: bool) -> dict[str, Any]:
    device = llm.runtime.device
    points, checks = read_twice(llm, questions)
    checks += [attention(device, dtype) for dtype in KV_ERROR]
    checks.append(selection(device))
    return {
        "model": Path(model).name,
        "device": llm.runtime.device_line,
        "memory": llm.summary(),
        "context": llm.context,
        "points": points,
        "checks": checks,
    }


def show(report: dict[str, Any]) -> None:
    print(f"{report['model']} on {report['device']}\n{report['memory']}")
    print(f"{'tokens':>8}{'seconds':>9}{'read/s':>9}{'step ms':>9}{'anonymous':>11}{'file pages':>12}{'device':>10}")
    for p in report["points"]:
        device = "" if p.device is None else format_size(p.device)
        print(
            f"{p.tokens:8}{p.seconds:9.2f}{p.read_per_s:9.0f}{p.decode_ms:9.2f}{format_size(p.anonymous):>11}"
            f"{format_size(p.files):>12}{device:>10}"
        )
    for check in report["checks"]:
        print(("ok    " if check.ok else "FAIL  ") + check.text)


# ---------------------------------------------------------------- the model


class Reader:
    """One sequence of a loaded model's plan, driven from here: the engine is idle meanwhile."""

    def __init__(self, llm: LLM) -> None:
        from apu_engine.engine.pages import PagePool

        loaded = llm.runtime.loaded
        self.plan, self.chunk, self.llm = loaded.plan, loaded.options.max_rows, llm
        self.step = self.plan.new_step()
        self.tables: tuple[PageTable, ...] = PagePool(loaded.groups).tables()

    def forward(self, tokens: Sequence[int], position: int, wanted: Sequence[int] = ()) -> Floats:
        """(wanted, V): stores tokens at `position` on, and gives the logits after some of them."""
        for table in self.tables:
            table.cover(position, position + len(tokens))
        self.step.clear()
        row = self.step.add_sequence(tokens, position, [table.entries for table in self.tables])
        for i in wanted:
            self.step.add_output(row + i, LOGITS)
        self.plan.submit(self.step, 0, self.plan.slices["sample"][1]).wait()
        logits: Floats = self.step.logits[: len(wanted)].copy()
        return logits

    def read(self, tokens: Sequence[int], begin: int, end: int) -> None:
        for at in range(begin, end, self.chunk):
            self.forward(tokens[at : min(at + self.chunk, end)], at)

    def decode_ms(self, token: int, position: int) -> float:
        """Median over steps of one row at `position`, whose tokens are written again later."""
        times = []
        for _ in range(DECODED):
            begin = time.perf_counter()
            self.forward([token], position, [0])
            times.append(time.perf_counter() - begin)
        return 1e3 * float(np.median(times))


def read_twice(llm: LLM, questions: bool) -> tuple[list[Point], list[Finding]]:
    tokens = text_of(llm) if questions else random_ids(llm)
    last = len(tokens) - 1
    reader = Reader(llm)
    points: list[Point] = []
    free = llm.runtime.device.free_memory() if llm.runtime.device.props.kind != "cpu" else None
    begin, at = time.perf_counter(), 0
    for end in lengths(last):
        before = time.perf_counter()
        reader.read(tokens, at, end)
        seconds = time.perf_counter() - before
        rate, at = (end - at) / seconds, end
        points.append(point(llm, end, time.perf_counter() - begin, rate, reader.decode_ms(tokens[end], end), free))
    first = reader.forward(tokens[last:], last, [0])
    checks = []
    if questions:
        checks = [ask(reader, len(tokens), d, q, a) for d, (q, a, _) in zip(DEPTHS, NEEDLES, strict=True)]
    again = Reader(llm)
    again.read(tokens, 0, last)
    same = np.array_equal(first.view(np.uint32), again.forward(tokens[last:], last, [0]).view(np.uint32))
    checks.append(Finding(bool(same), f"read again: the logits after {len(tokens):,} tokens have the same bits"))
    return points, checks


def lengths(last: int) -> list[int]:
    """256, 512, ... and the last."""
    return [n for n in (256 << i for i in range(32)) if n < last] + [last]


def point(llm: LLM, tokens: int, seconds: float, rate: float, decode_ms: float, free: int | None) -> Point:
    now = llm.footprint()
    device = None if free is None else llm.runtime.loaded.kv_bytes + max(0, free - llm.runtime.device.free_memory())
    return Point(tokens, seconds, rate, decode_ms, now.anonymous, sum(file.rss for file in now.files), device)


def random_ids(llm: LLM) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, llm.vocabulary, llm.context - ANSWER_ROOM).tolist()
    return ids


def text_of(llm: LLM) -> list[int]:
    """Tokens that fill the context but for a question; NEEDLES are in it at DEPTHS. Raises ConfigError where a question
    needs more room than is left for it.
    """
    room = llm.context - ANSWER_ROOM
    longest = max(len(llm.tokenize(question + answer, add_special=False)) for question, answer, _ in NEEDLES)
    if longest >= ANSWER_ROOM:
        raise ConfigError(f"a question takes {longest} tokens of this vocabulary; use --no-questions")
    ids = llm.tokenize("These are notes about a town.")
    sentences = [llm.tokenize(" " + text, add_special=False) for text in FILLER]
    needles = [llm.tokenize("".join(parts), add_special=False) for parts in NEEDLES]
    number = 0
    for depth, needle in zip((*DEPTHS, 1.0), (*needles, []), strict=True):
        until = room * depth - (len(needle) if needle else 0)
        while len(ids) + len(sentences[number % len(FILLER)]) <= until:
            ids += sentences[number % len(FILLER)]
            number += 1
        ids += needle
    return ids


def ask(reader: Reader, position: int, depth: float, question: str, expected: str) -> Finding:
    """The hidden number must be the likeliest of all numbers after the question."""
    asked = reader.llm.tokenize(question, add_special=False)
    scores, said = {}, False
    for number in (*(answer for _, answer, _ in NEEDLES), *DECOYS):
        answer = reader.llm.tokenize(number, add_special=False)
        wanted = range(len(asked) - 1, len(asked) - 1 + len(answer))
        logits = reader.forward([*asked, *answer], position, list(wanted)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        scores[number] = sum(float(row[t] - np.log(np.exp(row).sum())) for row, t in zip(logits, answer, strict=True))
        said = said or (number == expected and [int(row.argmax()) for row in logits] == answer)
    best = max(scores, key=lambda number: scores[number])
    how = "word for word" if said else f"log-probability {scores[expected]:.2f}"
    text = f"the number hidden at {depth:.0%}:{expected} expected,{best} likeliest of {len(scores)}, {how}"
    return Finding(best == expected, text)


# ---------------------------------------------------------------- plans made here


def attention(device: Device, dtype: int) -> Finding:
    """Stores STORED random tokens by a layer's rotation and looks back over them with one more."""
    heads, kv_heads, size, width, base = 8, 2, 64, 64, 10000.0
    dims = {"D": width, "H": heads, "K": kv_heads, "d": size, "V": 512}
    rng = np.random.default_rng(3)
    table, norm = rng.standard_normal((512, width)).astype(np.float32), np.ones(width, np.float32)
    wq, wk, wv = (
        (rng.standard_normal((n * size, width)) / width**0.5).astype(np.float32) for n in (heads, kv_heads, kv_heads)
    )
    ids = rng.integers(0, len(table), STORED + 1)
    rows = 512
    pages = -(-(STORED + 1) // PAGE_TOKENS)
    with DeviceArrays(device) as arrays:
        builder = PlanBuilder(arrays, Limits(rows, 1, 1, STORED + 1, len(table)), dims)
        embedding = builder.weight(arrays.add("table", table), "V D")
        x = builder.embed(embedding)
        matrices = [
            builder.weight(arrays.add(n, w), s)
            for n, w, s in (("q", wq, "H*d D"), ("k", wk, "K*d D"), ("v", wv, "K*d D"))
        ]
        q, k, v = builder.matmul(["q", "k", "v"], x, matrices)
        builder.layer = 0
        cache = builder.kv_cache(0, 0, pages, dtype)
        builder.rope_store(q, k, v, Rope(size, ROPE_HALVES, base), cache)
        out = builder.attention(q, cache, size**-0.5)
        builder.layer = -1
        hidden = builder.gather_norm(x, builder.weight(arrays.add("norm", norm), "D"), 1e-5)
        builder.sample(builder.matmul(["logits"], hidden, [embedding])[0])
        with planned(device, builder) as plan:
            step = plan.new_step()
            own = [np.arange(pages, dtype=np.uint32)[::-1].copy()]
            for at in [*range(0, STORED, rows), STORED]:
                step.clear()
                step.add_sequence(ids[at : STORED + 1 if at == STORED else min(at + rows, STORED)], at, own)
                plan.submit(step, 0, out_op(plan, out.id) + 1).wait()
            found = plan.read(out)[0]
    expected = attended(table[ids], wq, wk, wv, heads, kv_heads, size, base, dtype == lib.APU_F16)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    name = {lib.APU_F32: "F32", lib.APU_F16: "F16"}[dtype]
    text = f"attention over {STORED:,} tokens, {name}: off by {error:.1e} of the largest value"
    return Finding(error < KV_ERROR[dtype], text)


def out_op(plan: Plan, tensor: int) -> int:
    """The op that writes a tensor."""
    return next(i for i, op in enumerate(plan.spec.ops) if tensor in op.outputs)


def attended(
    x: Floats, wq: Floats, wk: Floats, wv: Floats, heads: int, kv_heads: int, size: int, base: float, half: bool
) -> NDArray[np.float64]:
    """(H*d) of the last row, in float64; keys and values rounded to F16 where asked."""
    wide = x.astype(np.float64)

    def rotated(y: NDArray[np.float64], positions: NDArray[Any]) -> NDArray[np.float64]:
        angles = positions[:, None, None] * base ** (-2.0 * np.arange(size // 2) / size)
        low, high = y[..., : size // 2], y[..., size // 2 :]
        return np.concatenate(
            [low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)], -1
        )

    positions = np.arange(len(x))
    q = rotated((wide[-1:] @ wq.T).reshape(1, heads, size), positions[-1:])[0]
    k = rotated((wide @ wk.T).reshape(len(x), kv_heads, size), positions)
    v = (wide @ wv.T).reshape(len(x), kv_heads, size)
    if half:
        k, v = k.astype(np.float16).astype(np.float64), v.astype(np.float16).astype(np.float64)
    out = []
    for head in range(heads):
        scores = k[:, head * kv_heads // heads] @ q[head] * size**-0.5
        weights = np.exp(scores - scores.max())
        out.append(weights @ v[:, head * kv_heads // heads] / weights.sum())
    return np.concatenate(out)


def selection(device: Device) -> Finding:
    """The largest logits of many rows, in order; many of them are equal."""
    rng = np.random.default_rng(4)
    dims = {"D": 64, "V": VOCABULARY}
    table = rng.integers(-8, 9, (VOCABULARY, 64)).astype(np.float32)
    with DeviceArrays(device) as arrays:
        builder = PlanBuilder(arrays, Limits(ROWS, ROWS, ROWS, PAGE_TOKENS, VOCABULARY), dims)
        weight = builder.weight(arrays.add("table", table), "V D")
        norm = builder.weight(arrays.add("norm", np.ones(64, np.float32)), "D")
        hidden = builder.gather_norm(builder.embed(weight), norm, 1e-5)
        builder.sample(builder.matmul(["logits"], hidden, [weight])[0])
        with planned(device, builder) as plan:
            step = plan.new_step(LARGEST)
            for row in range(ROWS):
                step.add_sequence([int(rng.integers(0, VOCABULARY))], 0, [])
                step.add_output(row, SAMPLE | TOP | LOGITS, top_n=LARGEST)
            begin = time.perf_counter()
            plan.run(step)
            seconds = time.perf_counter() - begin
            wrong = sum(
                not np.array_equal(step.top_ids[row], np.argsort(-step.logits[row], kind="stable")[:LARGEST])
                for row in range(ROWS)
            )
    took = f"{1e3 * seconds:.1f} ms with them"
    text = f"the {LARGEST} largest of {VOCABULARY:,} logits, {ROWS} rows, in exact order ({took})"
    return Finding(not wrong, text + (f": {wrong} rows differ" if wrong else ""))


if __name__ == "__main__":
    sys.exit(main())
