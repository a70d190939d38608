"""How long the context is, and which memory strategies have room for it: decided before anything is mapped.

A context that was asked for is never shortened: above the trained length it is a notice, above memory it is refused.
Else it is the least of what the model was trained for, 32768 and what fits. On the CPU, weights are file pages: they
count in full, but a file larger than memory still runs, so at least a quarter of what is free is left to the KV cache,
or all of it to the shortest context.
On a GPU, a strategy fits when all its limits hold; the first that has room for the whole context decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from apu_engine._native import PAGE_TOKENS
from apu_engine.errors import ApuError, BudgetError
from apu_engine.memory.budget import RUNTIME_BYTES, Estimate, Needs, estimates
from apu_engine.memory.limits import Limits, of_machine
from apu_engine.options import format_size

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.arch import GroupSpec, LayerKind, PlanOptions
    from apu_engine.config import EngineConfig
    from apu_engine.weights.model_file import ModelFile

MOST = 32768
LEAST = 512  # a chosen context is never shorter; below this the machine is full
SHARE = 0.9  # of the memory that is left, for KV cache and scratch
_STEP = 64 << 20  # grain of the size of a file that would fit
MAX_OUTPUTS = 32  # output rows of a step: what bounds the logits scratch, and the speed of logits(ids)


@dataclass(frozen=True, slots=True)
class ContextChoice:
    """`tokens`, why it is not longer, and notices for the user."""

    tokens: int
    reason: str
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model will get: its context, limits of its plan, and the strategies that have room for both.

    `strategies` are those of the candidates that fit, in their order (all of them with `force`); `refused` says why
    each other one does not. `groups` are the pages of the KV cache, `kinds` what tokens take in the layers.
    """

    context: ContextChoice
    options: PlanOptions
    groups: tuple[GroupSpec, ...]
    kinds: tuple[LayerKind, ...]
    needs: Needs
    limits: Limits
    estimates: tuple[Estimate, ...]
    strategies: tuple[str, ...]

    @property
    def refused(self) -> dict[str, str]:
        return {item.strategy: item.reason for item in self.estimates if not item.fits}


class Sizes:
    """What a model's plan needs at any context length, from its header alone."""

    def __init__(self, config: EngineConfig, model: ModelFile) -> None:
        from apu_engine import arch

        self.config, self.model = config, model
        self.trained: int = arch.architecture(model).read(model).context
        self.weights = model.weight_bytes
        spec = arch.plan(model, self.options(1))
        self.scratch = spec.arena_bytes + arch.made_bytes(model, spec)
        self.kinds = arch.layer_kinds(spec)
        self._groups = arch.groups(spec)

    def options(self, tokens: int) -> PlanOptions:
        """Limits of a plan for this context."""
        from apu_engine import arch

        config = self.config
        return arch.PlanOptions(
            ctx=tokens,
            parallel=config.parallel,
            max_rows=max(config.batch, config.parallel),
            max_sequences=config.parallel,
            max_outputs=max(MAX_OUTPUTS, config.parallel),
            kv_type=config.kv_type,
            precision=config.precision,
            graph=config.graph,
        )

    def groups(self, tokens: int) -> tuple[GroupSpec, ...]:
        """Pages of the KV cache for all sequences."""
        from apu_engine import arch

        options = self.options(tokens)
        return tuple(replace(group, page_count=arch.page_count(options, group.window)) for group in self._groups)

    def kv(self, tokens: int) -> int:
        """Bytes of the KV cache for all sequences."""
        return sum(group.page_count * group.page_bytes_total for group in self.groups(tokens))

    def fit(
        self,
        context: ContextChoice,
        limits: Limits,
        found: tuple[Estimate, ...],
        strategies: tuple[str, ...],
        cached: int = 0,
    ) -> Fit:
        tokens = context.tokens
        needs = self.needs(tokens, cached)
        return Fit(context, self.options(tokens), self.groups(tokens), self.kinds, needs, limits, found, strategies)

    def needs(self, tokens: int, cached: int = 0) -> Needs:
        return Needs(self.weights, self.kv(tokens), self.scratch, tokens, cached)


def fit(
    config: EngineConfig,
    model: ModelFile,
    device: Device | None = None,
    strategies: Sequence[str] = ("direct",),
    limits: Limits | None = None,
    sizes: Sizes | None = None,
) -> Fit:
    """The context and the strategies for a model on a device. `strategies` are the candidates, best first.

    Without a device and `limits` it is the CPU's; `sizes` saves reading the header again. Raises BudgetError with
    needs, limits and remedies when nothing fits and `config.force` is off.
    """
    sizes = sizes or Sizes(config, model)
    if limits is None:
        limits = of_machine(device=device) if device is not None else replace(of_machine(), kind="cpu", device="cpu")
    if limits.kind == "cpu":
        available = min(
            bound
            for bound in (limits.memory_available, limits.cgroup_available, config.memory_budget or None)
            if bound is not None
        )
        context = choose_context(
            config.ctx,
            sizes.trained,
            lambda ctx: sizes.kv(ctx) + sizes.scratch,
            available,
            sizes.weights,
            budget=bool(config.memory_budget) and available == config.memory_budget,
            force=config.force,
        )
        found = estimates(strategies, sizes.needs(context.tokens), limits, config.memory_budget)
        return sizes.fit(context, limits, found, tuple(strategies))
    return _on_a_gpu(config, sizes, strategies, limits)


def _on_a_gpu(config: EngineConfig, sizes: Sizes, strategies: Sequence[str], limits: Limits) -> Fit:
    most = config.ctx or min(sizes.trained, MOST)
    share = 1.0 if config.ctx else SHARE
    cached = 0

    def at(tokens: int) -> tuple[Estimate, ...]:
        return estimates(strategies, sizes.needs(tokens, cached), limits, config.memory_budget)

    def fits(tokens: int) -> bool:
        return any(_has_room(item, share) for item in at(tokens))

    if not fits(most):
        cached = _cached_bytes(sizes.model)  # looked up only where the answer matters: it takes a while
    tokens, reason = most, "as asked" if config.ctx else "trained length" if most == sizes.trained else "default limit"
    lies = f"{limits.device}: the runtime reports more free memory than there is, so its figure is left out"
    notices = [lies] if limits.driver_lies else []
    if not fits(most):
        longest = _longest(most, fits)
        if not config.ctx and longest >= min(LEAST, most):
            tokens, reason = longest, "what fits in memory"
        elif not config.force:
            raise BudgetError(_gpu_refusal(config, sizes, strategies, limits, cached))
        else:
            notices.append(f"--force: {'; '.join(f'{item.strategy}: {item.reason}' for item in at(most))}")
    if config.ctx > sizes.trained:
        notices.append(_above_trained(config.ctx, sizes.trained))
    found = at(tokens)
    chosen = tuple(item.strategy for item in found if item.fits) or tuple(strategies)
    return sizes.fit(ContextChoice(tokens, reason, tuple(notices)), limits, found, chosen, cached)


def _has_room(item: Estimate, share: float) -> bool:
    return all(demand.growing <= demand.room * share if demand.growing else demand.fits for demand in item.demands)


def _gpu_refusal(config: EngineConfig, sizes: Sizes, strategies: Sequence[str], limits: Limits, cached: int) -> str:
    """What is needed, what there is, and what exactly would help, in one line."""
    tokens = config.ctx or min(sizes.trained, LEAST)
    needs = sizes.needs(tokens, cached)
    found = estimates(strategies, needs, limits, config.memory_budget)
    slots = f" x {config.parallel}" if config.parallel > 1 else ""
    parts = [
        f"{sizes.model.path} does not fit on {limits.device}: weights {format_size(needs.weights)}, "
        f"KV cache {format_size(needs.kv)} (ctx {tokens}{slots}), scratch {format_size(needs.scratch)}, "
        f"runtime {format_size(RUNTIME_BYTES)}",
        *(f"{item.strategy}: {'; '.join(map(str, item.missing))}" for item in found),
    ]
    return f"{'. '.join(parts)}. {_capital(', or '.join(_remedies(config, sizes, found, limits, cached)))}"


def _remedies(config: EngineConfig, sizes: Sizes, found: Sequence[Estimate], limits: Limits, cached: int) -> list[str]:
    strategies = [item.strategy for item in found]
    tokens = config.ctx or min(sizes.trained, LEAST)

    def fitting(changed: EngineConfig, names: Sequence[str]) -> Callable[[int], bool]:
        other = Sizes(changed, sizes.model)
        return lambda ctx: any(
            item.fits for item in estimates(names, other.needs(ctx, cached), limits, changed.memory_budget)
        )

    remedies = [item.remedy for item in found if item.remedy]
    if config.memory == "staged" and fitting(config, ["registered"])(tokens):
        remedies.append("use --memory auto, which reads the file in place")
    longest = _longest(tokens, fitting(config, strategies))
    if longest:
        remedies.append(f"use --ctx {longest}")
    for kv_type in ("f16", "q8_0"):
        try:
            if fitting(replace(config, kv_type=kv_type), strategies)(tokens):
                remedies.append(f"use --kv-type {kv_type}")
                break
        except ApuError:  # heads that this type cannot hold
            continue
    if config.parallel > 1 and fitting(replace(config, parallel=1), strategies)(tokens):
        remedies.append("use --parallel 1")
    smaller = _largest(
        sizes.weights // _STEP,
        lambda steps: any(
            item.fits
            for item in estimates(
                strategies, replace(sizes.needs(tokens), weights=steps * _STEP), limits, config.memory_budget
            )
        ),
    )
    if smaller:
        remedies.append(f"use a file of at most {format_size(smaller * _STEP)}")
    short = {demand.limit for item in found for demand in item.missing}
    if "memory_budget" in short:
        remedies.append("raise --memory-budget")
    if "what the memory cgroup leaves" in short:
        remedies.append("raise the container's or the unit's memory limit")
    most = limits.memory_total - limits.headroom
    if any(demand.limit == "memory available" and demand.needed <= most for item in found for demand in item.missing):
        remedies.append("end other programs")
    return [*remedies, "use --device cpu, which reads the file in place", "try anyway with --force"]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cached_bytes(model: ModelFile) -> int:
    from apu_engine.memory.mapping import Mapping

    total = 0
    for file, size in zip(model.files, model.file_sizes, strict=True):
        with Mapping.open(file, size) as mapping:
            total += mapping.resident_bytes() or 0
    return total


def choose_context(
    requested: int,
    trained: int,
    need: Callable[[int], int],
    available: int,
    weight_bytes: int,
    *,
    budget: bool = False,
    force: bool = False,
) -> ContextChoice:
    """The context for a model on the CPU. `need(ctx)` is KV cache plus scratch in bytes; `budget` says that what is
    available was set by the user; `force` turns refusals into notices.

    Raises BudgetError with the numbers and remedies when what was asked for, or the least context, does not fit.
    """
    if requested:
        notices = []
        if need(requested) > available:
            problem = _cpu_refusal(requested, need, available, budget)
            if not force:
                raise BudgetError(problem)
            notices.append(f"--force: {problem}")
        elif need(requested) + weight_bytes > available:
            notices.append(
                f"weights ({format_size(weight_bytes)}) and ctx {requested} ({format_size(need(requested))}) exceed "
                f"the memory available ({format_size(available)}); weights will be read from disk again and again"
            )
        if requested > trained:
            notices.append(_above_trained(requested, trained))
        return ContextChoice(requested, "as asked", tuple(notices))
    bound = int(SHARE * max(available - weight_bytes, available // 4))
    most = min(trained, MOST)
    if need(most) <= bound:
        return ContextChoice(most, "trained length" if most == trained else "default limit")
    fits = _longest(most, lambda ctx: need(ctx) <= bound)
    least = min(LEAST, most)
    if fits >= least:
        return ContextChoice(fits, f"fits in {format_size(bound)}")
    if need(least) <= available:  # which is what holds for a context that was asked for
        return ContextChoice(least, "the least")
    problem = _cpu_refusal(least, need, available, budget)
    if not force:
        raise BudgetError(problem)
    return ContextChoice(least, "the least", (f"--force: {problem}",))


def _above_trained(tokens: int, trained: int) -> str:
    return (
        f"ctx {tokens} is above the {trained} tokens that the model was trained for; "
        "answers may become incoherent beyond that"
    )


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """The longest context of whole pages up to `most` that fits; 0 when none does."""
    return _largest(most // PAGE_TOKENS, lambda pages: fits(pages * PAGE_TOKENS)) * PAGE_TOKENS


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _cpu_refusal(tokens: int, need: Callable[[int], int], bound: int, budget: bool) -> str:
    longest = _longest(tokens, lambda ctx: need(ctx) <= bound)
    remedies = [f"use ctx {longest}"] if longest else []
    remedies += ["use kv_type f16 where it is f32, q8_0 where it is f16", "lower parallel or batch"]
    remedies.append("raise memory_budget" if budget else "free memory")
    what = f"memory_budget leaves {format_size(bound)}" if budget else f"{format_size(bound)} is available"
    return f"ctx {tokens} needs {format_size(need(tokens))} for KV cache and scratch, but {what}; " + ", or ".join(
        [*remedies, "try anyway with --force"]
    )
