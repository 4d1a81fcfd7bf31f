"""Options: the command line before the file before the environment, and each says where from."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from launch.cli import cli
from launch.settings import Settings, setting_name, user_file
from protocol.errors import UsageError


def options(*arguments: str, **environment: str) -> Result:
    clean = {"HEADRACE_CONFIG": None, "XDG_CONFIG_HOME": "/nowhere", **environment}
    return CliRunner().invoke(cli, arguments, env=clean)


def origins(result: Result) -> dict[str, tuple[str, str]]:
    assert result.exception is None, result.output
    return {row["option"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(
        'checkpoint = "/ckpt"\nreaders = 3\nqueue = 5\n[serve]\nport = 9001\nthink = true\n'
        "[generate]\nreaders = 7\n"
    )
    return path


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(
    file: Path,
) -> None:
    environment = {
        "HEADRACE_PORT": "1",
        "HEADRACE_QUEUE": "2",
        "HEADRACE_HOST": "::1",
        "HEADRACE_READERS": "9",
    }
    arguments = ("--config", str(file), "options", "serve", "--json", "--queue", "6")
    found = origins(options(*arguments, **environment))
    assert found["queue"] == ("6", "command line")
    assert found["port"] == ("9001", f"file {file}")
    assert found["readers"] == ("3", f"file {file}")
    assert found["host"] == ("::1", "environment HEADRACE_HOST")
    assert found["think"] == ("True", f"file {file}")
    assert found["checkpoint"] == ("/ckpt", f"file {file}")
    assert found["policy"][1] == "default"


def test_a_table_is_for_its_command_alone(file: Path) -> None:
    found = origins(options("--config", str(file), "options", "generate", "--json"))
    assert found["readers"] == ("7", f"file {file}")


def test_the_commands_really_get_those_values(file: Path) -> None:
    seen: dict[str, object] = {}

    @cli.command("probe")
    @click.argument("directory")
    @click.option("--readers", type=int, default=4)
    @click.option("--queue", type=int, default=8)
    def probe(**given: object) -> None:
        seen.update(given)

    try:
        result = options("--config", str(file), "probe", "--queue", "1", HEADRACE_READERS="2")
    finally:
        del cli.commands["probe"]
    assert result.exception is None, result.output
    assert seen == {"directory": "/ckpt", "readers": 3, "queue": 1}


def test_a_value_of_the_wrong_kind_names_the_option(file: Path) -> None:
    result = options("serve", "/nope", HEADRACE_PORT="many")
    assert result.exit_code == 2 and "--port" in result.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpoint = 5", "'DIR': 5 is not a name; write it in quotes"),
        ("route-trace = true", "'--route-trace': True is not a name"),
        ("warm-dir = false", "'--warm-dir': False is not a name"),
        ("readers = 2.5", "'--readers': '2.5' is not a valid integer"),
        ("readers = true", "'--readers': 'true' is not a valid integer"),
        ("readers = [1]", "'--readers': '[1]' is not a valid integer"),
        ("readers = 2020-01-01", "'--readers': '2020-01-01' is not a valid integer"),
        ("think = [1]", "'--think': '[1]' is not a valid boolean"),
    ],
)
def test_a_value_that_the_file_alone_can_have_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    directory = [] if "checkpoint" in text else ["/nope"]
    for command in (("serve", *directory), ("options",)):
        result = options("--config", str(path), *command)
        assert result.exit_code == 2 and says in result.output


def test_what_is_repeatable_may_be_one_value_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for text, shown in (('"25%"', "25%"), ('["25%", "50%"]', "25%,50%")):
        path.write_text(f"cache = {text}")
        found = origins(options("--config", str(path), "options", "simulate", "--json"))
        assert found["cache"] == (shown, f"file {path}")
    found = origins(options("options", "simulate", "--json", HEADRACE_CACHE="75%"))
    assert found["cache"] == ("75%", "environment HEADRACE_CACHE")


@pytest.mark.parametrize(
    ("option", "written", "shown"),
    [
        ("cache", "1KiB", "1024"),
        ("cache", "2.5%", "2.5%"),
        ("pin-experts", "3:17,5:0-1", "3:17,5:0,5:1"),
    ],
)
def test_a_value_is_shown_as_it_could_be_given(option: str, written: str, shown: str) -> None:
    found = origins(options("options", "serve", "--json", f"--{option}", written))
    assert found[option] == (shown, "command line")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("porty = 1", "porty is no option; did you mean port?"),
        ("[serve]\nquue = 1", "[serve] quue is no option of it; did you mean queue?"),
        ("[sreve]\nport = 1", "[sreve] is no command; did you mean serve?"),
        ("port = ", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        Settings.load(path, cli, {})
    assert says in str(raised.value) and str(path) in str(raised.value)


def test_a_file_that_was_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Settings.load(tmp_path / "none.toml", cli, {})
    with pytest.raises(UsageError, match="cannot be read"):
        Settings.load(None, cli, {"HEADRACE_CONFIG": str(tmp_path / "none.toml")})
    assert Settings.load(None, cli, {"HOME": str(tmp_path)}).path is None


def test_the_users_own_file_is_found(tmp_path: Path) -> None:
    own = user_file({"HOME": str(tmp_path)})
    own.parent.mkdir(parents=True)
    own.write_text("readers = 2")
    settings = Settings.load(None, cli, {"HOME": str(tmp_path)})
    assert settings.path == own and settings.file == {("", "readers"): 2}


def test_an_api_key_is_not_printed() -> None:
    result = options("options", "serve", HEADRACE_API_KEY="secret")
    assert "secret" not in result.output and "(set)" in result.output


def test_options_are_those_of_serve_where_no_command_is_named() -> None:
    found = origins(options("options", "--queue", "6", "--json"))
    assert found["queue"] == ("6", "command line")


def test_showing_options_leaves_a_command_without_its_demands() -> None:
    assert options("options", "check").exit_code == 0
    assert "Missing argument 'DIR'" in options("check").output


def test_help_says_what_an_option_may_be() -> None:
    shown = " ".join(options("serve", "--help").output.split())
    for range_ in ("4; 1<=x<=256]", "60.0; 0.001<=x<=30000000.0]", "8000; 0<=x<=65535]"):
        assert range_ in shown


def test_an_unknown_command_is_named() -> None:
    result = options("options", "sevre")
    assert isinstance(result.exception, UsageError)
    assert "did you mean serve" in str(result.exception)


def test_every_option_has_one_name_in_the_file() -> None:
    names = [setting_name(parameter) for parameter in cli.commands["serve"].params]
    assert len(names) == len(set(names)) and "cache" in names and "checkpoint" in names
