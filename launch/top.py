"""`headrace top`: a running server's figures in the terminal, or once as JSON."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from launch.terminal.figures_view import figures_view
from protocol.errors import HeadraceError, UsageError

PERIOD_S = 1.0
ANSWER_S = 10.0
HISTORY = 60


class NoAnswer(HeadraceError):
    """The server is not there, or does not let this program in."""

    exit_code = 2


@click.command("top")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's.")
@click.option("--api-key", default="", help="Its key, where it has one; HEADRACE_API_KEY too.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures once, for a script.")
def top_command(url: str, api_key: str, as_json: bool) -> None:
    """Watch a server that `headrace serve` started."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url is {url!r}, expected something like http://127.0.0.1:8000")
    url = url.rstrip("/")
    stats = _ask(f"{url}/stats?history={HISTORY}", api_key)
    if as_json:
        click.echo(json.dumps(stats, indent=2))
        return
    if not sys.stdout.isatty():
        Console().print(figures_view(stats, _ask(f"{url}/residency", api_key), 100, 34))
        return
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                stats = _ask(f"{url}/stats?history={HISTORY}", api_key)
                residency = _ask(f"{url}/residency", api_key)
            except NoAnswer as error:
                live.update(Text(str(error), style="red"), refresh=True)
            else:
                view = figures_view(stats, residency, console.width, console.height)
                live.update(view, refresh=True)
            time.sleep(PERIOD_S)


def _ask(url: str, api_key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            parsed: dict[str, Any] = json.load(answer)
            return parsed
    except urllib.error.HTTPError as error:
        raise NoAnswer(f"{url}: {_reason(error)}") from None
    except urllib.error.URLError as error:
        raise NoAnswer(
            f"{url}: no server there ({error.reason}); is `headrace serve` on?"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url}: no such answer as a Headrace server gives ({error})") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"
