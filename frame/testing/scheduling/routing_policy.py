"""The conformance suite of routing policies: single choices, simulated replicas that come, go and
fill, and what the record promises. Must not know a policy by name."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median

from frame.interfaces.routing import RoutingCapabilities, RoutingPolicy, RoutingRequest
from frame.testing.conformance import Check, Subject, collect, count_elements
from frame.testing.contexts import ROUTING
from frame.testing.generators import Salted, require_growth

MAX_SECONDS = 1e-3  # of one choice among 64 replicas; the router's event loop waits for it
NUM_BLOCKS = 32  # of a long prompt
MAX_SHARE = 2.0  # of the mean that a replica gets of requests that have nothing in common
MEMORY = 40_000  # requests, half of them of new sessions, between two looks at what a policy remembers
MAX_LOOKS, MAX_ELEMENTS = 8, 1_000_000  # one of which what it remembers must not reach while it grows
ODD_SESSIONS = ("0", " ", "a" * 10_000, "ü", "\udc80", "\x00", "None", "a/b?c=d")

Make = Callable[[], RoutingPolicy]


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `routing_policy`: contract, then the promises of the record."""
    can = subject.record.capabilities
    can = can if isinstance(can, RoutingCapabilities) else RoutingCapabilities()
    broken = [
        name for name, kept in (("load", can.avoids_load), ("prefix", can.keeps_prefixes), ("session", can.keeps_sessions)) if not kept
    ]

    def make() -> RoutingPolicy:
        policy: RoutingPolicy = subject.target(ROUTING, subject.options)
        return policy

    return (check for check in collect(__name__, make) if check.name.partition("_")[0] not in broken)


class Prompts:
    """Prompts of random blocks; `extend` gives the next turn of a conversation."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def make(self, num_blocks: int = 4) -> list[int]:
        return [self._random.getrandbits(64) for _ in range(num_blocks)]

    def extend(self, blocks: list[int], num_blocks: int = 1) -> list[int]:
        return blocks + self.make(num_blocks)


def choose(policy: RoutingPolicy, request: RoutingRequest, loads: Mapping[int, int]) -> int:
    """The choice, after a look at what every choice has to leave alone."""
    blocks, before = list(request.blocks), dict(loads)
    chosen = policy.choose_replica(request, loads)
    assert isinstance(chosen, int) and not isinstance(chosen, bool), f"choose_replica must return a number, not {chosen!r}"
    assert chosen in before, f"choose_replica chose {chosen} of the replicas {[*before]}"
    assert dict(loads) == before, "choose_replica changed the loads"
    assert list(request.blocks) == blocks, "choose_replica changed the request's blocks"
    return chosen


def check_choice_is_a_replica_that_may_be_chosen(make: Make) -> None:
    """Any subset of any numbers may be offered, another one for each request: 70 replicas, one, and
    new ones after thousands of requests."""
    policy, prompts, rng = make(), Prompts(), random.Random(1)
    numbers = [*range(70), 500, 10_000]
    talks = [prompts.make(rng.randint(0, NUM_BLOCKS)) for _ in range(50)]
    for turn in range(3000):
        offered = rng.sample(numbers if turn > 1000 else numbers[:3], rng.choice((1, 1, 2, 3)) if turn <= 1000 else rng.randint(1, 72))
        loads = {number: rng.choice((0, 0, 1, 7, 300, 5000)) for number in offered}
        session = rng.choice(("", f"talk-{turn % 40}"))
        choose(policy, RoutingRequest(rng.choice(talks), session), loads)
        if turn % 100 == 0:
            policy.forget_replica(rng.choice([*numbers, 77]))


def check_odd_requests(make: Make) -> None:
    """Prompts without a block, long ones, and whatever a client writes as its session."""
    policy, prompts = make(), Prompts()
    for blocks in ([], prompts.make(1), [0, (1 << 64) - 1], tuple(prompts.make(5000))):
        for session in ("", *ODD_SESSIONS):
            choose(policy, RoutingRequest(blocks, session), {3: 0, 1: 0})
            choose(policy, RoutingRequest(blocks, session), {9: 1 << 40})


def check_requests_without_a_common_part_spread(make: Make) -> None:
    """Requests that have no block and no session in common, and do not end: each of eight replicas
    gets at most twice the mean."""
    policy, prompts, loads = make(), Prompts(), dict.fromkeys(range(8), 0)
    for number in range(4000):
        loads[choose(policy, RoutingRequest(prompts.make(2), f"session {number}"), loads)] += 1
    assert max(loads.values()) <= MAX_SHARE * 4000 / 8, f"8 replicas got {[*loads.values()]} of 4000 different requests"
    assert min(loads.values()) > 0, f"8 replicas got {[*loads.values()]} of 4000 different requests"


def check_new_replica_gets_requests(make: Make) -> None:
    policy, prompts = make(), Prompts()
    for number in range(500):
        choose(policy, RoutingRequest(prompts.make(2), f"old {number}"), {0: 50, 1: 50})
    got = Counter(choose(policy, RoutingRequest(prompts.make(2), f"new {n}"), {0: 50, 1: 50, 2: 0}) for n in range(300))
    assert got[2] >= 50, f"a new replica got {got[2]} of 300 different requests, and two older ones with 50 sequences each the rest"


def check_policies_are_apart(make: Make) -> None:
    """Two policies in one process, of two servers or groups: neither sees the other's requests. The
    random choices of both depend on their seed alone."""
    prompts, rng = Prompts(), random.Random(2)
    talks = [prompts.make(3) for _ in range(20)]
    requests = [RoutingRequest(rng.choice(talks), rng.choice(("", f"{rng.randrange(9)}"))) for _ in range(300)]
    loads = [{replica: rng.randrange(3) for replica in range(4)} for _ in requests]

    def run(disturb: bool) -> list[int]:
        policy, other, chosen = make(), make(), list[int]()
        for request, load in zip(requests, loads, strict=True):
            chosen.append(choose(policy, request, load))
            if disturb:
                choose(other, RoutingRequest(request.blocks, request.session), {replica: 9 - replica for replica in range(4)})
                other.forget_replica(chosen[-1])
        return chosen

    assert run(disturb=False) == run(disturb=True), "the choices of a policy depend on another object of its class"


def check_memory_is_bounded(make: Make) -> None:
    """Any bound will do: it is found where what the policy remembers no more grows."""
    policy, prompts, sizes = make(), Prompts(), [0]
    loads = dict.fromkeys(range(4), 0)
    while len(sizes) <= MAX_LOOKS and sizes[-1] < MAX_ELEMENTS:
        for number in range(MEMORY):
            policy.choose_replica(RoutingRequest(prompts.make(8), f"{len(sizes)}-{number}" if number % 2 else ""), loads)
        sizes.append(count_elements(policy, maximum=3 * MAX_ELEMENTS))
        if len(sizes) > 2 and sizes[-1] <= sizes[-2] + MEMORY // 40:
            return
    raise AssertionError(f"after each {MEMORY} requests it holds more elements: {sizes[1:]}")


def check_choice_is_fast(make: Make) -> None:
    """Among 64 replicas that have all seen a prompt of 32 blocks, after 20,000 requests."""
    policy, prompts, best = make(), Prompts(), 1.0
    loads, talks = dict.fromkeys(range(64), 3), [prompts.make(NUM_BLOCKS) for _ in range(100)]
    for number in range(20_000):
        choose(policy, RoutingRequest(prompts.make(2), f"{number}" if number % 2 else ""), {number % 64: 0, (number + 1) % 64: 0})
    for replica in range(64):
        for talk in talks:
            policy.choose_replica(RoutingRequest(talk), {replica: 0})
    for _ in range(5):
        times = []
        for talk in talks:
            began = time.perf_counter()
            policy.choose_replica(RoutingRequest(talk, "one"), loads)
            times.append(time.perf_counter() - began)
        best = min(best, median(times))
        if best < MAX_SECONDS:
            return
    raise AssertionError(f"choose_replica takes {best * 1e6:.0f} µs among 64 replicas, and an event loop waits for it")


def check_long_prompts_take_linear_time(make: Make) -> None:
    """A prompt of 128k tokens has 8,192 blocks of 16."""

    def choose_for(num_blocks: int) -> Callable[[], object]:
        policy, blocks = make(), Prompts().make(num_blocks)
        return lambda: policy.choose_replica(RoutingRequest(blocks), {0: 0, 1: 0})

    require_growth(choose_for, 1024, 8192, "a choice for a prompt of so many blocks", factor=16.0)


def check_prefix_of_long_prompts(make: Make) -> None:
    """Two conversations with 500 equal blocks go on where their own turns are."""
    policy, prompts = make(), Prompts()
    begin = prompts.make(500)
    talks = [prompts.extend(begin, 6), prompts.extend(begin, 6)]
    for replica, talk in enumerate(talks):
        choose(policy, RoutingRequest(talk), {replica: 0})
    got = [choose(policy, RoutingRequest(prompts.extend(talks[number])), {1 - number: 1, number: 1, 2: 1}) for number in (0, 1, 0, 1)]
    assert got == [0, 1, 0, 1], f"conversations of replicas 0 and 1, which differ after 500 equal blocks, went to {got}"


def check_load_counts_after_thousands_of_requests(make: Make) -> None:
    """What ended counts no more: a replica that had 5,000 requests gets the next one if it is
    free."""
    policy, prompts = make(), Prompts()
    for _ in range(5000):
        choose(policy, RoutingRequest(prompts.make(2)), {0: 0})
    got = Counter(choose(policy, RoutingRequest(prompts.make(2)), {0: 0, 1: 60}) for _ in range(50))
    assert not got[1], f"a replica with 60 sequences got {got[1]} of 50 requests, beside a free one that had served many before"


def check_forgetting_leaves_the_others(make: Make) -> None:
    """Replicas that start again, seen or not, once or twice: later choices are valid, and the
    others keep getting requests."""
    policy, prompts, loads = make(), Prompts(), dict.fromkeys(range(3), 0)
    for _ in range(3):
        for number in range(60):
            choose(policy, RoutingRequest(prompts.make(2), f"{number}"), loads)
        for replica in (1, 1, 63, 2000):
            assert policy.forget_replica(replica) is None, "forget_replica must return None"  # type: ignore[func-returns-value]
    late = dict.fromkeys(loads, 0)
    for number in range(300):
        late[choose(policy, RoutingRequest(prompts.make(2), f"late {number}"), late)] += 1
    assert min(late.values()) > 0, f"after replica 1 was forgotten three replicas get {[*late.values()]} of 300 requests"


def check_load_keeps_new_prompts_away(make: Make) -> None:
    """A replica with 400 outstanding sequences beside three with 4: it gets no new prompt."""
    for busy in range(4):
        policy, prompts = make(), Prompts(busy)
        loads = {replica: 400 if replica == busy else 4 for replica in range(4)}
        got = Counter(choose(policy, RoutingRequest(prompts.make(3)), loads) for _ in range(200))
        assert not got[busy], f"replica {busy} has 400 sequences, the others 4, and it got {got[busy]} of 200 new prompts"


def check_load_evens_out(make: Make) -> None:
    """Sequences of unequal lengths: when 2,000 have come and some have ended, the loads of four
    replicas differ by less than half of their mean."""
    policy, prompts, rng = make(), Prompts(), random.Random(3)
    loads, running = dict.fromkeys(range(4), 0), list[tuple[int, int]]()
    for now in range(2000):
        chosen = choose(policy, RoutingRequest(prompts.make(2)), loads)
        loads[chosen] += 1
        running.append((now + rng.choice((5, 1000)), chosen))
        for end, replica in [each for each in running if each[0] <= now]:
            loads[replica] -= 1
            running.remove((end, replica))
    assert max(loads.values()) - min(loads.values()) < sum(loads.values()) / 8, f"four replicas end with the loads {[*loads.values()]}"


def check_load_moves_a_hot_prompt(make: Make) -> None:
    """One prompt for all requests, none of which ends: no replica gets more than twice the mean."""
    policy, blocks, loads = make(), Prompts().make(8), dict.fromkeys(range(4), 0)
    for _ in range(400):
        loads[choose(policy, RoutingRequest(blocks), loads)] += 1
    assert max(loads.values()) <= 200, f"four replicas got {[*loads.values()]} of 400 equal requests, none of which has ended"


def check_prefix_is_followed(make: Make) -> None:
    """40 conversations over four replicas, whose loads are equal: each turn goes where the turns
    before went."""
    policy, prompts, loads = make(), Prompts(), dict.fromkeys(range(4), 2)
    talks = [prompts.make(3) for _ in range(40)]
    homes = [choose(policy, RoutingRequest(talk), {**loads, number % 4: 1}) for number, talk in enumerate(talks)]
    for _ in range(3):
        talks = [prompts.extend(talk) for talk in talks]
        got = [choose(policy, RoutingRequest(talk), loads) for talk in talks]
        assert got == homes, f"{sum(a != b for a, b in zip(got, homes, strict=True))} of 40 conversations went to another replica"


def check_prefix_is_the_longest(make: Make) -> None:
    """Two conversations with the same beginning on two replicas: each goes on where its own turns
    are, although the beginning is on both."""
    policy, prompts = make(), Prompts()
    begin = prompts.make(2)
    talks = [prompts.extend(begin, 6), prompts.extend(begin, 6)]
    for replica, talk in enumerate(talks):
        choose(policy, RoutingRequest(talk), {replica: 0})
    for turn in range(4):
        talks = [prompts.extend(talk) for talk in talks]
        order = (0, 1) if turn % 2 else (1, 0)
        got = {number: choose(policy, RoutingRequest(talks[number]), {0: 1, 1: 1, 2: 1}) for number in order}
        assert got == {0: 0, 1: 1}, f"conversations of replicas 0 and 1, which begin with equal blocks, went to {got[0]} and {got[1]}"


def check_prefix_is_followed_by_few_requests(make: Make) -> None:
    """One or two requests that run are no load: a conversation stays beside replicas without
    any."""
    for load in (1, 2):
        policy, talk = make(), (prompts := Prompts()).make(6)
        home = choose(policy, RoutingRequest(talk), dict.fromkeys(range(4), 0))
        for _ in range(3):
            talk = prompts.extend(talk)
            chosen = choose(policy, RoutingRequest(talk), {replica: load * (replica == home) for replica in range(4)})
            assert chosen == home, f"a conversation leaves its replica, which has {load} requests, for one that has none"


def check_prefix_is_forgotten(make: Make) -> None:
    """A replica that was started again has nothing in its cache; the others keep theirs."""
    policy, prompts = make(), Prompts()
    talks = [prompts.make(4) for _ in range(2)]
    for replica, talk in enumerate(talks):
        choose(policy, RoutingRequest(talk), {replica: 0})
    policy.forget_replica(0)
    got = [choose(policy, RoutingRequest(talk), loads) for talk, loads in zip(talks, ({0: 2, 2: 1}, {1: 2, 2: 1}), strict=True)]
    assert got[0] == 2, "a prompt goes to the replica that had it before it was started again"
    assert got[1] == 1, "forget_replica forgot another replica's prompts"


def check_prefix_told_by_caches(make: Make) -> None:
    """A replica has the share of a prompt that its cache tells, 0.0 included; one that tells none
    has what was sent to it; and a replica that is not offered is not chosen whatever it tells."""
    policy, prompts, rng = make(), Prompts(), random.Random(5)
    for turn in range(200):
        replicas = rng.sample(range(100), rng.randint(2, 5))
        talk, held = prompts.make(10), dict[int, float]()
        for replica in replicas:
            if sent := rng.choice((0, 3, 6, 10)):
                choose(policy, RoutingRequest(talk[:sent]), {replica: 0})
                held[replica] = sent / 10
        told = {replica: rng.choice((0.0, 0.0, 0.3, 0.6, 1.0)) for replica in replicas if rng.random() < 0.5}
        shares = {replica: told.get(replica, held.get(replica, 0.0)) for replica in replicas}
        told[100 + turn % 3] = 1.0
        chosen = choose(policy, RoutingRequest(talk, cached=told), dict.fromkeys(replicas, 1))
        best = max(shares.values())
        assert shares[chosen] == best, f"replica {chosen} has {shares[chosen]:.0%} of a prompt, and another one {best:.0%}; told are {told}"


def check_load_counts_more_than_a_told_prompt(make: Make) -> None:
    """A whole prompt in the cache of a replica with hundreds of sequences more brings it no new
    prompt."""
    policy, prompts, rng = make(), Prompts(), random.Random(6)
    for _ in range(100):
        replicas = rng.sample(range(100), rng.randint(2, 4))
        busy, others = replicas[0], replicas[1:]
        loads = {busy: rng.randint(400, 5000)} | {replica: rng.randrange(4) for replica in others}
        told = {busy: rng.choice((0.9, 0.99, 1.0))} | {replica: 0.0 for replica in others if rng.random() < 0.5}
        request = RoutingRequest(prompts.make(rng.randint(1, 9)), cached=told)
        chosen = choose(policy, request, dict(rng.sample([*loads.items()], len(loads))))
        assert chosen != busy, f"of the loads {loads} the greatest got a prompt that its cache has"


def check_load_is_that_of_the_number(make: Make) -> None:
    """Replicas whose numbers have low bits in common are different ones."""
    policy, prompts, rng = make(), Prompts(), random.Random(7)
    for _ in range(200):
        low = rng.randrange(8)
        busy, free = rng.sample([low + (step << bits) for bits in (3, 5, 6, 8, 10, 12) for step in range(1, 3)] + [low], 2)
        chosen = choose(policy, RoutingRequest(prompts.make(2)), dict(rng.sample([(busy, 50), (free, 0)], 2)))
        assert chosen == free, f"replica {busy} with 50 sequences got a new prompt, beside replica {free} with none"


def check_prefix_stays_where_a_request_was_refused(make: Make) -> None:
    """Requests that are under way together, some refused: a replica has what it had before, and
    nothing of the refused request, which may be sent to another replica next."""
    policy, prompts, rng = make(), Prompts(), random.Random(8)
    for _ in range(30):
        talks = [prompts.make(rng.randint(1, 4)) for _ in range(4)]
        for replica, talk in enumerate(talks):
            choose(policy, RoutingRequest(talk), {replica: 0})
        sent = [RoutingRequest(prompts.extend(talk, 4), notes={}) for talk in talks]
        for replica in rng.sample(range(4), 4):
            choose(policy, sent[replica], {replica: 0})
        refused = rng.sample(range(4), rng.randint(1, 3))
        for replica in refused:
            policy.forget_request(sent[replica], replica)
            if rng.random() < 0.5:  # the next try, whose replica refuses it too
                choose(policy, sent[replica], {4: 0})
                policy.forget_request(sent[replica], 4)
        for replica in rng.sample(range(4), 4):
            home = choose(policy, RoutingRequest(talks[replica]), {5: 0, replica: 1})
            assert home == replica, "after replicas refused requests, a prompt leaves the replica that had it before"
            choose(policy, RoutingRequest(sent[replica].blocks[:-2]), {6: 0})
            home = choose(policy, RoutingRequest(sent[replica].blocks), {replica: 1, 6: 1})
            assert home == (6 if replica in refused else replica), "a request that was refused counts as sent, or one that was not is lost"


def check_session_stays(make: Make) -> None:
    """Requests of a session go to one replica whatever their prompts; sessions spread."""
    policy, prompts = make(), Prompts()
    names = [f"session-{number:04}" for number in range(400)]
    rng, homes = random.Random(4), dict[str, int]()
    for _ in range(4):
        rng.shuffle(names)
        for name in names:
            chosen = choose(policy, RoutingRequest(prompts.make(3), name), {replica: rng.randrange(5) for replica in range(4)})
            assert homes.setdefault(name, chosen) == chosen, f"session {name} went to replica {homes[name]}, and then to {chosen}"
    got = Counter(homes.values())
    assert len(got) == 4 and max(got.values()) < 200, f"four replicas have {sorted(got.values())} of 400 sessions"


def check_session_moves_with_its_replica_alone(make: Make) -> None:
    """While a replica is away its sessions go to others, each to one; all other sessions stay.
    When it is back, each has one replica again."""
    policy = make()
    names = [f"{number}" for number in range(300)]

    def ask(replicas: tuple[int, ...]) -> dict[str, int]:
        first, second = ({name: choose(policy, RoutingRequest([], name), dict.fromkeys(replicas, 0)) for name in names} for _ in range(2))
        assert first == second, "a session has two replicas although none came or went"
        return first

    before, away = ask((0, 1, 2, 3)), ask((0, 1, 3))
    moved = [name for name in names if before[name] != 2 and away[name] != before[name]]
    assert not moved, f"{len(moved)} sessions of replicas that stayed moved when another one left"
    assert len({away[name] for name in names if before[name] == 2}) > 1, "all sessions of a replica that left went to one other"
    ask((0, 1, 2, 3))


def check_session_is_the_same_in_each_process(make: Make) -> None:
    """Several routers, and one that starts again, send a session to the same replica. Python's
    hashes of texts, which differ in each process, do not count."""
    names, homes = [f"session {number}" for number in range(60)], []
    for salt in range(3):
        policy = make()
        requests = [RoutingRequest([], Salted(name, salt)) for name in names]
        homes.append([choose(policy, request, dict.fromkeys(range(4), 0)) for request in requests])
    moved = sum(len({*each}) > 1 for each in zip(*homes, strict=True))
    assert not moved, f"{moved} of {len(names)} sessions have another replica in another process: use a hash that is the same in each"


def check_session_names_are_compared_whole(make: Make) -> None:
    """Names that begin alike, of 8, 64 and 300 equal characters, are different sessions."""
    policy = make()
    for length in (8, 64, 300):
        got = {choose(policy, RoutingRequest([], "x" * length + f"{n}"), dict.fromkeys(range(4), 0)) for n in range(100)}
        assert len(got) == 4, f"100 sessions whose names begin with {length} equal characters are all on {len(got)} of 4 replicas"


def check_session_does_not_depend_on_earlier_requests(make: Make) -> None:
    """Of two routers, one has seen replicas come and go: each session has the same replica on both,
    whatever numbers the replicas have."""
    policy, rng, replicas = make(), random.Random(9), (2, 34, 66, 1026)
    names = [f"talk {number}" for number in range(60)]
    for name in names:
        for _ in range(4):
            choose(policy, RoutingRequest([], name), dict.fromkeys(rng.sample([*replicas, 7, 8], rng.randint(1, 4)), 0))
    new = make()
    for name in names:
        got = [choose(each, RoutingRequest([], name), dict.fromkeys(replicas, 0)) for each in (policy, new)]
        assert got[0] == got[1], f"a session goes to replica {got[1]} at first, and to {got[0]} where replicas came and went"
    got = [choose(new, RoutingRequest([], name), dict.fromkeys(replicas, 0)) for name in names]
    assert {*got} == {*replicas}, f"60 sessions are on the replicas {sorted({*got})} of {sorted(replicas)}"
