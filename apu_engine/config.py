"""Every option of the engine in one place: default, help, range, and its APU_* twin in the environment.

An option is one dataclass field. The command line, the Python API, the environment and docs/configuration.md
are all derived from it, and no other module reads an option from the environment. An argument or flag wins
over the environment, which wins over the default; errors name option and source.
`python -m apu_engine.config` prints docs/configuration.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from apu_engine.errors import ConfigError
from apu_engine.options import TRUE, Spec, option

Source = Literal["flag", "argument"]
GROUPS = {
    "model": "Model and device",
    "engine": "Engine",
    "sampling": "Sampling defaults",
    "text": "Text",
    "server": "Server",
    "output": "Output",
}
_FROM_FILE = "the file's general.sampling key, else "


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options, checked; a field's meaning is its help text, here and in docs/configuration.md."""

    # ---- model and device
    model: str | None = option(
        "path",
        None,
        "Model: a GGUF file, any shard of a split set, a folder that holds one, or a folder of safetensors.",
        "--model",
        "-m",
        group="model",
    )
    device: str = option(
        "str",
        "auto",
        "Where the model runs: auto, cpu, hip[:N] or cuda[:N]; auto takes hip where usable, else cpu.",
        "--device",
        group="model",
    )
    threads: int = option(
        "int",
        0,
        "CPU workers; 0 takes the physical cores that affinity and cgroup allow.",
        "--threads",
        "-t",
        group="model",
        lo=0,
        hi=512,
        default_text="0 (physical cores)",
    )
    isa: str = option(
        "str",
        "auto",
        "CPU instruction set; a level that the processor lacks is an error.",
        "--isa",
        group="model",
        choices=("auto", "portable", "avx2", "avx2vnni", "avx512"),
    )
    kernels: str | None = option(
        "path",
        None,
        "Folder of the GPU's code objects, where they lie elsewhere than beside the library.",
        "--kernels",
        group="model",
        default_text="those of the build",
    )
    pin: bool = option("bool", False, "Pin each CPU worker to one core.", "--pin", group="model")
    precision: str = option(
        "str",
        "default",
        "Activations in matrix products: int8 (default), the output head's in 15 bits (fine: a tenth slower), or float "
        "(exact: slower, the oracle).",
        "--precision",
        group="model",
        choices=("default", "fine", "exact"),
    )
    kv_type: str = option(
        "str",
        "auto",
        "Type of the KV cache, keys and values alike; auto is f32 when the model's matrices are F32, else f16. "
        "q8_0 takes 53% of f16's memory and needs heads of whole blocks of 32.",
        "--kv-type",
        "-ctk",
        group="model",
        choices=("auto", "f32", "f16", "q8_0"),
    )
    memory: str = option(
        "str",
        "auto",
        "How a device reaches the weights: in place after registration, in place without, or as one copy on the "
        "device. auto measures it on slices of the file, once for each device, driver, kernel and file system. The CPU "
        "reads the mapped file in place (direct).",
        "--memory",
        group="model",
        choices=("auto", "registered", "direct", "staged"),
    )
    memory_way: str = option(
        "str",
        "auto",
        "How pages are registered in place: svm (A: SVM attributes), advise (B: memory advice), lock (C: memory lock) "
        "or register (D: hipHostRegister, cuMemHostRegister); auto takes the fastest that verifies.",
        "--memory-way",
        group="model",
        choices=("auto", "svm", "advise", "lock", "register"),
    )
    memory_budget: int = option(
        "size",
        0,
        "Most bytes that weights, KV cache and scratch may take together (on the CPU, whose weights are page cache, KV "
        "cache and scratch); 0 takes what the machine and the cgroup have free. What a GPU allocates is not charged to "
        "a container's memory limit: set it there.",
        "--memory-budget",
        group="model",
        lo=0,
        default_text="0 (what is free)",
    )
    force: bool = option(
        "bool",
        False,
        "Load although the memory budget says that it does not fit.",
        "--force",
        group="model",
    )
    mlock: bool = option(
        "bool",
        False,
        "Lock the mapped weights in memory (needs a memlock limit above the file's size). What an AMD GPU reads in "
        "place by registration is locked anyway, as far as that limit lets.",
        "--mlock",
        group="model",
    )
    prefetch: bool = option(
        "bool",
        True,
        "Read the whole file into the page cache while loading. What is registered is read anyway.",
        "--prefetch",
        group="model",
    )
    graph: bool = option(
        "bool",
        True,
        "On a GPU, replay steps as captured graphs; without, every kernel is launched by itself: slower, but a fault "
        "names its op and kernel.",
        "--graph",
        group="model",
    )
    copy_weights: bool = option(
        "bool",
        False,
        "Debugging only: copy the weights to anonymous memory instead of using the mapped file, so that the "
        "footprint check has something to find.",
        group="model",
    )

    # ---- engine
    ctx: int = option(
        "int",
        0,
        "Context length in tokens, prompt and answer together; 0 takes the least of what the model was "
        "trained for, 32768 and what fits in memory.",
        "--ctx",
        "-c",
        "--ctx-size",
        group="engine",
        lo=0,
        hi=1 << 24,
        default_text="0 (chosen)",
    )
    parallel: int = option(
        "int",
        1,
        "Requests that run at the same time; each may fill the whole context.",
        "--parallel",
        "-np",
        group="engine",
        lo=1,
        hi=256,
    )
    batch: int = option(
        "int",
        512,
        "Most rows (tokens) of one step; a longer prompt is read in chunks of this size.",
        "--batch",
        "-b",
        group="engine",
        lo=1,
        hi=8192,
    )
    queue: int = option(
        "int",
        64,
        "Requests that may wait for their turn; one more is refused (HTTP 429).",
        "--queue",
        group="engine",
        lo=0,
        hi=100_000,
    )
    max_tokens: int = option(
        "int",
        0,
        "Tokens generated when a request names no limit; 0 goes on to the end of the context.",
        "--max-tokens",
        "-n",
        group="engine",
        lo=0,
        hi=1 << 24,
        default_text="0 (to the end of the context)",
    )

    watchdog: int | None = option(
        "int",
        None,
        "Seconds without progress, of loading or of a step, after which the process says what it was doing and ends "
        "with status 75, so that it can be started again; 0 is never.",
        "--watchdog",
        group="engine",
        lo=0,
        hi=86400,
        default_text="300 for serve, else 0 (never)",
    )

    # ---- sampling defaults
    temperature: float | None = option(
        "float",
        None,
        "Divides the logits; 0 always takes the most probable token.",
        "--temperature",
        "--temp",
        group="sampling",
        lo=0,
        hi=100,
        default_text=_FROM_FILE + "0.8",
    )
    top_k: int | None = option(
        "int",
        None,
        "Keep the k most probable tokens; 0 keeps all.",
        "--top-k",
        group="sampling",
        lo=0,
        hi=1 << 24,
        default_text=_FROM_FILE + "40",
    )
    top_p: float | None = option(
        "float",
        None,
        "Keep the most probable tokens up to this total probability; 1 keeps all.",
        "--top-p",
        group="sampling",
        lo=0,
        hi=1,
        default_text=_FROM_FILE + "0.95",
    )
    min_p: float | None = option(
        "float",
        None,
        "Keep tokens of at least this share of the top token's probability; 0 keeps all.",
        "--min-p",
        group="sampling",
        lo=0,
        hi=1,
        default_text=_FROM_FILE + "0.05",
    )
    repeat_penalty: float | None = option(
        "float",
        None,
        "Divides positive and multiplies negative logits of recent tokens; 1 is none.",
        "--repeat-penalty",
        group="sampling",
        lo=0.01,
        hi=100,
        default_text=_FROM_FILE + "1",
    )
    repeat_last_n: int | None = option(
        "int",
        None,
        "Tokens that the penalties look back over; -1 is all, 0 none.",
        "--repeat-last-n",
        group="sampling",
        lo=-1,
        hi=1 << 24,
        default_text=_FROM_FILE + "64",
    )
    frequency_penalty: float | None = option(
        "float",
        None,
        "Subtracted from a recent token's logit for each time it occurs.",
        "--frequency-penalty",
        group="sampling",
        lo=-2,
        hi=2,
        default_text="0",
    )
    presence_penalty: float | None = option(
        "float",
        None,
        "Subtracted once from the logit of each recent token.",
        "--presence-penalty",
        group="sampling",
        lo=-2,
        hi=2,
        default_text="0",
    )
    seed: int | None = option(
        "int",
        None,
        "Seed of the random numbers; none draws one per request and reports it.",
        "--seed",
        "-s",
        group="sampling",
        lo=0,
        hi=(1 << 64) - 1,
        default_text="none (drawn per request)",
    )

    # ---- text
    chat_template: str | None = option(
        "path",
        None,
        "File with a Jinja chat template that takes the place of the model's own.",
        "--chat-template",
        group="text",
        default_text="the model's",
    )
    reasoning_effort: str | None = option(
        "str",
        None,
        "How much a model thinks where a request does not say: as far as its chat template knows the word.",
        "--reasoning-effort",
        group="text",
        choices=("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        default_text="the template's",
    )
    system: str | None = option("str", None, "System prompt of `chat`.", "--system", group="text")

    # ---- server
    host: str = option("str", "127.0.0.1", "Address to listen on.", "--host", group="server")
    port: int = option("int", 8000, "Port to listen on; 0 takes a free one.", "--port", group="server", lo=0, hi=65535)
    alias: str | None = option(
        "str",
        None,
        "Model name that the API lists.",
        "--alias",
        "-a",
        group="server",
        default_text="the file's name",
    )
    api_key: str | None = option(
        "str", None, "Key that requests must carry as a bearer token.", "--api-key", group="server"
    )
    max_body: int = option(
        "size",
        32 << 20,
        "Largest request body; a larger one is refused (HTTP 413).",
        "--max-body",
        group="server",
        lo=1024,
        hi=1 << 34,
    )
    drain_timeout: float = option(
        "float",
        10.0,
        "Seconds that running requests get to end after SIGTERM or Ctrl-C.",
        "--drain-timeout",
        group="server",
        lo=0,
        hi=3600,
    )

    # ---- output
    log_level: str = option(
        "str",
        "info",
        "Least severe messages that are logged.",
        "--log-level",
        group="output",
        choices=("debug", "info", "warning", "error"),
    )
    timings: bool = option(
        "bool",
        False,
        "Print where the time went: loading by stage, prompt and generation.",
        "--timings",
        group="output",
    )
    debug: bool = option("bool", False, "Show Python tracebacks of errors.", "--debug", group="output")

    def __post_init__(self) -> None:
        for spec in specs():
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name), "argument"))

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any] | None = None,
        source: Source = "argument",
        environment: Mapping[str, str] | None = None,
    ) -> EngineConfig:
        """The configuration of a run: `given` values that are not None, else APU_* variables, else defaults.

        `source` says what `given` is, for messages. Raises ConfigError for an unknown name or a bad value.
        """
        environment = os.environ if environment is None else environment
        given = {name: value for name, value in (given or {}).items() if value is not None}
        values: dict[str, Any] = {}
        for spec in specs():
            if spec.name in given:
                values[spec.name] = spec.check(given.pop(spec.name), source)
            elif environment.get(spec.env, "") != "":
                values[spec.name] = spec.check(environment[spec.env], "environment")
        if given:
            name = next(iter(given))
            raise ConfigError(f"{name}: is no option; the options are listed in docs/configuration.md", name)
        return cls(**values)


def _spec(item: Any) -> Spec:
    return Spec(name=item.name, default=item.default, **item.metadata)


_SPECS: dict[str, Spec] = {}


def specs() -> tuple[Spec, ...]:
    """All options in the order of their declaration."""
    if not _SPECS:
        _SPECS.update((item.name, _spec(item)) for item in fields(EngineConfig))
    return tuple(_SPECS.values())


def spec(name: str) -> Spec:
    """The option called `name`; KeyError when there is none."""
    specs()
    return _SPECS[name]


def debug_wanted(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Whether tracebacks are asked for: known before the command line is parsed, because parsing can fail too."""
    environment = os.environ if environment is None else environment
    return "--debug" in argv or environment.get(spec("debug").env, "").lower() in TRUE


def kernels_wanted(environment: Mapping[str, str] | None = None) -> str | None:
    """The folder of code objects that the environment names, for devices that are opened without a configuration."""
    environment = os.environ if environment is None else environment
    return environment.get(spec("kernels").env) or None


def hip_library_wanted(environment: Mapping[str, str] | None = None) -> str | None:
    """The libamdhip64 that the environment names (APU_HIP_LIBRARY)."""
    environment = os.environ if environment is None else environment
    return environment.get("APU_HIP_LIBRARY") or None


def library_folders(environment: Mapping[str, str] | None = None) -> tuple[str, list[str]]:
    """(ROCM_PATH or "", folders of LD_LIBRARY_PATH)."""
    environment = os.environ if environment is None else environment
    return environment.get("ROCM_PATH", ""), [f for f in environment.get("LD_LIBRARY_PATH", "").split(":") if f]


def sysroot_wanted(environment: Mapping[str, str] | None = None) -> str | None:
    """The folder that stands for / where this machine's /proc, /sys and /dev are read (APU_SYSROOT): for tests only."""
    environment = os.environ if environment is None else environment
    return environment.get("APU_SYSROOT") or None


def configuration_markdown() -> str:
    """docs/configuration.md."""
    return "\n".join(_markdown_lines()) + "\n"


def _markdown_lines() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield (
        "Every option can be given as a command-line flag, as an environment variable, or as an argument of "
        "`apu_engine.LLM(...)` under its plain name (`ctx=8192`). A flag or argument wins over the "
        "environment, which wins over the default. Sizes take KiB, MiB, GiB or their first letters. On/off "
        "flags have a `--no-` form."
    )
    yield ""
    yield "This page is generated: `python -m apu_engine.config > docs/configuration.md`."
    for group, title in GROUPS.items():
        yield ""
        yield f"## {title}"
        yield ""
        yield "| flag | environment | value | default | meaning |"
        yield "| --- | --- | --- | --- | --- |"
        for item in specs():
            if item.group == group:
                flags = ", ".join(f"`{flag}`" for flag in item.flags) or f"(argument `{item.name}`)"
                expected = item.expected.replace("|", "\\|")
                yield f"| {flags} | `{item.env}` | {expected} | {item.shown_default} | {item.help} |"
    yield ""
    yield "## Other variables"
    yield ""
    yield (
        "`APU_HIP_LIBRARY` is the path of the libamdhip64 to use instead of the one found. `APU_SYSROOT` is the "
        "folder below which /proc, /sys and /dev of this machine are read; it is for tests only. Others' variables "
        "that count: `ROCM_PATH` and `LD_LIBRARY_PATH`, where AMD's runtime is looked for; `XDG_CACHE_HOME`, below "
        "which measurements are kept (else `~/.cache`)."
    )


if __name__ == "__main__":
    print(configuration_markdown(), end="")
