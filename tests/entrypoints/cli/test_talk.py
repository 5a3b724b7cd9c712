"""`frame chat` and `frame eval` against a server and in process."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from frame.entrypoints.cli import chat
from frame.entrypoints.cli.main import cli
from frame.entrypoints.tools import server_calls
from tests.entrypoints.serving import RunningServer

TASK = ["--task", "copy", "--samples", "2", "--json"]


def run(*arguments: str, given: str | None = None) -> str:
    done = CliRunner().invoke(cli, arguments, input=given)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_chat_is_the_same_with_a_server_and_in_process(server: RunningServer, checkpoint: Path) -> None:
    same = ["--max-tokens", "8", "-m", "hi"]
    asked = run("chat", "--base-url", server.url, *same)
    assert asked.strip()
    assert run("chat", "--model", str(checkpoint), "--max-model-len", "256", "--dtype", "float32", *same) == asked


def test_chat_remembers_and_forgets(server: RunningServer) -> None:
    first, second, again = run("chat", "--base-url", server.url, "--max-tokens", "6", given="hi\nhi\n/clear\nhi\n/exit\n").split("\n")[:3]
    assert first == again
    assert first != second


def test_chat_sends_no_command_to_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/help", "/foo", "/etc/hosts", "/why is this", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    sent: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        sent.append(messages[-1]["content"])
        yield "yes"

    chat.talk(reply, None, None)  # type: ignore[arg-type]
    assert sent == ["/etc/hosts", "/why is this"]
    assert capsys.readouterr().err == f"{chat.COMMANDS}\nunknown command /foo; {chat.COMMANDS}\n"


def test_chat_shows_the_server_s_complaint(server: RunningServer) -> None:
    done = CliRunner().invoke(cli, ["chat", "--base-url", server.url, "--max-tokens", "100000", "-m", "x"])
    assert done.exit_code == 1
    assert "lower max_tokens" in done.output


def test_eval_of_a_server_and_in_process(server: RunningServer, checkpoint: Path) -> None:
    by_server = json.loads(run("eval", "--base-url", server.url, *TASK))
    in_process = json.loads(run("eval", "--model", str(checkpoint), "--dtype", "float32", *TASK))
    assert by_server["tasks"]["copy"]["samples"] == 2
    assert by_server["tasks"]["copy"]["errors"] == in_process["tasks"]["copy"]["errors"] == 0


@pytest.mark.parametrize("command", [["chat", "-m", "hi"], ["eval", *TASK]])
def test_a_server_that_does_not_answer_is_one_sentence(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--base-url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "The server at http://127.0.0.1:1 does not respond" in done.output
    done = CliRunner().invoke(cli, [*command, "--base-url", "127.0.0.1:1"])
    assert "write http://127.0.0.1:1" in done.output
    done = CliRunner().invoke(cli, [*command, "--base-url", "http://127.0.0.1:1", "--api-key", "k", "--tp", "2"])
    assert (done.exit_code, "--tp has no effect on the server" in done.output) == (2, True)
    done = CliRunner().invoke(cli, [*command, "--port", "8000"])
    assert (done.exit_code, "flag --port: server.port applies to servers, and this engine has none" in done.output) == (78, True)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_of_an_answer_are_shown_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        yield "\x1b]52;c;eA==\x07\x9b\n\tc"

    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    chat.talk(reply, None, "hi")
    shown = "\u241b]52;c;eA==\u2407\ufffd\n\tc\n" if is_terminal else "\x1b]52;c;eA==\x07\x9b\n\tc\n"
    assert capsys.readouterr().out == shown
    assert server_calls.read_error_message('{"error": {"message": "no\\u001b[2J"}}') == "no\u241b[2J"


def test_a_refused_message_does_not_end_a_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []

    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        asked.append([message["content"] for message in messages])
        if messages[-1]["content"] == "bad":
            raise click.ClickException("no")
        yield "yes"

    lines = iter(["good", "bad", "more", "/exit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.talk(reply, None, None)
    assert asked == [["good"], ["good", "yes", "bad"], ["good", "yes", "more"]]
    assert "no" in capsys.readouterr().err


def test_in_process_a_refusal_is_one_sentence(checkpoint: Path) -> None:
    done = CliRunner().invoke(cli, ["chat", "--model", str(checkpoint), "--max-model-len", "64", "--max-tokens", "1000", "-m", "x"])
    assert done.exit_code == 1
    assert "lower max_tokens" in done.output


@contextmanager
def answering(body: bytes, head: bytes = b"200 OK") -> Iterator[str]:
    """A server that answers each request with these bytes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b"HTTP/1.1 " + head + b"\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n" + body)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()


EVENT = b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\n'


@pytest.mark.parametrize(
    ("body", "head", "sentence"),
    [
        (EVENT, b"200 OK", "is incomplete: its stream ends without [DONE]"),
        (b"<html>", b"200 OK", "is incomplete"),
        (b"data: {\n\n", b"200 OK", "The server sent '{', which is no event of /v1/chat/completions"),
        (b'data: {"choices": 3}\n\n', b"200 OK", "which is no event"),
        (b"data: []\n\n", b"200 OK", "which is no event"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', b"200 OK", "which is no event"),
        (b"", b"302 Found", "answers with status 302"),
        (b"", b"204 No Content", "answers with status 204"),
    ],
)
def test_chat_with_what_is_no_server_of_chats(body: bytes, head: bytes, sentence: str) -> None:
    with answering(body, head) as url:
        done = CliRunner().invoke(cli, ["chat", "--base-url", url, "-m", "hi"])
    assert (done.exit_code, "Traceback" in done.output) == (1, False)
    assert sentence in done.output, done.output


def test_chat_with_a_whole_answer() -> None:
    with answering(EVENT + b"data: [DONE]\n\n") as url:
        assert run("chat", "--base-url", url, "-m", "hi") == "yes\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["-m", "\udcff"], 1, "The message is not valid UTF-8"),
        (["-m", " "], 2, "--message is empty"),
        (["-m", "x", "--base-url", "http://[::1"], 1, "does not respond"),
        (["-m", "x", "--api-key", "é日"], 1, "The API key has characters that are not printable ASCII"),
        (["-m", "x", "--temperature", "nan"], 2, "nan is not a finite number"),
        (["-m", "x", "--temperature", "inf"], 2, "inf is not in the range"),
    ],
)
def test_chat_refuses_what_cannot_be_sent(arguments: list[str], code: int, sentence: str) -> None:
    done = CliRunner().invoke(cli, ["chat", "--base-url", "http://127.0.0.1:1", *arguments])
    assert done.exit_code == code, done.output
    assert sentence in done.output


def test_an_evaluation_of_which_all_requests_fail_is_no_score() -> None:
    with answering(b'{"data": [{"id": "m"}]}') as url:
        done = CliRunner().invoke(cli, ["eval", "--base-url", url, *TASK])
    assert done.exit_code == 1
    assert "All 2 requests failed, so this is no score. The first error: " in done.output


def test_standard_input_that_is_not_utf_8() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frame", "chat", "--base-url", "http://127.0.0.1:1"], input=b"\xff\xfe\n", capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr, done.stderr
    assert b"is not valid UTF-8" in done.stderr


def test_a_full_output_is_a_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-m", "frame", "dashboard"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"frame: the output cannot be written: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr, done.stderr
