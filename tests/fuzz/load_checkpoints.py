"""Loads the checkpoints of standard input, one folder a line, with little memory, and writes what
each gave as a line of JSON: {"folder", "error", "message", "seconds", "events"}.

`test_checkpoints.py` runs it: a checkpoint that hangs or exhausts memory ends this process alone.
`events`: what the audit hook saw that a checkpoint must not cause.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.launch import load_tokenizer

FORBIDDEN = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
ROOM = 3 << 30  # bytes of address space besides what the imports take
PACKAGES = ("frame-bitsandbytes/frame_bitsandbytes", "frame-gguf/frame_gguf")  # on the path


class Audit:
    """Records the forbidden events while a checkpoint is loaded."""

    def __init__(self) -> None:
        self.folder = ""
        self.events: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event in FORBIDDEN or (event in ("import", "open") and self._leads_out(event, arguments)):
            self.events.append(f"{event} {arguments!r:.200}")

    def _leads_out(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """An import from the checkpoint's folder, or a system's file."""
        if event == "import":
            return str(arguments[1] or "").startswith(self.folder) or arguments[0].partition(".")[0] == "evil"
        return str(arguments[0]).startswith(("/etc/passwd", "/dev/zero"))


def load(folder: str) -> None:
    """As a server: resolve, load the tokenizer and the weights."""
    names = json.loads((Path(folder) / "load.json").read_text()) if (Path(folder) / "load.json").is_file() else {}
    packages = Path(__file__).resolve().parents[2] / "packages"
    config = FrameConfig.model_validate(
        {
            "model": {"path": folder, **names},
            "cache": {"max_total_tokens": 256},
            "scheduler": {"max_running_requests": 2},
            "plugins": {"paths": [str(packages / name) for name in PACKAGES]},
        }
    )
    prepared = prepare(config)
    load_tokenizer(prepared.resolved)
    build_rank(prepared.resolved, prepared.registry)


def main() -> None:
    audit = Audit()
    for number, line in enumerate(sys.stdin):
        folder, error, message = line.strip(), "", ""
        started, audit.events, audit.folder = time.perf_counter(), [], folder if number else ""
        try:
            load(folder)
        except Exception as raised:  # the test compares it
            kinds = [kind.__name__ for kind in type(raised).__mro__]
            error = "ConfigurationError" if "ConfigurationError" in kinds else kinds[0]
            message = str(raised)
        audit.folder = ""
        result = {"folder": folder, "error": error, "message": message, "seconds": time.perf_counter() - started, "events": audit.events}
        print(json.dumps(result), flush=True)
        if not number:  # the first one is whole, and has imported everything
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


if __name__ == "__main__":
    main()
