"""What must not stand in the package: unsafe decoding, global state, mixins, catch-all files,
undocumented modules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.architecture.source import Module, classes, functions, has_docstring, is_under, module, package, walk

FILE_NAMES = {"utils", "util", "manager", "managers", "helper", "helpers", "common", "misc", "base"}
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing")
UNSAFE_METHODS = {
    "recv_pyobj": "decodes with pickle",
    "send_pyobj": "encodes with pickle",
    "all_gather_object": "uses pickle",
    "broadcast_object_list": "uses pickle",
    "gather_object": "uses pickle",
    "scatter_object_list": "uses pickle",
    "send_object_list": "uses pickle",
    "recv_object_list": "uses pickle",
}
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
MUTABLE_CALLS |= {"WeakKeyDictionary", "WeakValueDictionary"}
MUTATING = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear", "appendleft"}
STATELESS_ROOMS = (
    *("frame.core", "frame.models", "frame.attention_backends", "frame.quantization", "frame.plugins", "frame.entrypoints"),
    "frame_automata",
)
MAX_DOCSTRING_CHARS = 800  # six lines of before the wrap at 100 columns
COUNTS = {"M", "num_rows", "num_tokens", "num_pairs", "tokens", "pairs"}  # how kernels call numbers that change with each step

# "check path[:name]" -> why it may stand.
EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "clock frame/text/chat_template.py",
            "clock frame/entrypoints/engine_client/adapter_registry.py",
            "clock frame/entrypoints/http/native/pooling.py",
            "clock frame/entrypoints/http/openai/responses.py",
            "clock frame/entrypoints/http/operations/live_feed.py",
            "clock frame/entrypoints/http/openai/response_objects.py",
            "clock frame/entrypoints/http/services.py",
            "clock frame/entrypoints/http/realtime/session.py",
        ),
        "shows the time; nothing waits for it",
    ),
    "clock frame/plugins/kv_tiers/block_files.py": "a file's date outlives the process that wrote it",
    "clock frame/entrypoints/http/batch/files.py": "a file's date outlives this process, whose monotonic clock does not",
    "clock frame/entrypoints/http/openai/response_files.py": "the dates of stored responses outlive this process",
    "clock frame/entrypoints/http/openai/response_store.py": "the dates of stored responses outlive this process",
    "clock frame/entrypoints/http/batch/folder.py": "the age of a file that a killed process left",
    "clock frame/entrypoints/http/batch/sending.py": "compares with the date at which a batch expires",
    "clock frame/entrypoints/http/batch/jobs.py": "a batch's dates outlive this process, whose monotonic clock does not",
    "cuda frame/kernels/nvidia.py": "kernels for NVIDIA GPUs, whose launchers get tensors instead of a platform, ask about the device here",
    "cuda frame/plugins/weight_transfers/ipc.py": "opens another process's memory of the GPU, which no platform does",
    "cuda frame/rl/buckets.py": "shares memory of the trainer, whose process has no platform",
    "unsafe frame/testing/weight_transfer/suite.py:pickle": "replaces its functions, to see that none is called",
    "unsafe frame/testing/weights/weight_source.py:pickle": "writes a pickle with a payload, which no weight source may execute",
    "clock frame/entrypoints/handoff.py": "a signature expires on another host, whose monotonic clock is another one",
    **dict.fromkeys(
        ("clock frame/plugins/tracers/otlp.py", "clock frame/plugins/tracers/json_lines.py", "clock frame/testing/serving/tracer.py"),
        "spans are dated; their lengths are measured by the monotonic clock",
    ),
    "clock frame/plugins/key_stores/http.py": "another host says until when a token is valid",
    "clock frame/kv_events/publisher.py": "dates a batch for subscribers on other hosts",
    "clock frame/entrypoints/engine_client/request_dump.py": "dates of records and files outlive this process",
}

Breach = tuple[str, str]


def unsafe_code(found: Module) -> Iterator[Breach]:
    """Everything that runs or decodes what it is given."""
    for use in found.imports:
        if is_under(use.target, *UNSAFE_MODULES):
            yield f"unsafe {found.path}:{use.target}", f"{found.at(use.line)}: imports {use.target}"
    for node in walk(found.tree):
        if isinstance(node, ast.Call) and (problem := _unsafe_call(node)):
            yield f"unsafe {found.path}", f"{found.at(node)}: {problem}"


def _unsafe_call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}:
        return f"calls {name}"
    if name == "torch.load":
        return "torch.load unpickles, weights_only or not"
    if last in UNSAFE_METHODS:
        return f"{last} {UNSAFE_METHODS[last]}"
    if keywords.get("shell", "False") != "False":
        return "runs a shell"
    if keywords.get("allow_pickle", "False") != "False":
        return "allows pickle"
    return None


def global_state(found: Module) -> Iterator[Breach]:
    """`global`, mutable values at module level that are no constant tables, and caches without a
    bound."""
    for node in walk(found.tree):
        if isinstance(node, ast.Global):
            yield f"global {found.path}", f"{found.at(node)}: global {', '.join(node.names)}"
    if not is_under(found.name, *STATELESS_ROOMS):
        return
    changed = _changed_names(found.tree)
    for node in found.tree.body:
        for name, value in _assigned(node):
            is_table = name.lstrip("_").isupper() and name not in changed
            if _is_mutable(value) and not is_table and not name.startswith("__"):
                yield f"global {found.path}:{name}", f"{found.at(node)}: {name} is mutable state of a module"
    for function in functions(found.tree):
        if any(_is_unbounded_cache(decorator) for decorator in function.decorator_list) and function.args.args:
            yield f"global {found.path}:{function.name}", f"{found.at(function)}: {function.name} has a cache without a bound"


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in walk(tree):
        is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        is_method = isinstance(node, ast.Attribute) and node.attr in MUTATING
        if (is_item or is_method) and isinstance(node.value, ast.Name):
            names.add(node.value.id)
    return names


def _is_unbounded_cache(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text in {"cache", "functools.cache"} or "maxsize=None" in text or text.endswith("lru_cache(None)")


def mixins(found: Module) -> Iterator[Breach]:
    for node in classes(found.tree):
        if node.name.endswith("Mixin"):
            yield f"mixin {found.path}:{node.name}", f"{found.at(node)}: {node.name} is a mixin"


def file_names(found: Module) -> Iterator[Breach]:
    path = PurePosixPath(found.path)
    if FILE_NAMES & {path.stem, *path.parent.parts}:
        yield f"name {found.path}", f"{found.path}: name it after what it is"


def docstrings(found: Module) -> Iterator[Breach]:
    """Modules, and public classes and functions of the interfaces."""
    text = ast.get_docstring(found.tree)
    if text is None:
        yield f"docstring {found.path}", f"{found.path}: has no docstring"
    elif len(text) > MAX_DOCSTRING_CHARS:
        yield f"docstring {found.path}", f"{found.path}: its docstring has more than {MAX_DOCSTRING_CHARS} characters"
    if is_under(found.name, "frame.core.interfaces", "frame.interfaces"):
        for node in classes(found.tree):
            if not node.name.startswith("_") and not has_docstring(node) and not node.name.endswith("Requirements"):
                yield f"docstring {found.path}:{node.name}", f"{found.at(node)}: {node.name} has no docstring"


def silenced_errors(found: Module) -> Iterator[Breach]:
    """`except Exception: pass` and bare `except:`."""
    for node in walk(found.tree):
        if isinstance(node, ast.ExceptHandler):
            is_wide = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
            is_empty = all(ast.unparse(part) in {"pass", "..."} for part in node.body)
            if node.type is None or (is_wide and is_empty):
                yield f"silenced {found.path}", f"{found.at(node)}: an error of any kind is dropped"


def wall_clock(found: Module) -> Iterator[Breach]:
    """Looks at a clock that may be set: fine for showing the time, wrong for waiting, deadlines and
    ages."""
    for node in walk(found.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}:
            yield f"clock {found.path}", f"{found.at(node)}: {ast.unparse(node.func)} jumps when the clock is set; use time.monotonic"


def cuda(found: Module) -> Iterator[Breach]:
    """`torch.cuda`, which only the platform `cuda` uses: other code serves every platform."""
    if is_under(found.name, "frame.plugins.platforms"):
        return
    lines = [use.line for use in found.imports if is_under(use.target, "torch.cuda")]
    lines += [node.lineno for node in walk(found.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"]
    for line in lines:
        yield f"cuda {found.path}", f"{found.at(line)}: uses torch.cuda; use the context's platform"


def kernels_by_count(found: Module) -> Iterator[Breach]:
    """Kernels that are compiled anew, in the middle of serving, for numbers of rows that 16
    divides, or for those that it does not."""
    for node in functions(found.tree):
        jits = [each for each in node.decorator_list if ast.unparse(each).startswith(("triton.jit", "gluon.jit"))]
        if not jits or not node.name.endswith("_kernel"):
            continue
        named = {each.value for each in ast.walk(jits[0]) if isinstance(each, ast.Constant)}
        for argument in node.args.args:
            if argument.arg in COUNTS and argument.annotation is None and argument.arg not in named:
                yield f"kernel {found.path}:{node.name}", f"{found.at(node)}: name {argument.arg} in do_not_specialize_on_alignment"


CHECKS: tuple[Callable[[Module], Iterable[Breach]], ...] = (
    unsafe_code,
    global_state,
    mixins,
    file_names,
    docstrings,
    silenced_errors,
    wall_clock,
    kernels_by_count,
    cuda,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_nothing_forbidden(check: Callable[[Module], Iterable[Breach]]) -> None:
    assert [sentence for found in package() for key, sentence in check(found) if key not in EXCEPTIONS] == []


def test_exceptions_are_needed_and_explained() -> None:
    found = {key for each in package() for check in CHECKS for key, _ in check(each)}
    assert sorted(set(EXCEPTIONS) - found) == [], "these exceptions can go"
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (unsafe_code, "import pickle"),
        (unsafe_code, "def f():\n    from multiprocessing import Queue"),
        (unsafe_code, "eval('1')"),
        (unsafe_code, "torch.load(path)"),
        (unsafe_code, "torch.load(path, weights_only=True)"),
        (unsafe_code, "socket.recv_pyobj()"),
        (unsafe_code, "torch.distributed.broadcast_object_list(x)"),
        (unsafe_code, "subprocess.run('ls', shell=True)"),
        (unsafe_code, "np.load(path, allow_pickle=True)"),
        (global_state, "def f():\n    global x\n    x = 1"),
        (global_state, "cache = {}"),
        (global_state, "_seen: set[str] = set()"),
        (global_state, "TABLE = {}\ndef f():\n    TABLE['a'] = 1"),
        (global_state, "NAMES = []\ndef f():\n    NAMES.append(1)"),
        (global_state, "@functools.cache\ndef f(x): ..."),
        (mixins, "class OutputMixin: ..."),
        (docstrings, "x = 1"),
        (docstrings, '"""' + "a\n" * MAX_DOCSTRING_CHARS + '"""'),
        (silenced_errors, "try:\n    f()\nexcept Exception:\n    pass"),
        (silenced_errors, "try:\n    f()\nexcept:\n    g()"),
        (wall_clock, "deadline = time.time() + 5"),
        (cuda, "def f():\n    torch.cuda.synchronize()"),
        (cuda, "def f(stream: torch.cuda.Stream): ..."),
        (cuda, "from torch.cuda import Event"),
        (kernels_by_count, "@triton.jit\ndef add_kernel(x, M, BM: tl.constexpr): ..."),
        (kernels_by_count, "@triton.jit(do_not_specialize=['N'])\ndef add_kernel(x, M, N): ..."),
    ],
)
def test_checks_find(check: Callable[[Module], Iterable[Breach]], text: str) -> None:
    assert list(check(module(text)))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (unsafe_code, "safetensors.torch.load(data)"),
        (unsafe_code, "model.eval()"),
        (global_state, "TABLE = {'a': 1}"),
        (global_state, "__all__ = ['a']"),
        (global_state, "@lru_cache(maxsize=8)\ndef f(x): ..."),
        (silenced_errors, "try:\n    f()\nexcept ValueError:\n    pass"),
        (wall_clock, "deadline = time.monotonic() + 5"),
        (kernels_by_count, "@triton.jit(do_not_specialize_on_alignment=['M'])\ndef add_kernel(x, M): ..."),
        (kernels_by_count, "@triton.jit\ndef part(x, M): ..."),
        (cuda, "def f(x):\n    return x.is_cuda"),
    ],
)
def test_checks_allow(check: Callable[[Module], Iterable[Breach]], text: str) -> None:
    assert list(check(module(text))) == []


def test_file_names_finds() -> None:
    assert list(file_names(module("", "frame.core.utils")))
    assert list(file_names(module("", "frame.common.x")))
