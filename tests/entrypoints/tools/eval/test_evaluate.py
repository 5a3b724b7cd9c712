"""The evaluation over backends that answer well, badly and not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from frame.entrypoints.tools.eval.evaluate import evaluate
from frame.entrypoints.tools.eval.tasks import TASKS, Message, make_examples


class Oracle:
    """Answers from the list of right answers, every tenth sum wrong; counts the requests in
    flight."""

    def __init__(self, samples: int, seed: int) -> None:
        examples = [example for task in TASKS for example in make_examples(task, samples, seed)]
        self.answers = {str(example.messages): example.expected for example in examples}
        self.active = self.max_active = 0

    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        assert max_tokens > 0
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        await asyncio.sleep(0)
        self.active -= 1
        return self.answers[str(tuple(messages))]

    async def complete(self, prompt: str, max_tokens: int) -> str:
        return "        pass\n" if "class " in prompt else "    pass\n"


class Broken:
    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        raise ConnectionError("refused")

    async def complete(self, prompt: str, max_tokens: int) -> str:
        return "    )\n"


async def test_right_answers() -> None:
    backend = Oracle(12, seed=2)
    report = await evaluate(backend, samples=12, seed=2, concurrency=5)
    assert [score.name for score in report.tasks] == list(TASKS)
    assert all(score.rate == 1.0 and score.samples == 12 for score in report.tasks)
    assert backend.max_active == 5
    assert sum(score.samples for score in report.recall_by_length) == 12
    assert report.failures() == []
    data = json.loads(json.dumps(report.to_json()))
    assert data["tasks"]["sum"]["rate"] == 1.0
    assert "recall" in report.table()
    assert "100.0%" in report.table() and " 0.0%" not in report.table()  # lengths without samples are left out


async def test_wrong_answers_are_kept() -> None:
    backend = Oracle(10, seed=0)
    spoiled = str(make_examples("sum", 10, 0)[3].messages)
    backend.answers[spoiled] = "0"
    report = await evaluate(backend, tasks=("sum", "copy"), samples=10)
    assert report.score("sum") == 0.9
    assert report.score("copy") == 1.0
    assert [failure.answer for failure in report.failures("sum")] == ["0"]
    assert report.recall_by_length == []


async def test_failed_requests_count_as_wrong() -> None:
    report = await evaluate(Broken(), tasks=("sum", "python"), samples=3)
    assert [(score.correct, score.errors) for score in report.tasks] == [(0, 3), (0, 0)]
    assert "first error: ConnectionError: refused" in report.table()
