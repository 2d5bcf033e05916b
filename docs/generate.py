"""Writes docs/reference/cli.md and docs/reference/tasks.md from the code: `python docs/generate.py`.

With `--check` it writes nothing, and fails if a page is not what it would write.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

REFERENCE = Path(__file__).parent / "reference"
WIDTH = 100  # of a signature on one line

MADE = "<!-- Made from the code by `make reference`. Change the code, and make it again. -->"

CLI = f"""\
# The command line

{MADE}

Without `--server URL` (or `MILLPOND_SERVER`, with its token in `MILLPOND_TOKEN`) every command works on the data
directory: `--data DIR`, or `MILLPOND_DATA`, or `~/.local/share/millpond`. No server needs to run; if one does, or a
worker, the command asks the owner of the directory. Data goes to stdout, all else to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 no answer from the server, or from the owner of
the data directory.

Times are `90`, `90s`, `1m30s`, `2h`, `30d` or ISO 8601; instants RFC 3339, in UTC unless they say otherwise. A job is
named by its id, or by QUEUE/ID where several queues have one of that id.

A [tutorial](../tutorial/jobs.md) shows most of it at work. `millpond completion` makes your shell complete these words.
"""

TASKS = f"""\
# Tasks

{MADE}

Functions that workers call: `millpond.App`, and the rest from `millpond.tasks`. The
[tutorial](../tutorial/jobs.md#python-tasks) shows them at work.

Limits: a job, with all its arguments, has up to 1 MiB; a result and a state document up to 64 KiB each. Store what is
larger elsewhere, and hand its name on. Where values go as JSON there is no NaN and no Infinity: as an argument they are
`WrongArguments`, as a result the end of the job. Whole numbers in a result have up to 64 bits.

On a server, to enqueue tasks takes a token with `--role producer` and `--commands`; to wait for a result, or to look at
a job, `--role viewer`; `--role operator` may do both, and cancel. A task enqueues with the token of its worker, so a
worker whose tasks enqueue others and wait for them needs `--role operator --commands`.

A type checker knows the arguments of `enqueue`: those of the function, without a `Context` that is its first parameter.
One in another place needs a default for that (`context: Context | None = None`).
"""

HIDDEN = {"help"}  # of the arguments of every command
RAISED = {"RetryLater", "GiveUp"}  # by tasks: their arguments are of interest
INTERNAL = {"Task.jobs", "Testing.close"}  # public for our own modules


# ---- the command line ---------------------------------------------------------------------------------------------


def cli_page() -> str:
    from millpond.cli.completion import whole_parser

    nouns = verbs_of(whole_parser())
    contents = "\n".join(f"- [{name}](#{name}): {about}" for name, (_, about) in nouns.items())
    parts = [section(parser, name, about, "##") for name, (parser, about) in nouns.items()]
    return "\n".join([CLI, contents, "", *parts])


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {one.dest: one.help or "" for one in action._choices_actions}
            return {name: (below, about[name]) for name, below in action.choices.items()}
    return {}


def section(parser: argparse.ArgumentParser, title: str, about: str, level: str) -> str:
    """A noun with its verbs, or a verb: usage, arguments, examples."""
    verbs = verbs_of(parser)
    lines = [f"{level} {title}", "", f"{about[0].upper()}{about[1:]}.", ""]
    if verbs:
        lines += [section(below, f"{title} {name}", told, "###") for name, (below, told) in verbs.items()]
        return "\n".join(lines)
    lines += ["```", usage(parser), "```", ""]
    lines += rows(parser)
    lines += examples(parser.epilog or "")
    return "\n".join(lines)


def usage(parser: argparse.ArgumentParser) -> str:
    """Made here: that of argparse is not the same in all versions of Python."""
    given = [action for action in parser._actions if action.dest not in HIDDEN]
    needed = [
        f"{action.option_strings[-1]} {takes(action)}" for action in given if action.option_strings and action.required
    ]
    placed = [place(action) for action in given if not action.option_strings]
    optional = ["[FLAG…]"] if len(placed) + len(needed) < len(given) else []
    return " ".join([parser.prog, *needed, *optional, *placed])


def place(action: argparse.Action) -> str:
    shapes = {"?": "[{0}]", "*": "[{0}…]", "+": "{0}…"}
    return shapes.get(str(action.nargs), "{0}").format(takes(action))


def takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.metavar is None and action.choices is not None:
        return "|".join(map(str, action.choices))
    return str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))


def rows(parser: argparse.ArgumentParser) -> list[str]:
    told = [row(action) for action in parser._actions if action.dest not in HIDDEN]
    return ["| | |", "|---|---|", *told, ""] if told else []


def row(action: argparse.Action) -> str:
    """Names and metavar, and what the help says."""
    value = f" {takes(action)}".rstrip()
    names = ", ".join(f"`{name}`" for name in action.option_strings[:-1])
    last = f"{action.option_strings[-1]}{value}" if action.option_strings else takes(action)
    shown = ", ".join(filter(None, [names, "`" + last.replace("|", "\\|") + "`"]))
    return f"| {shown} | {cell(help_of(action))} |"


def help_of(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def cell(text: str) -> str:
    return re.sub(r"([*_<>])", r"\\\1", text).replace("|", "\\|")


def examples(epilog: str) -> list[str]:
    """What is told below the examples is text."""
    shown, _, told = epilog.removeprefix("examples:\n").partition("\n\n")
    lines = ["```", *(line.removeprefix("  ") for line in shown.rstrip().splitlines()), "```", ""] if shown else []
    return [*lines, told.strip(), ""] if told.strip() else lines


# ---- tasks ----------------------------------------------------------------------------------------------------------


def tasks_page() -> str:
    from millpond.jobs.view import Job
    from millpond.tasks import app, consumer, context, errors, handle, pytest_plugin, task, testing

    parts = [
        module_text(app),
        class_text(app.App, "App", init=True),
        class_text(task.Task, "Task", also=task.Enqueues),
        consumer_text(consumer.Consumer),
        class_text(handle.Handle, "Handle"),
        class_text(handle.AsyncHandle, "AsyncHandle"),
        struct_text(Job, "Job"),
        class_text(context.Context, "Context"),
        function_text(context.current, "millpond.tasks.current"),
        "## Errors\n\n" + module_text(errors),
        *(error_text(kind) for kind in own_classes(errors)),
        "## Tests\n\n" + module_text(testing),
        "And as fixtures:\n\n" + module_text(pytest_plugin),
        class_text(testing.Testing, "Testing", level="###"),
    ]
    return "\n".join([TASKS, *parts])


def own_classes(module: Any) -> list[type]:
    return [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]


def module_text(module: Any) -> str:
    """Its docstring; what is indented there is code."""
    return as_markdown(inspect.getdoc(module) or "")


def as_markdown(text: str) -> str:
    """Indented lines become a fenced block."""
    lines: list[str] = []
    for code_block, block in groupby(joined(text.splitlines()), key=lambda line: line.startswith("    ")):
        inner = [line[4:] if code_block else line for line in block]
        while inner and not inner[-1].strip():
            inner.pop()
        lines += ["```", *inner, "```", ""] if code_block else [*inner, ""]
    return "\n".join(lines)


def joined(lines: list[str]) -> Iterator[str]:
    """An empty line between two lines of code is code."""
    for number, line in enumerate(lines):
        after = next((one for one in lines[number:] if one), "")
        before = next((one for one in reversed(lines[:number]) if one), "")
        inside = not line and after.startswith("    ") and before.startswith("    ")
        yield "    " if inside else line


def class_text(kind: type, name: str, *, also: type | None = None, init: bool = False, level: str = "##") -> str:
    told = [f"{level} {name}", "", as_markdown(inspect.cleandoc(kind.__doc__ or ""))]
    if init:
        told.append(function_text(vars(kind)["__init__"], f"millpond.{name}"))
    for source in (kind, *([also] if also else [])):
        named = [(f"{name}.{label}", member) for label, member in members(source)]
        told += [member_text(member, label) for label, member in named if label not in INTERNAL]
    return "\n".join(told)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    for label, member in vars(kind).items():
        if not label.startswith("_") and (isinstance(member, property) or inspect.isfunction(member)):
            yield label, member


def member_text(member: Any, name: str) -> str:
    if isinstance(member, property):
        kind = inspect.signature(getter(member)).return_annotation
        return "\n".join([f"**`{name}`** `{kind}`", "", inspect.cleandoc(member.__doc__ or ""), ""])
    return function_text(member, name)


def getter(member: property) -> Callable[..., Any]:
    assert member.fget is not None
    return member.fget


def function_text(function: Callable[..., Any], name: str) -> str:
    return "\n".join(["```", signature(function, name), "```", "", inspect.cleandoc(function.__doc__ or ""), ""])


def signature(function: Callable[..., Any], name: str) -> str:
    """On one line if it fits, else a line a parameter. Annotations are shown as they are written."""
    told = inspect.signature(function)
    start = "async " if inspect.iscoroutinefunction(function) else ""
    given = list(parameters(told))
    end = "" if told.return_annotation in ("Any", "None", inspect.Signature.empty) else f" -> {told.return_annotation}"
    text = f"{start}{name}({', '.join(given)}){end}"
    if len(text) <= WIDTH:
        return text
    return "\n".join([f"{start}{name}(", *(f"    {one}," for one in given), f"){end}"])


def parameters(told: inspect.Signature) -> Iterator[str]:
    starred = False
    for one in told.parameters.values():
        if one.name in ("self", "function"):
            continue
        if one.kind == one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        stars = "*" if one.kind == one.VAR_POSITIONAL else "**" if one.kind == one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f" = {one.default!r}"
        yield f"{stars}{one.name}: {one.annotation}{default}"


def consumer_text(kind: type) -> str:
    return f"## Consumer\n\nMade by `App.consumer`. {inspect.cleandoc(kind.__doc__ or '')}\n"


def struct_text(kind: type[msgspec.Struct], name: str) -> str:
    """Fields of what `Handle.job` gives and `--json` shows."""
    fields = [f"| `{field}` | {cell(str(kind.__annotations__[field]))} |" for field in kind.__struct_fields__]
    about = inspect.cleandoc(kind.__doc__ or "")
    return "\n".join([f"## {name}", "", about, "", "| | |", "|---|---|", *fields, ""])


def error_text(kind: type) -> str:
    """What is raised by the task itself is made by the user: with its arguments."""
    bases = ", ".join(base.__name__ for base in kind.__bases__)
    told = inspect.cleandoc(kind.__doc__) if "__doc__" in vars(kind) and kind.__doc__ else ""
    made = ["```", signature(vars(kind)["__init__"], kind.__name__), "```", ""] if kind.__name__ in RAISED else []
    return "\n".join([f"### {kind.__name__}", "", f"A kind of {bases}. {told}".strip(), "", *made])


# ---- all of it ------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {"cli.md": cli_page, "tasks.md": tasks_page}


def made(name: str) -> str:
    text = re.sub(r"[ \t]+$", "", PAGES[name](), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for name in PAGES:
        page, text = REFERENCE / name, made(name)
        if page.exists() and page.read_text() == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            page.write_text(text)
    print(f"{'stale' if '--check' in arguments else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
