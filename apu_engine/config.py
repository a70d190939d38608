"""Every option of the engine in one place: default, help, range, and its APU_* twin in the environment.

An option is one dataclass field. The command line, the Python API, the environment and docs/configuration.md
are all derived from it, and no other module reads an option from the environment. An argument or flag wins
over the environment, which wins over the default; errors name option and source.
`python -m apu_engine.config` prints docs/configuration.md.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from apu_engine.errors import ConfigError

Source = Literal["flag", "argument"]
GROUPS = {
    "model": "Model and device",
    "engine": "Engine",
    "sampling": "Sampling defaults",
    "text": "Text",
    "server": "Server",
    "output": "Output",
}
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Spec:
    """What an option accepts and how it is shown. `optional`: None is a value, an empty string means it."""

    name: str
    kind: Literal["int", "float", "bool", "str", "path", "size"]
    default: Any
    help: str
    group: str
    flags: tuple[str, ...]
    optional: bool
    choices: tuple[str, ...]
    lo: float | None
    hi: float | None
    default_text: str

    @property
    def env(self) -> str:
        return "APU_" + self.name.upper()

    @property
    def metavar(self) -> str:
        if self.choices:
            return "|".join(self.choices)
        names = {"int": "N", "float": "X", "bool": "0|1", "str": "TEXT", "path": "PATH", "size": "BYTES"}
        return names[self.kind]

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.kind == "bool":
            return "on" if self.default else "off"
        if self.kind == "size" and self.default:
            return format_size(self.default)
        return "none" if self.default is None else self._show(self.default)

    @property
    def expected(self) -> str:
        """What a good value is, for messages and the documentation."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        what = {
            "int": "an integer",
            "float": "a number",
            "bool": "1, true, yes, on or 0, false, no, off",
            "str": "text",
            "path": "a path",
            "size": "a size such as 512MiB or 8G",
        }[self.kind]
        if self.lo is not None and self.hi is not None:
            return f"{what} from {self._show(self.lo)} to {self._show(self.hi)}"
        if self.lo:
            return f"{what} of at least {self._show(self.lo)}"
        return what

    def _show(self, value: Any) -> str:
        if self.kind == "size":
            return format_size(int(value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    def convert(self, value: Any) -> Any:
        """`value` as this option's type; ValueError when it is not one. Strings are parsed."""
        if self.optional and (value is None or value == ""):
            return None
        if self.choices:
            if value not in self.choices:
                raise ValueError
            return value
        converted = _CONVERT[self.kind](value)
        if (self.lo is not None and converted < self.lo) or (self.hi is not None and converted > self.hi):
            raise ValueError
        return converted

    def check(self, value: Any, source: str) -> Any:
        """As `convert`, but raises ConfigError naming the option as the user of `source` knows it."""
        try:
            return self.convert(value)
        except (ValueError, TypeError, OverflowError):
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
            label, where = self.name, "argument"
            if source == "flag":
                label, where = self.flags[0] if self.flags else self.name, "command line"
            elif source == "environment":
                label, where = self.env, "environment"
            message = f"{label}: expected {self.expected}, found {shown} (from the {where})"
            raise ConfigError(message, self.name) from None


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def _to_str(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ValueError
    return text


def _to_size(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
    if match is None:
        raise ValueError
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


_CONVERT: Mapping[str, Any] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "path": _to_str,
    "size": _to_size,
}


def format_size(nbytes: int) -> str:
    """Bytes in binary units that `--memory-limit` and its like read back: 0, 512 B, 1.5 GiB."""
    for unit, name in (("t", "TiB"), ("g", "GiB"), ("m", "MiB"), ("k", "KiB")):
        if nbytes >= _SIZE_UNITS[unit]:
            amount = nbytes / _SIZE_UNITS[unit]
            return f"{amount:.0f} {name}" if amount == int(amount) else f"{amount:.1f} {name}"
    return f"{nbytes} B" if nbytes else "0"


def _option(
    kind: Literal["int", "float", "bool", "str", "path", "size"],
    default: Any,
    help: str,
    *flags: str,
    group: str,
    choices: tuple[str, ...] = (),
    lo: float | None = None,
    hi: float | None = None,
    default_text: str = "",
    optional: bool | None = None,
) -> Any:
    optional = default is None if optional is None else optional
    return field(
        default=default,
        metadata={
            "kind": kind,
            "help": help,
            "flags": flags,
            "group": group,
            "choices": choices,
            "lo": lo,
            "hi": hi,
            "default_text": default_text,
            "optional": optional,
        },
    )


_FROM_FILE = "the file's general.sampling key, else "


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options, checked; a field's meaning is its help text, here and in docs/configuration.md."""

    # ---- model and device
    model: str | None = _option(
        "path",
        None,
        "Model file (GGUF; any shard of a split set, or a folder that holds one).",
        "--model",
        "-m",
        group="model",
    )
    device: str = _option(
        "str",
        "auto",
        "Where the model runs: auto, cpu or hip[:N]; auto takes hip where usable, else cpu.",
        "--device",
        group="model",
    )
    threads: int = _option(
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
    isa: str = _option(
        "str",
        "auto",
        "CPU instruction set; a level that the processor lacks is an error.",
        "--isa",
        group="model",
        choices=("auto", "portable", "avx2", "avx2vnni", "avx512"),
    )
    pin: bool = _option("bool", False, "Pin each CPU worker to one core.", "--pin", group="model")
    precision: str = _option(
        "str",
        "default",
        "Activations in matrix products: quantised per weight type (default), or float (exact: slower, the oracle).",
        "--precision",
        group="model",
        choices=("default", "exact"),
    )
    kv_type: str = _option(
        "str",
        "auto",
        "Type of the KV cache, keys and values alike; auto is f32 when the model's matrices are F32, else f16. "
        "q8_0 takes 53% of f16's memory and needs heads of whole blocks of 32.",
        "--kv-type",
        "-ctk",
        group="model",
        choices=("auto", "f32", "f16", "q8_0"),
    )
    memory: str = _option(
        "str",
        "auto",
        "How a device reaches the weights: in place after registration, in place without, or as one copy "
        "on the device. The CPU reads the mapped file in place (direct).",
        "--memory",
        group="model",
        choices=("auto", "registered", "direct", "staged"),
    )
    memory_limit: int = _option(
        "size",
        0,
        "Most bytes that KV cache and scratch may take; 0 takes what the machine and the cgroup have free.",
        "--memory-limit",
        group="model",
        lo=0,
        default_text="0 (what is free)",
    )
    mlock: bool = _option(
        "bool",
        False,
        "Lock the mapped weights in memory (needs a memlock limit above the file's size).",
        "--mlock",
        group="model",
    )
    prefetch: bool = _option(
        "bool", True, "Read the whole file into the page cache while loading.", "--prefetch", group="model"
    )
    copy_weights: bool = _option(
        "bool",
        False,
        "Debugging only: copy the weights to anonymous memory instead of using the mapped file, so that the "
        "footprint check has something to find.",
        group="model",
    )

    # ---- engine
    ctx: int = _option(
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
    parallel: int = _option(
        "int",
        1,
        "Requests that run at the same time; each may fill the whole context.",
        "--parallel",
        "-np",
        group="engine",
        lo=1,
        hi=256,
    )
    batch: int = _option(
        "int",
        512,
        "Most rows (tokens) of one step; a longer prompt is read in chunks of this size.",
        "--batch",
        "-b",
        group="engine",
        lo=1,
        hi=8192,
    )
    queue: int = _option(
        "int",
        64,
        "Requests that may wait for their turn; one more is refused (HTTP 429).",
        "--queue",
        group="engine",
        lo=0,
        hi=100_000,
    )
    max_tokens: int = _option(
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

    # ---- sampling defaults
    temperature: float | None = _option(
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
    top_k: int | None = _option(
        "int",
        None,
        "Keep the k most probable tokens; 0 keeps all.",
        "--top-k",
        group="sampling",
        lo=0,
        hi=1 << 24,
        default_text=_FROM_FILE + "40",
    )
    top_p: float | None = _option(
        "float",
        None,
        "Keep the most probable tokens up to this total probability; 1 keeps all.",
        "--top-p",
        group="sampling",
        lo=0,
        hi=1,
        default_text=_FROM_FILE + "0.95",
    )
    min_p: float | None = _option(
        "float",
        None,
        "Keep tokens of at least this share of the top token's probability; 0 keeps all.",
        "--min-p",
        group="sampling",
        lo=0,
        hi=1,
        default_text=_FROM_FILE + "0.05",
    )
    repeat_penalty: float | None = _option(
        "float",
        None,
        "Divides positive and multiplies negative logits of recent tokens; 1 is none.",
        "--repeat-penalty",
        group="sampling",
        lo=0.01,
        hi=100,
        default_text=_FROM_FILE + "1",
    )
    repeat_last_n: int | None = _option(
        "int",
        None,
        "Tokens that the penalties look back over; -1 is all, 0 none.",
        "--repeat-last-n",
        group="sampling",
        lo=-1,
        hi=1 << 24,
        default_text=_FROM_FILE + "64",
    )
    frequency_penalty: float | None = _option(
        "float",
        None,
        "Subtracted from a recent token's logit for each time it occurs.",
        "--frequency-penalty",
        group="sampling",
        lo=-2,
        hi=2,
        default_text="0",
    )
    presence_penalty: float | None = _option(
        "float",
        None,
        "Subtracted once from the logit of each recent token.",
        "--presence-penalty",
        group="sampling",
        lo=-2,
        hi=2,
        default_text="0",
    )
    seed: int | None = _option(
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
    chat_template: str | None = _option(
        "path",
        None,
        "File with a Jinja chat template that takes the place of the model's own.",
        "--chat-template",
        group="text",
        default_text="the model's",
    )
    system: str | None = _option("str", None, "System prompt of `chat`.", "--system", group="text")

    # ---- server
    host: str = _option("str", "127.0.0.1", "Address to listen on.", "--host", group="server")
    port: int = _option("int", 8000, "Port to listen on; 0 takes a free one.", "--port", group="server", lo=0, hi=65535)
    alias: str | None = _option(
        "str",
        None,
        "Model name that the API lists.",
        "--alias",
        "-a",
        group="server",
        default_text="the file's name",
    )
    api_key: str | None = _option(
        "str", None, "Key that requests must carry as a bearer token.", "--api-key", group="server"
    )
    max_body: int = _option(
        "size",
        32 << 20,
        "Largest request body; a larger one is refused (HTTP 413).",
        "--max-body",
        group="server",
        lo=1024,
        hi=1 << 34,
    )
    drain_timeout: float = _option(
        "float",
        10.0,
        "Seconds that running requests get to end after SIGTERM or Ctrl-C.",
        "--drain-timeout",
        group="server",
        lo=0,
        hi=3600,
    )

    # ---- output
    log_level: str = _option(
        "str",
        "info",
        "Least severe messages that are logged.",
        "--log-level",
        group="output",
        choices=("debug", "info", "warning", "error"),
    )
    timings: bool = _option(
        "bool",
        False,
        "Print where the time went: loading by stage, prompt and generation.",
        "--timings",
        group="output",
    )
    debug: bool = _option("bool", False, "Show Python tracebacks of errors.", "--debug", group="output")

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
    return "--debug" in argv or environment.get(spec("debug").env, "").lower() in _TRUE


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


if __name__ == "__main__":
    print(configuration_markdown(), end="")
