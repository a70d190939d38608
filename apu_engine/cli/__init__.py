"""The `apu-engine` command: one module per verb, imported with typer only when the command runs.

Every failure is one line on standard error and an exit status: 1 when something went wrong, 2 when the command line or
an option is wrong, 78 when the machine lacks memory or a usable GPU (so that a supervisor does not try again), 75 when
the watchdog ended it (so that it does), 130 after Ctrl-C. `--debug` or APU_DEBUG=1 shows the traceback as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

PROGRAM = "apu-engine"


def standard_streams() -> None:
    """Makes all three usable: what stdout's encoding lacks is written as an escape, a closed stream is /dev/null.

    Else the next file that is opened would get the closed stream's descriptor, and with it what is written there.
    """
    import os

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name); returns the exit status."""
    standard_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    from apu_engine.config import debug_wanted
    from apu_engine.errors import ApuError

    debug = debug_wanted(args)
    try:
        from apu_engine.cli.app import build

        status = build()(args or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe went away; what is left in the buffer has no destination
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        if isinstance(error, ApuError):
            return _fail(str(error), error.exit_status)
        if hasattr(error, "format_message"):  # typer's usage errors, whichever click they come from
            return _fail(_usage(error), 2)
        if isinstance(error, OSError):
            return _fail(str(error), 1)
        hint = "" if debug else "; --debug shows where"
        return _fail(f"internal error: {type(error).__name__}: {error}{hint}", 1)


def _usage(error: Exception) -> str:
    message = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    return f"{message}; see `{command} --help`"


def _fail(message: str, status: int) -> int:
    line = " ".join(message.split("\n"))
    print(f"{PROGRAM}: {line}", file=sys.stderr)
    return status
