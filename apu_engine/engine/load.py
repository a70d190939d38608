"""From a configuration to a running engine, in stages that can be watched and timed.

Order: "tokenizer" (header, tokenizer), "pool" (device and its threads), "map" (files mapped, nothing read),
"load" (readahead, plan and states), "ready". At "pool" nothing is mapped yet: the footprint check takes its
baseline there. `Runtime.close` undoes all of it in reverse order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.config import EngineConfig
from apu_engine.engine.context import ContextChoice, fit
from apu_engine.engine.engine import Engine
from apu_engine.engine.job import SamplingParams
from apu_engine.engine.sampling import sampling_defaults
from apu_engine.errors import ApuError, ConfigError, MappingError, ModelError
from apu_engine.memory.budget import human_bytes
from apu_engine.memory.mapping import Mapping, Progress, mlock, prefetch
from apu_engine.weights.model_file import ModelFile

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.arch import LoadedModel
    from apu_engine.text.template import ChatTemplate
    from apu_engine.text.tokenizer import Tokenizer

STAGES = ("tokenizer", "pool", "map", "load", "ready")
MAX_TEMPLATE_BYTES = 1 << 20
OnStage = Callable[[str], None]
OnProgress = Callable[[Progress], None]


class AnonymousCopy:
    """A mapping's bytes copied to anonymous memory: what this engine exists to avoid, made on purpose for a
    test.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._bytes: NDArray[np.uint8] = mapping.array().copy()
        self.address: int = self._bytes.ctypes.data
        self.nbytes = self.size = mapping.nbytes


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
    mappings: list[Mapping]
    loaded: LoadedModel
    context: ContextChoice
    engine: Engine
    notices: list[str] = field(default_factory=list)
    stages: list[tuple[str, float]] = field(default_factory=list)  # (stage, seconds it took)
    copies: list[AnonymousCopy] = field(default_factory=list)
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
    def copied_bytes(self) -> int:
        """Bytes of weights that exist a second time: on a GPU that holds a copy, or on request."""
        return sum(copy.nbytes for copy in self.copies) + self.loaded.staged_bytes

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template; else chats are written as a plain transcript."""
        return bool(self.template_override or self.model.metadata.get("tokenizer.chat_template"))

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
        self.loaded.close()
        self.copies.clear()
        for mapping in self.mappings:
            mapping.close()
        self.device.close()


class LoadCancelled(ApuError):
    """The `cancel` event of `load` was set."""


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

    Calls `on_stage(name)` at the end of each of STAGES and `on_progress` during readahead; setting `cancel`
    ends loading at the next stage with LoadCancelled. `for_chat` starts the process that renders chat
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
    from apu_engine.weights.gguf import open_model

    model = open_model(Path(path))
    tokenizer, tokenizer_error = _tokenizer(model)
    override = _template_file(config)
    template = None
    if tokenizer is not None and for_chat:
        template = make_template(model, tokenizer, override)
        opened.append(template)
        template.start()
    stages.end("tokenizer")

    from apu_engine import arch
    from apu_engine.device import open_device

    device, choice = open_device(
        config.device, kernels=config.kernels, threads=config.threads, isa=config.isa, pin=config.pin
    )
    opened.append(device)
    _check_strategy(config.memory, device.props.kind)
    stages.end("pool")

    fitted = fit(config, model, device, _strategies(config.memory, device.props.kind))
    context, options = fitted.context, fitted.options
    notices = list(context.notices)
    mappings: list[Mapping] = []
    for file, size in zip(model.files, model.file_sizes, strict=True):
        mappings.append(Mapping.open(file, size))
        opened.append(mappings[-1])
    stages.end("map")

    if config.mlock:
        notices.append(mlock(mappings).notice)
    if config.prefetch:
        notices.append(prefetch(mappings, max(device.props.threads, 2), on_progress, stages.cancel).notice)
    copies = [AnonymousCopy(mapping) for mapping in mappings] if config.copy_weights else []
    loaded = arch.load(model, copies or mappings, device, options, config.memory)
    opened.append(loaded)
    from apu_engine.engine.runner import PlanRunner

    def check() -> None:
        for mapping in mappings:
            mapping.check()

    engine = Engine(
        PlanRunner(loaded), context=context.tokens, parallel=config.parallel, queue=config.queue, check=check
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
        mappings=mappings,
        loaded=loaded,
        context=context,
        engine=engine,
        notices=[notice for notice in notices if notice],
        stages=stages.times,
        copies=copies,
        template_override=override,
        _template=template,
    )
    stages.end("ready")
    return runtime


def _check_strategy(strategy: str, kind: str) -> None:
    """Raises ConfigError for a memory strategy that the device lacks."""
    if kind == "cpu" and strategy not in ("auto", "direct"):
        raise ConfigError(
            f"memory: {strategy} needs a GPU; the cpu device reads the mapped file in place (auto or direct)", "memory"
        )
    if kind != "cpu" and strategy not in ("auto", "staged"):
        raise ConfigError(
            f"memory: {strategy} is not there on {kind} yet; it holds one copy of the weights (auto or staged)",
            "memory",
        )


def _strategies(strategy: str, kind: str) -> tuple[str, ...]:
    """Candidates for a device, best first."""
    if strategy != "auto":
        return (strategy,)
    return ("direct",) if kind == "cpu" else ("staged",)


def _tokenizer(model: ModelFile) -> tuple[Tokenizer | None, ModelError | None]:
    """A file without a usable tokenizer still runs on token ids; why is kept for whoever asks for text."""
    if "tokenizer.ggml.model" not in model.metadata:
        missing = f"{model.path}: has no tokenizer (tokenizer.ggml.model is missing); it can run on token ids only"
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


def make_template(model: ModelFile, tokenizer: Tokenizer, override: str | None) -> ChatTemplate:
    """The template of a model, or `override`."""
    from apu_engine.text.template import ChatTemplate

    return ChatTemplate.from_metadata(model.metadata, tokenizer, str(model.path), override)


def summary(runtime: Runtime) -> str:
    """`weights 98.4 MB mapped, copied 0, anonymous 0; ctx 8192 (KV 184 MB)`, from what the kernel reports."""
    from apu_engine.memory.footprint import footprint

    now = footprint(files=[mapping.path for mapping in runtime.mappings])
    mapped = sum(item.mapped for item in now.files)
    anonymous = sum(item.anonymous for item in now.files)
    return (
        f"weights {human_bytes(mapped)} mapped, copied {_bytes(runtime.copied_bytes)}, anonymous {_bytes(anonymous)}; "
        f"ctx {runtime.context.tokens} (KV {human_bytes(runtime.loaded.kv_bytes)})"
    )


def _bytes(count: int) -> str:
    return human_bytes(count) if count else "0"


def stage_lines(stages: Sequence[tuple[str, float]]) -> str:
    """`tokenizer 120 ms, pool 1 ms, ...`."""
    return ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in stages)
