"""Options: precedence, parsing, messages that name option and source, and the generated page."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from apu_engine.config import EngineConfig, configuration_markdown, debug_wanted, spec, specs
from apu_engine.errors import ConfigError
from apu_engine.options import format_size

ROOT = Path(__file__).parents[2]


def test_defaults_need_nothing() -> None:
    config = EngineConfig.resolve(environment={})
    assert config == EngineConfig()
    assert (config.host, config.port, config.ctx, config.parallel) == ("127.0.0.1", 8000, 0, 1)


def test_given_wins_over_environment_wins_over_default() -> None:
    environment = {"APU_CTX": "1000", "APU_THREADS": "3", "APU_PREFETCH": "off", "APU_ALIAS": ""}
    config = EngineConfig.resolve({"ctx": 2000, "threads": None}, environment=environment)
    assert (config.ctx, config.threads, config.prefetch, config.alias) == (2000, 3, False, None)


def test_every_option_has_a_twin_that_works() -> None:
    samples: dict[str, str] = {"int": "1", "float": "1", "bool": "yes", "str": "x", "path": "x", "size": "1M"}
    for item in specs():
        text = item.choices[-1] if item.choices else samples[item.kind]
        config = EngineConfig.resolve(environment={item.env: text})
        assert getattr(config, item.name) == item.convert(text), item.name


@pytest.mark.parametrize(
    ("given", "source", "words"),
    [
        ({"ctx": "abc"}, "flag", ["--ctx", "integer from 0 to 16777216", "'abc'", "command line"]),
        ({"ctx": -1}, "argument", ["ctx", "found -1", "argument"]),
        ({"ctx": True}, "argument", ["ctx", "found True"]),
        ({"top_p": "nan"}, "flag", ["--top-p", "a number from 0 to 1", "'nan'"]),
        ({"precision": "low"}, "flag", ["--precision", "one of default, fine, exact", "'low'"]),
        ({"mlock": "perhaps"}, "argument", ["mlock", "'perhaps'"]),
        ({"memory_budget": "12 parsecs"}, "flag", ["--memory-budget", "512MiB or 8G", "'12 parsecs'"]),
        ({"nonsense": 1}, "argument", ["nonsense", "no option", "docs/configuration.md"]),
    ],
)
def test_a_bad_value_names_option_and_source(given: dict[str, Any], source: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        EngineConfig.resolve(given, source, environment={})
    for word in words:
        assert word in str(info.value)
    assert "\n" not in str(info.value)


def test_a_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"APU_PORT: expected an integer from 0 to 65535, found '70000'.*environment"):
        EngineConfig.resolve(environment={"APU_PORT": "70000"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1024", 1024), ("512MiB", 512 << 20), ("8G", 8 << 30), ("1.5 GB", 3 << 29), ("2kb", 2048)],
)
def test_sizes(text: str, value: int) -> None:
    assert spec("memory_budget").convert(text) == value
    assert spec("memory_budget").convert(format_size(value)) == value


def test_debug_is_known_before_parsing() -> None:
    assert debug_wanted(["chat", "--debug"], {})
    assert debug_wanted([], {"APU_DEBUG": "1"})
    assert not debug_wanted(["chat"], {"APU_DEBUG": "0"})


def test_flags_are_unique() -> None:
    flags = [flag for item in specs() for flag in item.flags]
    assert len(flags) == len(set(flags))


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text() == configuration_markdown(), "run: python -m apu_engine.config > docs/configuration.md"


def test_no_other_module_reads_options_from_the_environment() -> None:
    package = ROOT / "apu_engine"
    for path in sorted(set(package.rglob("*.py")) - {package / "config.py"}):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        if any(isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes):
            words = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            assert not [word for word in words if re.search(r"\bAPU_[A-Z]", word)], path
