"""Regular languages over bytes, by derivatives (Brzozowski 1964): an expression is a state, its
derivative by a byte the next state.

Counts stay numbers instead of copies of the counted part. States whose counts differ beyond the
reach of one token share a mask (`clamp`). Knows no syntax and no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LARGE = 1 << 20
MAX_NODES = 60_000  # nodes and derivatives of one language


@dataclass(slots=True, eq=False)  # a frozen class takes four times as long to make; nodes are never changed
class Node:
    """An expression. Created by a `Language`, where equal expressions are the same object."""

    kind: str  # "none": no text, "empty": the empty text, "bytes", "cat", "alt", "repeat"
    members: int = 0  # of "bytes": bit b is set for byte b
    parts: tuple[Node, ...] = ()  # of "cat": two; of "alt": two or more, in any order; of "repeat": one
    minimum: int = 0
    maximum: int | None = None  # of "repeat"; None: no bound
    is_nullable: bool = False  # whether the empty text matches
    first: int = 0  # the first bytes of its texts; bit b is set for byte b
    size: int = 1  # number of nested parts; LARGE for a repetition


@dataclass(slots=True)
class Language:
    """Creates nodes and their derivatives. Every node but `none` matches some text."""

    num_derived: int = 0  # number of computed derivatives
    max_size: int = MAX_NODES  # entries of the caches, above which they are cleared
    none: Node = field(default_factory=lambda: Node("none"))
    empty: Node = field(default_factory=lambda: Node("empty", is_nullable=True))
    _nodes: dict[tuple[object, ...], Node] = field(default_factory=dict)
    _derivatives: dict[tuple[Node, int], Node] = field(default_factory=dict)
    _clamped: dict[tuple[Node, int], Node] = field(default_factory=dict)
    _forms: dict[Node, Form] = field(default_factory=dict)
    _further: dict[tuple[Node, int], Node] = field(default_factory=dict)
    _passes: dict[tuple[Node, Node], bytes] = field(default_factory=dict)
    _joined: dict[tuple[Node, Node], Node] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def size(self) -> int:
        """Entries of the caches."""
        return len(self._nodes) + len(self._derivatives) + len(self._further) + len(self._joined)

    def one_byte(self, members: int) -> Node:
        """One byte of a set."""
        return self._node("bytes", members=members) if members else self.none

    def cat_all(self, parts: Sequence[Node]) -> Node:
        node = self.empty
        for part in reversed(parts):
            node = self.cat(part, node)
        return node

    def cat(self, first: Node, second: Node) -> Node:
        if first is self.none or second is self.none:
            return self.none
        if first is self.empty:
            return second
        if second is self.empty:
            return first
        if first.kind == "cat":
            cached = self._joined.get((first, second))
            if cached is None:
                cached = self._joined[first, second] = self._join(first, second)
            return cached
        return self._node("cat", (first, second), is_nullable=first.is_nullable and second.is_nullable)

    def _join(self, first: Node, second: Node) -> Node:
        """The sequence of a sequence and a node, nested to the right, so that equal sequences are
        equal."""
        spine = []
        while first.kind == "cat":
            spine.append(first.parts[0])
            first = first.parts[1]
        for part in (first, *reversed(spine)):
            second = self._node("cat", (part, second), is_nullable=part.is_nullable and second.is_nullable)
        return second

    def alt(self, choices: Iterable[Node]) -> Node:
        flat: dict[Node, None] = {}
        members = 0
        for choice in choices:
            for part in choice.parts if choice.kind == "alt" else (choice,):
                if part.kind == "bytes":
                    members |= part.members
                elif part is not self.none:
                    flat[part] = None
        if members:
            flat[self.one_byte(members)] = None
        if len(flat) < 2:
            return next(iter(flat), self.none)
        parts = tuple(sorted(flat, key=id))
        return self._node("alt", parts, is_nullable=any(part.is_nullable for part in parts))

    def repeat(self, part: Node, minimum: int, maximum: int | None) -> Node:
        if part is self.none:
            return self.none if minimum else self.empty
        if part is self.empty or maximum == 0:
            return self.empty
        if minimum == maximum == 1:
            return part
        minimum = 0 if part.is_nullable else minimum
        return self._node("repeat", (part,), minimum=minimum, maximum=maximum, is_nullable=minimum == 0)

    def derive(self, node: Node, byte: int) -> Node:
        """Return the derivative by a byte."""
        if not node.first >> byte & 1:
            return self.none
        key = node, byte
        cached = self._derivatives.get(key)
        if cached is None:
            self.num_derived += 1
            cached = self._derive(node, byte)
            self._derivatives[key] = cached
        return cached

    def follow(self, node: Node, text: bytes) -> Node:
        """Return the derivative by a text."""
        known, at, end = self._derivatives, 0, len(text)
        while at < end and node is not self.none:
            byte = text[at]
            if node.kind != "cat":
                node, at = known.get((node, byte)) or self.derive(node, byte), at + 1
                continue
            head, tail = node.parts
            if head.kind == "repeat":
                count = end - at - len((text[at:] if at else text).lstrip(self._passed(head.parts[0], tail)))
                if count > 1:
                    count = count if head.maximum is None else min(count, head.maximum)
                    node, at = self._after(node, count), at + count
                    continue
            # What the tail does not take part in is derived without it: few heads have many tails.
            while head.kind != "cat" and head.first >> byte & 1 and not (head.is_nullable and tail.first >> byte & 1):
                head, at = known.get((head, byte)) or self.derive(head, byte), at + 1
                if at == end:
                    break
                byte = text[at]
            if head is not node.parts[0]:
                node = self.cat(head, tail) if at == end or head.first >> byte & 1 or not head.is_nullable else tail
            elif head.is_nullable and not head.first >> byte & 1:
                node = tail
            else:
                node, at = known.get((node, byte)) or self.derive(node, byte), at + 1
        return node

    def find_passed(self, node: Node) -> tuple[bytes, int]:
        """Bytes of which any text, up to a length, leads from a state to one that depends on the
        length alone. -> the bytes, and the maximum length; no bytes: the state is of another
        kind."""
        if node.kind != "cat" or node.parts[0].kind != "repeat":
            return b"", 0
        head, tail = node.parts
        return self._passed(head.parts[0], tail), LARGE if head.maximum is None else head.maximum

    def form(self, node: Node) -> Form:
        """`form_of`, cached."""
        cached = self._forms.get(node)
        if cached is None:
            cached = self._forms[node] = form_of(node)
        return cached

    def clamp(self, node: Node, max_length: int) -> Node:
        """Return a node that accepts the same prefixes of up to `max_length` bytes. Counts beyond
        the reach of such a prefix are reduced to `longest + 1`."""
        key = node, max_length
        cached = self._clamped.get(key)
        if cached is None:
            cached = self._clamp(node, max_length)
            self._clamped[key] = cached
        return cached

    def forget(self) -> bool:
        """Clear the caches if they are large, and return whether. Existing nodes stay valid; equal
        nodes created later are other objects."""
        if self.size <= self.max_size:
            return False
        self._nodes, self._derivatives, self._clamped = {}, {}, {}
        self._further, self._passes, self._forms, self._joined = {}, {}, {}, {}
        return True

    def _passed(self, part: Node, after: Node) -> bytes:
        """The bytes that are one whole repetition of `part` and cannot start `after`."""
        key = part, after
        cached = self._passes.get(key)
        if cached is None:
            alone = self._passes.get((part, self.none))
            if alone is None:
                alone = bytes(byte for byte in range(256) if self.derive(part, byte) is self.empty)
                self._passes[part, self.none] = alone
            cached = self._passes[key] = bytes(byte for byte in alone if not after.first >> byte & 1)
        return cached

    def _after(self, node: Node, count: int) -> Node:
        """The state of a sequence that begins with a repetition, `count` repetitions later."""
        repeat, after = node.parts
        if not repeat.minimum and repeat.maximum is None:
            return node
        cached = self._further.get((node, count))
        if cached is None:
            maximum = None if repeat.maximum is None else repeat.maximum - count
            cached = self.cat(self.repeat(repeat.parts[0], max(0, repeat.minimum - count), maximum), after)
            self._further[node, count] = cached
        return cached

    def _node(
        self,
        kind: str,
        parts: tuple[Node, ...] = (),
        *,
        members: int = 0,
        minimum: int = 0,
        maximum: int | None = None,
        is_nullable: bool = False,
    ) -> Node:
        key = (kind, members, parts, minimum, maximum)
        cached = self._nodes.get(key)
        if cached is None:
            first = members
            for part in parts:
                first |= part.first
                if kind == "cat" and not part.is_nullable:
                    break
            size = LARGE if kind == "repeat" else min(LARGE, 1 + sum(part.size for part in parts))
            cached = self._nodes.setdefault(key, Node(kind, members, parts, minimum, maximum, is_nullable, first, size))
        return cached

    def _derive(self, node: Node, byte: int) -> Node:
        if node.kind == "bytes":
            return self.empty if node.members >> byte & 1 else self.none
        if node.kind == "cat":
            first, second = node.parts
            if not first.first >> byte & 1:
                return self.derive(second, byte)
            derived = self.cat(self.derive(first, byte), second)
            return self.alt((derived, self.derive(second, byte))) if first.is_nullable and second.first >> byte & 1 else derived
        if node.kind == "alt":
            return self.alt([self.derive(part, byte) for part in node.parts if part.first >> byte & 1])
        if node.kind == "repeat":
            part = node.parts[0]
            rest = self.repeat(part, max(0, node.minimum - 1), None if node.maximum is None else node.maximum - 1)
            return self.cat(self.derive(part, byte), rest)
        return self.none

    def _clamp(self, node: Node, max_length: int) -> Node:
        if node.kind == "cat":
            spine = []
            while node.kind == "cat" and (node, max_length) not in self._clamped:
                spine.append(node)
                node = node.parts[1]
            clamped = self.clamp(node, max_length)
            for each in reversed(spine):  # a loop, since recursion would be too deep for a long text
                clamped = self._clamped[each, max_length] = self.cat(self.clamp(each.parts[0], max_length), clamped)
            return clamped
        if node.kind == "alt":
            return self.alt([self.clamp(part, max_length) for part in node.parts])
        if node.kind == "repeat":
            far = max_length + 1
            maximum = None if node.maximum is None else min(node.maximum, far)
            return self.repeat(self.clamp(node.parts[0], max_length), min(node.minimum, far), maximum)
        return node


def first_sets(node: Node) -> set[int]:
    """The sets of first bytes, as bits, of the parts that may start a text of the node."""
    first_bytes = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.members:
            first_bytes.add(each.members)
        if each.kind == "cat":
            waiting.append(each.parts[0])
            if each.parts[0].is_nullable:
                waiting.append(each.parts[1])
        else:
            waiting.extend(each.parts)
    return first_bytes


Form = tuple[str, int, tuple["Form", ...], int, int | None]


def form_of(node: Node) -> Form:
    """A key of an expression, equal for equal expressions of all languages."""
    parts = tuple(form_of(part) for part in node.parts)
    parts = tuple(sorted(parts, key=repr)) if node.kind == "alt" else parts
    return node.kind, node.members, parts, node.minimum, node.maximum


def rebuild(language: Language, node: Node) -> Node:
    """The same expression as a node of another language."""
    parts = [rebuild(language, part) for part in node.parts]
    if node.kind == "cat":
        return language.cat(*parts)
    if node.kind == "alt":
        return language.alt(parts)
    if node.kind == "repeat":
        return language.repeat(parts[0], node.minimum, node.maximum)
    if node.kind == "bytes":
        return language.one_byte(node.members)
    return language.empty if node.kind == "empty" else language.none
