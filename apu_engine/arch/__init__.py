"""Architectures by GGUF's `general.architecture`: from a model file to a plan on a device.

`describe` and `plan` need only the header, so context and memory can be chosen before anything is mapped;
`load` puts the same plan on a device over its weights. A new architecture is one file with `read` and
`build`, and a line here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from apu_engine._native import Device, Region, lib
from apu_engine.arch import deepseek2, deepseek4, gemma3, glm4moe, gpt_oss, llama, qwen2, qwen3, qwen3moe
from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config
from apu_engine.errors import ConfigError, ModelError
from apu_engine.plan import Limits, OfflineBinder, Plan, PlanBuilder, PlanSpec, reserve_states
from apu_engine.plan.builder import PRECISIONS
from apu_engine.plan.operands import Pages
from apu_engine.plan.spec import most_pages
from apu_engine.plan.weights import Binder
from apu_engine.weights.ggml_types import GGML_TYPES
from apu_engine.weights.model_file import ModelFile, TensorRef

ARCHITECTURES: dict[str, ModuleType] = {
    "llama": llama,
    "gemma3": gemma3,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "deepseek2": deepseek2,
    "deepseek4": deepseek4,
}
MAX_ROWS = 65536  # of one step, the native limit
KV_TYPES: dict[str, int] = {"f32": lib.APU_F32, "f16": lib.APU_F16, "q8_0": lib.APU_Q8_0}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`ctx` tokens per sequence, pages reserved for `parallel` such sequences; limits of one step.

    `kv_type` "auto" is f32 when all matrices are F32, else f16; "q8_0" needs heads of whole blocks of 32.
    `precision` "exact" keeps activations in float. `graph` lets a GPU replay steps as captured graphs.
    """

    ctx: int
    parallel: int = 1
    max_rows: int = 512
    max_sequences: int = 8
    max_outputs: int = 64
    kv_type: str = "auto"
    precision: str = "default"
    graph: bool = True

    def __post_init__(self) -> None:
        for name in ("ctx", "parallel", "max_rows", "max_sequences", "max_outputs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}", name)
        if self.max_rows > MAX_ROWS or self.max_outputs > MAX_ROWS:
            raise ConfigError(f"max_rows, max_outputs: expected at most {MAX_ROWS}", "max_rows")
        if self.kv_type not in ("auto", *KV_TYPES):
            raise ConfigError(f"kv_type: expected auto, {', '.join(KV_TYPES)}, found {self.kv_type!r}", "kv_type")
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision: expected one of {', '.join(PRECISIONS)}, found {self.precision!r}", "precision"
            )


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """States that share page tables.

    `window` 0: all tokens; `page_bytes_total`: one page id in all its states.
    """

    window: int
    page_count: int
    page_bytes_total: int


class RowSize(NamedTuple):
    """Bytes that one token takes in one state of a layer; `window` 0: for as long as the sequence lasts."""

    name: str
    token_bytes: int
    window: int


class LayerKind(NamedTuple):
    """What a token takes in each of `layers` layers."""

    layers: int
    rows: tuple[RowSize, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the header tells.

    `kv_bytes_per_token` has one entry per group, windowed groups stop growing at `windows`.
    """

    architecture: str
    context_trained: int
    layers: int
    vocabulary: int
    hidden_size: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: tuple[int, ...]
    windows: tuple[int, ...]


@dataclass(slots=True)
class LoadedModel:
    """A plan on a device with its states. Close it before the weights and the device."""

    plan: Plan
    groups: tuple[GroupSpec, ...]
    vocabulary: int
    layers: int
    hidden_size: int
    context_trained: int
    kv_bytes: int  # reserved; committed page by page as they are written
    scratch_bytes: int
    weight_bytes: int
    made_bytes: int  # of vectors that are kept in float32 beside the file, and of tensors that no file holds
    options: PlanOptions
    _regions: list[Region]

    def close(self) -> None:
        """Waits for what runs, then frees plan and states. Harmless twice."""
        self.plan.destroy()
        for region in self._regions:
            region.free()
        self._regions.clear()


def architecture(model: ModelFile) -> ModuleType:
    """The module that builds this model. Raises ModelError listing what is supported."""
    name = model.architecture
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{model.path}: architecture {name!r} is not supported; supported are {supported}", (name,))
    return ARCHITECTURES[name]


def describe(model: ModelFile, kv_type: str = "auto") -> ModelInfo:
    """The model's size and needs, from metadata alone; its tensors' shapes are checked too.

    Raises ModelError for an architecture or tensor type without support, FormatError for metadata that cannot
    be right.
    """
    config: Config = architecture(model).read(model)
    spec = plan(model, PlanOptions(ctx=1, kv_type=kv_type))
    per_token = [0] * spec.group_count
    for state in spec.states:
        per_token[state.group] += state.token_bytes
    return ModelInfo(
        architecture=model.architecture,
        context_trained=config.context,
        layers=config.layers,
        vocabulary=config.V,
        hidden_size=config.D,
        parameters=sum(tensor.elements for tensor in model.tensors.values()),
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=tuple(per_token),
        windows=config.group_windows,
    )


def plan(model: ModelFile, options: PlanOptions, binder: Binder | None = None) -> PlanSpec:
    """The plan as data; without a binder weights have file offsets for addresses.

    To list, check and estimate.
    """
    module = architecture(model)
    config: Config = module.read(model)
    sequences = min(options.max_sequences, options.max_rows)
    limits = Limits(options.max_rows, sequences, options.max_outputs, options.ctx, config.V)
    builder = PlanBuilder(binder or OfflineBinder(), limits, config.dims, options.precision)
    blocks = Blocks(model, config, builder)
    windows = config.group_windows
    dtype = KV_TYPES[resolve_kv_type(model, options.kv_type)]
    block = GGML_TYPES[dtype].elements
    if config.dims["d"] % block:
        raise ConfigError(
            f"kv_type: {options.kv_type} stores blocks of {block} elements, but the heads of {model.path} have "
            f"{config.dims['d']}; use f16",
            "kv_type",
        )
    if config.sparse and dtype not in (lib.APU_F32, lib.APU_F16):
        raise ConfigError(
            f"kv_type: {options.kv_type} is not for {model.architecture}, whose rows have 8 bits in f16; use f16",
            "kv_type",
        )
    pages = {window: Pages(i, window, page_count(options, window)) for i, window in enumerate(windows)}
    for layer in blocks.layers():
        at = pages[config.windows[layer]]
        if config.sparse:
            blocks.caches.append(deepseek4.caches(builder, config, layer, at, pages.get(0, at), dtype))
        else:
            cache = builder.latent_cache if config.latent else builder.kv_cache
            blocks.caches.append(cache(at.group, at.window, at.count, dtype))
    module.build(blocks)
    return builder.finish()


def tensors_used(model: ModelFile, options: PlanOptions) -> list[TensorRef]:
    """The tensors that a plan reads: what a device has to be given. Every complaint about the file comes here, before
    anything is given to a device.
    """
    binder = OfflineBinder()
    plan(model, options, binder)
    return list(binder.used.values())


def load(model: ModelFile, weights: Binder, device: Device, options: PlanOptions) -> LoadedModel:
    """Reserves the states and creates the plan over weights that the device can read.

    Raises what `describe` does, and NativeError when the device refuses.
    """
    spec = plan(model, options, weights)
    regions = reserve_states(device, spec)
    try:
        native = Plan(device, spec, graph=options.graph)
    except BaseException:
        for region in regions:
            region.free()
        raise
    config: Config = architecture(model).read(model)
    return LoadedModel(
        plan=native,
        groups=groups(spec),
        vocabulary=config.V,
        layers=config.layers,
        hidden_size=config.D,
        context_trained=config.context,
        kv_bytes=spec.state_bytes,
        scratch_bytes=native.scratch_bytes,
        weight_bytes=model.weight_bytes,
        made_bytes=made_bytes(model, spec),
        options=options,
        _regions=regions,
    )


def made_bytes(model: ModelFile, spec: PlanSpec) -> int:
    """Of small tensors that are kept in memory beside the files: made ones, and vectors that are not float32 at an
    address of it.
    """
    total = 0
    for tensor in spec.tensors:
        if not tensor.is_weight:
            continue
        ref = model.tensors.get(tensor.name)
        if ref is not None and ref.made is not None:
            total += ref.nbytes
        elif len(tensor.shape) == 1 and (tensor.dtype != lib.APU_F32 or tensor.segments[0].address % 4):
            total += 4 * tensor.shape[0]
    return total


def groups(spec: PlanSpec) -> tuple[GroupSpec, ...]:
    """One GroupSpec per page-table group of a plan."""
    out = []
    for group in range(spec.group_count):
        states = [state for state in spec.states if state.group == group]
        out.append(GroupSpec(states[0].window, states[0].page_count, sum(state.page_bytes for state in states)))
    return tuple(out)


def layer_kinds(spec: PlanSpec) -> tuple[LayerKind, ...]:
    """The states of a plan's layers, layers with equal ones together, in the order of the first."""
    layers: dict[int, list[RowSize]] = {}
    for state in spec.states:
        name = state.name.split(".", 2)[2]
        layers.setdefault(state.layer, []).append(RowSize(name, state.token_bytes, state.window))
    return tuple(LayerKind(count, rows) for rows, count in Counter(map(tuple, layers.values())).items())


def page_count(options: PlanOptions, window: int) -> int:
    """Pages of a group for `parallel` sequences: `ctx` tokens each, or what a window and a step touch."""
    return most_pages(options.ctx, window, options.max_rows) * options.parallel


def resolve_kv_type(model: ModelFile, kv_type: str) -> str:
    """The type in use: `kv_type` itself, or what "auto" takes for this model."""
    if kv_type != "auto":
        return kv_type
    matrices = {tensor.dtype for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return "f32" if matrices <= {lib.APU_F32, lib.APU_I32} else "f16"


__all__ = [
    "ARCHITECTURES",
    "GroupSpec",
    "LayerKind",
    "LoadedModel",
    "ModelInfo",
    "PlanOptions",
    "describe",
    "groups",
    "layer_kinds",
    "load",
    "made_bytes",
    "page_count",
    "plan",
    "resolve_kv_type",
    "tensors_used",
]
