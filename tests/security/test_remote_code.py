"""A checkpoint's Python code runs only with --trust-remote-code, in every process and by every
call.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame.checkpoint.remote_code import load_class
from frame.core.errors import CheckpointError, ConfigurationError
from frame.entrypoints.http.native.tokenizing import describe_tokens
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.text.python_tokenizer import PythonTokenizer
from frame.text.tokenizer import Tokenizer
from tests.architecture.source import package
from tests.entrypoints.serving import RunningServer
from tests.models.harness import open_session
from tests.models.test_logits import check, prompt

LOADING = frozenset({"from_pretrained", "from_config", "_from_config"})
OTHER_WAYS = frozenset({"get_class_from_dynamic_module", "_from_config"})
NAMED = (*LOADING, *OTHER_WAYS, "Tokenizer")  # one of them is in the text of each file that loads code
MARK = """from pathlib import Path

(Path({folder!r}) / ("ran-" + __name__.rpartition(".")[2])).touch()
"""
CONFIGURATION = """from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
FAST = """from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
# ids are characters, with one special token
SLOW = """import json
from pathlib import Path

from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.vocab"}

    def __init__(self, vocab_file, **kwargs):
        self.known = json.loads(Path(vocab_file).read_text())
        self.texts = {i: text for text, i in self.known.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.known)

    def get_vocab(self):
        return {**self.known, **self.added_tokens_encoder}

    def _tokenize(self, text):
        return [text[i : i + 2] for i in range(0, len(text), 2)]  # pairs: no tokenizer of the library's does that

    def _convert_token_to_id(self, token):
        return self.known.get(token, 0)

    def _convert_id_to_token(self, index):
        return self.texts.get(index, "")

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""
PROCESSOR = """from transformers import AutoTokenizer


class OwnProcessor:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        from .tokenization_own import OwnTokenizer

        return cls(OwnTokenizer.from_pretrained(folder, **kwargs))
"""


def change(file: Path, **changes: Any) -> None:
    found = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({key: value for key, value in {**found, **changes}.items() if value is not None}))


def add_code(folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text(MARK.format(folder=str(folder)) + code)


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ran-*"))


def own_model(folder: Path) -> Path:
    make_checkpoint("LlamaForCausalLM", folder)
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map)
    add_code(folder, "configuration_own", CONFIGURATION)
    add_code(folder, "modeling_own", MODEL)
    return folder


def own_tokenizer(folder: Path, slow: bool = True, processor: bool = False) -> Path:
    """A Llama whose tokenizer is Python code."""
    make_checkpoint("LlamaForCausalLM", folder)
    names = [None, "tokenization_own.OwnTokenizer"]
    auto_map = {"AutoTokenizer": names[::-1] if slow else names}
    if slow:
        (folder / "tokenizer.json").unlink()
        pairs = [chr(a) + chr(b) for a in range(ord("a"), ord("p")) for b in range(ord("a"), ord("p"))]
        (folder / "own.vocab").write_text(json.dumps({text: i for i, text in enumerate(["?", *pairs, *map(chr, range(32, 127))])}))
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=None if processor else auto_map,
           bos_token=None, eos_token=None, pad_token=None)  # fmt: skip
    if processor:
        change(folder / "processor_config.json", auto_map={"AutoProcessor": "processing_own.OwnProcessor"})
        add_code(folder, "processing_own", PROCESSOR)
    add_code(folder, "tokenization_own", SLOW if slow else FAST)
    return folder


def evil(folder: Path) -> Path:
    """A checkpoint with code in every place where transformers looks for it."""
    own_tokenizer(own_model(folder))
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", architectures=["OwnForCausalLM"], model_type="own", auto_map=auto_map)
    change(folder / "generation_config.json", auto_map=auto_map, custom_generate="modeling_own.py")
    add_code(folder, "custom_generate", "")
    (folder / "custom_generate").mkdir()
    add_code(folder / "custom_generate", "generate", "")
    return folder


def is_loading(node: ast.AST) -> bool:
    """Whether a call may run a checkpoint's code: a call of transformers or of our tokenizer."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    return node.func.attr in LOADING or (of, node.func.attr) == ("Tokenizer", "load")


def test_every_call_says_whether_code_may_run() -> None:
    found, calls = [], 0
    named = [each for each in package() if any(name in each.text for name in NAMED)]  # the others need not be parsed
    for each in named:
        for node in ast.walk(each.tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in OTHER_WAYS:
                found.append(f"{each.at(node)} loads code by a way of its own")
            if isinstance(node, ast.Call) and is_loading(node):
                calls += 1
                given = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
                if not given or (isinstance(given[0], ast.Constant) and given[0].value is not False):
                    found.append(f"{each.at(node)} does not say trust_remote_code")
    assert found == []
    assert calls > 5


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("make", [evil, own_tokenizer, own_model], ids=["all", "tokenizer", "model"])
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("config", "check")], ids=["serve", "check"])
def test_standard_input_is_not_read(make: Callable[[Path], Path], command: tuple[str, ...], tmp_path: Path) -> None:
    folder = make(tmp_path / "evil")
    ended = subprocess.run(
        [sys.executable, "-m", "frame", *command, "--model", str(folder)],
        input="y\n" * 1000, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    assert ran(folder) == []
    assert ended.returncode == 78, ended.stderr
    assert ended.stderr.count("--trust-remote-code") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_unneeded_code_does_not_run(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path / "model", slow=False)
    add_code(folder, "modeling_own", MODEL)
    change(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    with RunningServer(folder) as server:
        assert server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}).status_code == 200
    assert ran(folder) == []


def test_model_code_runs_where_trusted(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    with pytest.raises(ConfigurationError, match="OwnForCausalLM is neither .* --trust-remote-code"):
        open_session(folder, model="transformers")
    assert ran(folder) == []
    session = open_session(folder, model="transformers", trust_remote_code=True)
    assert ran(folder) == ["ran-configuration_own", "ran-modeling_own"]
    plain = make_checkpoint("LlamaForCausalLM", tmp_path / "plain")
    check(session, load_reference(plain))
    logits = open_session(folder, model="transformers", trust_remote_code=True, load_format="dummy").step([(0, prompt(20))])[0]
    assert logits.isfinite().all()


@pytest.mark.parametrize("is_slow", [False, True], ids=["fast", "slow"])
def test_tokenizer_code_runs_where_trusted(tmp_path: Path, is_slow: bool) -> None:
    folder = own_tokenizer(tmp_path / "model", slow=is_slow)
    if is_slow:
        with pytest.raises(CheckpointError, match="tokenizer .* --trust-remote-code"):
            Tokenizer.load(folder)
    else:
        assert Tokenizer.load(folder).encode("abcd") == Tokenizer.load(make_checkpoint("LlamaForCausalLM", tmp_path / "p")).encode("abcd")
    assert ran(folder) == []
    tokenizer = Tokenizer.load(folder, trust_remote_code=True)
    assert ran(folder) == ["ran-tokenization_own"]
    assert tokenizer.decode(tokenizer.encode("abcd")) == "abcd"
    assert tokenizer.is_python is isinstance(tokenizer.backend, PythonTokenizer) is is_slow
    if is_slow:
        ids = tokenizer.encode("abcd")
        assert ids == [tokenizer.find_token_id("ab"), tokenizer.find_token_id("cd")]
        assert tokenizer.encode_batch(["ab", "cd"]) == [[ids[0]], [ids[1]]]
        assert tokenizer.encode_inputs([["ab"], ["ab", "cd"]]) == [([ids[0]], 0), (ids, 1)]
        assert tokenizer.encode_inputs([["ab", "cdcdcd"], ["abab"]], max_length=2) == [(ids, 1), ([ids[0]] * 2, 0)]
        cards = describe_tokens(tokenizer, "abcd", ids, special=True)
        assert [(card["id"], card["special"], card["start"]) for card in cards] == [(ids[0], False, None), (ids[1], False, None)]


def test_processor_code_runs_where_trusted(tmp_path: Path) -> None:
    folder = own_tokenizer(tmp_path / "model", processor=True)
    with pytest.raises(CheckpointError, match="tokenizer .* --trust-remote-code"):
        Tokenizer.load(folder)
    assert ran(folder) == []
    assert Tokenizer.load(folder, trust_remote_code=True).decode([1, 2]) == "aaab"


@pytest.mark.parametrize("reference", ["other/repo--tokenization_own.OwnTokenizer", "../up.Own", "tokenization_own", "tokenization_own.No"])
def test_code_outside_the_folder_is_refused(tmp_path: Path, reference: str) -> None:
    folder = own_tokenizer(tmp_path / "model")
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [reference, None]})
    with pytest.raises(CheckpointError, match="module.Class|cannot be loaded"):
        Tokenizer.load(folder, trust_remote_code=True)


def test_no_class_is_loaded_without_trust(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_class(None, "model", "modeling_own.OwnForCausalLM")
    assert ran(folder) == []


@pytest.mark.slow
def test_server_with_trusted_code(tmp_path: Path) -> None:
    folder = own_tokenizer(own_model(tmp_path / "model"))
    change(folder / "config.json", architectures=["OwnForCausalLM"], model_type="own",
           auto_map={"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})  # fmt: skip
    with RunningServer(folder, "--trust-remote-code", fake=False) as server:
        reply = server.post("/generate", {"text": "abcd", "sampling_params": {"max_new_tokens": 3, "temperature": 0}})
        assert (reply.status_code, reply.json()["meta_info"]["prompt_tokens"]) == (200, 2)
        grammar = {"text": "ab", "sampling_params": {"max_new_tokens": 3, "regex": "a+"}}
        refused = server.post("/generate", grammar)
        assert (refused.status_code, "Python code" in refused.text) == (400, True)
    assert ran(folder) == ["ran-configuration_own", "ran-modeling_own", "ran-tokenization_own"]
