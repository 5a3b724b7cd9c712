"""`Services`: the state of one server that all routes share, and checks of a request against it.

Made by the server; routes get it as `ServicesDep`. Must not depend on a dialect's shapes.
`request_starter` starts requests with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.config.resolved import Resolved
from frame.core.interfaces.model import Task
from frame.entrypoints.engine_client.adapter_registry import AdapterRegistry
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.quotas import FairSemaphore, PlaceShares, TenantQuotas
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.tokenizing import AsyncTokenizer
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, quoted
from frame.entrypoints.http.operations.live_history import LiveHistory
from frame.entrypoints.http.operations.metrics import ServerMetrics
from frame.entrypoints.http.protocol.bodies import prompt_limit
from frame.entrypoints.http.protocol.session_store import SessionStore
from frame.entrypoints.keys import KeyAccess
from frame.entrypoints.processes.resource_monitor import ResourceMonitor
from frame.entrypoints.tracing import Tracing
from frame.entrypoints.version import package_version
from frame.interfaces.parsing import ReasoningParser, ToolCallParser
from frame.media.feature_store import FeatureStore
from frame.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # rooms that a server imports with their routes, and that can be deleted with them
    from frame.entrypoints.http.batch.jobs import BatchJobRunner
    from frame.entrypoints.http.openai.response_store import ResponseStore
    from frame.entrypoints.http.operations.live_feed import LiveFeed
    from frame.entrypoints.http.protocol.continuation import Fleet
    from frame.entrypoints.http.realtime.open_sessions import OpenSessions
    from frame.entrypoints.media.media_service import MediaService
    from frame.entrypoints.speech import Speech

log = logging.getLogger(__name__)

NO_TOKENIZER = "this server was started with --skip-tokenizer-init and takes token ids only; send input_ids to /generate"


ROUTES_FOR = {
    "generate": "/v1/chat/completions or /v1/completions",
    "embed": "/v1/embeddings, /v1/rerank or /v1/score",
    "classify": "/v1/classify, /v1/rerank or /v1/score",
}
SPEECH_ROUTES = "/v1/audio/transcriptions or /v1/audio/translations"


@dataclass(slots=True)
class Services:
    """What all routes of one server share. `reasoning` and `tool_calls` make a parser for a
    response; None where none is configured."""

    resolved: Resolved
    client: EngineClient | ReplicaClient
    tokenizer: Tokenizer | None = None
    text_input: AsyncTokenizer | None = None
    reasoning: Callable[[], ReasoningParser] | None = None
    tool_calls: Callable[[], ToolCallParser] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics | None = None
    history: LiveHistory | None = None  # of the load, for the page
    feed: LiveFeed | None = field(init=False, default=None)  # of the page, after its first request
    about: dict[str, Any] = field(default_factory=dict)  # plugins and settings, for the page
    draining: bool = False
    tracing: Tracing | None = None
    keys: KeyAccess | None = None  # None: no request needs a key
    watch: ResourceMonitor | None = None  # resource usage of the processes
    score_prompt: str | None = None  # text.score_prompt, read
    moderation_policy: str | None = None  # text.moderation_policy, read
    adapters: AdapterRegistry | None = None  # None without adapters.enabled
    media: MediaService | None = None  # None: the model reads text only
    fleet: Fleet | None = None  # None without FRAME_FLEET_KEY
    quotas: TenantQuotas = field(init=False)  # of the API keys
    # Background work
    tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    # None without batches.folder and server.state_dir
    batches: BatchJobRunner | None = field(init=False, default=None)
    # Held by each audio file that is being decoded, in a process that takes up to 512 MB
    audio_files: FairSemaphore = field(init=False, default_factory=lambda: FairSemaphore(8, 2))
    audio_turns: FairSemaphore = field(init=False, default_factory=lambda: FairSemaphore(2))  # for the work on one window
    text_turns: FairSemaphore = field(init=False, default_factory=lambda: FairSemaphore(1))  # for many token ids to text
    # The place of the large responses that are being formatted
    formatting: FairSemaphore = field(init=False, default_factory=lambda: FairSemaphore(1))
    speech: Speech | None = field(init=False, default=None)  # of a speech model, after its first request
    features: FeatureStore = field(init=False, default_factory=FeatureStore)  # of its audio
    realtime: OpenSessions | None = field(init=False, default=None)  # after its first session
    sessions: SessionStore = field(init=False, default_factory=SessionStore)  # that clients have opened
    _responses: ResponseStore | None = field(init=False, default=None)
    # OpenAI's system_fingerprint, of the version and the settings that outputs may depend on
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        server = self.resolved.user.server
        digest = hashlib.sha256(self.resolved.model_dump_json(exclude={"user": {"server", "batches", "log"}}).encode())
        self.fingerprint = f"frame-{package_version()}-{digest.hexdigest()[:8]}"
        num_keys = 0 if self.keys is None else self.keys.num_tenants
        places = PlaceShares(self.client.limits.max_outstanding, num_keys) if num_keys > 1 else None
        self.quotas = TenantQuotas(server.max_requests_per_key, places)
        if self.tokenizer is not None:
            _ = self.tokenizer.bounds  # read now: for a large vocabulary it takes a while
        if (folder := self.resolved.batch_folder) is not None:
            self.batches = self._make_batches(folder)
        if server.state_dir is not None:
            _ = self.responses  # read now: its files may be many

    def _make_batches(self, folder: Path) -> BatchJobRunner:
        from frame.entrypoints.http.batch.files import FileStore
        from frame.entrypoints.http.batch.jobs import BatchJobRunner
        from frame.entrypoints.http.batch.sending import LineSender

        config = self.resolved.user.batches

        def is_stopping() -> bool:
            return self.draining or self.client.dead_reason is not None

        return BatchJobRunner(config, FileStore(folder, config), LineSender(config.concurrency, self.quotas, is_stopping), is_stopping)

    @property
    def responses(self) -> ResponseStore:
        """The stored responses and conversations."""
        if self._responses is None:
            from frame.entrypoints.http.openai.response_files import ResponseFiles
            from frame.entrypoints.http.openai.response_store import ResponseStore

            server = self.resolved.user.server
            store = (server.response_store_size, server.response_store_bytes, server.response_store_ttl, server.response_store_share)
            files = None if server.state_dir is None else ResponseFiles(Path(server.state_dir))
            self._responses = ResponseStore(*store, prompt_limit(self.resolved.max_context), files)
        return self._responses

    def close_responses(self) -> None:
        """Write the stored responses that are not written yet."""
        if self._responses is not None:
            self._responses.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run background work, which no client awaits. It has reserved its sequences before, so
        quotas and the queue bound it."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model in the API; responses have the first."""
        return tuple(dict.fromkeys((self.resolved.served_name, *self.resolved.user.model.served_aliases)))

    @property
    def base_names(self) -> tuple[str, ...]:
        """What requests may call the model without an adapter."""
        return (*self.model_names, self.resolved.user.model.path)

    def adapter_of(self, model: str, tenant: str) -> str | None:
        """The name of the adapter that a request's `model` names, as NAME or BASE:NAME; None: it
        names none that the tenant may use."""
        if self.adapters is None or not model or model in self.base_names:
            return None
        base, colon, name = model.rpartition(":")
        is_known = (not colon or base in self.base_names) and self.adapters.find(name, tenant) is not None
        return name if is_known else None

    def response_model(self, model: str) -> str:
        """The model's name in the response to a request that passed `check_model`: an adapter's as
        it was sent."""
        return model if model and model not in self.base_names else self.resolved.served_name

    def check_model(self, name: str, tenant: str) -> None:
        """Raise ApiError 404 for a model or an adapter that this tenant has not here."""
        if name and name not in self.base_names and self.adapter_of(name, tenant) is None:
            others = "" if self.adapters is None else " and the adapters that /v1/models lists"
            sentence = f"the model {quoted(name)} does not exist; this server has {self.resolved.served_name!r}{others}"
            raise ApiError(404, sentence, "model", "model_not_found")

    def need_task(self, *tasks: Task, takes_audio: bool = False) -> None:
        """Raise ApiError 400 unless the server's task is one of these. `takes_audio`: the request
        has audio, which encoder-decoder models need and others refuse themselves."""
        task = self.resolved.task
        if not takes_audio:
            self.need_text_model()
        if task not in tasks:
            name, required = self.resolved.served_name, " or ".join(tasks)
            sentence = f"{name!r} is served to {task} (model.task), not to {required}; use {ROUTES_FOR[task]}"
            raise ApiError(400, sentence, "model", "wrong_task")

    def need_text_model(self) -> None:
        """Raise ApiError 400 for a model that only transcribes audio."""
        if self.resolved.model.encoder_length:
            sentence = f"{self.resolved.served_name!r} only transcribes audio; send a file to {SPEECH_ROUTES}"
            raise ApiError(400, sentence, "model", "wrong_task")

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of media that chats may have."""
        return () if self.media is None else tuple(self.media.placeholders())

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, NO_TOKENIZER)
        return self.tokenizer

    def need_text_input(self) -> AsyncTokenizer:
        if self.text_input is None:
            raise ApiError(400, NO_TOKENIZER)
        return self.text_input

    def ready_problem(self) -> str | None:
        """Why this server takes no requests now; None while it takes them."""
        if self.draining:
            return "the server is shutting down"
        return self.client.dead_reason or self.client.unavailable_reason or self.client.commands.sleep_problem

    def check_awake(self) -> None:
        """Raise ApiError 503 for a request that would wait for an operator's command, where the
        settings refuse it; always after a wake without weights."""
        commands = self.client.commands
        refuses = self.resolved.user.execution.sleep == "refuse" or (commands.lacks_weights and "weights" not in commands.released)
        if refuses and (problem := commands.sleep_problem) is not None:
            raise ApiError(503, problem, retry_after=RETRY_AFTER)
