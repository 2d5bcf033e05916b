"""`millpond completion`: scripts by which a shell completes these words, made from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from millpond.cli.flags import COMPLETES, Arguments, Subparsers, add_command
from millpond.cli.output import DONE

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = """\
  millpond completion bash > ~/.local/share/bash-completion/completions/millpond
  source <(millpond completion bash)               only for this shell
  millpond completion zsh > ~/.zfunc/_millpond     with ~/.zfunc in fpath, before compinit
  millpond completion fish > ~/.config/fish/completions/millpond.fish
"""

BASH = """\
# Completion of millpond for bash, made by `millpond completion bash`.
_millpond() {{
    local cur prev path= word words i before=
    cur=${{COMP_WORDS[COMP_CWORD]}}
    prev=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $cur == = ]]; then  # bash takes --state=dead apart, others do not
        cur=
    elif [[ $prev == = ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $cur == --*=* ]]; then
        prev=${{cur%%=*}} before=${{cur%%=*}}= cur=${{cur#*=}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        case "${{path:+$path }}$word" in
            {paths}) path="${{path:+$path }}$word" ;;
        esac
    done
    case "$path $prev" in
{values}
        *) case "$path" in
{words}
           esac ;;
    esac
    if [[ -z $words && $cur != -* ]]; then
        local IFS=$'\\n'  # a file's name may have spaces
        COMPREPLY=($(compgen -P "$before" -f -- "$cur"))
    else
        COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))
    fi
}}
complete -o filenames -F _millpond millpond
"""

ZSH = """\
#compdef millpond
# Completion of millpond for zsh, made by `millpond completion zsh`.
autoload -U +X bashcompinit && bashcompinit
{bash}"""


class Command(NamedTuple):
    """One parser: the words that lead to it, and what may follow."""

    path: tuple[str, ...]
    verbs: dict[str, str]
    flags: dict[str, str]
    choices: dict[str, tuple[str, ...]]  # of a flag with a value: what it may be; () for a file or anything
    words: tuple[str, ...]  # what its positional arguments may be


def add(subparsers: Subparsers) -> None:
    verb = add_command(subparsers, "completion", "make your shell complete these words", EXAMPLES)
    verb.add_argument("shell", choices=SHELLS)
    verb.set_defaults(run=completion)


def completion(asked: Arguments) -> int:
    commands = list(_commands(whole_parser(), ()))
    made = {"bash": bash, "zsh": lambda these: ZSH.format(bash=bash(these)), "fish": fish}[asked.shell]
    print(made(commands), end="")
    return DONE


def whole_parser() -> argparse.ArgumentParser:
    """With every noun in it: this is the one command that needs them all."""
    from millpond.cli.main import NOUNS, add_noun, bare_parser

    parser, nouns = bare_parser()
    for noun in NOUNS:
        add_noun(nouns, noun)
    return parser


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Command]:
    below: dict[str, argparse.ArgumentParser] = {}
    found = Command(path, {}, {}, {}, ())
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            found.verbs.update({one.dest: one.help or "" for one in action._choices_actions})
        elif action.option_strings:
            name = action.option_strings[-1]
            found.flags.update(dict.fromkeys(action.option_strings, action.help or ""))
            if action.nargs != 0:
                found.choices[name] = tuple(map(str, action.choices or ()))
        else:
            words += map(str, action.choices or vars(action).get(COMPLETES, ()))
    yield found._replace(words=tuple(words))
    for name, one in below.items():
        yield from _commands(one, (*path, name))


# ---- the shells ---------------------------------------------------------------------------------------------------


def bash(commands: list[Command]) -> str:
    paths = "|".join(f'"{" ".join(one.path)}"' for one in commands if one.path)
    values = "\n".join(
        f'        "{" ".join(one.path)} {flag}") words="{" ".join(choices)}" ;;'
        for one in commands
        for flag, choices in one.choices.items()
    )
    words = "\n".join(
        f'           "{" ".join(one.path)}") words="{" ".join((*one.verbs, *one.words, *one.flags))}" ;;'
        for one in commands
    )
    return BASH.format(paths=paths, values=values, words=words)


def fish(commands: list[Command]) -> str:
    lines = ["# Completion of millpond for fish, made by `millpond completion fish`."]
    for one in commands:
        when = _fish_when(one, commands)
        for name, about in one.verbs.items():
            lines.append(f"complete -c millpond -f -n {when} -a {name} -d {_fish_quoted(about)}")
        for word in one.words:
            lines.append(f"complete -c millpond -f -n {when} -a {word}")
        for flag, about in one.flags.items():
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            value = f" -r -a '{' '.join(one.choices[flag])}'" if flag in one.choices else ""
            lines.append(f"complete -c millpond -n {when} {kind}{value} -d {_fish_quoted(about)}")
    return "\n".join(lines) + "\n"


def _fish_when(command: Command, commands: list[Command]) -> str:
    """All words of its path have been seen, and none that leads further."""
    seen = [f"__fish_seen_subcommand_from {word}" for word in command.path]
    further = f"not __fish_seen_subcommand_from {' '.join(command.verbs)}" if command.verbs else ""
    return "'" + ("; and ".join(filter(None, [*seen, further])) or "true") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
