"""`frame chat`: a streaming chat in the terminal, with a server (`--base-url`) or with a model in
this process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import click

from frame.entrypoints.cli.options import FiniteRange, config_command, refuse_engine_flags
from frame.entrypoints.configuration.sources import LoadedConfig, refuse_server_settings
from frame.entrypoints.tools.server_calls import CONTROLS, describe_unreachable, make_headers, read_error_message

if TYPE_CHECKING:
    from frame.entrypoints.offline.engine import Engine

Messages = list[dict[str, Any]]
StreamReply = Callable[[Messages], Generator[str]]

COMMANDS = "/clear clears the conversation, /exit or Ctrl-D exits, Ctrl-C stops an answer."
_COMMAND = re.compile("/[a-z]+")  # a line of one word; paths and sentences are messages


HELP = f"Chat in the terminal with a server (--base-url) or with a model in this process. {COMMANDS}"


@config_command(help=HELP)
@click.option("--base-url", help="URL of the server, such as http://127.0.0.1:30000. Default: load the model in this process.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=int, default=512, help="Maximum number of tokens of an answer.")
@click.option("--temperature", type=FiniteRange(0, 100), default=0.0, help="Sampling temperature; 0: greedy.")
@click.option("--message", "-m", help="Send one message, print the answer and exit.")
def command(
    loaded: LoadedConfig, base_url: str | None, system: str | None, max_tokens: int, temperature: float, message: str | None
) -> None:
    parameters = {"max_tokens": max_tokens, "temperature": temperature}
    if message is not None and not message.strip():
        raise click.UsageError("--message is empty; write a text")
    if base_url is not None:
        refuse_engine_flags(loaded)
        talk(_server(base_url, loaded.config.server.api_key, parameters), system, message)
        return
    from frame.entrypoints.offline.engine import Engine

    refuse_server_settings(loaded)
    click.echo(f"loading {loaded.config.model.path} …", err=True)
    with Engine(config=loaded.config) as engine:
        talk(_engine(engine, parameters), system, message)


def talk(reply: StreamReply, system: str | None, only: str | None) -> None:
    """Converse until the user exits. `only`: a single message to send instead."""
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    is_terminal = sys.stdin.isatty()
    if only is None and is_terminal:
        click.echo(COMMANDS, err=True)
    while True:
        line = only if only is not None else _read(is_terminal)
        if line is None or line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(start)
            continue
        if only is None and _COMMAND.fullmatch(line):
            click.echo(COMMANDS if line == "/help" else f"unknown command {line}; {COMMANDS}", err=True)
            continue
        if line:
            check_text(line)
            asked = [*messages, {"role": "user", "content": line}]
            try:
                messages = [*asked, {"role": "assistant", "content": _say(reply(asked))}]
            except click.ClickException as error:
                if not is_terminal or only is not None:
                    raise
                error.show()  # the message is not added to the conversation
        if only is not None:
            return


def check_text(text: str) -> None:
    """Raise ClickException for a text of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.ClickException("The message is not valid UTF-8; write it in UTF-8, and set a locale such as C.UTF-8.") from None


def _read(is_terminal: bool) -> str | None:
    try:
        return input("> " if is_terminal else "").strip()
    except UnicodeDecodeError:
        raise click.ClickException("The standard input is not valid UTF-8; write it in UTF-8.") from None
    except (EOFError, KeyboardInterrupt):
        return None


def _say(pieces: Generator[str]) -> str:
    """Print an answer as it arrives; Ctrl-C stops it."""
    printed: list[str] = []
    try:
        for piece in pieces:
            printed.append(piece)
            click.echo(piece.translate(CONTROLS) if sys.stdout.isatty() else piece, nl=False)
    except KeyboardInterrupt:
        pieces.close()
    click.echo()
    return "".join(printed)


def _engine(engine: Engine, parameters: dict[str, Any]) -> StreamReply:
    def reply(messages: Messages) -> Generator[str]:
        try:
            for delta in engine.stream(messages, parameters):
                yield delta.text
        except (ValueError, RuntimeError) as error:  # the request is invalid, or the engine ended
            raise click.ClickException(str(error)) from None

    return reply


def _server(base_url: str, api_key: str | None, parameters: dict[str, Any]) -> StreamReply:
    import httpx

    headers, url = make_headers(api_key), base_url.rstrip("/").removesuffix("/v1")
    try:
        client = httpx.Client(base_url=url, headers=headers, timeout=None)  # noqa: S113 - generation has no time limit
    except httpx.InvalidURL as error:
        raise click.ClickException(describe_unreachable(base_url, error)) from None

    def reply(messages: Messages) -> Generator[str]:
        body = {"model": "", "messages": messages, "stream": True, **parameters}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    said = read_error_message(response.text)
                    raise click.ClickException(said or f"{base_url} answers with status {response.status_code}")
                is_complete = False
                for line in response.iter_lines():
                    is_complete |= line == "data: [DONE]"
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _pieces(line[6:])
                if not is_complete:
                    raise click.ClickException(f"The answer of {base_url} is incomplete: its stream ends without [DONE].")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(describe_unreachable(base_url, error)) from None

    return reply


def _pieces(data: str) -> list[str]:
    """The texts of an event. Raises ClickException for an error, and for what is no event of a
    chat."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise click.ClickException(str(event["error"]["message"]).translate(CONTROLS))
        deltas = [choice["delta"] for choice in event["choices"]]
        return [(delta.get("reasoning_content") or "") + (delta.get("content") or "") for delta in deltas]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shown = data[:100].translate(CONTROLS)
        raise click.ClickException(f"The server sent {shown!r}, which is no event of /v1/chat/completions.") from None
