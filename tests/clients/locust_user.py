"""What locust's users do: chats and streamed completions, until REQUESTS have been answered. Run by
`test_locust.py`."""

from __future__ import annotations

import json
import os
from typing import Any

import gevent
from locust import HttpUser, constant, events, task

REQUESTS = int(os.environ["REQUESTS"])
HEADERS = {"authorization": f"Bearer {os.environ['KEY']}"}
BODY = {"model": "frame-tiny", "max_tokens": 8, "temperature": 0}


@events.init.add_listener
def stop_when_done(environment: Any, **_: Any) -> None:
    def count(**_: Any) -> None:
        if environment.stats.total.num_requests >= REQUESTS:
            gevent.spawn(environment.runner.quit)  # not in the user that quitting ends

    environment.events.request.add_listener(count)


class User(HttpUser):
    """Waits for nothing between its requests."""

    wait_time = constant(0)

    @task
    def chat(self) -> None:
        body = {**BODY, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        with self.client.post("/v1/chat/completions", json=body, headers=HEADERS, catch_response=True) as response:
            if response.status_code != 200 or not response.json()["choices"][0]["message"]["content"]:
                response.failure(response.text)

    @task
    def streamed(self) -> None:
        body = {**BODY, "prompt": "def add(a, b):", "stream": True}
        with self.client.post("/v1/completions", json=body, headers=HEADERS, stream=True, catch_response=True) as response:
            lines = [line for line in response.iter_lines() if line]
            pieces = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
            if lines[-1:] != [b"data: [DONE]"] or not "".join(piece["choices"][0]["text"] for piece in pieces):
                response.failure(f"{response.status_code}: {lines[-1:]}")
