"""From a configuration to a running engine, in stages that can be watched and timed.

Order: "tokenizer" (header, tokenizer), "pool" (device and its threads), "map" (how the weights are reached is known,
files open, nothing read), "load" (readahead, registration or staging, plan and states), "ready". At "pool" nothing is
mapped yet: the footprint check takes its baseline there. `Runtime.close` undoes all of it in reverse order.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apu_engine.config import EngineConfig
from apu_engine.engine.context import ContextChoice, Fit, Sizes, fit
from apu_engine.engine.engine import Engine
from apu_engine.engine.job import SamplingParams
from apu_engine.engine.sampling import sampling_defaults
from apu_engine.errors import ApuError, BudgetError, ConfigError, LoadCancelled, MappingError, ModelError
from apu_engine.memory.mapping import Mapping, Progress
from apu_engine.memory.watchdog import Watchdog
from apu_engine.options import format_size
from apu_engine.weights.model_file import ModelFile

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.arch import LoadedModel
    from apu_engine.memory.probe import Candidate
    from apu_engine.memory.strategies import Job, Weights
    from apu_engine.text.template import ChatTemplate
    from apu_engine.text.tokenizer import Tokenizer

STAGES = ("tokenizer", "pool", "map", "load", "ready")
MAX_TEMPLATE_BYTES = 1 << 20
OnStage = Callable[[str], None]
OnProgress = Callable[[Progress], None]


@dataclass(slots=True)
class Runtime:
    """Everything that is open for one model."""

    config: EngineConfig
    model: ModelFile
    tokenizer: Tokenizer | None
    tokenizer_error: ModelError | None  # why there is no tokenizer
    sampling: SamplingParams
    device: Device
    device_reason: str
    weights: Weights
    placement: Candidate  # how the weights came to the device, and why so
    loaded: LoadedModel
    context: ContextChoice
    engine: Engine
    watchdog: Watchdog
    notices: list[str] = field(default_factory=list)
    stages: list[tuple[str, float]] = field(default_factory=list)  # (stage, seconds it took)
    template_override: str | None = None  # text of the file that `chat_template` names
    _template: ChatTemplate | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device_line(self) -> str:
        """What the model runs on, and why: `cpu, avx512, 16 threads (no AMD GPU: /dev/kfd is absent)`, `hip, gfx1151,
        Radeon 8060S Graphics (as asked)`.
        """
        props = self.device.props
        what = f"{props.threads} threads" if props.kind == "cpu" else props.name
        return f"{props.kind}, {props.arch}, {what} ({self.device_reason})"

    @property
    def mappings(self) -> list[Mapping]:
        """The files as they are mapped: none where a GPU holds a copy."""
        return self.weights.mappings

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that were copied: to a GPU's memory, or on request."""
        return self.weights.copied_bytes

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template, or a known prompt format; else chats are written as a plain transcript."""
        if self.template_override or self.model.metadata.get("tokenizer.chat_template"):
            return True
        if self.tokenizer is None:
            return False
        from apu_engine.text.formats import find_format

        return find_format(self.model.metadata, self.tokenizer) is not None

    @property
    def template(self) -> ChatTemplate:
        """The chat template, made at first use. Raises ModelError without a tokenizer."""
        with self._lock:
            if self._template is None:
                if self.tokenizer is None:
                    assert self.tokenizer_error is not None
                    raise self.tokenizer_error
                self._template = make_template(self.model, self.tokenizer, self.template_override)
            return self._template

    def close(self, timeout: float = 0.0) -> None:
        """Ends the engine after at most `timeout` seconds, then frees everything. Harmless twice."""
        if self.engine.forked:
            return  # the threads and the template process belong to the parent
        self.engine.close(timeout)
        if self._template is not None:
            self._template.close()
        with self.watchdog.during("giving back the device's memory"):
            self.loaded.close()
            self.weights.close(then=self.device.close)
        self.watchdog.close()


class _Stages:
    def __init__(self, on_stage: OnStage | None, cancel: threading.Event) -> None:
        self.cancel = cancel
        self.times: list[tuple[str, float]] = []
        self._on_stage = on_stage
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.times.append((name, now - self._last))
        if self._on_stage is not None:
            self._on_stage(name)
        if self.cancel.is_set() and name != "ready":
            raise LoadCancelled("loading was cancelled")
        self._last = time.perf_counter()


def load(
    config: EngineConfig,
    on_stage: OnStage | None = None,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    for_chat: bool = False,
) -> Runtime:
    """Open `config.model` and start an engine for it.

    Calls `on_stage(name)` at the end of each of STAGES and `on_progress` while weights are read, registered or staged;
    setting `cancel` ends loading soon with LoadCancelled. `for_chat` starts the process that renders chat
    templates meanwhile, which otherwise the first chat does. Raises ConfigError, FormatError, ModelError,
    MappingError, BudgetError or NativeError; what was opened by then is closed again.
    """
    if config.model is None:
        raise ConfigError("model: no model was named", "model")
    stages = _Stages(on_stage, cancel or threading.Event())
    opened: list[Any] = []
    try:
        return _load(config, config.model, stages, on_progress, for_chat, opened)
    except BaseException:
        for item in reversed(opened):
            item.close()
        raise


def _load(
    config: EngineConfig,
    path: str,
    stages: _Stages,
    on_progress: OnProgress | None,
    for_chat: bool,
    opened: list[Any],
) -> Runtime:
    from apu_engine.weights.opening import open_model

    model = open_model(Path(path))
    tokenizer, tokenizer_error = _tokenizer(model)
    override = _template_file(config)
    template = None
    if tokenizer is not None and for_chat:
        template = make_template(model, tokenizer, override)
        opened.append(template)
        template.start()
        _check_effort(template, config.reasoning_effort)
    stages.end("tokenizer")

    from apu_engine import arch
    from apu_engine.device import open_device

    device, choice = open_device(
        config.device, kernels=config.kernels, threads=config.threads, isa=config.isa, pin=config.pin
    )
    opened.append(device)
    _check_strategy(config, device)
    stages.end("pool")

    watchdog = Watchdog(config.watchdog or 0)
    opened.append(watchdog)
    with watchdog.during(f"loading {model.path.name}") as task:
        from apu_engine.memory.strategies import Job

        job = Job(
            device=device,
            files=model.files,
            sizes=model.file_sizes,
            refs=arch.tensors_used(model, arch.PlanOptions(ctx=1, kv_type=config.kv_type)),
            progress=on_progress,
            cancel=stages.cancel,
            task=task,
            mapped=lambda: stages.end("map"),
            readahead=config.prefetch,
            lock=config.mlock,
            copy=config.copy_weights,
        )
        weights, placement, fitted = _place(config, model, device, job)
        opened.append(weights)
        job.goes_on("creating the plan")
        loaded = arch.load(model, weights, device, fitted.options)
    opened.append(loaded)
    context = fitted.context
    from apu_engine.engine.runner import PlanRunner

    engine = Engine(
        PlanRunner(loaded),
        context=context.tokens,
        parallel=config.parallel,
        queue=config.queue,
        check=weights.check,
        watchdog=watchdog,
    )
    stages.end("load")
    runtime = Runtime(
        config=config,
        model=model,
        tokenizer=tokenizer,
        tokenizer_error=tokenizer_error,
        sampling=sampling_defaults(config, model),
        device=device,
        device_reason=choice.reason,
        weights=weights,
        placement=placement,
        loaded=loaded,
        context=context,
        engine=engine,
        watchdog=watchdog,
        notices=[*model.notices, *context.notices, *weights.notices],
        stages=stages.times,
        template_override=override,
        _template=template,
    )
    stages.end("ready")
    return runtime


def _check_strategy(config: EngineConfig, device: Device) -> None:
    """Raises ConfigError for a memory strategy or way that the device lacks."""
    strategy, way, props = config.memory, config.memory_way, device.props
    if props.kind == "cpu":
        if strategy not in ("auto", "direct"):
            raise ConfigError(
                f"memory: {strategy} needs a GPU; the cpu device reads the mapped file in place (auto or direct)",
                "memory",
            )
        if way != "auto":
            raise ConfigError(
                f"memory_way: {way} needs a GPU; the cpu device reads the mapped file in place (auto)", "memory_way"
            )
        return
    where = f"{props.kind}, {props.name}"
    if strategy == "direct" and not props.pageable:
        raise ConfigError(
            f"memory: direct needs a device that reads pageable memory through the host's page tables, which {where} "
            "does not (auto, registered or staged)",
            "memory",
        )
    if strategy == "registered" and not props.ways:
        raise ConfigError(
            f"memory: registered needs a runtime that can register file pages, which that of {where} cannot "
            "(auto or staged)",
            "memory",
        )
    ways = () if strategy in ("staged", "direct") else props.ways
    if way not in ("auto", *ways):
        expected = " or ".join(("auto", *ways))
        raise ConfigError(
            f"memory_way: expected {expected} on {where} with memory {strategy}, found {way}", "memory_way"
        )


def _possible(memory: str, device: Device) -> list[str]:
    """The strategies that the option and the device leave."""
    has = {"registered": bool(device.props.ways), "direct": device.props.pageable, "staged": True}
    return [name for name, there in has.items() if there and memory in ("auto", name)]


def _place(config: EngineConfig, model: ModelFile, device: Device, job: Job) -> tuple[Weights, Candidate, Fit]:
    """The weights where the device reads them, by the first candidate that fits and works.

    Why those before it did not is in the weights' notices. Raises BudgetError where none fits, else what the only
    candidate raised, or Refused with what each one did.
    """
    from apu_engine._native import NativeError
    from apu_engine.memory.probe import Candidate, candidates, probe
    from apu_engine.memory.strategies import Refused, open_weights

    sizes = Sizes(config, model)
    measured = None
    if device.props.kind == "cpu":
        tried = [Candidate("direct", why="as asked")]
    elif config.copy_weights:
        tried = [Candidate("staged", why="as asked")]
    else:
        fit(config, model, device, _possible(config.memory, device), sizes=sizes)  # said before anything is tried
        only = "direct" if config.memory == "direct" else config.memory_way
        measured = None if config.memory == "staged" else probe(job, only=None if only == "auto" else only)
        tried = candidates(config.memory, config.memory_way, measured, device.props.ways)
    failures: list[tuple[Candidate, ApuError]] = []
    for candidate in tried:
        try:
            fitted = fit(config, model, device, (candidate.strategy,), sizes=sizes)
            weights = open_weights(job, candidate.strategy, candidate.way)
        except (NativeError, Refused, BudgetError) as error:
            if len(tried) == 1:
                raise
            failures.append((candidate, error))
            continue
        weights.notices += [f"weights are not {failed.title}: {error}" for failed, error in failures]
        lost = [way for way in measured.ways if way.lost] if measured is not None else []
        weights.notices += [f"{way.title} of reading weights in place is not used: {way.problem}" for way in lost]
        return weights, candidate, fitted
    if all(isinstance(error, BudgetError) for _, error in failures):
        fit(config, model, device, list(dict.fromkeys(candidate.strategy for candidate in tried)), sizes=sizes)
    text = "; ".join(f"{failed.title}: {error}" for failed, error in failures)
    raise Refused(f"{model.path}: {device.props.kind}, {device.props.name} cannot reach the weights: {text}")


def _tokenizer(model: ModelFile) -> tuple[Tokenizer | None, ModelError | None]:
    """A file without a usable tokenizer still runs on token ids; why is kept for whoever asks for text."""
    if "tokenizer.ggml.model" not in model.metadata:
        missing = model.metadata.get("tokenizer.problem") or (
            f"{model.path}: has no tokenizer (tokenizer.ggml.model is missing); it can run on token ids only"
        )
        return None, ModelError(missing, ("tokenizer.ggml.model",))
    from apu_engine.text.tokenizer import Tokenizer

    try:
        return Tokenizer.from_metadata(model.metadata, str(model.path)), None
    except ModelError as error:
        return None, error


def _template_file(config: EngineConfig) -> str | None:
    if config.chat_template is None:
        return None
    from apu_engine.memory.files import open_regular

    problem = f"is larger than {MAX_TEMPLATE_BYTES >> 20} MiB; a chat template is a short text"
    try:
        fd, info = open_regular(config.chat_template)
        with os.fdopen(fd, "rb") as file:
            if info.st_size <= MAX_TEMPLATE_BYTES:
                return file.read(MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except MappingError as error:
        problem = error.problem.replace("a model is", "a chat template is")
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise ConfigError(f"chat_template: {config.chat_template}: {problem}", "chat_template")


def _check_effort(template: ChatTemplate, effort: str | None) -> None:
    """Refuses a `reasoning_effort` that no chat could have. A broken template is told at the first chat."""
    from apu_engine.text.errors import TemplateError

    with contextlib.suppress(TemplateError):
        template.for_effort(effort)


def make_template(model: ModelFile, tokenizer: Tokenizer, override: str | None) -> ChatTemplate:
    """The template of a model, or `override`."""
    from apu_engine.text.template import ChatTemplate

    return ChatTemplate.from_metadata(model.metadata, tokenizer, str(model.path), override)


def summary(runtime: Runtime) -> str:
    """How the weights are reached and what they take, as the kernel reports it.

    `weights 98.4 MB mapped, copied 0, anonymous 0; ctx 8192 (KV 184 MB)` on the CPU, with `vectors 1.2 MB` where norms
    and their like are not float32 in the file,
    `weights 80.8 GB in place (way A), copied 0, anonymous 0, 97% of device bandwidth; ...` and `weights 98.4 MB staged:
    in place reads at 1.2% of device memory (51 of 4361 GB/s); copied 98.4 MB once, file pages dropped, anonymous 0;
    ...` on a GPU.
    """
    from apu_engine.memory.footprint import footprint
    from apu_engine.memory.strategies import LETTERS

    now = footprint(files=runtime.model.files)
    anonymous = format_size(sum(item.anonymous for item in now.files))
    weights, why, copied = runtime.weights, runtime.placement.why, format_size(runtime.copied_bytes)
    size = format_size(weights.nbytes)
    if runtime.device.props.kind == "cpu" or runtime.config.copy_weights:
        mapped = format_size(sum(item.mapped for item in now.files))
        text = f"weights {mapped} mapped, copied {copied}, anonymous {anonymous}"
        if runtime.loaded.made_bytes:
            text += f", vectors {format_size(runtime.loaded.made_bytes)}"
    elif weights.strategy == "staged":
        kept = f"{format_size(weights.kept_bytes)} of file pages kept" if weights.kept_bytes else "file pages dropped"
        text = f"weights {size} staged: {why}; copied {copied} once, {kept}, anonymous {anonymous}"
    else:
        how = f"way {LETTERS[weights.way]}" if weights.way else "direct"
        text = f"weights {size} in place ({how}), copied {copied}, anonymous {anonymous}, {why}"
    return f"{text}; ctx {runtime.context.tokens} (KV {format_size(runtime.loaded.kv_bytes)})"


def stage_lines(stages: Sequence[tuple[str, float]]) -> str:
    """`tokenizer 120 ms, pool 1 ms, ...`."""
    return ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in stages)
