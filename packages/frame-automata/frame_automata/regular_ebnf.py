"""EBNF without recursion as a regular language. Used by the backend; knows no vocabulary."""

from __future__ import annotations

from frame.plugins.grammar_backends.ebnf import Expression, Rules, UnsupportedSyntaxError
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import characters, literal

MAX_NODES = 20_000


def read_rules(language: Language, rules: Rules) -> Node | None:
    """The texts of `root`; None when a rule needs itself. Raises UnsupportedSyntaxError for a
    grammar that is too large."""
    nodes: dict[str, Node | None] = {}

    def node_of(expression: Expression) -> Node | None:
        if language.num_nodes > MAX_NODES:
            raise UnsupportedSyntaxError("too many states")
        if expression.kind == "text":
            return literal(language, expression.text)
        if expression.kind == "class":
            return characters(language, list(expression.ranges))
        if expression.kind == "rule":
            if expression.text not in nodes:
                nodes[expression.text] = None  # until it is there: who meets it meets itself
                nodes[expression.text] = node_of(rules[expression.text])
            return nodes[expression.text]
        found = [node_of(each) for each in expression.children]
        if None in found:
            return None
        known = [each for each in found if each is not None]
        if expression.kind == "choice":
            return language.alt(known)
        if expression.kind == "repeat":
            return language.repeat(known[0], expression.minimum, expression.maximum)
        node = language.empty
        for each in reversed(known):
            node = language.cat(each, node)
        return node

    return node_of(Expression("rule", "root"))
