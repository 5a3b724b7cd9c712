"""`Engine`: offline inference without a server, sync, async and streaming; the counterpart of
vLLM's `LLM`.

The model runs in a thread of this process, or with tp > 1 in child processes.

with Engine(model="frame-tiny") as engine:
    print(engine.generate("def add(a, b):", SamplingParams(max_tokens=32)).text)
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_type_hints

import msgspec
import numpy as np

from frame.core.errors import did_you_mean
from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Control, ControlReply
from frame.entrypoints.engine_client.limits import STATES_OF_TOKENS, InvalidRequestError, check_request, get_child_params
from frame.entrypoints.offline.adapters import Lora, OfflineAdapters
from frame.entrypoints.offline.collector import Delta, Job, Output, SequenceOutput, call_soon, group_outputs
from frame.entrypoints.offline.media import OfflineMedia
from frame.entrypoints.offline.prompts import (
    EngineError,
    Params,
    Prompt,
    check_text,
    encode_messages,
    expand_params,
    has_media,
    to_list,
    to_token_ids,
)
from frame.entrypoints.offline.vectors import Vectors, need_task
from frame.entrypoints.offline.weights import OfflineWeights
from frame.media.feature_store import FeatureStore

if TYPE_CHECKING:
    from frame.config.schema import FrameConfig
    from frame.entrypoints.offline.session import Session
    from frame.entrypoints.speech import Transcription
    from frame.text.tokenizer import Encoded, Tokenizer

log = logging.getLogger(__name__)

Loras = Lora | Sequence[Lora | None] | None  # the adapter of all prompts, or one for each
ACTIONS = get_args(get_type_hints(Control)["action"])
POOLING_PARAMS = SamplingParams(max_tokens=1)  # of sequences that yield a vector
DEFAULT_MAX_TOKENS = 128  # for prompts without parameters
MAX_CRASHES = 3  # of engines during one call, after which the call fails


class Engine(OfflineWeights):
    """An engine for offline use. Keywords are configuration keys: names of flags (`max_model_len`,
    `tp`) or `section_field`. `plugins`: plugin classes of this process, such as a scheduling
    policy of a notebook; each is used where its setting is not given.

    A prompt is a string, a list of token ids or a list of chat messages (dicts); a list of prompts
    gives a list of outputs, in order. A text with media is a dict (docs/multimodal.md).
    Parameters are given once for all prompts, or one per prompt, and so is `lora`, the name or the
    folder of an adapter.
    Any number of prompts may be given: they are submitted as the engine's queue has room. Raises
    InvalidRequestError (a ValueError) before anything runs when a prompt or a parameter cannot be
    served. A sequence that fails later has `error` and the finish reason "error", and the others
    are not affected; methods that return no `Output` raise EngineError. After a crash the engine is
    restarted and the call continues; EngineError when that fails: its `outputs` hold what was
    generated so far.
    """

    def __init__(
        self, model: str | None = None, *, config: FrameConfig | str | None = None, plugins: Sequence[type] = (), **keys: Any
    ) -> None:
        from frame.entrypoints.offline.session import open_session, resolve_arguments

        prepared = resolve_arguments(config, keys if model is None else {"model": model, **keys}, plugins)
        self._resolved = prepared.resolved
        self._prepared, self._open = prepared, open_session
        self._session: Session = self._open(prepared)
        self._restarting = threading.Lock()
        self._is_closed = False
        self._names = itertools.count()
        self._features = FeatureStore()
        self._media = OfflineMedia(self._resolved)
        self._adapters = OfflineAdapters(self._resolved.user.adapters, self._resolved.tokenizer_path, self._send, self._running)
        for module in self._resolved.user.adapters.modules:
            self.load_lora_adapter(*module.split("=", 1))
        self._vectors = Vectors(prepared.resolved, lambda: self.tokenizer, self._session.limits.max_pooling_tokens, self._pool)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError where `skip_tokenizer_init` is set."""
        tokenizer = self._session.tokenizer
        if tokenizer is None:
            raise EngineError("this engine was started with skip_tokenizer_init; give token ids, and read token_ids of the outputs")
        return tokenizer

    @property
    def info(self) -> dict[str, Any]:
        """The resolved configuration and the size of the KV cache."""
        return dict(self._session.info)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of media that prompts may have: "image", "video", "audio"."""
        return () if self._resolved.media is None else tuple(self._resolved.media.modalities)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls without `params`, which also set `max_tokens`: those of
        `sampling.defaults`."""
        return self._resolved.default_params

    # generate -------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None) -> Any:
        """Generate until every sequence has ended. Returns an `Output`, or a list of them for a
        list of prompts."""
        done = threading.Event()
        job, counts, is_single = self._job(prompts, params, lora, Job(done.set))
        self._run(job, done)
        return self._results(job, counts, is_single)

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> Any:
        """`generate` for an event loop; cancelling it aborts the requests."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        job, counts, is_single = await self._ajob(prompts, params, lora, Job(lambda: call_soon(loop, done.set)))
        try:
            self._start(job)
            await done.wait()
            while job.num_unfinished:
                done.clear()
                await asyncio.to_thread(self._recover, job)
                await done.wait()
        finally:
            self._stop(job)
        return self._results(job, counts, is_single)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> Iterator[Delta]:
        """Yield what each step adds, sequences interleaved. Leaving the loop early aborts the
        requests."""
        deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        job, _, _ = self._job(prompts, params, lora, Job(lambda: deltas.put(None), deltas.put))
        try:
            self._start(job)
            while True:
                while (delta := deltas.get()) is not None:
                    yield delta
                if not job.num_unfinished:
                    return
                self._recover(job)
        finally:
            self._stop(job)

    async def astream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> AsyncIterator[Delta]:
        """`stream` for an event loop."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        finish = lambda: call_soon(loop, deltas.put_nowait, None)  # noqa: E731
        job, _, _ = await self._ajob(prompts, params, lora, Job(finish, lambda delta: call_soon(loop, deltas.put_nowait, delta)))
        try:
            self._start(job)
            while True:
                while (delta := await deltas.get()) is not None:
                    yield delta
                if not job.num_unfinished:
                    return
                await asyncio.to_thread(self._recover, job)
        finally:
            self._stop(job)

    # vectors --------------------------------------------------------------------------------------

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora: Lora | None = None,
        per_token: bool = False,
    ) -> Any:
        """Embeddings of texts or token ids, float32 [inputs, width]; [width] for one input.
        `dimensions` keeps the first values of each; `prompt_name` is one of the checkpoint's
        prompts; `truncate` cuts inputs that are too long instead of refusing them. `per_token`
        returns the hidden states of each input, [tokens, width], neither pooled nor normalized.
        """
        is_single, several = to_list(inputs)
        vectors = self._vectors.embed(several, dimensions, prompt_name, truncate, lora, per_token)
        return vectors[0] if is_single else vectors

    def classify(self, inputs: Prompt | Sequence[Prompt], *, truncate: bool = False, lora: Lora | None = None) -> Any:
        """The probability of each class, by its label; a list of these for a list of inputs."""
        is_single, several = to_list(inputs)
        results = self._vectors.classify(several, truncate, lora)
        return results[0] if is_single else results

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        lora: Lora | None = None,
    ) -> np.ndarray:
        """Relevance of pairs of texts, float32 [pairs]; the cosine for an embedding model. One
        first text is paired with every second one, or two lists of equal length are paired in
        order."""
        texts = [[side] if isinstance(side, str) else list(side) for side in (first, second)]
        return self._vectors.score(texts[0], texts[1], instruction, truncate, lora)

    # audio ----------------------------------------------------------------------------------------

    def transcribe(
        self,
        audio: str | Path | bytes | np.ndarray,
        *,
        language: str | None = None,
        task: Literal["transcribe", "translate"] = "transcribe",
        prompt: str = "",
        temperature: float = 0.0,
        seed: int | None = None,
        word_timestamps: bool = False,
    ) -> Transcription:
        """The text of speech: a file's path or bytes, or float32 samples [n] of 16 kHz. `language`:
        its code; None: the model finds it. `prompt`: text that came before. With `translate` the
        text is English. Audio longer than the model's window is cut where it is quiet. With
        `word_timestamps` the model reads each text once more, and the result has `words`."""
        from frame.entrypoints.offline.transcribing import SpeechOptions, transcribe_audio
        from frame.entrypoints.speech import Speech

        need_task(self._resolved, "generate")
        options = SpeechOptions(language, task, prompt, temperature, seed, word_timestamps)
        return transcribe_audio(Speech(self._resolved, self.tokenizer), self._features, self._run_speech, audio, options)

    def _run_speech(self, plans: Sequence[tuple[list[int], SamplingParams]], items: Sequence[MediaItem]) -> list[Output]:
        """Run one sequence for each item."""
        outputs = self._run_tokens(plans, encoder_items=items)
        if failed := next((output for output in outputs if output.finish_reason not in ("stop", "length")), None):
            raise EngineError(failed.error or "the request was aborted", outputs)
        return outputs

    # control --------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Empty the prefix cache. Raises EngineError while requests run."""
        self.control("flush_cache")

    def control(self, action: Any, **arguments: Any) -> dict[str, Any]:
        """Run an engine command (`server_info`, `check_integrity`, …) and return its data. Raises
        EngineError when it fails."""
        if action not in ACTIONS:
            raise EngineError(f"there is no command {action!r}{did_you_mean(str(action), ACTIONS)}")
        reply = self._send(action, **arguments)
        if not reply.ok:
            raise EngineError(reply.error or f"{action} failed")
        return self._note_state(action, arguments, reply.data)

    def _send(self, action: Any, **arguments: Any) -> ControlReply:
        replies: queue.SimpleQueue[ControlReply] = queue.SimpleQueue()
        control = Control(id=uuid.uuid4().hex, action=action, arguments=arguments)
        session = self._running()
        try:
            session.collector.add_command(control.id, replies.put)
        except RuntimeError as error:
            raise EngineError(str(error)) from None
        session.send_all([control])
        return replies.get()

    def load_lora_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter from a folder as `name`. A name that is loaded again gets a new version;
        calls that run end on the old one. Raises AdapterError, which says why it cannot be used."""
        self._adapters.load(name, str(path))

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter once the calls that use it have ended."""
        self._adapters.unload(name)

    def close(self) -> None:
        """Stop the engine and release the device. A second call does nothing."""
        self._is_closed = True
        self._session.close()
        self._adapters.close()
        self._media.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_adapters"):
            self.close()

    # parts ----------------------------------------------------------------------------------------

    def _running(self) -> Session:
        """The session; a new one after a crash. Raises the error of its start."""
        with self._restarting:
            if self._session.collector.dead_reason is not None and not self._is_closed:
                log.warning("%s; the engine is restarted", self._session.collector.dead_reason)
                self._session.close()
                gc.collect()  # frees the weights and the KV cache of the crashed engine
                self._session = self._restore_state(self._open(self._prepared))
                self._note_restart()
            return self._session

    async def _ajob(self, prompts: Any, params: Any, lora: Loras, job: Job) -> tuple[Job, list[int], bool]:
        """`_job` for an event loop, which does not wait for an adapter, nor for media."""
        if lora is None and not has_media(prompts):
            return self._job(prompts, params, lora, job)
        work = asyncio.ensure_future(asyncio.to_thread(self._job, prompts, params, lora, job))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: job.held.close())
            raise

    def _job(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None, lora: Loras, job: Job
    ) -> tuple[Job, list[int], bool]:
        """Fill the job with sequences. Returns it, the number of sequences of each prompt, and
        whether one prompt was given, not a list."""
        try:
            return self._fill_job(prompts, params, lora, job)
        except BaseException:
            job.held.close()
            raise

    def _fill_job(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None, lora: Loras, job: Job
    ) -> tuple[Job, list[int], bool]:
        need_task(self._resolved, "generate")
        self._session.send_all([])  # wakes an idle engine while the prompts are tokenized
        is_single, several = to_list(prompts)
        all_params = expand_params(params, len(several))
        ids, media = self._encode(several, job)
        limits = self._session.limits
        if params is None:
            rooms = [min(limits.max_context, limits.capacity) - len(prompt) for prompt in ids]
            default = self._resolved.default_params
            all_params = [msgspec.structs.replace(default, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room))) for room in rooms]
        counts = []
        adapters = self._adapters.find(lora, len(several))
        for place, (prompt, each, adapter) in enumerate(zip(ids, all_params, adapters, strict=True)):
            each = self.tokenizer.encode_bad_words(each) if each.bad_words else each
            if (each.stop or each.stop_regex) and self._session.tokenizer is None:
                field = "stop" if each.stop else "stop_regex"
                raise InvalidRequestError(f"{field} needs a tokenizer, which this engine does not have; use stop_token_ids", field)
            check_request(limits, prompt, each)
            counts.append(each.n)
            for number in range(each.n):
                alone = each if each.n == 1 else get_child_params(each, number)
                self._add_sequence(job, prompt, alone, adapter)
                job.sequences[-1].media = media.get(place, [])
        self._hold_adapters(job)
        return job, counts, is_single

    def _hold_adapters(self, job: Job) -> None:
        """Keep the job's adapters in the engine until its end."""
        if job.adapters:
            with ExitStack() as stack:
                stack.enter_context(self._adapters.hold(job.adapters))
                self._adapters.place(job.adapters)
                job.held.enter_context(stack.pop_all())

    def _add_sequence(self, job: Job, ids: list[int], params: SamplingParams, adapter: str = "") -> None:
        sequence = SequenceOutput(job, f"offline-{next(self._names)}", ids, params)
        sequence.adapter = adapter
        job.sequences.append(sequence)

    def _pool(self, encoded: list[Encoded], lora: Lora | None, per_token: bool) -> list[np.ndarray]:
        """Run sequences of a pooling model. Returns float32 [width] of each; with `per_token`
        [tokens, hidden_size]."""
        params = STATES_OF_TOKENS if per_token else POOLING_PARAMS
        plans = [(to_token_ids(ids), params) for ids, _ in encoded]
        outputs = self._run_tokens(plans, second_text_starts=[start for _, start in encoded], lora=lora)
        vectors = [output.hidden_states if output.vector is None else np.frombuffer(output.vector, "<f4") for output in outputs]
        for output, vector in zip(outputs, vectors, strict=True):
            if vector is None:
                raise EngineError(output.error or "the request was aborted", outputs)
        return [vector for vector in vectors if vector is not None]

    def _run_tokens(
        self,
        plans: Sequence[tuple[list[int], SamplingParams]],
        second_text_starts: Sequence[int] = (),
        encoder_items: Sequence[MediaItem] = (),
        lora: Lora | None = None,
    ) -> list[Output]:
        """Run sequences of token ids to their end, one for each plan."""
        done = threading.Event()
        job = Job(done.set)
        adapters = self._adapters.find(lora, len(plans))
        for (ids, params), adapter in zip(plans, adapters, strict=True):
            check_request(self._session.limits, ids, params)
            self._add_sequence(job, ids, params, adapter)
            job.sequences[-1].reads_states = params.return_hidden_states
        for sequence, start in zip(job.sequences, second_text_starts, strict=False):
            sequence.second_text_start = start
        for sequence, item in zip(job.sequences, encoder_items, strict=False):
            sequence.media = [item]
        self._hold_adapters(job)
        self._run(job, done)
        return [sequence.output for sequence in job.sequences]

    def _encode(self, prompts: Sequence[Prompt], job: Job) -> tuple[list[list[int]], dict[int, list[MediaItem]]]:
        """The token ids of each prompt, and the media of some, whose files the job keeps."""
        ids: list[list[int]] = [[]] * len(prompts)
        media: dict[int, list[MediaItem]] = {}
        texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
        if texts:
            for i, encoded in zip(texts, self.tokenizer.encode_batch([check_text(str(prompts[i])) for i in texts]), strict=True):
                ids[i] = encoded
        for i, prompt in enumerate(prompts):
            if has_media(prompt):
                ids[i], media[i] = self._media.encode(prompt, self.tokenizer, job.held)
            elif not isinstance(prompt, str):
                ids[i] = encode_messages(self.tokenizer, prompt) if prompt and isinstance(prompt[0], dict) else to_token_ids(prompt)  # type: ignore[arg-type,index]
        return ids, media

    def _run(self, job: Job, done: threading.Event) -> None:
        """Run a job to its end, across crashes of the engine. The job sets `done`."""
        try:
            self._start(job)
            done.wait()
            while job.num_unfinished:
                done.clear()
                self._recover(job)
                done.wait()
        finally:
            self._stop(job)

    def _start(self, job: Job) -> None:
        """Run the sequences that have not ended, each from its last token on."""
        try:
            session = self._adapters.place(job.adapters) if job.adapters else self._running()
            self._require_weights()
            session.collector.add_job(job)
        except RuntimeError as error:
            raise EngineError(str(error)) from None
        if job.is_stopped:  # by another thread, meanwhile
            self._stop(job)

    def _recover(self, job: Job) -> None:
        """The engine crashed: continue the job in a new one. Raises EngineError when that fails."""
        dead = (job.collector and job.collector.dead_reason) or "the engine crashed"
        job.num_crashes += 1
        if job.num_crashes >= MAX_CRASHES:
            dead += f"; {job.num_crashes} engines crashed during this call, which is not tried again"
        elif not self._is_closed:
            try:
                self._start(job)
            except Exception as error:  # noqa: BLE001 - whatever a start may raise
                dead += f"; the engine could not be restarted: {error}"
            else:
                return
        for sequence in job.running:
            sequence.output.finish_reason, sequence.output.error = "error", dead
        self._finish_text(job)
        raise EngineError(dead, [sequence.output for sequence in job.sequences])

    def _stop(self, job: Job) -> None:
        job.is_stopped = True
        if job.collector is not None:
            job.collector.remove_job(job)
        job.held.close()

    def _results(self, job: Job, counts: list[int], is_single: bool) -> Output | list[Output]:
        self._finish_text(job)
        if failed := [sequence.output for sequence in job.sequences if sequence.output.error is not None]:
            log.warning("%d of %d sequences ended with an error; the first: %s", len(failed), len(job.sequences), failed[0].error)
        outputs = group_outputs((sequence.output for sequence in job.sequences), counts)
        return outputs[0] if is_single else outputs

    def _finish_text(self, job: Job) -> None:
        if job.collector is not None:
            job.collector.finish_text(job)
