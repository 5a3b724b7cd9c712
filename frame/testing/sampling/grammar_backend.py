"""The conformance suite of grammar backends. Must not know a backend by name.

Masks of finite languages are compared token by token with the texts of the language; texts of other
grammars are validated with `re`, `json` and jsonschema.
"""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from frame.core.interfaces.sampling import GRAMMAR_KINDS, MAX_ROLLBACK, GrammarContext
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import ALIKE, make_alike, require_bounded, require_fast, taking_turns
from frame.testing.sampling import grammar_keywords, grammar_requests
from frame.testing.sampling.grammar_cases import FINITE, INVALID, JSON_CASES, OPEN, TAG, Language, Vocabulary
from frame.testing.sampling.grammar_run import Run, takes_text

MAX_COMPILE, MAX_FILL = 10.0, 0.02  # seconds; of a small grammar, and the median of one mask
MAX_KNOWN = 1.8e-3  # seconds of a mask of the state that was asked for before
WALKS, MAX_TOKENS = 4, 60  # random texts of a grammar, and their length
MAX_SPACES = 1100  # in one place of JSON; `max_whitespace` of the backends' options is 1,024 at most
MAX_SENTENCE = 400  # characters of an error, which a client reads
THREADS, MIN_FILLS = 4, 6000  # masks that they fill, of few grammars or many


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `grammar_backend`."""
    vocabulary = Vocabulary.load()
    context = GrammarContext(vocabulary.tokenizer, vocabulary.size)
    kinds = getattr(subject.record.capabilities, "kinds", GRAMMAR_KINDS)
    run = Run(lambda: subject.target(context, subject.options), kinds, vocabulary)
    tags = {"structural_tag"}
    about = {"whitespace_has": {"json_schema", "json_object"}, "whitespace_of": tags, "json_of_a": tags, "memory": {"regex"}}
    left_out = tuple(name for name, needed in about.items() if not needed & set(kinds))
    every = (*collect(__name__, run), *collect(grammar_requests.__name__, run), *collect(grammar_keywords.__name__, run))
    yield from (check for check in every if not check.name.startswith(left_out))
    more_ends = partial(_ignore_ends_of_other_models, subject, vocabulary, kinds)
    yield Check("end_tokens_that_the_model_lacks", more_ends)
    is_json = {"json_schema", "json_object"} & set(kinds)
    if is_json and subject.options is not None and {"any_whitespace", "max_whitespace"} <= set(type(subject.options).model_fields):
        loose = subject.options.model_copy(update={"any_whitespace": True, "max_whitespace": 3})
        spaced = Run(lambda: subject.target(context, loose), kinds, vocabulary)
        yield Check("whitespace_of_the_options", partial(_compare_whitespace, spaced))


# sources ------------------------------------------------------------------------------------------


def check_declared_kinds_compile(run: Run) -> None:
    for kind in run.kinds:
        assert kind in GRAMMAR_KINDS, f"the record declares the kind {kind!r}, which does not exist"
    for case in run.of((*FINITE, *OPEN)):
        began = time.process_time()
        compiled = run.compile(case)
        taken = time.process_time() - began
        assert taken < MAX_COMPILE, f"{case.name} takes {taken:.1f} s to compile"
        assert compiled.num_bytes > 0, f"num_bytes of {case.name} is {compiled.num_bytes}: grammars are evicted by it"


def check_invalid_grammars_are_refused(run: Run) -> None:
    """An invalid grammar, a kind that the record does not declare, and an unknown kind raise
    ValueError with one sentence, and leave the backend as it was."""
    others = [(kind, "x") for kind in GRAMMAR_KINDS if kind not in run.kinds]
    for kind, source in [*(bad for bad in INVALID if bad[0] in run.kinds), *others, ("unknown", "x")]:
        try:
            run.backend.compile(kind, source).start()
        except ValueError as error:
            text = str(error)
            assert text and "\n" not in text and len(text) <= MAX_SENTENCE, f"the error for {kind} {source!r} is no sentence: {text!r}"
        except Exception as error:
            raise AssertionError(f"{kind} {source!r} raises {type(error).__name__} and not ValueError") from error
        else:
            raise AssertionError(f"{kind} {source!r} is invalid, and compiles")
    case = run.of(FINITE)[0]
    assert run.allowed(run.start(case)).any(), "an invalid grammar breaks those that follow"


# masks --------------------------------------------------------------------------------------------


def check_masks_equal_a_reference(run: Run) -> None:
    """At each step of random texts the mask has the tokens that continue a text of the language, an
    end token where one ends, and nothing else: no special token, no id past the tokenizer. Where
    all texts continue alike, one token of these bytes suffices."""
    for case in run.of(FINITE):
        for seed in range(WALKS):
            _compare(run, case, random.Random(seed), is_split=False)


def check_characters_may_be_split(run: Run) -> None:
    """The same with tokens of one byte, which split the characters of the text."""
    for case in run.of(FINITE):
        for seed in range(2):
            _compare(run, case, random.Random(seed), is_split=True)


def _ignore_ends_of_other_models(subject: Subject, vocabulary: Vocabulary, kinds: Sequence[str]) -> None:
    """A tokenizer's end tokens from `vocab_size` on, which checkpoints list, are no tokens of the
    model."""
    tokenizer = copy.copy(vocabulary.tokenizer)
    tokenizer.eos_token_ids = (*vocabulary.ends, vocabulary.size)
    context = GrammarContext(tokenizer, vocabulary.size)
    run = Run(lambda: subject.target(context, subject.options), kinds, vocabulary)
    for case in run.of(FINITE)[:3]:
        _compare(run, case, random.Random(0), is_split=False)


def _compare(run: Run, case: Language, dice: random.Random, is_split: bool) -> None:
    vocabulary, grammar, done = run.vocabulary, run.start(case), b""
    for _ in range(MAX_TOKENS):
        rest = case.rest(done)
        expected, mask = vocabulary.allowed(rest), run.allowed(grammar)
        where = f"{case.name} after {done.decode(errors='replace')!r}"
        is_forced = len({text[:1] for text in rest}) == 1
        for token in np.flatnonzero(mask & ~expected if is_forced else mask != expected)[:1].tolist():
            is_wrong = "allows" if mask[token] else "does not allow"
            raise AssertionError(f"{where}: the mask {is_wrong} token {token} ({vocabulary.show(token)})")
        assert mask.any(), f"{where}: the mask is empty"
        assert grammar.is_finished() == (rest == {b""}), f"{where}: is_finished() is {grammar.is_finished()}"
        continues = run.continuations(mask)
        if b"" in rest and (not continues or dice.random() < 0.3):
            end = dice.choice(vocabulary.ends)
            assert grammar.accept_token(end), f"{where}: accept_token() refuses the end token {end}"
            assert grammar.is_finished(), f"{where}: is_finished() is False after the end token"
            return
        short = [token for token in continues if token in vocabulary.single_bytes] if is_split else []
        token = dice.choice(short or continues)
        assert grammar.accept_token(token), f"{where}: it refuses token {token} ({vocabulary.show(token)}), which the mask allows"
        done += vocabulary.tokens[token]


def check_accept_agrees_with_the_mask(run: Run) -> None:
    """`accept_token` takes a token of the mask, else returns False and changes nothing."""
    dice = random.Random(0)
    for case in run.of(FINITE):
        tokens: list[int] = []
        done = b""
        for _ in range(4):
            is_allowed = run.vocabulary.allowed(case.rest(done))
            refused = dice.sample(np.flatnonzero(~is_allowed).tolist(), 12)
            refused += [end for end in run.vocabulary.ends if not is_allowed[end]]
            grammar = run.start(case, tokens)
            before = run.allowed(grammar)
            for token in refused:
                shown = run.vocabulary.show(token)
                assert not grammar.accept_token(token), f"{case.name}: it takes token {token} ({shown}), which the mask does not have"
            assert np.array_equal(before, run.allowed(grammar)), f"{case.name}: a token that is refused changes the state"
            continues = run.continuations(before)
            for token in continues[:8]:
                assert run.start(case, tokens).accept_token(token), f"{case.name}: accept_token() refuses token {token}, which the mask has"
            if not continues:
                break
            tokens.append(dice.choice(continues))
            done += run.vocabulary.tokens[tokens[-1]]


def check_tokens_are_rolled_back(run: Run) -> None:
    """After `rollback_tokens` the masks and results are those before the tokens, whatever was asked
    along them, and the text goes on from there. An end token is undone too."""
    for case in run.of((*FINITE, *OPEN)):
        for seed in range(WALKS):
            dice, grammar, trail = random.Random(seed), run.start(case), []
            for _ in range(12):
                allowed, is_finished = run.allowed(grammar), grammar.is_finished()
                trail.append((allowed, is_finished))
                choices = run.continuations(allowed)
                ends = [token for token in run.vocabulary.ends if allowed[token]]
                is_end = not choices or (bool(ends) and dice.random() < 0.3)
                token = dice.choice(ends if is_end else choices)
                assert grammar.accept_token(token), f"{case.name}: accept_token() refuses token {token}, which the mask has"
                if is_end or dice.random() < 0.4:
                    count = dice.randint(int(is_end), min(len(trail), 5))
                    run.allowed(grammar)  # a mask that the backend may keep
                    grammar.rollback_tokens(count)
                    where = f"{case.name}: after rollback_tokens({count}) of {len(trail)} tokens"
                    if count:
                        allowed, is_finished = trail[-count]
                        assert np.array_equal(run.allowed(grammar), allowed), f"{where} the mask is another than before them"
                        assert grammar.is_finished() == is_finished, f"{where} is_finished() is {not is_finished}"
                        del trail[-count:]


def check_many_tokens_are_rolled_back(run: Run) -> None:
    """`MAX_ROLLBACK` tokens at once: the masks are those before them."""
    sources = {"regex": "bbb(ab|b)*c", "choice": json.dumps(["b" * (MAX_ROLLBACK + 4), "bbbc"])}
    kind = next((kind for kind in sources if kind in run.kinds), None)
    if kind is None:
        raise SkipCheck("the backend compiles neither regular expressions nor choices")
    grammar = run.backend.compile(kind, sources[kind]).start()
    token = next(token for token, text in run.vocabulary.tokens.items() if text == b"b")
    first = run.allowed(grammar)
    for count in (70, MAX_ROLLBACK):
        for number in range(count):
            assert grammar.accept_token(token), f"accept_token() refuses token {number} of a text that the grammar allows"
        grammar.rollback_tokens(count)
        assert np.array_equal(run.allowed(grammar), first), f"after rollback_tokens({count}) the mask is another than before {count} tokens"


def check_constraints_are_not_kept(run: Run) -> None:
    """A grammar that all requests use keeps none of their constraints."""
    compiled = run.compile(run.of((*FINITE, *OPEN))[0])
    require_bounded(compiled, lambda number: run.allowed(compiled.start()), 400, "constraints that have ended")


def check_a_known_mask_is_fast(run: Run) -> None:
    case = run.of(FINITE)[0]
    grammar, mask = run.start(case), np.zeros(-(-run.vocabulary.size // 32), np.int32)
    require_fast(lambda: grammar.fill_mask(mask), MAX_KNOWN, "a mask that was filled before", calls=30)


def check_masks_are_written_whole(run: Run) -> None:
    """`fill_mask` writes all words of its row and no other, whatever they held."""
    for case in run.of((*FINITE, *OPEN)):
        grammar = run.start(case)
        first = run.allowed(grammar)
        assert np.array_equal(first, run.allowed(grammar, before=-1)), f"{case.name}: fill_mask() leaves bits that were in the mask before"
        words = -(-run.vocabulary.size // 32)
        batch = np.full((3, words), 7, np.int32)
        grammar.fill_mask(batch[1])
        assert (batch[[0, 2]] == 7).all(), f"{case.name}: fill_mask() writes outside of its row"


# texts --------------------------------------------------------------------------------------------


def check_random_texts_follow_the_grammar(run: Run) -> None:
    """Texts drawn from the masks are in the language."""
    ended = 0
    for case in run.of(OPEN):
        for seed in range(WALKS):
            text = write_text(run, case, random.Random(seed))
            if text is not None:
                ended += 1
                assert case.holds(text), f"{case.name}: the masks allow {text!r}"
    assert ended, "no random text of any grammar ends: is the end token allowed?"


def write_text(run: Run, case: Language, dice: random.Random) -> str | None:
    """A random text; None where it does not end. Prefers what ends it."""
    vocabulary, grammar, data = run.vocabulary, run.start(case), b""
    closing = [token for token, text in vocabulary.tokens.items() if text in (b'"', b"}", b"]", b")", b">")]
    for _ in range(3 * MAX_TOKENS):
        allowed = run.allowed(grammar)
        ends = [token for token in vocabulary.ends if allowed[token]]
        assert allowed.any(), f"{case.name} after {data!r}: the mask is empty"
        near = [token for token in closing if allowed[token]]
        continues = run.continuations(allowed)
        if not continues or (ends and dice.random() < 0.4):
            assert grammar.accept_token(ends[0]), f"{case.name} after {data!r}: accept_token() refuses the end token that the mask has"
            return data.decode(errors="replace")
        token = dice.choice(near) if near and dice.random() < 0.5 else dice.choice(continues)
        assert grammar.accept_token(token), f"{case.name} after {data!r}: accept_token() refuses token {token}, which the mask has"
        data += vocabulary.tokens[token]
    return None


def check_known_texts_are_judged(run: Run) -> None:
    """Texts in the language are taken as the tokenizer writes them; texts outside are refused
    before their end."""
    for case in run.of((*OPEN, *JSON_CASES)):
        for texts in case.valid:  # ways to write one text, such as whitespace in JSON
            assert any(takes_text(run, case, text) for text in texts), f"{case.name}: {texts[0]!r} is valid, and is refused"
        for text in case.invalid:
            assert not takes_text(run, case, text), f"{case.name}: {text!r} is invalid, and is taken"


def check_whitespace_has_an_end(run: Run) -> None:
    """Models repeat whitespace: between the parts of JSON it is bounded, and the text goes on."""
    space = run.vocabulary.encode(" ")[0]
    for case in run.of(case for case in OPEN if case.kind in ("json_schema", "json_object")):
        grammar = run.start(case)
        for token in run.vocabulary.encode(case.valid[0][0][:1]):
            grammar.accept_token(token)
        num_spaces = next((number for number in range(MAX_SPACES) if not grammar.accept_token(space)), MAX_SPACES)
        assert num_spaces < MAX_SPACES, f"{case.name}: {MAX_SPACES} spaces may follow its first character; an answer may be spaces alone"


def check_whitespace_of_a_tag(run: Run) -> None:
    """`max_whitespace_cnt` of a structural tag is that of its own tag, where the backend reads
    it."""
    for maximum in (2, 6, 2):
        content = {"type": "json_schema", "json_schema": {"const": [1]}, "max_whitespace_cnt": maximum}
        form = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
        case = Language("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
        try:
            run.backend.compile(case.kind, case.source)
        except ValueError as error:
            raise SkipCheck(f"it does not read max_whitespace_cnt: {error}") from None
        one, all_of_them, more = (takes_text(run, case, f"<f>[{' ' * number}1]</f>") for number in (1, maximum, maximum + 1))
        assert all_of_them == one, f"with max_whitespace_cnt {maximum}, one space is {'taken' if one else 'refused'}, and {maximum} are not"
        assert not more, f"with max_whitespace_cnt {maximum}, {maximum + 1} spaces are taken"


def check_json_of_a_tag_has_spaces(run: Run) -> None:
    """JSON in a structural tag may be written with a space after its commas and colons, as models
    write the arguments of tools."""
    case, text = Language("structural_tag", json.dumps({"type": "structural_tag", "format": TAG})), '<f>{"city": "Rome", "exact": true}</f>'
    assert takes_text(run, case, text), f"{case.name}: {text!r} is refused"


def _compare_whitespace(run: Run) -> None:
    """With `any_whitespace`, up to `max_whitespace` characters may stand in each place between the
    parts of JSON, and no more."""
    pair = {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2}
    schema = {"type": "object", "properties": {"a": pair}, "required": ["a"], "additionalProperties": False}
    for case in run.of((Language("json_schema", json.dumps(schema)), Language("json_object", ""))):
        for places in ("{%s}", '{"a"%s:[1,2]}', '{"a":%s[1,2]}', '{"a":[1,%s2]}', '{"a":[1,2%s]%s}', '{%s"a"%s:%s[%s1%s,%s2%s]%s}'):
            if places == "{%s}" and case.kind == "json_schema":
                continue
            for spaces, is_valid in (("", True), (" ", True), ("\n\t ", True), ("    ", False), ("\u00a0", False)):
                text = places.replace("%s", spaces)
                is_taken = takes_text(run, case, text)
                verb = "taken" if is_taken else "refused"
                assert is_taken == is_valid, f"{case.name}: {text!r} is {verb} with any_whitespace and max_whitespace 3"


# requests -----------------------------------------------------------------------------------------


def check_requests_stand_alone(run: Run) -> None:
    """Constraints of one grammar share no state."""
    for case in run.of((*FINITE, *OPEN)):
        compiled = run.compile(case)
        one, other = compiled.start(), compiled.start()
        first = run.allowed(other)
        assert one.accept_token(run.continuations(first)[0])
        assert np.array_equal(first, run.allowed(other)), f"{case.name}: a token of one request changes the mask of another"
        assert np.array_equal(first, run.allowed(compiled.start())), f"{case.name}: a new request begins where another is"


def check_grammars_stand_alone(run: Run) -> None:
    """A grammar stays what it is when others are compiled, of its kind and of others."""
    cases = run.of((*FINITE, *OPEN))
    compiled = [run.compile(case) for case in cases]
    others = [run.make(), run.make()]  # of which each compiles half of the grammars, in another order
    for number, (case, each) in enumerate(zip(reversed(cases), reversed(compiled), strict=True)):
        among = run.allowed(each.start())
        alone = run.allowed(others[number % 2].compile(case.kind, case.source).start())
        assert np.array_equal(among, alone), f"{case.name}: its mask is another when other grammars are compiled"


def check_sources_are_compared_whole(run: Run) -> None:
    """Grammars whose sources are equal in up to 600 characters, or in a normal form of Unicode, are
    different grammars."""
    sources: dict[str, Callable[[str], tuple[str, str]]] = {
        "choice": lambda name: (json.dumps([name, "x"]), name),
        "regex": lambda name: (name, name),
        "json_schema": lambda name: (json.dumps({"const": name}), json.dumps(name, ensure_ascii=False)),
        "ebnf": lambda name: (f"root ::= {json.dumps(name, ensure_ascii=False)}", name),
    }
    for kind, write in ((kind, write) for kind, write in sources.items() if kind in run.kinds):
        for pair in (*make_alike((*ALIKE, 600)), ("e\u0301", "\u00e9"), ("\ufb01", "fi")):
            cases = [(Language(kind, source), text) for source, text in map(write, pair)]
            for number, (case, text) in enumerate(cases):
                assert takes_text(run, case, text), f"{case.name} refuses its text, after a grammar whose source begins alike"
                assert not takes_text(run, case, cases[1 - number][1]), f"{case.name} takes the text of another source that begins alike"


def check_kinds_of_one_source(run: Run) -> None:
    """One source is another grammar in another kind."""
    kinds, source = [kind for kind in ("choice", "regex") if kind in run.kinds], '["ab"]'
    if len(kinds) < 2:
        raise SkipCheck("it does not compile both a choice and an expression")
    for order in (kinds, kinds[::-1]):
        anew = Run(run.make, run.kinds, run.vocabulary)
        for case in (Language(kind, source) for kind in order):
            for text, kind in (("ab", "choice"), ("b", "regex")):
                assert takes_text(anew, case, text) == (case.kind == kind), f"{case.name} is wrong about {text!r}, beside {order}"


def check_loaded_grammars_are_equal(run: Run) -> None:
    """`load(dump(compiled))` in another process has the masks of the compiled grammar."""
    loader = run.make()
    cases = run.of((*FINITE, *OPEN))
    dumped = [run.backend.dump(run.compile(case)) for case in cases]
    loaded = [loader.load(case.kind, case.source, data) for case, data in zip(cases, dumped, strict=True)]
    for case, each in zip(cases, loaded, strict=True):
        here, there, dice = run.start(case), each.start(), random.Random(1)
        for _ in range(10):
            allowed = run.allowed(here)
            assert np.array_equal(allowed, run.allowed(there)), f"{case.name}: a grammar that was dumped and loaded has another mask"
            continues = run.continuations(allowed)
            if not continues:
                break
            token = dice.choice(continues)
            is_taken = here.accept_token(token) and there.accept_token(token)
            assert is_taken, f"{case.name}: a loaded grammar refuses a token of its mask"


def check_masks_are_filled_in_threads(run: Run) -> None:
    """Threads fill masks of different requests at once."""
    cases = run.of((*FINITE, *OPEN))
    compiled = [run.compile(case) for case in cases] * 3
    alone = [run.allowed(each.start()) for each in compiled]
    begin = threading.Barrier(THREADS)

    def fill(first: int) -> list[np.ndarray]:
        begin.wait(timeout=60)
        return [run.allowed(each.start()) for each in compiled[first:] + compiled[:first]]

    with taking_turns(), ThreadPoolExecutor(THREADS) as pool:
        for _ in range(max(3, MIN_FILLS // (THREADS * len(compiled)))):
            for first, masks in enumerate(pool.map(fill, range(THREADS))):
                for mask, expected in zip(masks, alone[first:] + alone[:first], strict=True):
                    assert np.array_equal(mask, expected), "a mask differs when threads fill several at once"


def check_masks_are_filled_in_time(run: Run) -> None:
    for case in run.of((*FINITE, *OPEN)):
        grammar, dice, taken = run.start(case), random.Random(2), []
        for _ in range(12):
            began = time.perf_counter()
            allowed = run.allowed(grammar)
            taken.append(time.perf_counter() - began)
            continues = run.continuations(allowed)
            if not continues or not grammar.accept_token(dice.choice(continues)):
                break
        median = sorted(taken)[len(taken) // 2]
        assert median < MAX_FILL, f"{case.name}: a mask takes {median * 1e3:.0f} ms, and each step waits for it"
