"""`headrace generate`: one prompt in, the model's text out, and a short account of the run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from engram_io.token_map import load_tokenizer
from launch.command_options import with_group_options
from launch.foreground import console, run_foreground, running_group
from launch.group import ProcessGroup
from launch.options import GenerateOptions, GroupOptions
from launch.prompt import chat_prompt, check_prompt, raw_prompt
from launch.ranges import COUNT, MIN_P, PATH, SEED, TEMPERATURE, TOP_K, TOP_P
from launch.summary import run_figures, run_table
from launch.warm_options import with_warm_options
from launch.whole_file import whole_file
from protocol.config import ModelConfig
from protocol.errors import ResourceError, UsageError, failure
from protocol.messages import Finished, PrefillProgress, TokenEvent


@click.command("generate")
@with_group_options
@with_warm_options(warm=False)
@click.option("--prompt", help="The prompt.  [default: standard input]")
@click.option("--prompt-file", type=PATH, help="A file with the prompt.")
@click.option("--prompt-ids", help="The prompt as token ids, separated by commas; taken as is.")
@click.option("--chat/--raw", default=True, help="Ask as a user, or continue the text as it is.")
@click.option(
    "--max-tokens", type=COUNT, default=256, show_default=True, help="Most tokens to generate."
)
@click.option(
    "--temperature",
    type=TEMPERATURE,
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token.",
)
@click.option(
    "--top-k", type=TOP_K, default=0, show_default=True, help="Choose among this many; 0: all."
)
@click.option(
    "--top-p",
    type=TOP_P,
    default=1.0,
    show_default=True,
    help="Choose among this much probability.",
)
@click.option(
    "--min-p", type=MIN_P, default=0.0, show_default=True, help="Least share of the likeliest's."
)
@click.option(
    "--seed",
    "sampling_seed",
    type=SEED,
    default=0,
    show_default=True,
    help="The same seed gives the same text.",
)
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given repeatedly.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--trace", type=PATH, help="Write a trace for ui.perfetto.dev.")
@click.option("--json", "json_file", type=PATH, help="Write the figures.")
def generate_command(
    group: GroupOptions,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    chat: bool,
    json_file: Path | None,
    sampling_seed: int,
    **request: Any,
) -> None:
    """Generate text from the checkpoint in DIR.

    The text goes to standard output as it comes, everything else to standard error.

    \b
    headrace generate DIR --prompt "Why is the sky blue?"
    headrace generate DIR --raw --prompt "Once upon a time" --max-tokens 50
    headrace generate DIR --cache 64GiB --trace run.json --json run-figures.json < question.txt
    """
    for path in (group.trace, group.route_trace, json_file):
        _check_writable(path)
    config = ModelConfig.load(group.checkpoint)
    tokenizer = None
    if prompt_ids is not None:
        ids = _parse_ids(prompt_ids)
    else:
        encode = chat_prompt if chat else raw_prompt
        text = _prompt_text(prompt, prompt_file)
        tokenizer = load_tokenizer(group.checkpoint, config)
        ids = encode(tokenizer, config, text)
    check_prompt(ids, config, group.max_context)
    request["stop"] = tuple(request["stop"])
    options = GenerateOptions(ids, seed=sampling_seed, **request)

    async def main() -> None:
        async with running_group(group, tokenizer) as running:
            await _generate(running, options, json_file)

    run_foreground(main)


async def _generate(group: ProcessGroup, options: GenerateOptions, json_file: Path | None) -> None:
    parts: list[str] = []
    finished: Finished | None = None
    with console.status("reading the prompt") as status:
        async for event in group.generate(options):
            match event:
                case PrefillProgress(_, done, total, _):
                    status.update(f"reading the prompt: {done} of {total} tokens")
                case TokenEvent():
                    status.stop()
                    _emit(event.text, parts)
                case Finished():
                    status.stop()
                    _emit(event.text, parts)
                    finished = event
    assert finished is not None
    if finished.reason == "error":
        raise failure(finished.failure, finished.error)
    print(flush=True)
    figures = run_figures("".join(parts), finished, await group.stats())
    console.print(run_table(figures))
    if json_file is not None:
        _write_figures(json_file, figures)
    trace = group.options.trace
    if trace is not None:
        count = await group.trace_stop(trace)
        console.print(f"[dim]{count} trace events in {trace}; open it at ui.perfetto.dev[/dim]")


def _write_figures(path: Path, figures: dict[str, Any]) -> None:
    try:
        with whole_file(path) as file:
            file.write(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None


def _emit(text: str, parts: list[str]) -> None:
    parts.append(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other; give one")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        try:
            text = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{prompt_file}: cannot be read as UTF-8 text ({error})") from None
    else:
        text = _standard_input()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text ({error.reason})") from None
    if not text.strip():
        raise UsageError("the prompt is empty; give --prompt, --prompt-file or standard input")
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text ({error.reason})") from None


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(re.fullmatch("-?[0-9]{1,20}", part) for part in parts):
        raise UsageError(f"--prompt-ids {text!r}: expected numbers separated by commas")
    return [int(part) for part in parts]


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
