"""`ProfiledRunner`: a runner that records steps with torch's profiler on request. Each rank writes
a trace of its own.

A recording ends after its number of steps, which bounds its memory. Each launch is a span of the
trace, named by `step_label`. Must not know HTTP or a request.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frame.core.interfaces.runner import ProfileError, ProfileRequest, WrappedRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.interfaces.runner import ModelRunner, PendingStep

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def step_label(batch: ScheduledBatch) -> str:
    """The name of a step's span in traces; `frame profile` parses it."""
    return f"step {batch.step}: {batch.num_decodes} decodes of {len(batch.slots)} rows, {int(batch.num_scheduled.sum())} tokens"


class ProfiledRunner(WrappedRunner):
    """Traces are written to FOLDER/NAME-rankRANK.json.gz, for Perfetto or chrome://tracing."""

    def __init__(self, runner: ModelRunner, folder: Path, rank: int, activities: Sequence[Any]) -> None:
        super().__init__(runner)
        self._folder = folder
        self._rank = rank
        self._activities = activities
        self._profile: Any = None  # torch.profiler.profile, while recording
        self._left = 0  # steps
        self._path = folder

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        if self._profile is not None:
            if not self._left:
                self._write()
            self._left -= 1
            with torch.profiler.record_function(step_label(batch)):
                return self._runner.launch(batch)
        return self._runner.launch(batch)

    def profile(self, request: ProfileRequest | None) -> str:
        """Start a recording, or stop it if `request` is None. -> the trace's path. Raises
        ProfileError."""
        if request is None:
            if self._path == self._folder:
                raise ProfileError("nothing was recorded; start a profile first")
            if self._profile is not None:
                self._write()
            return str(self._path)
        if self._profile is not None:
            raise ProfileError("a profile is being recorded; stop it first")
        if not _NAME.fullmatch(request.name):
            raise ProfileError("the profile's name may hold letters, digits, - and _")
        if (problem := request.problem()) is not None:
            raise ProfileError(problem)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfileError(f"the folder execution.profile_dir cannot be made ({error.strerror}); name another") from error
        self._path = self._folder / f"{request.name}-rank{self._rank}.json.gz"
        self._profile, self._left = torch.profiler.profile(activities=self._activities), request.num_steps
        self._profile.start()
        return str(self._path)

    def close(self) -> None:
        if self._profile is not None:
            self._write()
        self._runner.close()

    def _write(self) -> None:
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # a full disk must not end the engine
            log.error("the profile could not be written: %s", error)
        else:
            log.info("a profile was written to %s", self._path)
