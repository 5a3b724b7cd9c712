"""The routes `/v1/audio/transcriptions` and `/v1/audio/translations` of the OpenAI API.

Files are decoded in threads, a window at a time in turn by key; the windows of a file are the
sequences of one request. Must not depend on the engine.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, Protocol

import msgspec
from pydantic import Field, model_validator

from frame.entrypoints.audio import MAX_BYTES, open_audio
from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.errors import CLOSE, ApiError, DisconnectedError
from frame.entrypoints.http.failures import aborted, as_api_error, raise_failed, too_many
from frame.entrypoints.http.protocol.api_route import FILE_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import FormReader, RequestOptions, parse_body
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import Caller, RequestPlan, check_sequence_count, start_request, stream_response, wait_complete
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.speech import Alignment, Segment, Speech, Transcription, Window, format_subtitles, join_segments, name_text_language
from frame.entrypoints.word_times import Word
from frame.media.feature_store import FeatureLease

router = ApiRouter(access=Access.USER)

ALIGNED_AT_ONCE = 4  # windows whose words are timed in one request
LARGEST_FIELD = 64 * 1024  # bytes of a field that is no file
FIELDS = "file, model, language, prompt, response_format, temperature, seed, timestamp_granularities[], chunking_strategy and stream"
NESTED = re.compile(r"chunking_strategy\[(\w{1,50})\]")  # a form's name of a field of the object

TranscriptionUsage = declare(
    "TranscriptionUsage",
    "seconds? input_tokens? output_tokens? total_tokens?",
    "`seconds`: of type duration. The numbers of tokens: of type tokens.",
    type=Literal["duration", "tokens"],
)
TranscriptionEvent = declare(
    "TranscriptionEvent",
    "delta? text?",
    "`delta`: of a piece of text. `text` and `usage`: of the last event.",
    type=Literal["transcript.text.delta", "transcript.text.done"],
    usage=NotRequired[TranscriptionUsage],
)
TranscriptionSegment = declare(
    "TranscriptionSegment",
    "end text temperature compression_ratio",
    "`avg_logprob` is that of the segment's window.",
    id=int,
    start=float,
    tokens=list[int],
    avg_logprob=float | None,
)
TranscriptionWord = declare("TranscriptionWord", "word end", "A word with its punctuation, and its seconds in the audio.", start=float)
TranscriptionObject = declare(
    "TranscriptionObject",
    "text language? duration?",
    "A transcription; with `response_format: verbose_json` all fields.",
    usage=TranscriptionUsage,
    task=NotRequired[Literal["transcribe", "translate"]],
    segments=NotRequired[array(TranscriptionSegment)],
    words=NotRequired[array(TranscriptionWord)],
)


class SpeechFields(RequestOptions):
    """The fields of a form besides its file."""

    is_form: ClassVar[bool] = True
    model: str = ""
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    chunking_strategy: str | dict[str, Any] | None = None
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ()
    stream: bool = False

    @model_validator(mode="after")
    def _check(self) -> SpeechFields:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ApiError(400, "timestamp_granularities needs response_format verbose_json", "timestamp_granularities")
        if self.stream and self.response_format not in ("json", "text"):
            raise ApiError(400, f"stream needs response_format json or text, not {self.response_format}", "stream")
        _check_chunking(self.chunking_strategy)
        return self

    @property
    def has_stamps(self) -> bool:
        return self.response_format in ("verbose_json", "srt", "vtt")

    @property
    def has_words(self) -> bool:
        return "word" in self.timestamp_granularities

    @property
    def has_segments(self) -> bool:
        return not self.timestamp_granularities or "segment" in self.timestamp_granularities


def _check_chunking(strategy: str | dict[str, Any] | None) -> None:
    """Raise ApiError for a strategy other than the server's, which cuts long files where they are
    quiet."""
    name = "chunking_strategy"
    if isinstance(strategy, str) and strategy.lstrip().startswith("{"):
        try:
            strategy = msgspec.json.decode(strategy, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            raise ApiError(400, f"{name} is no JSON object; send auto, or an object", name) from None
    if isinstance(strategy, dict):
        for key in strategy.keys() - {"type"}:
            sentence = f"{name}.{key} cannot be set: long files are cut at the quietest place near the end of a window; leave it out"
            raise ApiError(400, sentence, f"{name}.{key}")
        if strategy.get("type") != "server_vad":
            raise ApiError(400, f"{name}.type must be server_vad", f"{name}.type")
    elif strategy not in (None, "auto"):
        raise ApiError(400, f"{name} must be auto, or an object of the type server_vad", name)


@router.post("/v1/audio/transcriptions", dependencies=[FILE_BODY], responses=responds_with(TranscriptionObject, events=TranscriptionEvent))
async def transcriptions(context: ContextDep, services: ServicesDep) -> Any:
    """Transcribe an audio file, as multipart/form-data."""
    return await _respond(context, services, "transcribe")


@router.post("/v1/audio/translations", dependencies=[FILE_BODY], responses=responds_with(TranscriptionObject, events=TranscriptionEvent))
async def translations(context: ContextDep, services: ServicesDep) -> Any:
    """Translate an audio file to English, as multipart/form-data."""
    return await _respond(context, services, "translate")


async def _respond(context: RequestContext, services: Services, task: str) -> Any:
    with closing(services.features.open_lease(context.tenant)) as lease:
        return await _transcribe(context, services, task, lease)


async def _transcribe(context: RequestContext, services: Services, task: str, lease: FeatureLease) -> Any:
    speech = need_speech(services)  # other models refuse the file before it is read
    form, file = await read_form(context)
    services.check_model(form.model, context.tenant)
    try:
        if form.has_words:
            speech.check_alignment("timestamp_granularities")
        language = speech.choose_language(form.language.lower() if form.language else None, task)
        windows = await _decode_while_connected(context, services, file, lease)
    except QuotaExceededError as error:
        raise too_many(error) from None
    except ValueError as error:
        raise as_api_error(error) from None
    state, language, prompt = await start_windows(context, services, form, windows, language, task)
    if form.stream:
        await _stream(context, services, state)
        return None
    segments, texts = list[Segment](), list[list[int]]()
    sequences = await _finish(state)
    for window, sequence in zip(windows, sequences, strict=True):
        _, ids, pieces = sequence.take_output()
        logprobs = [each for piece in pieces for each in piece.logprobs]
        segments += speech.read_segments(ids, window.start, window.seconds, logprobs, has_stamps=form.has_stamps)
        texts.append([*prompt, *ids])
    aligned = _Texts(windows, texts, len(prompt), name_text_language(language, task))
    words = await _align(context, services, form, aligned, lease) if form.has_words else []
    transcription = join_segments(segments, language, sum(window.seconds for window in windows), words)
    if form.response_format in ("json", "verbose_json"):
        return _write_object(transcription, task, form, state)
    body = transcription.text + "\n" if form.response_format == "text" else format_subtitles(transcription.segments, form.response_format)
    kind = b"text/vtt; charset=utf-8" if form.response_format == "vtt" else b"text/plain; charset=utf-8"
    await context.respond(body.encode(), headers=((b"content-type", kind),))
    return None


async def start_windows(
    caller: Caller, services: Services, form: SpeechFields, windows: Sequence[Window], language: str | None, task: str = "transcribe"
) -> tuple[RequestState, str | None, list[int]]:
    """Start the request that writes the text of windows. language: None: detect it first. -> its
    state, the language, and the prompt of each window. Raises ApiError, DisconnectedError."""
    speech, items = need_speech(services), [window.item for window in windows]
    if language is None and speech.detects_language:
        detection = await start_request(
            caller, services, RequestPlan(*_each(speech.plan_detection(), 1), form, prefix="lang-", encoder_items=items[:1])
        )
        language = speech.find_language((await _finish(detection))[0].take_output()[1][0])
    sampled: dict[str, Any] = {"has_stamps": form.has_stamps, "temperature": form.temperature, "seed": form.seed}
    window_plan = speech.plan_window(language, task, form.prompt, **sampled)
    plan = RequestPlan(*_each(window_plan, len(items)), form, prefix="transcr-", encoder_items=items)
    return await start_request(caller, services, plan), language, window_plan[0]


def need_speech(services: Services) -> Speech:
    """How this server's model is asked to transcribe. Raises ApiError for other models."""
    services.need_task("generate", takes_audio=True)
    if services.speech is None:
        try:
            services.speech = Speech(services.resolved, services.need_tokenizer())
        except ValueError as error:
            raise as_api_error(error) from None
    return services.speech


async def read_form(context: RequestContext) -> tuple[SpeechFields, bytes]:
    """The fields and the file of a form. Raises ApiError."""
    reader = FormReader(context.header(b"content-type") or "", FIELDS)
    fields: dict[str, list[bytearray]] = {}
    size = 0
    async for piece in context.held_pieces():
        for part, content in reader.feed(piece):
            if not content:
                fields.setdefault(part.name, []).append(bytearray())
                continue
            size = size + len(content) if part.name == "file" else size
            fields[part.name][-1] += content
            if size > MAX_BYTES or (part.name != "file" and len(fields[part.name][-1]) > LARGEST_FIELD):
                maximum = MAX_BYTES if part.name == "file" else LARGEST_FIELD
                raise ApiError(413, f"{part.name[:50]} has more than {maximum} bytes; send less", part.name[:50], headers=CLOSE)
    reader.close()
    values: dict[str, Any] = {}
    for name, contents in fields.items():
        if (nested := NESTED.fullmatch(name)) is not None:
            strategy = values.setdefault("chunking_strategy", {})
            if not isinstance(strategy, dict) or nested[1] in strategy or len(contents) > 1:
                raise ApiError(400, "chunking_strategy is given twice; send it once", "chunking_strategy")
            strategy[nested[1]] = contents[0].decode("utf-8", "replace")
            continue
        plain = name.removesuffix("[]")
        if plain not in ("file", *SpeechFields.model_fields):
            raise ApiError(400, f"the field {name[:50]!r} is unknown; send {FIELDS}", name[:50] or None)
        if (plain != "timestamp_granularities" and len(contents) > 1) or plain in values:
            raise ApiError(400, f"{plain} is given twice; send it once", plain)
        texts = [] if plain == "file" else [content.decode("utf-8", "replace") for content in contents]
        values[plain] = contents[0] if plain == "file" else texts if plain == "timestamp_granularities" else texts[0]
    file = bytes(values.pop("file", b""))
    if not file:
        raise ApiError(400, "file is missing or empty; send the audio", "file")
    return parse_body(SpeechFields, values)[0], file


async def _decode_while_connected(context: RequestContext, services: Services, file: bytes, lease: FeatureLease) -> list[Window]:
    """`decode_windows`, which ends when the client disconnects. Raises DisconnectedError."""
    decoding = asyncio.create_task(decode_windows(context, services, file, lease))

    def stop() -> None:
        decoding.cancel()

    context.on_disconnect(stop)
    try:
        await asyncio.wait({decoding})
    finally:
        decoding.cancel()
    if decoding.cancelled():
        raise DisconnectedError
    return decoding.result()


class Holder(Caller, Protocol):
    """A caller whose memory counts, until it ends."""

    def hold(self, size: int) -> None: ...


async def decode_windows(context: Holder, services: Services, file: bytes, lease: FeatureLease) -> list[Window]:
    """The windows of a file, each decoded in a turn of its key. Raises InvalidRequestError,
    QuotaExceededError, ApiError."""
    speech, windows = need_speech(services), list[Window]()
    async with services.audio_files.hold_slot(context.tenant):
        async with services.audio_turns.hold_slot(context.tenant):
            opened = await asyncio.to_thread(open_audio, file)
        with closing(opened):
            count = math.ceil(opened.seconds / speech.window_seconds)
            check_sequence_count(services, count, "file")  # before the work, which would be for nothing
            if context.lease is not None:
                context.lease.reserve_sequences(count)
            rest = speech.read_windows(opened, lease)
            while True:
                async with services.audio_turns.hold_slot(context.tenant):
                    window = await asyncio.to_thread(next, rest, None)
                if window is None:
                    return windows
                context.hold(4 * math.prod(speech.input_shape))
                windows.append(window)
                check_sequence_count(services, len(windows), "file")


class _Texts(NamedTuple):
    """The windows of a file, and for each the tokens of its prompt and text."""

    windows: list[Window]
    token_ids: list[list[int]]
    prompt_len: int
    language: str | None


async def _align(context: RequestContext, services: Services, form: SpeechFields, texts: _Texts, lease: FeatureLease) -> list[Word]:
    """The words of all windows. A few windows at a time are read again by the model, so that few
    matrices (2.7 MB each) are held. Raises ApiError, DisconnectedError."""
    speech, words = need_speech(services), list[Word]()
    pairs = list(zip(texts.windows, texts.token_ids, strict=True))
    prompt_len, language = texts.prompt_len, texts.language

    def plan(window: Window, ids: list[int]) -> Alignment | None:
        return speech.plan_alignment(window, ids[:prompt_len], ids[prompt_len:], lease)

    for first in range(0, len(pairs), ALIGNED_AT_ONCE):
        planned = [await asyncio.to_thread(plan, *pair) for pair in pairs[first : first + ALIGNED_AT_ONCE]]
        alignments = [each for each in planned if each is not None]
        if not alignments:
            continue
        items = [each.item for each in alignments]
        plans = _each(speech.plan_alignment_step(), len(items))
        state = await start_request(context, services, RequestPlan(*plans, form, prefix="align-", encoder_items=items))
        await _finish(state)
        for index, alignment in enumerate(alignments):
            async with services.audio_turns.hold_slot(context.tenant):
                words += await asyncio.to_thread(speech.read_words, alignment, state.vectors.pop(index), language)
    return words


def _each(plan: tuple[list[int], Any], count: int) -> tuple[list[Any], list[Any]]:
    return [plan[0]] * count, [plan[1]] * count


async def _finish(state: RequestState) -> list[SequenceState]:
    sequences = await wait_complete(state)
    if any(each.finish is not None and each.finish.reason == "abort" for each in sequences):
        raise aborted()
    return sequences


async def _stream(context: RequestContext, services: Services, state: RequestState) -> None:
    """Events of the text in the order of the windows."""
    texts = OrderedTexts(len(state.sequences))

    def write(sequence: SequenceState) -> bytes:
        return b"".join(_event({"type": "transcript.text.delta", "delta": text}) for text in texts.feed(sequence))

    def close() -> bytes:
        return _event({"type": "transcript.text.done", "text": texts.whole, "usage": _usage(state)})

    await stream_response(context, services, state, write, close)


class OrderedTexts:
    """The texts of windows in their order; what comes early of a later one waits."""

    def __init__(self, num_windows: int) -> None:
        self._waiting = [""] * num_windows
        self._ended = set[int]()  # whose last text is in `_waiting`
        self._first = 0  # that has not ended
        self._given: list[str] = []

    def feed(self, sequence: SequenceState) -> list[str]:
        """-> the texts that the new output of a sequence adds. Raises ApiError for one that
        failed."""
        raise_failed([sequence])
        self._waiting[sequence.index] += sequence.take_output()[0]
        if sequence.finish is not None:
            self._ended.add(sequence.index)
        texts = []
        while self._first < len(self._waiting):
            if text := self._waiting[self._first]:
                texts.append(text)
                self._waiting[self._first] = ""
            if self._first not in self._ended:
                break
            self._first += 1
        self._given += texts
        return texts

    @property
    def whole(self) -> str:
        return "".join(self._given)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(state: RequestState) -> dict[str, Any]:
    inputs, outputs = sum(len(each.prompt) for each in state.sequences), sum(each.num_tokens for each in state.sequences)
    return {"type": "tokens", "input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}


def _write_object(transcription: Transcription, task: str, form: SpeechFields, state: RequestState) -> dict[str, Any]:
    if form.response_format == "json":
        return {"text": transcription.text, "usage": _usage(state)}
    segments = [
        {
            "id": number,
            "start": round(each.start, 2),
            "end": round(each.end, 2),
            "text": each.text,
            "tokens": each.token_ids,
            "temperature": form.temperature,
            "avg_logprob": each.avg_logprob,
            "compression_ratio": each.compression_ratio,
        }
        for number, each in enumerate(transcription.segments)
    ]
    words = [{"word": each.text.strip(), "start": each.start, "end": each.end} for each in transcription.words]
    return {
        "task": task,
        "language": transcription.language,
        "duration": round(transcription.duration, 2),
        "text": transcription.text,
        **({"segments": segments} if form.has_segments else {}),
        **({"words": words} if form.has_words else {}),
        "usage": {"type": "duration", "seconds": round(transcription.duration, 2)},
    }
