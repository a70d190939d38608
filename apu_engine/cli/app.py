"""The typer application: the verbs, and options made from EngineConfig.

A verb is a function whose first parameter is the EngineConfig; `with_config` adds the options of the groups
it names to the verb's own. All config options arrive as text and are parsed by config.py, so that a bad value
reads the same from a flag, the environment and Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from apu_engine.config import GROUPS, EngineConfig, specs
from apu_engine.errors import ConfigError
from apu_engine.options import Spec

Verb = Callable[..., int | None]


def with_config(*groups: str, exclude: tuple[str, ...] = (), model_argument: bool = False) -> Callable[[Verb], Verb]:
    """Make `verb(config, ...)` a command that has the options of `groups`, and a MODEL argument where asked."""

    def wrap(verb: Verb) -> Verb:
        chosen = [item for item in specs() if item.group in groups and item.flags and item.name not in exclude]
        own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
        options = [_parameter(item) for item in chosen]

        def command(**values: Any) -> int | None:
            given = {item.name: values.pop(item.name) for item in chosen}
            if model_argument and (model := values.pop("model_path")) is not None:
                given["model"] = model
            return verb(EngineConfig.resolve(given, "flag"), **values)

        argument = [_model_argument()] if model_argument else []
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*argument, *own, *options)]
        command.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        command.__doc__ = verb.__doc__
        plain = {item.name for item in chosen} | {p.name for p in (*argument, *own) if _is_plain(p)}
        command.plain = plain  # type: ignore[attr-defined]
        return command

    return wrap


def add(app: typer.Typer, name: str, verb: Verb, **options: Any) -> None:
    """Add a verb made by `with_config` to the application."""

    class Command(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            return _unconverted(super().get_params(ctx), verb.plain)  # type: ignore[attr-defined]

    app.command(name, cls=Command, **options)(verb)


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Verbs of two words, such as `bench bw`, before those of one."""
        words = " ".join(args[:2])
        if len(args) > 1 and (command := self.get_command(ctx, words)) is not None:
            return words, command, args[2:]
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return _unconverted(super().get_params(ctx), frozenset())


def _unconverted(params: list[Any], plain: Collection[str]) -> list[Any]:
    """`params`, of which those named keep text and switches as the parser leaves them.

    typer converts every value, absent ones too, with pydantic, whose import takes a third of the time until a verb
    begins.
    """
    for param in params:
        if (param.name in plain or param.name == "help") and "process_value" not in vars(param):
            param.process_value = partial(_process_value, param)
    return params


def _process_value(param: Any, ctx: Any, value: Any) -> Any:
    value = value if isinstance(value, (str, bool)) else None
    return value if param.callback is None else param.callback(ctx, param, value)


def _is_plain(parameter: inspect.Parameter) -> bool:
    return get_args(parameter.annotation)[0] in (str, bool, str | None, bool | None)


def require_model(config: EngineConfig, verb: str) -> str:
    """The model's path; ConfigError when none was named."""
    if not config.model:
        raise ConfigError(f"no model was named; try `apu-engine {verb} -m MODEL.gguf` or set APU_MODEL", "model")
    return config.model


def _parameter(item: Spec) -> inspect.Parameter:
    declarations = list(item.flags)
    kind: Any = str | None
    shown: dict[str, Any] = {"metavar": item.metavar}
    if item.kind == "bool":
        long = next(flag for flag in item.flags if flag.startswith("--"))
        declarations = [f"{long}/--no-{long[2:]}"]
        kind, shown = bool | None, {}
    option = typer.Option(
        *declarations,
        help=f"{item.help} [{item.env}; default: {item.shown_default}]",
        show_default=False,
        rich_help_panel=GROUPS[item.group],
        **shown,
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _model_argument() -> inspect.Parameter:
    argument = typer.Argument(metavar="MODEL", help="Model file, the same as --model.", show_default=False)
    return inspect.Parameter(
        "model_path",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, argument],
    )


def build() -> typer.Typer:
    """The application with all verbs."""
    from apu_engine.cli import bench, bench_bw, chat, doctor, footprint, plan, serve, show

    app = typer.Typer(
        cls=_Group,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        help="Runs language models from memory-mapped files, without copying the weights.",
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    ) -> None:
        if version:
            from apu_engine import __version__

            print(f"apu-engine {__version__}")
            raise typer.Exit

    for module in (serve, chat, bench, bench_bw, plan, show, footprint, doctor):
        module.register(app)
    return app
