"""The `openai` package's Realtime client, unmodified: conversations in text with the embedded
model, and transcriptions of a Whisper checkpoint."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.clients.conftest import CONFIG, KEY, MODEL, TEMPLATE, WEATHER_SCHEMA
from tests.entrypoints.http.openai.test_transcriptions import as_wave, noise
from tests.entrypoints.serving import RunningServer
from tests.tiny_whisper import make_whisper

WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": WEATHER_SCHEMA}
BAD_TOOL = {"type": "function", "name": "f", "parameters": {"type": "thing"}}
QUESTION: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is 2 + 5?"}]}
WHISPER = "whisper"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("realtime")
    (folder / "template.jinja").write_text(TEMPLATE)
    config = folder / "frame.yaml"
    config.write_text(CONFIG.format(template=folder / "template.jinja", key=KEY))
    running = RunningServer(Path(MODEL), "--config", str(config), "--device", "cpu", fake=False)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
def connection(client: Any) -> Iterator[Any]:
    with client.realtime.connect(model=MODEL) as connected:
        assert connected.recv().type == "session.created"
        yield connected


def collect(connection: Any, last: str) -> list[Any]:
    """The events up to one of this type."""
    events: list[Any] = []
    while not events or events[-1].type != last:
        events.append(connection.recv())
    return events


def ask(connection: Any, **response: Any) -> list[Any]:
    connection.response.create(response={"temperature": 0, "max_output_tokens": 24, **response})
    return collect(connection, "response.done")


@pytest.mark.slow
def test_a_conversation_in_text(client: Any, connection: Any) -> None:
    connection.session.update(session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]})
    session = connection.recv().session
    assert (session.instructions, session.model, session.output_modalities) == ("Be brief.", MODEL, ["text"])
    connection.conversation.item.create(item=QUESTION)
    added, done = connection.recv(), connection.recv()
    assert (added.type, done.type, added.previous_item_id) == ("conversation.item.added", "conversation.item.done", None)
    events = ask(connection)
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "conversation.item.done", "response.done",
    ]  # fmt: skip
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 5?"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == chat.choices[0].message.content
    response = events[-1].response
    assert response.output[0].content[0].text == text
    assert (response.status, response.status_details) == ("completed", None)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    connection.conversation.item.create(item=QUESTION)
    collect(connection, "conversation.item.done")
    again = ask(connection)
    more = client.chat.completions.create(
        model=MODEL, messages=[*messages, {"role": "assistant", "content": text}, messages[1]], temperature=0, max_tokens=24
    )
    assert again[-1].response.usage.input_tokens == more.usage.prompt_tokens
    assert again[-1].response.output[0].content[0].text == more.choices[0].message.content


def test_functions(connection: Any) -> None:
    connection.session.update(session={"type": "realtime", "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False})
    assert connection.recv().session.tools[0].name == "get_weather"
    connection.conversation.item.create(item=QUESTION)
    collect(connection, "conversation.item.done")
    events = ask(connection, max_output_tokens=100)
    (call,) = events[-1].response.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(deltas)["city"] in ("Oslo", "Rome")
    assert deltas == call.arguments == next(e.arguments for e in events if e.type == "response.function_call_arguments.done")
    connection.conversation.item.create(item={"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    collect(connection, "conversation.item.done")
    assert ask(connection, tool_choice="none")[-1].response.output[0].type == "message"


def test_items(connection: Any) -> None:
    for name, after in (("b", None), ("a", "root"), ("c", "b")):
        item = {**QUESTION, "id": name}
        connection.conversation.item.create(item=item, **({"previous_item_id": after} if after else {}))
        collect(connection, "conversation.item.done")
    connection.conversation.item.retrieve(item_id="c")
    assert connection.recv().item.content[0].text == "What is 2 + 5?"
    connection.conversation.item.delete(item_id="b")
    assert connection.recv().type == "conversation.item.deleted"
    connection.conversation.item.create(item={**QUESTION, "id": "d"})
    assert connection.recv().previous_item_id == "c"
    connection.recv()
    connection.conversation.item.retrieve(item_id="b")
    assert connection.recv().error.code == "item_not_found"


def test_a_response_out_of_the_conversation(connection: Any) -> None:
    connection.conversation.item.create(item={**QUESTION, "id": "first"})
    collect(connection, "conversation.item.done")
    events = ask(connection, conversation="none", input=[{"type": "item_reference", "id": "first"}], metadata={"topic": "sums"})
    assert "conversation.item.added" not in {event.type for event in events}
    assert (events[-1].response.metadata, events[-1].response.conversation_id) == ({"topic": "sums"}, None)


def test_a_response_is_cancelled(server: RunningServer, connection: Any) -> None:
    connection.conversation.item.create(item=QUESTION)
    collect(connection, "conversation.item.done")
    connection.response.create(response={"max_output_tokens": 200})
    assert connection.recv().type == "response.created"
    connection.response.create()
    connection.response.cancel()
    events = collect(connection, "response.done")
    assert [event.error.code for event in events if event.type == "error"] == ["conversation_already_has_active_response"]
    response = events[-1].response
    assert (response.status, response.status_details.reason) == ("cancelled", "client_cancelled")
    connection.response.cancel()
    assert connection.recv().error.code == "response_cancel_not_active"
    assert ask(connection)[-1].response.status == "completed"


@pytest.mark.parametrize(
    ("event", "param", "words"),
    [
        ({"type": "dance"}, "type", "unknown"),
        ({"type": "conversation.item.truncate"}, "type", "makes no speech"),
        ({"type": "response.create", "response": {"volume": 3}}, "response.volume", "unknown"),
        ({"type": "response.create", "loud": True}, "loud", "unknown"),
        ({"type": "response.create", "response": {"output_modalities": ["audio"]}}, "response.output_modalities", "makes no speech"),
        ({"type": "response.create", "response": {"prompt": {"id": "p"}}}, "response.prompt", "not stored"),
        ({"type": "response.create", "response": {"temperature": 9}}, "response.temperature", "at most 2"),
        ({"type": "response.create", "response": {"max_output_tokens": 0}}, "response.max_output_tokens", "1 or more"),
        ({"type": "response.create"}, "conversation", "empty"),
        ({"type": "session.update", "session": {"type": "transcription"}}, "session.type", "serves sessions of the type realtime"),
        ({"type": "session.update", "session": {"model": "gpt-realtime"}}, "session.model", "does not exist"),
        ({"type": "session.update", "session": {"reasoning": {"effort": "huge"}}}, "session.reasoning.effort", "it must be one of"),
        ({"type": "session.update", "session": {"tools": [BAD_TOOL]}}, "session.tools[0].parameters.type", "it must be one of"),
        (
            {"type": "session.update", "session": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}},
            "session.tool_choice",
            "which is not among tools",
        ),
        ({"type": "response.create", "response": {"tool_choice": "required"}}, "response.tool_choice", "there are no tools"),
        ({"type": "session.update", "session": {"audio": {"output": {"voice": "x"}}}}, "session.audio.output", "makes no speech"),
        (
            {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
            "session.audio.input.turn_detection", "detects no turns",
        ),
        ({"type": "session.update", "session": {"tools": [{"type": "mcp"}]}}, "session.tools[0].type", "must be function"),
        ({"type": "conversation.item.create", "item": {"type": "message", "role": []}}, "item.role", "must be one of"),
        (
            {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [{"type": "input_audio"}]}},
            "item.content[0].type", "input_text",
        ),
        ({"type": "conversation.item.create", "item": {**QUESTION, "previous": 1}}, "item.previous", "unknown"),
        ({"type": "conversation.item.create", "item": QUESTION, "previous_item_id": "x"}, "previous_item_id", "no item"),
        ({"type": "conversation.item.delete"}, "item_id", "missing"),
        ({"type": "input_audio_buffer.append", "audio": ""}, "type", "for transcription sessions"),
    ],
    ids=str,
)  # fmt: skip
def test_events_that_are_refused(connection: Any, event: Any, param: str, words: str) -> None:
    connection.send({**event, "event_id": "mine"})
    error = connection.recv().error
    assert (error.param, error.event_id) == (param, "mine")
    assert words in error.message
    connection.conversation.item.create(item=QUESTION)  # the session goes on
    assert connection.recv().type == "conversation.item.added"


def test_a_browser_sends_its_key_as_a_subprotocol(server: RunningServer) -> None:
    from websockets.sync.client import connect
    from websockets.typing import Subprotocol

    url = server.url.replace("http", "ws") + "/v1/realtime"
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{KEY}")]
    with connect(url, subprotocols=offered, compression=None) as socket:
        assert socket.subprotocol == "realtime"
        assert json.loads(socket.recv())["type"] == "session.created"
        assert socket.response is not None
        assert socket.response.headers["x-request-id"]


# transcription ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_whisper(tmp_path_factory.mktemp(WHISPER))
    running = RunningServer(folder, "--device", "cpu", "--served-model-name", WHISPER, "--dtype", "float32", fake=False)
    yield running
    running.stop()


@pytest.mark.slow
def test_a_transcription(whisper: RunningServer) -> None:
    client: Any = openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0)
    samples = noise(2.3)
    file = client.audio.transcriptions.create(model=WHISPER, file=as_wave(samples), language="de", prompt="Guten Tag")
    data = (samples * 32768).clip(-32768, 32767).astype("<i2").tobytes()
    transcription = {"model": WHISPER, "language": "de", "prompt": "Guten Tag"}
    audio: Any = {"input": {"format": {"type": "audio/pcm", "rate": 16000}, "transcription": transcription, "turn_detection": None}}
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        assert connection.recv().session.type == "transcription"
        connection.session.update(session={"type": "transcription", "audio": audio})
        assert connection.recv().session.audio.input.transcription.language == "de"
        for start in range(0, len(data), 10_000):
            connection.input_audio_buffer.append(audio=base64.b64encode(data[start : start + 10_000]).decode())
        connection.input_audio_buffer.commit()
        events = collect(connection, "conversation.item.input_audio_transcription.completed")
        assert [event.type for event in events[:3]] == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
        assert (events[-1].transcript, events[-1].usage.seconds) == (file.text, 2.3)
        deltas = [event.delta for event in events if event.type.endswith(".delta")]
        assert len(deltas) > 3
        assert "".join(deltas).strip() == file.text
        assert {event.item_id for event in events[3:]} == {events[0].item_id}


def test_a_transcription_without_a_language(whisper: RunningServer) -> None:
    client: Any = openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0)
    with client.realtime.connect() as connection:
        connection.recv()
        connection.input_audio_buffer.commit()
        assert connection.recv().error.code == "input_audio_buffer_commit_empty"
        connection.input_audio_buffer.append(audio="!")
        assert "base64" in connection.recv().error.message
        silence = base64.b64encode(np.zeros(24_000, "<i2").tobytes()).decode()
        connection.input_audio_buffer.append(audio=silence)
        connection.input_audio_buffer.clear()
        assert connection.recv().type == "input_audio_buffer.cleared"
        connection.input_audio_buffer.append(audio=silence)
        connection.input_audio_buffer.commit()
        assert collect(connection, "conversation.item.input_audio_transcription.completed")[-1].usage.seconds == 1.0
        for update, param in (
            ({"audio": {"input": {"transcription": {"model": "whisper-1"}}}}, "session.audio.input.transcription.model"),
            ({"audio": {"input": {"transcription": {"delay": "low"}}}}, "session.audio.input.transcription.delay"),
            ({"audio": {"input": {"format": {"type": "audio/pcmu"}}}}, "session.audio.input.format.type"),
            ({"instructions": "x"}, "session.instructions"),
        ):
            connection.send({"type": "session.update", "session": {"type": "transcription", **update}})
            assert connection.recv().error.param == param
        connection.send({"type": "session.update", "session": {"audio": {"input": {"transcription": {"language": "xx"}}}}})
        connection.recv()
        connection.input_audio_buffer.append(audio=silence)
        connection.input_audio_buffer.commit()
        failed = collect(connection, "conversation.item.input_audio_transcription.failed")[-1]
        assert failed.error.param == "language"
        connection.response.create()
        assert connection.recv().error.code == "wrong_session_type"


def test_a_server_that_stops_ends_idle_sessions(whisper: RunningServer) -> None:
    client: Any = openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0)
    from websockets.exceptions import ConnectionClosed

    with client.realtime.connect() as connection:
        connection.recv()
        stopping = threading.Thread(target=whisper.stop)
        stopping.start()
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv()
        stopping.join()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001
    assert whisper.process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(whisper.url)
