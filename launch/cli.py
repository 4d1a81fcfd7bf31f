"""The command line: every command's options, and what every command does with an error.

Promises: a HeadraceError is one line on stderr and its exit code; Ctrl-C is 130 and SIGTERM 143;
text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from pathlib import Path

import click

from launch.bench.commands import (
    decode_command,
    group_command,
    io_command,
    ipc_command,
    miss_command,
    prefill_command,
    trace_command,
)
from launch.chat import chat_command
from launch.check import check_command
from launch.doctor.command import doctor_command
from launch.fit.command import fit_command
from launch.generate import generate_command
from launch.pack.command import pack_command
from launch.ranges import PATH
from launch.server.command import serve_command
from launch.settings import Settings, noting_origins, options_command, walk
from launch.simulate.command import simulate_command
from launch.synth.command import synth_command
from launch.top import top_command
from protocol import __version__
from protocol.errors import HeadraceError, refused_by_machine
from protocol.lifecycle import DEBUG_VARIABLE, describe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="headrace")
@click.option(
    "--config",
    type=PATH,
    help="TOML file of options.  [default: $HEADRACE_CONFIG or ~/.config/headrace/headrace.toml]",
)
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Run DeepSeek-V4.1 Flash on one machine by streaming its experts from disk.

    \b
    headrace check DIR                         is this checkpoint whole, and what does it need?
    headrace doctor DIR                        what this machine gives, and what to mend
    headrace generate DIR --prompt "Hello"     read the model's answer
    headrace chat DIR                          talk to the model
    headrace serve DIR                         an OpenAI-compatible server, and a page to watch it
    headrace top                               that server's figures, in the terminal
    headrace options                           every option, its value, and where that comes from
    headrace synth DIR --preset wide           a random checkpoint to try real widths with
    headrace bench io DIR                      how fast this disk feeds the engine
    """
    context.obj = Settings.load(config, cli)
    context.default_map = context.obj.defaults(cli)


@cli.group()
def bench() -> None:
    """Measure this machine; each benchmark compares two ways side by side in one run."""


cli.add_command(check_command)
cli.add_command(generate_command)
cli.add_command(fit_command)
cli.add_command(pack_command)
cli.add_command(simulate_command)
cli.add_command(synth_command)
cli.add_command(serve_command)
cli.add_command(doctor_command)
cli.add_command(top_command)
cli.add_command(chat_command)
cli.add_command(options_command)
for command in (
    io_command,
    ipc_command,
    miss_command,
    group_command,
    trace_command,
    decode_command,
    prefill_command,
):
    bench.add_command(command)


for _, command in walk(cli):
    if command.callback is not None:
        command.callback = noting_origins(command.callback)


def main() -> None:
    """Entry point of `headrace` and of launch.py; never returns."""
    code = _run()
    # A reader that is gone, or a disk that is full: who waits for the rest has seen the code.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Everything is stopped by now. Taking the interpreter apart would add a second on a busy
    # machine, where Ctrl-C promises to be over within two.
    os._exit(code)


def _say(error: str) -> None:
    """One line; of a given value that is longer than any should be, its start."""
    shortened = re.sub(r"([^\s/:;'\"]{80})[^\s/:;'\"]{20,}", r"\1…", error)
    click.echo(f"headrace: {shortened}", err=True)


def _usage_line(error: click.ClickException) -> str:
    """What click has to say, in one line and with the command whose help says more."""
    said = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None) or click.get_current_context(silent=True)
    command = context.command_path if context is not None else "headrace"
    if isinstance(error, click.NoSuchOption) and error.option_name == "--config":
        said += "; it goes before the command, as in headrace --config FILE serve DIR"
    return f"{said[:1].lower()}{said[1:]}{_elsewhere(error)}; see {command} --help"


def _elsewhere(error: click.ClickException) -> str:
    """Where a value that click refuses has been written, unless on the command line."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    settings = error.ctx.find_object(Settings)
    origin = settings.origin(error.ctx, error.param) if settings is not None else ""
    return f" (from {origin})" if origin.startswith(("file", "environment")) else ""


def _run() -> int:
    """Run the command that was asked for; the exit code, with the error said."""
    try:
        cli.main(prog_name="headrace", standalone_mode=False)
    except HeadraceError as error:
        _say(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        _say(_usage_line(error))
        return 2
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader of the text has gone, as `| head` does.
        return 1
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        refused = refused_by_machine(error)
        _say(str(refused or describe(error)))
        return refused.exit_code if refused else 1
    return 0
