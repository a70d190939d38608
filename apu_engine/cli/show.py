"""`apu-engine show`: what a model file holds, and whether it fits, from its header alone and without a GPU.

The estimate is what loading checks: needs against the limits of each memory strategy, of this machine as /proc and /sys
show it or of a typical one (`--machine`). Without `--machine` the typical ones follow in a line each. The first part of
a file is enough where it holds the header. Nothing is mapped or allocated; the exit status is 78 where nothing fits.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apu_engine.cli.app import add, require_model, with_config
from apu_engine.config import EngineConfig
from apu_engine.errors import BudgetError
from apu_engine.options import format_size

if TYPE_CHECKING:
    from apu_engine.arch import LayerKind
    from apu_engine.engine.context import Fit
    from apu_engine.memory.budget import Estimate
    from apu_engine.memory.limits import Limits
    from apu_engine.weights.model_file import ModelFile

_GPU_STRATEGIES = ("registered", "staged")


@with_config(
    "model",
    "engine",
    "output",
    exclude=(
        *("kernels", "threads", "isa", "pin", "memory_way", "mlock", "prefetch", "graph", "precision"),
        *("queue", "max_tokens", "watchdog", "log_level", "timings"),
    ),
    model_argument=True,
)
def show(
    config: EngineConfig,
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Only the memory that loading would take, and whether it fits.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", metavar="NAME", help="Estimate for a typical machine, such as strix-halo-128; not this one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, sizes in bytes.")] = False,
) -> None:
    """Show what a model file holds and whether it fits into memory, in place and as a copy on the GPU."""
    from pathlib import Path

    from apu_engine.engine.context import fit
    from apu_engine.weights.opening import open_model

    model = open_model(Path(require_model(config, "show")), whole=False)
    limits = _limits(config, machine)
    strategies = _strategies(config.memory, limits.kind)
    refused = None
    try:
        fitted = fit(config, model, None, strategies, limits)
    except BudgetError as error:
        refused, fitted = error, fit(replace(config, force=True), model, None, strategies, limits)
    elsewhere = {} if machine or config.device == "cpu" else _elsewhere(config, fitted)
    if as_json:
        report = {} if estimate_only else {"model": _facts(model)}
        machines = {name: [_held(item) for item in found] for name, found in elsewhere.items()}
        print(json.dumps({**report, "estimate": _estimate(fitted, refused), "machines": machines}, indent=2))
    else:
        lines = [] if estimate_only else [*_model_lines(model), ""]
        lines += _estimate_lines(fitted, refused is None)
        if elsewhere:
            lines += ["", *_machine_lines(fitted.needs.tokens, elsewhere)]
        if model.missing_bytes:
            sizes = f"{format_size(sum(model.file_sizes))} of it, {format_size(model.missing_bytes)} are missing"
            lines += ["", f"{_one_line(str(model.path))} is a part of a model: {sizes}"]
        print("\n".join(lines))
    if refused is not None:
        raise refused


def _limits(config: EngineConfig, machine: str | None) -> Limits:
    from apu_engine.device import kind_and_index, open_device
    from apu_engine.memory.limits import of_machine, preset

    kind, _ = kind_and_index(config.device)
    if machine is not None:
        limits = preset(machine)
    elif kind in ("hip", "cuda"):
        with open_device(config.device)[0] as device:
            return of_machine(device=device)
    else:
        limits = of_machine()
    return replace(limits, kind="cpu", device="cpu") if config.device == "cpu" else limits


def _strategies(memory: str, kind: str) -> tuple[str, ...]:
    if kind == "cpu":
        return ("direct",)
    return _GPU_STRATEGIES if memory == "auto" else (memory,)


def _elsewhere(config: EngineConfig, fitted: Fit) -> dict[str, tuple[Estimate, ...]]:
    """The same needs on typical machines."""
    from apu_engine.memory.budget import estimates
    from apu_engine.memory.limits import PRESETS, preset

    needs, strategies = replace(fitted.needs, cached=0), _strategies(config.memory, "hip")
    return {name: estimates(strategies, needs, preset(name), config.memory_budget) for name in PRESETS}


# ---- the file


def _facts(model: ModelFile) -> dict[str, Any]:
    from apu_engine import arch
    from apu_engine.text.formats import ARCHITECTURES

    info = arch.describe(model)
    types: Counter[str] = Counter()
    for tensor in model.tensors.values():
        types[tensor.type_name] += tensor.nbytes
    return {
        "files": [str(file) for file in model.files],
        "name": str(model.metadata.get("general.name") or ""),
        "licence": str(model.metadata.get("general.license") or ""),
        "architecture": info.architecture,
        "layers": info.layers,
        "hidden_size": info.hidden_size,
        "vocabulary": info.vocabulary,
        "parameters": info.parameters,
        "context_trained": info.context_trained,
        "weight_bytes": info.weight_bytes,
        "types": dict(types.most_common()),
        "chat_template": bool(model.metadata.get("tokenizer.chat_template")),
        "built_in_format": info.architecture in ARCHITECTURES,
    }


def _model_lines(model: ModelFile) -> list[str]:
    facts = _facts(model)
    types = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in facts["types"].items())
    more = f" and {len(facts['files']) - 1} more" if len(facts["files"]) > 1 else ""
    rows = [
        ("file", facts["files"][0] + more),
        ("name", facts["name"]),
        ("licence", facts["licence"]),
        ("architecture", f"{facts['architecture']}, {facts['layers']} layers of width {facts['hidden_size']}"),
        ("parameters", f"{facts['parameters'] / 1e9:.2f} billion"),
        ("weights", f"{format_size(facts['weight_bytes'])} ({types})"),
        ("vocabulary", str(facts["vocabulary"])),
        ("context", f"{facts['context_trained']} tokens trained"),
        ("chat template", "yes" if facts["chat_template"] else "built in" if facts["built_in_format"] else "no"),
    ]
    return [f"{name:<14}{_one_line(value)}" for name, value in rows if value]


def _one_line(text: str) -> str:
    """Metadata is the file's author's: nothing in it may move the cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


# ---- the estimate


def _estimate(fitted: Fit, refused: BudgetError | None) -> dict[str, Any]:
    needs, limits = fitted.needs, fitted.limits
    return {
        "machine": limits.name,
        "device": limits.device,
        "context": fitted.context.tokens,
        "context_reason": fitted.context.reason,
        "weights": needs.weights,
        "kv": needs.kv,
        "scratch": needs.scratch,
        "pages": [
            {"window": group.window, "pages": group.page_count, "bytes": group.page_bytes_total}
            for group in fitted.groups
        ],
        "layers": [{"layers": kind.layers, "rows": [row._asdict() for row in kind.rows]} for kind in fitted.kinds],
        "fits": refused is None,
        "refusal": "" if refused is None else str(refused),
        "notices": [] if refused is not None else list(fitted.context.notices),
        "strategies": [_held(item) for item in fitted.estimates],
    }


def _held(item: Estimate) -> dict[str, Any]:
    """A strategy's needs held against a machine's limits."""
    return {
        "strategy": item.strategy,
        "fits": item.fits,
        "remedy": item.remedy,
        "pages_limit": item.pages_limit or None,
        "limits": [
            {"limit": demand.limit, "needed": demand.needed, "available": demand.available} for demand in item.demands
        ],
    }


def _estimate_lines(fitted: Fit, fits: bool) -> list[str]:
    from apu_engine.memory.budget import RUNTIME_BYTES

    needs, limits = fitted.needs, fitted.limits
    lines = [
        f"on {limits.name} ({limits.device}; {format_size(limits.memory_total)} of memory, "
        f"{format_size(limits.memory_available)} available)",
        f"  ctx {needs.tokens} ({fitted.context.reason}): weights {format_size(needs.weights)}, "
        f"KV cache {format_size(needs.kv)}, scratch {format_size(needs.scratch)}"
        + ("" if limits.kind == "cpu" else f", runtime {format_size(RUNTIME_BYTES)}"),
    ]
    lines += [f"    {line}" for line in map(_kind_line, fitted.kinds)]
    if limits.kind == "cpu" and needs.weights > limits.memory_available:
        lines.append("  the weights exceed memory: they are read from disk again and again, which is slow")
    for item in fitted.estimates:
        lines.append(f"  {item.strategy}: {'fits' if item.fits else 'does not fit'}")
        for demand in item.demands:
            mark = "" if demand.fits else "  <- too little"
            amounts = f"{format_size(demand.needed):>10} of {format_size(max(demand.available, 0)):>10}"
            lines.append(f"    {demand.limit:<34}{amounts}{mark}")
        if item.remedy:
            lines.append(f"    {item.remedy}")
    return lines + ([f"  note: {notice}" for notice in fitted.context.notices] if fits else [])


def _kind_line(kind: LayerKind) -> str:
    """ "61 layers: cache_latent 1152 bytes a token"."""
    whole = [f"{row.name} {row.token_bytes}" for row in kind.rows if not row.window]
    parts = [", ".join(whole) + " bytes a token"] if whole else []
    for window in dict.fromkeys(row.window for row in kind.rows if row.window):
        rows = ", ".join(f"{row.name} {row.token_bytes}" for row in kind.rows if row.window == window)
        parts.append(f"{rows} of the last {window}")
    return f"{kind.layers} {'layer' if kind.layers == 1 else 'layers'}: {'; '.join(parts)}"


_NAMES = {"registered": "in place", "direct": "in place", "staged": "as a copy"}


def _machine_lines(tokens: int, elsewhere: dict[str, tuple[Estimate, ...]]) -> list[str]:
    """One line for each typical machine, one column for each strategy."""
    strategies = [item.strategy for item in next(iter(elsewhere.values()))]
    lines = [f"{f'at ctx {tokens} on':<24}" + "".join(f"{_NAMES[strategy]:<22}" for strategy in strategies)]
    for machine, found in elsewhere.items():
        lines.append(f"  {machine:<22}" + "".join(f"{_verdict(item):<22}" for item in found))
    return [line.rstrip() for line in lines]


def _verdict(item: Estimate) -> str:
    if item.fits:
        return "fits"
    if item.pages_limit:
        return f"fits with {item.ttm_module}.pages_limit={item.pages_limit}"
    return f"{format_size(max(demand.needed - demand.available for demand in item.missing))} too much"


def register(app: typer.Typer) -> None:
    add(app, "show", show, short_help="Show what a model file holds and whether it fits.")
