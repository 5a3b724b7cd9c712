"""EBNF without recursion as a regular language. Used by the backend; knows no vocabulary."""

from __future__ import annotations

from frame.plugins.grammar_backends.ebnf import Part, Rules, UnsupportedSyntaxError
from frame_automata.regular import Language, Node
from frame_automata.regular_syntax import characters, literal

MAX_NODES = 20_000


def read_rules(language: Language, rules: Rules) -> Node | None:
    """The texts of `root`; None when a rule needs itself. Raises UnsupportedSyntaxError for a
    grammar that is too large."""
    nodes: dict[str, Node | None] = {}

    def node_of(part: Part) -> Node | None:
        if language.num_nodes > MAX_NODES:
            raise UnsupportedSyntaxError("too many states")
        if part.kind == "text":
            return literal(language, part.text)
        if part.kind == "class":
            return characters(language, list(part.ranges))
        if part.kind == "rule":
            if part.text not in nodes:
                nodes[part.text] = None  # until it is there: who meets it meets itself
                nodes[part.text] = node_of(rules[part.text])
            return nodes[part.text]
        found = [node_of(each) for each in part.parts]
        if None in found:
            return None
        known = [each for each in found if each is not None]
        if part.kind == "choice":
            return language.alt(known)
        if part.kind == "repeat":
            return language.repeat(known[0], part.minimum, part.maximum)
        node = language.empty
        for each in reversed(known):
            node = language.cat(each, node)
        return node

    return node_of(Part("rule", "root"))
