"""The intermediate representation of a program: what it appends to its state, as plain data.

`gen`, `select`, `image` and the roles build nodes; `+` joins them with text. Must not know a
backend.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

from frame.core.errors import did_you_mean
from frame.core.interfaces.sampling_params import SamplingParams

Method = Literal["logprob", "constrained"]
Normalization = Literal["token", "sum"]

DEFAULT_MAX_TOKENS = 128  # of a `gen` without a grammar
_SAMPLING = frozenset(SamplingParams.__struct_fields__)
# Keyword of SamplingParams -> the feature that a backend needs for it.
_GRAMMARS = {"regex": "regex", "choice": "choice", "json_schema": "schema", "json_object": "schema", "ebnf": "ebnf"}


class Node:
    """Something that a program can append: `node + node`, `text + node` and `node + text` join.

    A node has no value: the state has it once the node is appended. Comparing one with anything but
    a node, and using it as a condition, a text or a collection, raises TypeError: `gen("x") ==
    "Yes"` would otherwise be false, whatever the model says.
    """

    features: frozenset[str] = frozenset()  # what a backend must be able to express

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other) if isinstance(other, Node) else self._refuse()

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: object) -> NoReturn:
        name = getattr(self, "name", None)
        shown = "" if name is None else repr(name)
        sentence = f"{type(self).__name__.lower()}({shown}) has no value: append it to the state (s += …)"
        raise TypeError(f"{sentence}, then read s[{shown or 'name'}]" if isinstance(self, Gen | Select | Joined | Role) else sentence)

    __bool__ = __len__ = __iter__ = __contains__ = __str__ = __format__ = _refuse  # type: ignore[assignment]

    def __add__(self, other: Node | str) -> Joined:
        return Joined((*list_nodes(self), *list_nodes(other)))

    def __radd__(self, other: str) -> Joined:
        return Joined((*list_nodes(other), *list_nodes(self)))


@dataclass(frozen=True, eq=False)
class TextNode(Node):
    """Literal text."""

    text: str


@dataclass(frozen=True, eq=False)
class Gen(Node):
    """A generation. `params` are keywords of `SamplingParams`; `timeout` is in seconds."""

    name: str | None
    params: Mapping[str, Any]
    schema: Any = None  # a pydantic model or a JSON Schema
    timeout: float | None = None

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(_GRAMMARS[key] for key in self.params if key in _GRAMMARS)


@dataclass(frozen=True, eq=False)
class Select(Node):
    """A choice among texts, by log-probability or by constrained greedy decoding."""

    name: str | None
    choices: tuple[str, ...]
    method: Method = "logprob"
    normalization: Normalization = "token"
    timeout: float | None = None

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"logprob select" if self.method == "logprob" else "choice"})


@dataclass(frozen=True, eq=False)
class Image(Node):
    """An image by URL (http, https or data)."""

    url: str
    features = frozenset({"image"})


@dataclass(frozen=True, eq=False)
class Role(Node):
    """A message of a conversation."""

    role: str  # system, user or assistant
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Joined(Node):
    """Nodes one after the other."""

    nodes: tuple[Node, ...]


def gen(
    name: str | None = None, *, schema: Any = None, choices: Sequence[str] | None = None, timeout: float | None = None, **params: Any
) -> Gen:
    """A generation whose text (or, with `schema`, parsed value) is `s[name]`.

    Takes every keyword of `SamplingParams`, among them `regex`, `stop`, `temperature`, `seed` and
    `n` (the value is then a list, and the first text goes on in the prompt). `schema` is a pydantic
    model or a JSON Schema; `choices` restricts the text to one of these. Without `max_tokens` a
    free text has at most 128 tokens, a constrained one the rest of the context. Raises ValueError
    for an unknown keyword or a value out of range.
    """
    if choices is not None:
        params["choice"] = _checked_choices(choices)
    if schema is not None:
        params["json_schema"] = json.dumps(schema if isinstance(schema, Mapping) else schema.model_json_schema())
    if not any(key in _GRAMMARS for key in params):
        params.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    return Gen(name, check_sampling(params), schema, timeout)


def select(
    name: str | None,
    choices: Sequence[str],
    *,
    method: Method = "logprob",
    normalization: Normalization = "token",
    timeout: float | None = None,
) -> Select:
    """The likeliest of `choices`, as `s[name]`.

    `method="logprob"` scores each choice, tokenized on its own, after the prompt: the mean
    log-probability of its tokens (`normalization="token"`), or their sum ("sum"). Ties go to the
    first. `method="constrained"` decodes greedily among the choices: cheaper, and possible on more
    backends, but a choice whose first token is unlikely cannot win.
    """
    for value, known in ((method, ("logprob", "constrained")), (normalization, ("token", "sum"))):
        if value not in known:
            raise ValueError(f"select() takes {' or '.join(map(repr, known))}, not {value!r}")
    return Select(name, _checked_choices(choices), method, normalization, timeout)


def image(source: Any) -> Image:
    """An image in a user's message: a URL, a path, bytes, an image of PIL or an array of pixels.
    Refused by backends whose model takes none. Raises ValueError for what is no image."""
    if isinstance(source, str) and source.startswith(("http:", "https:", "data:", "file:")):
        return Image(source)
    from frame.entrypoints.offline.media import read_part

    data = read_part("image", source, "image()").source
    return Image(data if isinstance(data, str) else f"data:image/png;base64,{base64.b64encode(data).decode()}")


def system(content: Node | str) -> Role:
    """A system message."""
    return _role("system", content)


def user(content: Node | str) -> Role:
    """A user's message; images stand in these only."""
    return _role("user", content)


def assistant(content: Node | str) -> Role:
    """An assistant's message; generations stand in these only."""
    return _role("assistant", content)


def list_nodes(node: Node | str) -> tuple[Node, ...]:
    """The nodes that `node` joins. Raises TypeError for what is neither a node nor a string."""
    if isinstance(node, str):
        return (TextNode(node),) if node else ()
    if isinstance(node, Node):
        return node.nodes if isinstance(node, Joined) else (node,)
    raise TypeError(f"a program appends text, gen(), select(), image() or a role, not {type(node).__name__}")


def check_sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `SamplingParams` as a dict. Raises ValueError for a name or value that it has
    not."""
    for key in params:
        if key not in _SAMPLING:
            raise ValueError(f"gen() has no parameter {key!r}{did_you_mean(key, _SAMPLING | {'schema', 'choices', 'timeout'})}")
    try:
        problems = msgspec.convert(dict(params), SamplingParams).problems()
    except msgspec.ValidationError as error:
        raise ValueError(f"gen(): {error}") from None
    if problems:
        raise ValueError(problems[0].sentence)
    return dict(params)


def _role(role: str, content: Node | str) -> Role:
    for part in (nodes := list_nodes(content)):
        if isinstance(part, Role):
            raise ValueError(f"{role}() cannot hold {part.role}(); append one message after the other")
        if isinstance(part, Gen | Select) and role != "assistant":
            raise ValueError(f"{type(part).__name__.lower()}() stands in {role}(); generations belong in assistant()")
        if isinstance(part, Image) and role != "user":
            raise ValueError(f"image() stands in {role}(); images belong in user()")
    return Role(role, nodes)


def _checked_choices(choices: Sequence[str]) -> tuple[str, ...]:
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices is a list of one or more non-empty texts")
    return tuple(choices)
