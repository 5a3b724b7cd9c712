"""Plugins in packages of their own, each of at most 100 lines: installed, chosen by
configuration alone, checked by their suites, and serving."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from frame.checkpoint.model_config import find_model
from tests.examples.conftest import PACKAGES, Environment

MAX_LINES = 100
SUITES = (
    *("prefix_cache:blocks", "weight_source:tar", "stat_logger:statsd", "routing_policy:weighted", "cli_command:hello"),
    *("pooler:weightedmean", "key_store:team", "tracer:slow", "kv_allocator:banks", "sampler:mirostat"),
)

SERVE = """
import json, sys
from frame import Engine, SamplingParams
greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
prompts = [[*range(1, 60), last] for last in (3, 4, 3)]
for name in sys.argv[1:]:
    with Engine(config=name) as engine:
        outputs = [engine.generate(prompt, greedy) for prompt in prompts]
    print(json.dumps([[output.token_ids, output.cached_tokens] for output in outputs]))
"""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_is_short(package: Path) -> None:
    lines = [len(path.read_text().splitlines()) for path in package.glob("*.py")]
    assert 0 < sum(lines) <= MAX_LINES


def pack_model(folder: Path) -> Path:
    """A copy of the embedded model with its weights in an archive."""
    model = folder / "model"
    shutil.copytree(find_model("frame-tiny"), model)
    with tarfile.open(model / "weights.tar", "w") as archive:
        for file in model.glob("*.safetensors"):
            archive.add(file, file.name)
            file.unlink()
    return model


def test_a_file_alone_chooses_them_and_they_serve_equal_tokens(environment: Environment, tmp_path: Path) -> None:
    plain, own = tmp_path / "plain.yaml", tmp_path / "own.yaml"
    common = "execution: {threads: 1}\nlog: {level: warning}\n"
    plain.write_text(f"{common}cache: {{max_total_tokens: 1024}}\n")
    model = pack_model(tmp_path)
    cache = "cache: {max_total_tokens: 1024, prefix: blocks, allocator: banks}\n"
    own.write_text(f"{common}{cache}model: {{path: {model}, load_format: tar}}\n")
    first, second = map(json.loads, environment.run("-c", SERVE, plain, own).stdout.splitlines())
    assert first == second
    assert [cached for _, cached in second] == [0, 48, 48]


ROUTE = """
import asyncio, collections, httpx, sys
from frame.entrypoints.router.server import load_policy
from frame.entrypoints.router.replicas import Backends, counted
from frame.interfaces.routing import RoutingRequest
from frame.parallel.replica_choice import ReplicaChooser
policy = load_policy("weighted", ["weights=[3, 1]"])()
backends = Backends(["http://127.0.0.1:1", "http://127.0.0.1:2"], httpx.AsyncClient(), 1.0, ReplicaChooser(policy))
held = []
for _ in range(40):
    held.append(counted(backends.choose(RoutingRequest())))
    held[-1].__enter__()
print([backend.outstanding for backend in backends.all])
"""


def test_a_routing_policy_of_the_command_line_routes(environment: Environment) -> None:
    assert json.loads(environment.run("-c", ROUTE).stdout) == [30, 10]


EMBED = """
import json, sys
from frame import Engine
from frame.testing.checkpoints import load_reference, make_checkpoint
import pathlib, torch
folder = make_checkpoint("LlamaModel", pathlib.Path(sys.argv[1]))
(folder / "1_Pooling").mkdir()
(folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_weightedmean_tokens": true}')
kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
modules = [{"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"} for n, (path, kind) in enumerate(kinds)]
(folder / "modules.json").write_text(json.dumps(modules))
prompts = [[*range(6, 6 + length)] for length in (1, 30, 7)]
with Engine(str(folder), dtype="float32", threads=1, max_total_tokens=1024) as engine:
    vectors = engine.embed(prompts)
with torch.no_grad():
    for vector, prompt in zip(vectors, prompts):
        weights = torch.arange(1.0, len(prompt) + 1)
        hidden = load_reference(folder)(torch.tensor([prompt])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(weights @ hidden, dim=0)
        print(float((torch.tensor(vector) - expected).abs().max()))
"""


@pytest.mark.slow
def test_a_pooler_that_a_checkpoint_asks_for_makes_its_vectors(environment: Environment, tmp_path: Path) -> None:
    errors = [float(line) for line in environment.run("-c", EMBED, tmp_path / "model").stdout.split()]
    assert len(errors) == 3 and max(errors) < 1e-5


SAMPLE = """
import json, math
from frame import Engine, SamplingParams
from frame.entrypoints.engine_client.limits import InvalidRequestError
with Engine(threads=1, max_total_tokens=2048, sampler="mirostat", plugins_options={"sampler/mirostat": {"eta": 0.4}}) as engine:
    for tau in ("0.2", "2", "12"):
        params = SamplingParams(max_tokens=60, temperature=1.0, logprobs=0, ignore_eos=True, custom={"tau": tau})
        outputs = engine.generate([[5, 6, 7], [9] * 40, [11]], params)
        each = [-logprob / math.log(2) for output in outputs for logprob in output.logprobs.logprobs]
        print(sum(each) / len(each))
    for params in (SamplingParams(custom={"tau": "-1"}), SamplingParams(top_p=0.5)):
        try:
            print(engine.generate([5], params).error)
        except InvalidRequestError as error:
            print(error)
"""


@pytest.mark.slow
def test_a_sampler_of_the_configuration_keeps_the_surprise_of_each_request(environment: Environment) -> None:
    *found, wrong, unused = environment.run("-c", SAMPLE, timeout=300).stdout.splitlines()
    low, middle, high = map(float, found)
    assert low < 1.2 < middle < 2.4 < high
    assert wrong.startswith("custom['tau'] is '-1'; it must be above 0")
    assert unused.startswith("top_p has no effect with the sampler mirostat")


@pytest.mark.slow
def test_a_key_store_and_a_tracer_of_the_command_line_serve(environment: Environment, tmp_path: Path) -> None:
    """A server over sockets: keys of one team share a prefix cache that another team does not see;
    a key that is taken out of the file is refused; operators' routes open for the operators. Each
    process leaves its spans."""
    file = tmp_path / "teams.json"
    digests = {key: hashlib.sha256(key.encode()).hexdigest() for key in ("red-1", "red-2", "blue", "ops")}
    red, blue, ops = [digests["red-1"], digests["red-2"]], [digests["blue"]], [digests["ops"]]
    file.write_text(json.dumps({"red": {"digests": red}, "blue": {"digests": blue}, "ops": {"digests": ops, "operator": True}}))
    command = [str(environment.python), "-m", "frame", "serve", "--port", "0", "--threads", "1", "--max-total-tokens", "4096"]
    options = ("--key-store", "team", "--set", f"plugins.options.key_store/team.file={file}")
    (tmp_path / "spans").mkdir()
    spans = "plugins.options.tracer/slow"
    options += ("--tracer", "slow", "--set", f"{spans}.folder={tmp_path / 'spans'}", "--set", f"{spans}.seconds=0.0")
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = list(iter_until(process.stderr, "ready on"))[-1].partition("ready on ")[2].split()[0]

        def send(key: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.request("GET" if body is None else "POST", f"{url}{path}", json=body, headers=headers, timeout=60)

        body = {"input_ids": [*range(3, 100)], "sampling_params": {"max_new_tokens": 1}}
        cached = [send(key, "/generate", body).json()["meta_info"]["cached_tokens"] for key in ("red-1", "red-2", "blue")]
        assert cached[0] == cached[2] == 0 < cached[1]
        assert [send(key, "/v1/models").status_code for key in ("red-1", "red", "ops")] == [200, 401, 200]
        assert [send(key, "/server_info").status_code for key in ("red-1", "red", "ops")] == [403, 401, 200]
        file.write_text(json.dumps({"blue": {"digests": blue}}))
        time.sleep(0.2)
        assert [send(key, "/v1/models").status_code for key in ("red-1", "blue")] == [401, 200]
        file.write_text("{")
        time.sleep(0.2)
        assert [send(key, "/v1/models").status_code for key in ("red-1", "blue")] == [503, 503]
    finally:
        process.terminate()
        process.wait(30)
    names = {path.stem: [span["name"] for span in json.loads(path.read_text())] for path in (tmp_path / "spans").iterdir()}
    assert names["main"].count("POST /generate") == 3 == names["engine"].count("prefill")


def iter_until(lines: IO[str], text: str) -> Iterator[str]:
    """The lines up to the first one with the text."""
    for line in lines:
        yield line
        if text in line:
            return


SEND = """
import socket, sys
from types import SimpleNamespace
from frame.interfaces.stats import RequestRecord
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.configuration.sources import load_config
from frame.entrypoints.http.server import load_stat_loggers
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("127.0.0.1", 0))
receiver.settimeout(10)
option = f"plugins.options.stat_logger/statsd.port={receiver.getsockname()[1]}"
prepared = prepare(load_config(sys.argv[1], sets=[option]).config)
loggers = load_stat_loggers(prepared.resolved, prepared.registry, SimpleNamespace(client=None, metrics=None, history=None))
(logger,) = loggers._loggers.values()
logger.record_request(RequestRecord("r", "m", "alice", "stop", 20, 16, 5, 0.5, 0.01, 0.125, None))
print(receiver.recv(4096).decode())
"""


def test_a_stat_logger_of_the_configuration_sends_what_it_gets(environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "frame.yaml"
    file.write_text("log: {stat_loggers: [statsd]}\n")
    lines = environment.run("-c", SEND, file).stdout.splitlines()
    assert "frame.frame-tiny.requests.stop:1|c" in lines
    assert "frame.frame-tiny.time_to_first_token:125.000|ms" in lines


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not files_above_2_gib", pytest.param("", marks=pytest.mark.soak)], ids=["most", "all"])
def test_they_pass_their_suites(environment: Environment, tmp_path: Path, chosen: str) -> None:
    suites = [f"--frame-conformance={suite}" for suite in SUITES]
    options = ("-q", "-rs", "-p", "no:cacheprovider", "-k", chosen, "--rootdir", tmp_path)
    done = environment.run("-m", "pytest", *options, *suites, tmp_path, timeout=400)
    assert " passed" in done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    reasons = (
        "limit_conformance_options", "have no safetensors index", "list_broken_conformance_stores",
        "evicts in an order of its own", "honours no top_k",
    )  # fmt: skip
    assert all(any(reason in line for reason in reasons) for line in skipped), skipped
    assert len(skipped) == len(reasons)


def test_a_command_is_listed_run_denied_and_blamed(environment: Environment) -> None:
    listed = environment.frame("--help").stdout
    assert "Commands of installed packages" in listed
    assert "From frame-hello 1.0.0." in listed
    assert environment.frame("hello", "there").stdout.startswith("Hello, there.")
    broken = environment.frame("broken-hello", check=False)
    assert broken.returncode == 78
    assert "cli_command 'broken-hello' (frame-hello 1.0.0) was selected but does not load from frame_hello:no_such_command" in broken.stderr
    assert "Traceback" not in broken.stderr
    denied = "import os; os.environ['FRAME_PLUGINS__DENY'] = '[frame-hello]'; from frame.entrypoints.cli.main import main; main()"
    assert "frame-hello" not in environment.run("-c", denied, "--help").stdout
