"""The methods of the gRPC service, over the same `Services` as the HTTP routes: same limits,
quotas, request names and errors. Must not know a socket or a key: `GrpcCaller` has the tenant."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import copy
from itertools import chain
from typing import Any

from frame.core.messages import Finish
from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.grpc.calls import GrpcCaller, run_call, status_of
from frame.entrypoints.grpc.schema import Schema, add_logprobs, chat_of, finish_of, media_of, plain
from frame.entrypoints.http.chat.request_media import TextWithMedia
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import failure, raise_failed, too_many
from frame.entrypoints.http.native.generate import GenerateRequest, to_sampling_params
from frame.entrypoints.http.native.tokenizing import detokenize_ids
from frame.entrypoints.http.paced_json import INLINE_VALUES, run_turns
from frame.entrypoints.http.request_body import RequestOptions
from frame.entrypoints.http.request_context import ADAPTER
from frame.entrypoints.http.request_starter import RequestPlan, countable_tokens, encode_prompt, limit_unread_tokens, start_request
from frame.entrypoints.http.services import Services
from frame.entrypoints.version import package_version

log = logging.getLogger(__name__)

MAX_REQUESTS = 1024  # running in one GenerateStream call; further ones are read when one of these has ended
DUPLICATE = "ALREADY_EXISTS"  # status of a command's error; no request that runs ends with it
MAX_REPLIES = 64  # queued for a slow reader of GenerateStream; later output is joined into fewer replies


class Options(RequestOptions):
    """The options of a request, and what it calls the model."""

    model: str = ""


class Service:
    """The methods raise ApiError; `CallHandlers` wraps them."""

    def __init__(self, services: Services, schema: Schema, release: Callable[[int, str], None]) -> None:
        self._services = services
        self._schema = schema
        self._release = release  # gives the bytes of a message back to the pool

    async def generate(self, request: Any, caller: GrpcCaller) -> None:
        await self._put_replies(request, caller, caller.context.write)
        if caller.state is not None and caller.state.adapters:
            caller.context.set_trailing_metadata(((ADAPTER.decode(), caller.state.adapters),))

    async def generate_stream(self, commands: AsyncIterator[tuple[Any, int]], caller: GrpcCaller) -> None:
        session = Session(self, caller, self._release)
        reading = asyncio.create_task(session.read(commands))
        try:
            while (reply := await session.replies.get()) is not None:
                await caller.context.write(reply)
            if session.failure is not None:
                raise session.failure
        finally:
            await session.close(reading)

    async def abort(self, request: Any, caller: GrpcCaller) -> Any:
        if not request.all and not any(request.ids):
            raise ApiError(400, "ids is empty; give the ids of requests, or set all", "ids")
        self._services.client.abort_requests([] if request.all else [name for name in request.ids if name])
        return self._schema["AbortReply"]()

    async def tokenize(self, request: Any, caller: GrpcCaller) -> Any:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise ApiError(400, "send either text or chat", "text")
        prompt = chat_of(request.chat) if kind == "chat" else request.text
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await encode_prompt(self._services, prompt, special, countable_tokens(self._services), caller.tenant)
        return self._schema["TokenizeReply"](token_ids=ids)

    async def detokenize(self, request: Any, caller: GrpcCaller) -> Any:
        text = await detokenize_ids(self._services, list(request.token_ids), request.skip_special_tokens, "token_ids", caller.tenant)
        return self._schema["DetokenizeReply"](text=text)

    async def server_info(self, request: Any, caller: GrpcCaller) -> Any:
        services = self._services
        load = services.client.load
        return self._schema["ServerInfoReply"](
            model=services.resolved.served_name,
            version=package_version(),
            architecture=services.resolved.model.architecture,
            max_context=services.resolved.max_context,
            max_total_tokens=int(services.info.get("max_total_tokens", 0)),
            ready=services.ready_problem() is None,
            running=load.running if load is not None else 0,
            waiting=load.waiting if load is not None else 0,
        )

    # generation -----------------------------------------------------------------------------------

    async def run_request(self, request: Any, caller: GrpcCaller, put: Callable[[Any], Awaitable[None]]) -> None:
        """Put all replies of one request of a session, which `caller` serves alone; an error is its
        last reply."""
        try:
            with self._services.quotas.open_lease(caller.tenant) as lease:
                caller.lease = lease
                await run_call(self._services, caller, "Generate", self._put_replies(request, caller, put))
        except QuotaExceededError as error:
            await put(self._error_reply(request.id, too_many(error)))
        except ApiError as error:
            await put(self._error_reply(request.id, error))

    def _error_reply(self, name: str, error: ApiError) -> Any:
        return self.last_reply(name, Finish("error", None, error.message), status_of(error).name)

    def last_reply(self, name: str, finish: Finish, status: str = "", index: int = 0) -> Any:
        """The last reply of a sequence that sends none."""
        return self._schema["GenerateReply"](id=name, index=index, finish=finish_of(self._schema, finish, status))

    async def _put_replies(self, request: Any, caller: GrpcCaller, put: Callable[[Any], Awaitable[None]]) -> None:
        if request.WhichOneof("prompt") is None:
            raise ApiError(400, "send text, token_ids or chat", "prompt")
        kind = request.WhichOneof("prompt")
        prompt = request.text if kind == "text" else list(request.token_ids.ids) if kind == "token_ids" else chat_of(request.chat)
        if request.media:
            if kind != "text":
                raise ApiError(400, "media needs text with a placeholder for each; in a chat they are parts of messages", "media")
            prompt = TextWithMedia(request.text, [media_of(each, f"media[{i}]") for i, each in enumerate(request.media)])
        sent = GenerateRequest(sampling_params=plain(request.sampling_params))
        params, prompts_only = to_sampling_params(sent, 1, self._services.resolved.default_params)
        if prompts_only:
            raise ApiError(400, "max_tokens is 0; it must be at least 1", "max_tokens")
        salt, limit = request.cache_salt, caller.time_left()
        self._services.check_model(request.model, caller.tenant)
        options = Options(priority=request.priority, cache_salt=salt, timeout=limit, rid=request.id or None, model=request.model)
        state = await start_request(caller, self._services, RequestPlan([prompt], params, options))
        name = request.id or state.rid
        overrun: list[ApiError] = []

        def stop_slow_reader(error: ApiError) -> None:
            """Stop the request now; the error is raised when the client has read what was sent."""
            self._services.client.abort_request(state)
            overrun.append(error)

        limit_unread_tokens(self._services, state, stop_slow_reader)
        while state.num_unfinished or state.changed:
            for sequence in await state.wait():
                if len(state.sequences) == 1:
                    raise_failed([sequence])  # several sequences have one last reply each
                count, state.is_answered = sequence.num_logprobs, True
                reply, steps = self._reply(name, sequence)
                if count > INLINE_VALUES:
                    await run_turns(self._services.formatting, caller.tenant, steps)
                else:
                    deque(steps, 0)
                await put(reply)
                if overrun:
                    raise overrun[0]

    def _reply(self, name: str, sequence: SequenceState) -> tuple[Any, Iterator[None]]:
        """The reply with new output of a sequence, and steps that add log-probabilities to it."""
        text, ids, tokens = sequence.take_output()
        reply = self._schema["GenerateReply"](
            id=name, index=sequence.index, text=text, token_ids=ids, prompt_tokens=len(sequence.prompt),
            completion_tokens=sequence.num_tokens, cached_tokens=sequence.cached,
        )  # fmt: skip
        steps = [add_logprobs(reply.logprobs, tokens)] if tokens else []
        if sequence.prompt_logprobs is not None:
            steps.append(add_logprobs(reply.prompt_logprobs, [sequence.prompt_logprobs]))
            sequence.prompt_logprobs = None
        if sequence.finish is not None:
            status = status_of(failure(sequence.finish)).name if sequence.finish.reason == "error" else ""
            reply.finish.CopyFrom(finish_of(self._schema, sequence.finish, status))
        return reply, chain.from_iterable(steps)


class Session:
    """One GenerateStream call: its requests, one task each, and the queue of replies to write."""

    def __init__(self, service: Service, caller: GrpcCaller, release: Callable[[int, str], None]) -> None:
        self.replies: asyncio.Queue[Any] = asyncio.Queue(MAX_REPLIES)  # None: the call is over
        self.failure: ApiError | None = None
        self._service = service
        self._caller = caller
        self._release = release
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the request's id
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._stopped: set[str] = set()  # ids of aborted requests that have not ended yet

    async def read(self, commands: AsyncIterator[tuple[Any, int]]) -> None:
        """Run the client's commands until it has closed its side and every request has ended."""
        try:
            async for command, size in commands:
                with ExitStack() as held:
                    held.callback(self._release, size, self._caller.tenant)
                    await self._run_command(command, held)
            await asyncio.gather(*self._tasks.values())
        except ApiError as error:
            self.failure = error
        except Exception:
            log.exception("a GenerateStream call failed")
            self.failure = ApiError(500, "the server failed on this call; the cause is in its log")
        await self.replies.put(None)

    async def _run_command(self, command: Any, held: ExitStack) -> None:
        kind = command.WhichOneof("command")
        if kind == "generate":
            await self._start(command.generate, held)
        elif kind == "abort":
            self._abort(list(self._tasks) if command.abort.all else command.abort.ids)
        else:
            raise ApiError(400, "a command is neither generate nor abort; send one of them", "command")

    async def _start(self, request: Any, held: ExitStack) -> None:
        request.id = request.id or uuid.uuid4().hex
        if request.id in self._tasks:
            sentence = f"a request with the id {request.id!r} is running; choose another"
            await self.replies.put(self._service.last_reply(request.id, Finish("error", None, sentence), DUPLICATE))
            return
        await self._slots.acquire()  # a client that sends and does not read must not fill the memory
        self._tasks[request.id] = asyncio.create_task(self._run(request, held.pop_all()))
        await asyncio.sleep(0)  # start the task, so that a cancellation runs its `finally`

    async def _run(self, request: Any, held: ExitStack) -> None:
        caller, finished = copy(self._caller), set()
        caller.state = None

        async def put(reply: Any) -> None:
            await self.replies.put(reply)
            if reply.HasField("finish"):
                finished.add(reply.index)

        try:
            await self._service.run_request(request, caller, put)
        except asyncio.CancelledError:
            if request.id not in self._stopped:
                raise
            for index in range(1 if caller.state is None else len(caller.state.sequences)):
                if index not in finished:
                    await self.replies.put(self._service.last_reply(request.id, Finish("abort"), index=index))
        finally:
            held.close()
            self._stopped.discard(request.id)
            del self._tasks[request.id]
            self._slots.release()

    def _abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            if name in self._tasks and name not in self._stopped:
                self._stopped.add(name)
                self._tasks[name].cancel()

    async def close(self, reading: asyncio.Task[None]) -> None:
        """Cancel all that still runs: the call is over or its client has left."""
        tasks = [reading, *self._tasks.values()]
        self._stopped.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
