"""guidellm, a public load generator, unmodified, against the embedded model. Heavy to install (the
extra `load`), so it is a soak test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import frame
from tests.clients.conftest import KEY
from tests.entrypoints.serving import RunningServer

FOLDER = Path(frame.__file__).parent / "models" / "frame_tiny"
REQUESTS = 200


@pytest.mark.soak
@pytest.mark.parametrize("profile", ["kind=concurrent,streams=8", "kind=synchronous", "kind=poisson,rate=20"])
def test_every_request_is_answered(clients_server: RunningServer, tmp_path: Path, profile: str) -> None:
    found = shutil.which("guidellm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if found is None:
        pytest.skip("guidellm is not installed (pip install frame-serve[load])")
    report = tmp_path / "report.json"
    arguments = {
        "--backend": f"kind=openai_http,target={clients_server.url},api_key={KEY}",
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={FOLDER}",
        "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output": f"kind=json,path={report}",
    }
    words = [word for pair in arguments.items() for word in pair]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([found, "run", *words, "--disable-console"], check=True, env=environment, timeout=600)
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
