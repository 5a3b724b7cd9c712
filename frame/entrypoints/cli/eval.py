"""`frame eval`: scores a server (`--base-url`) or a model in this process on the embedded tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click

from frame.entrypoints.cli.options import config_command, refuse_engine_flags
from frame.entrypoints.configuration.sources import LoadedConfig, refuse_server_settings
from frame.entrypoints.tools.eval.evaluate import EvalBackend, Report, evaluate
from frame.entrypoints.tools.eval.tasks import TASKS, Message

HELP = "Score a server or a model on the embedded tasks: recall over long contexts, copy, reverse, sort, sum, Python."


@config_command(help=HELP)
@click.option("--base-url", help="URL of the server, such as http://127.0.0.1:30000. Default: load the model in this process.")
@click.option("--task", "tasks", multiple=True, type=click.Choice(TASKS), help="Task to run; repeatable. Default: all tasks.")
@click.option("--samples", type=click.IntRange(min=1), default=100, help="Number of examples per task.")
@click.option("--concurrency", type=click.IntRange(min=1), default=32, help="Maximum number of concurrent requests.")
@click.option("--question-seed", "seed", type=int, default=0, help="Seed of the examples.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def command(
    loaded: LoadedConfig, base_url: str | None, tasks: tuple[str, ...], samples: int, concurrency: int, seed: int, is_json: bool
) -> None:
    report = asyncio.run(_evaluate(loaded, base_url, tasks or TASKS, samples, seed, concurrency))
    click.echo(json.dumps(report.to_json(), indent=2) if is_json else report.table())
    failed = [each for each in report.outcomes if each.error]
    if failed and len(failed) == len(report.outcomes):
        raise click.ClickException(f"All {len(failed)} requests failed, so this is no score. The first error: {failed[0].error}")


async def _evaluate(loaded: LoadedConfig, base_url: str | None, tasks: Sequence[str], samples: int, seed: int, concurrency: int) -> Report:
    if base_url is not None:
        import httpx

        from frame.entrypoints.tools.eval.http_backend import HttpBackend
        from frame.entrypoints.tools.server_calls import describe_unreachable

        refuse_engine_flags(loaded)
        try:
            async with HttpBackend(base_url, api_key=loaded.config.server.api_key) as server:
                return await evaluate(server, tasks, samples, seed, concurrency)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise click.ClickException(describe_unreachable(base_url, error)) from None
    from frame.entrypoints.offline.engine import Engine

    refuse_server_settings(loaded)
    with Engine(config=loaded.config) as engine:
        return await evaluate(EngineBackend(engine), tasks, samples, seed, concurrency)


class EngineBackend(EvalBackend):
    """An engine in this process, with greedy sampling."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        return await self._complete([dict(message) for message in messages], max_tokens)

    async def complete(self, prompt: str, max_tokens: int) -> str:
        return await self._complete(prompt, max_tokens)

    async def _complete(self, prompt: Any, max_tokens: int) -> str:
        output = await self._engine.agenerate(prompt, {"max_tokens": max_tokens, "temperature": 0.0})
        if output.error is not None:  # counted as an error, not as a wrong response
            raise RuntimeError(output.error)
        return str(output.text)
