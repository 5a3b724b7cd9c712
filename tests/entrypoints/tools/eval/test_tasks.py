"""The task generators: seeded, right, disjoint from training."""

from __future__ import annotations

import random

import pytest

from frame.entrypoints.tools.eval import tasks
from frame.entrypoints.tools.eval.words import WORDS, invented_word, number

SHORT_TASKS = ("copy", "reverse", "sort", "sum")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_examples_depend_on_seed_and_index_alone(task: str) -> None:
    examples = tasks.make_examples(task, 5, seed=3)
    assert examples == tasks.make_examples(task, 8, seed=3)[:5]
    assert examples != tasks.make_examples(task, 5, seed=4)
    assert examples != tasks.make_examples(task, 5, seed=3, split="train")


def test_examples_stay_the_same() -> None:
    """Scores of different days are comparable only while these do not change."""
    assert tasks.make_example("sum", 0, 0).messages[-1]["content"] == "Compute 38 + 16."
    assert tasks.make_example("sort", 0, 0).expected == "blue,cube,music,sail,violet"


def test_unknown_task() -> None:
    with pytest.raises(ValueError, match="there are recall, copy"):
        tasks.make_example("recal", 0, 0)


def items(text: str) -> list[str]:
    return text.rsplit("\n", maxsplit=1)[-1].split(",")


@pytest.mark.parametrize("index", range(40))
def test_answers_are_right(index: int) -> None:
    rng = random.Random(index)
    copy = tasks.make_turn("copy", rng, "eval")
    assert copy.question.split("\n")[1] == copy.answer
    reverse = tasks.make_turn("reverse", rng, "eval")
    assert items(reverse.question)[::-1] == reverse.answer.split(",")
    ordered = tasks.make_turn("sort", rng, "eval")
    values = items(ordered.question)
    assert ordered.answer.split(",") == (sorted(values, key=int) if values[0].isdigit() else sorted(values))
    total = tasks.make_turn("sum", rng, "eval")
    assert sum(int(part) for part in total.identity.split("+")) == int(total.answer)


@pytest.mark.parametrize("index", range(20))
def test_recall_asks_for_one_line_of_its_list(index: int) -> None:
    example = tasks.make_example("recall", 1, index)
    text = "\n".join(message["content"] for message in example.messages)
    key = text.rsplit('"', 2)[1]
    assert text.count(f"\n{key}={example.expected}\n") == 1
    assert tasks.is_held_out("recall", key)
    assert example.messages[-1]["role"] == "user"


def test_recall_covers_its_buckets() -> None:
    lengths = [example.context_tokens for example in tasks.make_examples("recall", 60)]
    for low, high in tasks.RECALL_BUCKETS:
        assert any(low <= length < high for length in lengths)
    assert max(lengths) < 3100


@pytest.mark.parametrize("task", SHORT_TASKS)
def test_splits_are_disjoint(task: str) -> None:
    rng = random.Random(0)
    trained = {tasks.make_turn(task, rng, "train").identity for _ in range(300)}
    asked = {tasks.make_turn(task, rng, "eval").identity for _ in range(300)}
    assert not trained & asked
    assert all(tasks.is_held_out(task, identity) for identity in asked)


def test_training_never_asks_for_held_out_keys() -> None:
    pairs = tasks.recall_pairs(random.Random(0), 3000)
    trained, asked = tasks.askable_keys(pairs, "train"), tasks.askable_keys(pairs, "eval")
    assert sorted(trained + asked) == sorted(pairs)
    assert 0.03 < len(asked) / len(pairs) < 0.2


def test_order_and_grouping_do_not_hide_an_example() -> None:
    """3+5 and 5+3 are one identity, and so are all orders of a list."""
    for task in ("copy", "reverse", "sort"):
        identity = tasks.make_turn(task, random.Random(1), "eval").identity
        assert identity == ",".join(sorted(identity.split(",")))
    for index in range(50):
        a, b = tasks.make_turn("sum", random.Random(index), "eval").identity.split("+")
        assert int(a) <= int(b)


def test_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200
    assert all(word.isalpha() and word.islower() for word in WORDS)
    assert len(invented_word(random.Random(0), 3)) == 6
    assert all(len(number(random.Random(seed), 4)) == 4 for seed in range(50))
