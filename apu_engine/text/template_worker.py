"""The process that renders chat templates. Run as a script with nothing but its path: it imports only jinja2 and json.

A template comes with a model file and is a program. Jinja's sandbox keeps it from the host's objects but bounds neither
time nor memory, so it runs here, under limits that the kernel enforces, in a process that the parent may kill. Frames
on stdin and stdout are a little-endian u32 length and that many bytes of JSON. The first frame in sets up (import path,
limits, template); each later one holds the variables of a rendering. The environment is that of Hugging Face's
`apply_chat_template`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any

_LENGTH = struct.Struct("<I")
_NAME = "<template>"


def _read(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the parent is gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _receive() -> Any:
    return json.loads(_read(_LENGTH.unpack(_read(4))[0]))


def _send(message: dict[str, Any]) -> None:
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(1, view) :]


class _Failure(Exception):
    """What the parent makes a TemplateError of."""

    def __init__(self, message: str, reason: str, line: int | None = None) -> None:
        super().__init__(message)
        self.answer = {"error": message, "reason": reason, "line": line}


class _Renderer:
    def __init__(self, source: str, max_output: int) -> None:
        import jinja2
        from jinja2 import ext, meta, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(ext.Extension):
            """`{% generation %}` marks what a model is trained on; for rendering its body is all there is to it."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        class Raised(jinja2.TemplateError):
            """raise_exception of a template."""

        def raise_exception(message: object) -> None:
            raise Raised(str(message))

        def strftime_now(form: str) -> str:
            return datetime.now().strftime(form)

        class Namespace(jinja2.utils.Namespace):
            """Refuses names that begin with an underscore, the ways into the interpreter."""

            def __init__(*args: Any, **kwargs: Any) -> None:
                names = dict(*args[1:], **kwargs)
                for name in names:
                    Namespace.check(name)
                jinja2.utils.Namespace.__init__(args[0], names)

            def __setitem__(self, name: str, value: Any) -> None:
                Namespace.check(name)
                jinja2.utils.Namespace.__setitem__(self, name, value)

            @staticmethod
            def check(name: object) -> None:
                if str(name).startswith("_"):
                    raise SecurityError(f"namespace attribute {name!r} begins with an underscore")

        def to_json(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | str | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        self.jinja = jinja2
        self.tracker: Any = meta.TrackingCodeGenerator
        self.raised = Raised
        self.max_output = max_output
        self.environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, ext.loopcontrols]
        )
        self.environment.filters["tojson"] = to_json
        self.environment.globals["namespace"] = Namespace
        self.environment.globals["raise_exception"] = raise_exception
        self.environment.globals["strftime_now"] = strftime_now
        self.template = self.guarded(lambda: self.environment.from_string(source))
        self.variables = sorted(self.guarded(lambda: self.looked_up(source)) - self.environment.globals.keys())

    def looked_up(self, source: str) -> set[str]:
        """Names that the template takes from its variables; as jinja2's meta, but nothing is computed beforehand."""
        tracker = self.tracker(self.environment)
        tracker.optimizer = None
        tracker.visit(self.environment.parse(source))
        return set(tracker.undeclared_identifiers)

    def render(self, variables: dict[str, Any]) -> str:
        def run() -> str:
            parts, left = [], self.max_output
            for part in self.template.generate(**variables):
                left -= len(part)
                if left < 0:
                    raise _Failure(f"the text is longer than {self.max_output} characters", "size")
                parts.append(part)
            return "".join(parts)

        return str(self.guarded(run))

    def guarded(self, action: Any) -> Any:
        """`action()`, with every way in which a template fails turned into a _Failure."""
        try:
            return action()
        except _Failure:
            raise
        except self.raised as error:
            raise _Failure(str(error), "raised", _line(error)) from None
        except self.jinja.TemplateSyntaxError as error:
            raise _Failure(error.message or "syntax error", "syntax", error.lineno) from None
        except self.jinja.exceptions.SecurityError as error:
            raise _Failure(str(error), "security", _line(error)) from None
        except MemoryError:
            raise _Failure("it needs more memory than a template may have", "memory") from None
        except RecursionError as error:
            raise _Failure("it recurses too deeply", "memory", _line(error)) from None
        except Exception as error:
            raise _Failure(f"{type(error).__name__}: {str(error)[:500]}", "runtime", _line(error)) from None


def _line(error: BaseException) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _NAME:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _confine(memory: int) -> None:
    """At most `memory` bytes more than now; no new file, socket or process, should a template leave the sandbox."""
    with open("/proc/self/statm") as file:  # noqa: PTH123 (pathlib costs start-up time)
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))


def _warm_up() -> None:
    """Does once what imports modules on first use: no file opens later."""
    import jinja2.constants
    import jinja2.debug  # noqa: F401

    datetime.now().strftime("%c")
    renderer = _Renderer(r"{{ 'a\n' | tojson }}{{ lipsum(n=1) }}{{ none + 1 }}", 1 << 16)
    with contextlib.suppress(_Failure):
        renderer.render({})


def main() -> None:
    setup = _receive()
    sys.path[:] = setup["path"]
    seconds = setup["seconds"]
    _warm_up()
    _confine(setup["memory"])
    _send({"started": True})
    # Should the parent die while a template loops, the alarm's default action ends this process.
    signal.setitimer(signal.ITIMER_REAL, seconds + 2)
    try:
        renderer = _Renderer(setup["template"], setup["output"])
    except _Failure as failure:
        _send(failure.answer)
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _send({"ready": True, "variables": renderer.variables})
    while True:
        variables = _receive()
        signal.setitimer(signal.ITIMER_REAL, seconds + 2)
        try:
            answer: dict[str, Any] = {"text": renderer.render(variables)}
        except _Failure as failure:
            answer = failure.answer
        try:
            _send(answer)
        except MemoryError:
            _send({"error": "it needs more memory than a template may have", "reason": "memory", "line": None})
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
