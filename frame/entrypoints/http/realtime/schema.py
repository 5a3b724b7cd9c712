"""The events of clients, and the settings of a session and of a response: what they may have.

Everything is checked when it is sent, and a field without effect here is refused by its name. Used
by `session`. Must not know a connection or the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from frame.entrypoints.http.chat.request_fields import check_object
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import check_text_sizes
from frame.entrypoints.http.request_body import Metadata, RequestBody
from frame.entrypoints.http.validation_errors import validation_error
from frame.media.sound import RATES

Kind = TypeVar("Kind", bound=RequestBody)

MAX_ID_CHARS = 64
NO_SPEECH = "this server makes no speech"
NO_TURNS = "this server detects no turns; send null, and commit the buffer with input_audio_buffer.commit"
REFUSED_EVENTS = {
    "conversation.item.truncate": f"it cuts spoken output, and {NO_SPEECH}; use conversation.item.delete",
    "output_audio_buffer.clear": f"it stops spoken output, and {NO_SPEECH}",
}
REMEDIES = {  # of fields that only other servers have
    "prompt": "prompts are not stored here; send their text as instructions",
    "tracing": "nothing is traced for a session; leave it out",
    "include": "transcripts have no log-probabilities; leave it out",
}


class ClientEvent(RequestBody):
    type: str
    event_id: str | None = Field(None, max_length=512)


class SessionUpdate(ClientEvent):
    session: dict[str, Any]


class ItemCreate(ClientEvent):
    item: dict[str, Any]
    previous_item_id: str | None = None


class ItemEvent(ClientEvent):
    item_id: str


class ResponseCreate(ClientEvent):
    response: dict[str, Any] | None = None


class ResponseCancel(ClientEvent):
    response_id: str | None = None


class AudioAppend(ClientEvent):
    audio: str


EVENTS: Mapping[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemEvent,
    "conversation.item.delete": ItemEvent,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": ClientEvent,
    "input_audio_buffer.clear": ClientEvent,
}


class GenerationFields(RequestBody):
    """What a response is made with. The last three are not in OpenAI's API."""

    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | Literal["inf"] | None = None
    output_modalities: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    seed: int | None = None


class SessionFields(GenerationFields):
    type: Literal["realtime", "transcription"] | None = None
    model: str | None = None
    audio: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponseFields(GenerationFields):
    conversation: Literal["auto", "none"] | None = None
    input: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class Transcription(RequestBody):
    """`session.audio.input.transcription`."""

    model: str | None = None
    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=64 * 1024)


def read_event(value: Any) -> ClientEvent:
    """An event. Raises ApiError 400 that names an unknown type or field."""
    if not isinstance(value, dict):
        raise ApiError(400, "an event must be a JSON object with a type")
    name = value.get("type")
    if isinstance(name, str) and name in REFUSED_EVENTS:
        raise ApiError(400, f"the event {name} is not supported: {REFUSED_EVENTS[name]}", "type", "unsupported_event")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ApiError(400, f"the event type {quoted(name)} is unknown; send one of {', '.join(EVENTS)}", "type", "unknown_event")
    return read_object(kind, value)


def read_object(kind: type[Kind], value: Mapping[str, Any], place: str = "") -> Kind:
    """An object of a client. place: its path, with a dot at the end. Raises ApiError 400 that names
    the first wrong or unknown field."""
    check_names(value, kind.model_fields, place)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _at(place, validation_error(error.errors(include_url=False), value)) from None
    check_text_sizes({name: each for name, each in value.items() if name not in ("audio", "instructions")})
    return body


def check_names(value: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise ApiError 400 for a field that is not known; null is as good as none for those of other
    servers."""
    for name in value.keys() - known:
        if name in REMEDIES and place:
            if value[name] is not None:
                raise ApiError(400, f"{place}{name} is not supported: {REMEDIES[name]}", f"{place}{name}", "unsupported_field")
            continue
        sentence = f"the field {place}{name[:MAX_ID_CHARS]} is unknown; send {', '.join(known)}"
        raise ApiError(400, sentence, f"{place}{name[:MAX_ID_CHARS]}", "unknown_field")


def _at(place: str, error: ApiError) -> ApiError:
    """The error with the path of its object before the name of its field."""
    return error.with_param(f"{place}{error.param}") if place and error.param else error


def check_transcription_fields(fields: SessionFields) -> None:
    """Raise ApiError 400 for settings of a transcription session that only conversations have."""
    for name in fields.model_fields_set - {"type", "audio", "model"}:
        if getattr(fields, name) is not None:
            place = f"session.{name}"
            raise ApiError(400, f"{place} is not supported: this session transcribes audio; leave it out", place)


# audio --------------------------------------------------------------------------------------------


class AudioSettings(RequestBody):
    """What a transcription session has of `session.audio.input`."""

    rate: int = 24_000  # samples a second, of 16 bits and one channel
    transcription: Transcription = Field(default_factory=Transcription)

    def update(self, audio: Mapping[str, Any] | None) -> AudioSettings:
        """The settings after `session.audio` of an update. Raises ApiError 400."""
        sent_input = _read_audio_input(audio)
        rate, transcription = self.rate, self.transcription
        if sent_input.get("format") is not None:
            rate = _read_rate(check_object(sent_input["format"], "session.audio.input.format"))
        if "transcription" in sent_input:
            place = "session.audio.input.transcription"
            sent = {} if sent_input["transcription"] is None else check_object(sent_input["transcription"], place)
            transcription = read_object(Transcription, sent, f"{place}.")
        return AudioSettings(rate=rate, transcription=transcription)

    def describe(self) -> dict[str, Any]:
        """`session.audio`."""
        described = {"type": "audio/pcm", "rate": self.rate}
        transcription = self.transcription.model_dump()
        return {"input": {"format": described, "transcription": transcription, "turn_detection": None, "noise_reduction": None}}


def check_no_audio(audio: Mapping[str, Any] | None) -> None:
    """Raise ApiError 400 for audio of a session in text."""
    for name, value in _read_audio_input(audio).items():
        if value is not None:
            place = f"session.audio.input.{name}"
            raise ApiError(400, f"{place} is not supported: the model of this session reads text; leave it out", place)


def _read_audio_input(audio: Mapping[str, Any] | None) -> Mapping[str, Any]:
    audio = audio or {}
    check_names(audio, ("input", "output"), "session.audio.")
    if audio.get("output") is not None:
        raise ApiError(400, f"session.audio.output is not supported: {NO_SPEECH}; leave it out", "session.audio.output")
    sent_input: Any = audio.get("input")
    sent_input = {} if sent_input is None else check_object(sent_input, "session.audio.input")
    check_names(sent_input, ("format", "transcription", "turn_detection", "noise_reduction"), "session.audio.input.")
    if sent_input.get("turn_detection") is not None:
        raise ApiError(400, f"session.audio.input.turn_detection must be null: {NO_TURNS}", "session.audio.input.turn_detection")
    if sent_input.get("noise_reduction") is not None:
        place = "session.audio.input.noise_reduction"
        raise ApiError(400, f"{place} must be null: noise is not reduced here", place)
    return sent_input


def _read_rate(value: Mapping[str, Any]) -> int:
    place = "session.audio.input.format"
    check_names(value, ("type", "rate"), f"{place}.")
    if (kind := value.get("type")) != "audio/pcm":
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be audio/pcm, of 16 bits", f"{place}.type")
    rate = value.get("rate", 24_000)
    if type(rate) is not int or not RATES[0] <= rate <= RATES[1]:
        raise ApiError(400, f"{place}.rate is {quoted(rate)}; it must be a whole number from {RATES[0]} to {RATES[1]}", f"{place}.rate")
    return rate
