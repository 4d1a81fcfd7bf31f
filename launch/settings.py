"""Where an option's value comes from: the command line, then a TOML file, then the environment.

Owns the file and the environment's names, and hands both to click as defaults, so that a command
declares an option once. Every option `--some-name` of any command is `some-name` in the file (at
the top for all commands, in a table `[serve]` for one) and HEADRACE_SOME_NAME in the environment;
the DIR argument is `checkpoint` and HEADRACE_CHECKPOINT.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from launch.user_directories import user_directory
from protocol.errors import HeadraceError, UsageError

PREFIX = "HEADRACE_"
FILE_VARIABLE = "HEADRACE_CONFIG"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Settings:
    """The file's values by (command, option), command "" for all; `path` None without a file."""

    path: Path | None
    file: Mapping[tuple[str, str], Any]
    environment: Mapping[str, str]

    @classmethod
    def load(
        cls, path: Path | None, commands: click.Group, environment: Mapping[str, str] = os.environ
    ) -> Settings:
        """The file at `path`, or where HEADRACE_CONFIG says, or the user's own if there is one.
        Raises UsageError for a file that is missing, not TOML, or names an unknown option."""
        chosen = path or (Path(v) if (v := environment.get(FILE_VARIABLE)) else None)
        if chosen is None:
            own = user_file(environment)
            # Unlike Path.is_file, false also for a home that may not be looked into.
            chosen = own if os.path.isfile(own) else None
        if chosen is None:
            return cls(None, {}, environment)
        return cls(chosen, dict(_flatten(_read(chosen), chosen, commands)), environment)

    def defaults(self, group: click.Group) -> dict[str, Any]:
        """click's `default_map` for the commands of `group`."""
        found: dict[str, Any] = {}
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                found[name] = self.defaults(command)
            else:
                found[name] = self.values(name, command)
        return found

    def values(self, name: str, command: click.Command) -> dict[str, Any]:
        """What file and environment say for the command `name`, by parameter."""
        looked = {str(p.name): self._lookup(name, p) for p in command.params}
        return {parameter: value for parameter, value in looked.items() if value is not None}

    def origin(self, context: click.Context, parameter: click.Parameter) -> str:
        """Where `parameter` of `context`'s command has its value from, in words."""
        assert parameter.name is not None
        source = context.get_parameter_source(parameter.name)
        if source is ParameterSource.COMMANDLINE:
            return "command line"
        if source is not ParameterSource.DEFAULT_MAP:
            return "default"
        name = setting_name(parameter)
        command = context.info_name or ""
        if (command, name) in self.file or ("", name) in self.file:
            return f"file {self.path}"
        return f"environment {variable_name(name)}"

    def note_origins(self, error: HeadraceError, context: click.Context) -> None:
        """Have `error` say where the options that it names were set, unless on the command line."""
        named = re.findall(r"--([a-z-]+)", str(error))
        for parameter in context.command.params:
            origin = self.origin(context, parameter)
            if setting_name(parameter) in named and origin.startswith(("file", "environment")):
                error.args = (f"{error}; --{setting_name(parameter)} is from {origin}",)

    def _lookup(self, command: str, parameter: click.Parameter) -> Any:
        name = setting_name(parameter)
        value: Any = self.environment.get(variable_name(name))
        for key in (("", name), (command, name)):
            value = self.file.get(key, value)
        if value is None or not (parameter.multiple or parameter.nargs == -1):
            return _as_text(value, parameter.type)
        each = value if isinstance(value, list) else [value]
        return [_as_text(one, parameter.type) for one in each]


def _as_text(value: Any, kind: object) -> Any:
    """A value of a TOML file as a command line would have it, so that 2.5 or true is refused where
    a whole number is wanted. A name of a file has to be a string there."""
    if value is None or isinstance(kind, click.Path):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting_name(parameter: click.Parameter) -> str:
    """An option's name in the file: its longest spelling without dashes before it."""
    if isinstance(parameter, click.Argument):
        return CHECKPOINT if parameter.name == "directory" else str(parameter.name)
    return max(parameter.opts, key=len).lstrip("-")


def variable_name(setting: str) -> str:
    """A setting's name in the environment."""
    return PREFIX + setting.upper().replace("-", "_")


def noting_origins(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A command's function whose errors name a file or a variable as well; see `note_origins`."""

    @functools.wraps(callback)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return callback(*arguments, **named)
        except HeadraceError as error:
            context = click.get_current_context()
            settings = context.find_object(Settings)
            if settings is not None:
                settings.note_origins(error, context)
            raise

    return run


def user_file(environment: Mapping[str, str]) -> Path:
    """The file that is read when none is named."""
    return user_directory("XDG_CONFIG_HOME", ".config", environment) / "headrace.toml"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML ({error})") from None


def _flatten(
    parsed: dict[str, Any], path: Path, commands: click.Group
) -> Iterator[tuple[tuple[str, str], Any]]:
    by_command = {name: set(_setting_names(command)) for name, command in walk(commands)}
    every = set().union(*by_command.values())
    for key, value in parsed.items():
        if isinstance(value, dict):
            if key not in by_command:
                raise UsageError(f"{path}: [{key}] is no command{_suggest(key, by_command)}")
            for name, inner in value.items():
                if name not in by_command[key]:
                    hint = _suggest(name, by_command[key])
                    raise UsageError(f"{path}: [{key}] {name} is no option of it{hint}")
                yield (key, name), inner
        elif key in every:
            yield ("", key), value
        else:
            raise UsageError(f"{path}: {key} is no option{_suggest(key, every)}")


def walk(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Every command of `group` and of the groups in it, by its name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command)
        else:
            yield name, command


def _setting_names(command: click.Command) -> Iterator[str]:
    return (setting_name(parameter) for parameter in command.params)


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; see `headrace options`"


@click.command(
    "options",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
)
@click.argument("command", default="serve")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="For a script.")
@click.pass_context
def options_command(
    context: click.Context, command: str, arguments: tuple[str, ...], as_json: bool
) -> None:
    """Every option of COMMAND, or of serve, with its value and where that comes from.

    Further ARGUMENTS are those the command would get.

    \b
    headrace options
    headrace options generate --cache 64GiB
    """
    root = context.find_root()
    settings, group = root.obj, root.command
    assert isinstance(settings, Settings) and isinstance(group, click.Group)
    if command.startswith("-"):
        command, arguments = "serve", (command, *arguments)
    chosen = dict(walk(group)).get(command)
    if chosen is None:
        raise UsageError(f"there is no command {command!r}{_suggest(command, dict(walk(group)))}")
    chosen = _with_nothing_required(chosen)
    inner = click.Context(chosen, parent=root, info_name=command)
    inner.default_map = settings.values(command, chosen)
    chosen.parse_args(inner, list(arguments))
    rows = [
        {
            "option": setting_name(parameter),
            "value": None if value is None else _written(value),
            "origin": settings.origin(inner, parameter),
            "variable": variable_name(setting_name(parameter)),
        }
        for parameter in chosen.params
        if parameter.name is not None and parameter.name != "help"
        for value in (_shown(parameter, inner.params.get(parameter.name)),)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("option", "value", "from", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        style = "dim" if row["origin"] == "default" else ""
        table.add_row(row["option"], row["value"] or "-", row["origin"], style=style)
    Console().print(table)
    file = settings.path or f"{user_file(os.environ)} (not there)"
    click.echo(f"\nfile: {file}")


def _with_nothing_required(command: click.Command) -> click.Command:
    """`command`, which refuses what it always does, but for a value that is missing."""
    lenient = copy.copy(command)
    lenient.params = [copy.copy(parameter) for parameter in command.params]
    for parameter in lenient.params:
        parameter.required = False
    return lenient


def _shown(parameter: click.Parameter, value: Any) -> Any:
    """A secret is not printed."""
    return "(set)" if value and parameter.name == "api_key" else value


def _written(value: Any) -> str:
    """As it could be given: what is repeatable one after the other, an expert as LAYER:EXPERT."""
    if type(value) is not tuple:
        return str(value)
    return ",".join(":".join(map(str, v)) if type(v) is tuple else str(v) for v in value)
