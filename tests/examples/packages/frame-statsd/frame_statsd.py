"""A stat logger that sends counters and timings to statsd over UDP."""

from __future__ import annotations

import re
import socket

from pydantic import BaseModel, ConfigDict

from frame import hookimpl
from frame.interfaces.stats import RequestRecord, StatLogger, StatLoggerContext, StepRecord


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = 8125


@hookimpl
def register_stat_loggers(registry) -> None:
    registry.add("statsd", f"{__name__}:Statsd", options=Options, summary="Sends statistics to statsd over UDP.")


class Statsd(StatLogger):
    """UDP needs no connection: without a listener, what is sent is lost, and nothing waits."""

    def __init__(self, context: StatLoggerContext, options: Options | None = None) -> None:
        options = options or Options()
        self.address = (socket.gethostbyname(options.host), options.port)
        self.prefix = f"frame.{_name(context.model)}"
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setblocking(False)

    def send(self, *lines: str) -> None:
        if self.socket.fileno() < 0:
            return
        try:
            self.socket.sendto("\n".join(f"{self.prefix}.{line}" for line in lines).encode(), self.address)
        except OSError:  # a full buffer, or no listener
            return

    def record_step(self, step: StepRecord) -> None:
        self.send(f"prompt_tokens:{step.prompt_tokens}|c", f"generated_tokens:{step.generated_tokens}|c", f"running:{step.running}|g")

    def record_request(self, request: RequestRecord) -> None:
        lines = [f"requests.{_name(request.finish_reason)}:1|c", f"keys.{_name(request.key)}:{request.output_tokens}|c"]
        for name in ("end_to_end", "queue_time", "time_to_first_token", "inter_token_latency"):
            seconds = getattr(request, name)
            if seconds is not None:
                lines.append(f"{name}:{1000 * seconds:.3f}|ms")
        self.send(*lines)

    def close(self) -> None:
        self.socket.close()


def _name(text: str) -> str:
    """Text as part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64] or "none"
