"""Looser wordings of the tasks, for training only: what people type instead of the evaluation's
questions.

Sums without blanks, other separators, lists of one to four lines, keys without quotes, other
requests, greetings, and questions that the model cannot answer. The evaluation's split applies here
too: every question comes from `make_turn` or `askable_keys`. It does not depend on the tokenizer.
"""

import random

from frame.entrypoints.tools.eval import tasks
from frame.entrypoints.tools.eval.words import common_word, invented_word, number

GREETING = "Hello! I am frame-tiny. Give me a list to remember, to copy, to sort or to reverse, or a small sum."
ABILITY = "I can recall values from a list, copy, sort and reverse lists, add small numbers and write some Python."
NAME = "I am frame-tiny, the very small language model that comes with frame."
UNKNOWN = f"I do not know that. {ABILITY}"
WELCOME = "You are welcome."

_GREETINGS = ("hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening", "hey there", "hello, world", "greetings")
_THANKS = ("thank you", "thanks", "thanks a lot", "great, thanks", "thank you very much", "nice", "great")
_WHO = ("who are you", "what are you", "what is your name", "what model are you", "which model is this", "introduce yourself")
_ABILITIES = ("what can you do", "help", "what do you know", "how can you help me", "what are you good at")
_OUT_OF_REACH = (
    "what is the capital of {a}", "tell me a story about the {a}", "write a poem about a {a}", "why is the {a} so {b}", "count to {n}",
    "who was {a}", "what is a {a}", "translate {a} into french", "explain {a} to me", "how do I get to the {a}", "tell me a joke",
    "what time is it", "what is the weather in {a}", "how many {a} are there", "do you like the {a}", "write an essay about {a} and {b}",
    "what is the meaning of life", "say something about {a}", "is a {a} bigger than a {b}", "where is the {a}", "how are you",
    "when did {a} begin", "give me a recipe with {a}", "how old is the {a}", "can you play {a}",
)  # fmt: skip

_SUMS = ("{a}+{b}", "{a} + {b}", "{a}+{b}=", "{a} + {b} = ?", "What is {a}+{b}?", "what is {a} plus {b}?", "What's {a} + {b}?",
         "Compute {a}+{b}", "Calculate {a} + {b}.", "How much is {a} + {b}?", "add {a} and {b}", "{a} plus {b}",
         "sum of {a} and {b}")  # fmt: skip
_REQUESTS = {
    "copy": ("Copy:", "Repeat:", "Repeat after me:", "Copy this:", "Say:", "Echo this text:"),
    "reverse": ("Reverse:", "Reverse this:", "Reverse the list:", "Reverse the order of these:", "Backwards:"),
    "sort": ("Sort:", "Sort this:", "Sort this list:", "Sort these:", "Put in order:", "Sort in ascending order:"),
}
_RECALL = ('What is "{key}"?', "What is {key}?", "What is the {key}?", "{key}?", "What is the value of {key}?", "Tell me {key}.",
           "value of {key}",
           "Which value does {key} have?", "And {key}?", 'What is the value of "{key}"?')  # fmt: skip


def _typed(rng: random.Random, text: str, end: str) -> str:
    """The text as someone types it: capital or not, with or without the mark at its end."""
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    return text + (end if rng.random() < 0.6 else "")


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A greeting, thanks, a question about the model, or one that it cannot answer, with the
    answer."""
    kind = rng.randrange(10)
    if kind < 2:
        return _typed(rng, rng.choice(_GREETINGS), rng.choice("!.")), GREETING
    if kind == 2:
        return _typed(rng, rng.choice(_THANKS), rng.choice("!.")), WELCOME
    if kind == 3:
        return _typed(rng, rng.choice(_WHO), "?"), NAME
    if kind == 4:
        return _typed(rng, rng.choice(_ABILITIES), "?"), ABILITY
    text = rng.choice(_OUT_OF_REACH).format(a=common_word(rng), b=common_word(rng), n=number(rng, rng.randint(1, 2)))
    return _typed(rng, text, rng.choice("?.")), UNKNOWN


def loose_turn(task: str, rng: random.Random) -> tuple[str, str]:
    """A question of `task` in other words, with its answer."""
    if task == "sort" and rng.random() < 0.4:
        return _sort_invented(rng)
    turn = tasks.make_turn(task, rng, "train")
    if task == "sum":
        a, b = turn.identity.split("+")
        if rng.random() < 0.5:
            a, b = b, a
        return rng.choice(_SUMS).format(a=a, b=b), turn.answer
    content, reply = turn.question.split("\n", 1)[1], turn.answer
    if task != "copy" and rng.random() < 0.5:
        content, reply = content.replace(",", ", "), reply.replace(",", ", ")
    return f"{rng.choice(_REQUESTS[task])}{rng.choice((' ', chr(10)))}{content}", reply


def _sort_invented(rng: random.Random) -> tuple[str, str]:
    """Words outside the evaluation's list, so that sorting is more than a learned order of that
    list."""
    items = list({invented_word(rng, rng.randint(1, 3)) + rng.choice("   nrslt").strip() for _ in range(rng.randint(2, 7))})
    rng.shuffle(items)
    request = rng.choice((*tasks.SORT_WORD_REQUESTS, *_REQUESTS["sort"]))
    return f"{request}\n{','.join(items)}", ",".join(sorted(items))


def loose_recall(rng: random.Random) -> list[tuple[str, str]]:
    """A short list in one of several formats, and one to three questions about it: (question,
    answer) pairs."""
    keys: list[str] = []
    while not keys:
        pairs = tasks.recall_pairs(rng, 0)
        if rng.random() < 0.5:
            pairs |= {common_word(rng): value for value in list(pairs.values())[:2]}
        kept = rng.sample(sorted(pairs), rng.randint(1, len(pairs)))
        pairs = {key: pairs[key] for key in kept}
        keys = tasks.askable_keys(pairs, "train")
    form = rng.choice(("{}={}", "{} = {}", "{}: {}", '"{}": "{}"', "{} -> {}", "{} is {}"))
    heading = rng.choice((*tasks.RECALL_HEADERS, "Remember:", ""))
    listing = "\n".join([*([heading] if heading else []), *(form.format(key, value) for key, value in pairs.items())])
    asked = rng.choices(keys, k=rng.randint(1, 3))
    questions = [rng.choice(_RECALL).format(key=key) for key in asked]
    questions[0] = f"{listing}\n{questions[0]}"
    return [(question, pairs[key]) for question, key in zip(questions, asked, strict=True)]
