"""The conformance suite of poolers: steps of prompts of many lengths, beside each other, alone and
one after the other. Must not know a pooler by name.

No check knows what a pooler computes: it compares vectors of the same prompts in other company.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView
from frame.interfaces.pooling import Pooler, PoolerCapabilities, PoolerContext
from frame.testing.conformance import Check, Subject, collect, count_elements, unchanged_process
from frame.testing.generators import require_near_reference
from frame.testing.tensors import unchanged
from frame.testing.torch_calls import TorchCalls

HIDDEN = 48
LENGTHS = (5, 1, 130, 2, 17, 1, 64, 33)
LONG = (8192, 3, 5001)  # tokens of prompts whose sums leave the range of small floats
LONGEST = 131_072
WIDE_RESULT = 1e-3  # the same for vectors in float32 of states in fewer bits: lengths and sums are not rounded
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of a vector's greatest value
NUM_STEPS = 300  # after which a pooler holds no more than after half of them

Make = Callable[..., Pooler]


@dataclass(frozen=True)
class Prompts:
    """Rows of a step. `lasts`: rows whose prompts are complete; the others are chunks."""

    states: Sequence[torch.Tensor]  # of each row, float32 [tokens, hidden]
    lasts: Sequence[bool]
    slots: Sequence[int]

    @classmethod
    def draw(cls, lengths: Sequence[int], hidden: int = HIDDEN, seed: int = 0, lasts: Sequence[bool] | None = None) -> Prompts:
        generator = torch.Generator().manual_seed(seed)
        states = [torch.randn(length, hidden, generator=generator) for length in lengths]
        return cls(states, lasts or [True] * len(lengths), random.Random(seed).sample(range(len(lengths) + 8), len(lengths)))

    def choose(self, rows: Sequence[int]) -> Prompts:
        states, lasts, slots = self.states, self.lasts, self.slots
        return Prompts([states[row] for row in rows], [lasts[row] for row in rows], [slots[row] for row in rows])

    def make_step(self, device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ForwardBatch]:
        """The hidden states of the step, and its batch."""
        lengths = np.array([len(each) for each in self.states], np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        positions = np.concatenate([np.arange(length) for length in lengths])
        slots = np.array(self.slots, np.int32)
        table = np.zeros((len(lengths) + 8, 1), np.int32)

        def put(array: np.ndarray, kind: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(array).to(device, kind)

        batch = ForwardBatch(
            num_decodes=0,
            token_ids=put(positions % 7),
            positions=put(positions),
            kv_slots=put(np.arange(starts[-1])),
            request_slots=put(slots),
            seq_lens=put(lengths, torch.int32),
            query_lens=put(lengths, torch.int32),
            query_starts=put(starts, torch.int32),
            page_table=put(table, torch.int32),
            logits_indices=put((starts[1:] - 1)[np.array(self.lasts, np.bool_)]),
            kv=None,  # type: ignore[arg-type]  # a pooler reads no cache
            host=HostView(slots, lengths, lengths, table),
        )
        return torch.cat(list(self.states)).to(device, dtype), batch


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `pooler`: contract, then what the record says of tokens."""
    can, device = subject.record.capabilities, subject.setting.device
    reads_all = not isinstance(can, PoolerCapabilities) or can.whole_prompts

    def make(hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Pooler:
        pooler: Pooler = subject.target(PoolerContext(hidden, torch.device(device), dtype), subject.options)
        return pooler

    return (check for check in collect(__name__, make, device) if not (reads_all and check.name.startswith("last_")))


def pool(pooler: Pooler, prompts: Prompts, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The vectors of a step, on the host."""
    hidden, batch = prompts.make_step(device, dtype)
    with unchanged({"the hidden states": hidden, "batch.query_starts": batch.query_starts, "batch.query_lens": batch.query_lens}, "pool"):
        vectors = pooler.pool(hidden, batch)
    count, width = sum(prompts.lasts), hidden.shape[1]
    assert isinstance(vectors, torch.Tensor), f"pool must return a tensor, not {vectors!r:.60}"
    assert vectors.shape == (count, width), f"pool returned the shape {tuple(vectors.shape)} for {count} prompts of hidden size {width}"
    assert vectors.is_floating_point(), f"pool returned {vectors.dtype}; return a dtype of floating point"
    assert vectors.device.type == torch.device(device).type, f"pool returned a tensor on {vectors.device} for hidden states on {device}"
    return vectors.detach().float().cpu()


def require_equal(result: torch.Tensor, expected: torch.Tensor, what: str, dtype: torch.dtype = torch.float32) -> None:
    assert torch.isfinite(result).all(), f"{what}: the vectors are not finite"
    error = (result - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-6)
    worst = int(error.argmax())
    assert float(error[worst]) <= TOLERANCE[dtype], f"{what}: vector {worst} differs by {float(error[worst]):.1e} of its greatest value"


def check_shape_of_vectors(make: Make, device: str) -> None:
    """Hidden sizes of 1 to 4,096, and steps of one row and of 300."""
    for hidden, lengths in ((1, (3, 1)), (7, LENGTHS), (4096, (2, 9)), (HIDDEN, (1,)), (HIDDEN, [1 + n % 5 for n in range(300)])):
        vectors = pool(make(hidden), Prompts.draw(lengths, hidden), device)
        assert torch.isfinite(vectors).all(), f"{len(lengths)} prompts of hidden size {hidden} have vectors that are not finite"


def check_vectors_are_those_of_prompts_alone(make: Make, device: str) -> None:
    pooler, prompts = make(), Prompts.draw(LENGTHS)
    together = pool(pooler, prompts, device)
    alone = torch.cat([pool(pooler, prompts.choose([row]), device) for row in range(len(LENGTHS))])
    require_equal(together, alone, "prompts in one step and each in a step of its own")


def check_order_of_rows(make: Make, device: str) -> None:
    """Vector r is that of row r, in whichever order and slots the rows are."""
    pooler, prompts = make(), Prompts.draw(LENGTHS)
    expected = pool(pooler, prompts, device)
    for seed in range(3):
        order = random.Random(seed).sample(range(len(LENGTHS)), len(LENGTHS))
        moved = replace(prompts.choose(order), slots=range(len(order)))
        require_equal(pool(pooler, moved, device), expected[order], f"rows in the order {order}")


def check_prompts_differ(make: Make, device: str) -> None:
    """Different prompts have different vectors, also those of one token."""
    vectors = pool(make(), Prompts.draw((1, 1, 1, 4, 4, 90)), device)
    distances = torch.cdist(vectors, vectors) + torch.eye(len(vectors))
    assert float(distances.min()) > 1e-4, "two different prompts have equal vectors"


def check_neighbours_that_are_nan(make: Make, device: str) -> None:
    """A row whose states are NaN or infinite leaves the others alone, and is not hidden: the engine
    ends its request."""
    pooler, prompts = make(), Prompts.draw(LENGTHS)
    expected = pool(pooler, prompts, device)
    for row in (0, 3, len(LENGTHS) - 1):
        for value in (torch.nan, torch.inf):
            states = [torch.full_like(each, value) if place == row else each for place, each in enumerate(prompts.states)]
            vectors = pool(pooler, replace(prompts, states=states), device)
            others = [place for place in range(len(LENGTHS)) if place != row]
            require_equal(vectors[others], expected[others], f"rows beside one of {value}")
            assert not torch.isfinite(vectors[row]).all(), f"the vector of a row of {value} is finite, so that the engine serves it"


def check_small_floats(make: Make, device: str) -> None:
    """Hidden states in bfloat16 and float16 have the vectors that their values have in float32, of
    prompts of up to 8,192 tokens and of values whose sum leaves float16."""
    for dtype in (torch.bfloat16, torch.float16):
        drawn = Prompts.draw(LONG, seed=2)
        rounded = replace(drawn, states=[(each * 0.2 + 30).to(dtype).float() for each in drawn.states])
        expected = pool(make(), rounded, device)
        require_equal(pool(make(dtype=dtype), rounded, device, dtype), expected, f"hidden states in {dtype}", dtype)
        if make(dtype=dtype).pool(*rounded.make_step(device, dtype)).dtype == torch.float32:
            error = ((pool(make(dtype=dtype), rounded, device, dtype) - expected).abs() / expected.abs().clamp(min=1e-6)).max()
            assert float(error) < WIDE_RESULT, f"vectors in float32 of hidden states in {dtype} differ by {float(error):.1e}"


def check_large_states(make: Make, device: str) -> None:
    """Hidden states of 1e6, which float32 and bfloat16 hold and float16 does not, and of 1e-6."""
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (1e6, 1e-6):
            prompts = Prompts.draw(LENGTHS)
            scaled = replace(prompts, states=[each * scale for each in prompts.states])
            vectors = pool(make(dtype=dtype), scaled, device, dtype)
            assert torch.isfinite(vectors).all(), f"hidden states of {scale:g} in {dtype} have vectors that are not finite"
            assert bool((vectors.abs().amax(-1) > 0).all()), f"hidden states of {scale:g} in {dtype} have vectors of zeros"


def check_long_prompts(make: Make, device: str) -> None:
    """The vector of 8,192 tokens depends on no rounding of lengths: it equals that in a step with
    others, and small changes of the states change it little."""
    pooler, prompts = make(), Prompts.draw(LONG, seed=3)
    together = pool(pooler, prompts, device)
    for row in range(len(LONG)):
        require_equal(pool(pooler, prompts.choose([row]), device), together[row : row + 1], f"a prompt of {LONG[row]} tokens alone")
    near = replace(prompts, states=[each + 1e-6 for each in prompts.states])
    moved = float((pool(pooler, near, device) - together).abs().max())
    assert moved < 1e-3, f"hidden states that differ by 1e-6 have vectors that differ by {moved:.1e}"


def check_reach_of_prompts(make: Make, device: str) -> None:
    """The first, the second, the middle and the last token count in a prompt of 8,192 tokens if
    they do in one of 16; a prompt of 131,072 tokens has a finite vector, and so has its
    neighbour."""

    def find_reach(length: int) -> list[str]:
        drawn = Prompts.draw((length,), 8)
        places = {"first": 0, "second": 1, "middle": length // 2, "last": length - 1}
        whole, reached = pool(make(8), drawn, device), []
        for name, place in places.items():
            state = drawn.states[0].clone()
            state[place, 0] += 1e6
            if not torch.equal(pool(make(8), replace(drawn, states=[state]), device), whole):
                reached.append(name)
        return reached

    short, long = find_reach(16), find_reach(8192)
    assert short == long, f"the {' and '.join(short)} tokens count in a prompt of 16 tokens, and the {' and '.join(long)} in one of 8,192"
    pair = Prompts.draw((LONGEST, 5), 8)
    together = pool(make(8), pair, device)
    assert torch.isfinite(together).all(), f"a prompt of {LONGEST} tokens has a vector that is not finite"
    require_equal(together[1:], pool(make(8), pair.choose([1]), device), f"a short prompt beside one of {LONGEST} tokens")


def check_pool_is_fast(make: Make, device: str) -> None:
    """A step of 64 short prompts takes about as long as their mean."""
    pooler, (hidden, batch) = make(), Prompts.draw([3] * 64).make_step(device)

    def take_mean() -> torch.Tensor:
        rows = torch.arange(64, device=hidden.device).repeat_interleave(3)
        return torch.zeros(64, HIDDEN, device=hidden.device).index_add_(0, rows, hidden.float()) / 3

    require_near_reference(lambda: pooler.pool(hidden, batch), take_mean, "pool of 64 prompts", times=10, extra=1e-3)


def check_long_prompts_beside_short_ones(make: Make, device: str) -> None:
    """A step of one long prompt and 255 short ones takes about as long as its mean: its time and
    memory are those of its tokens, and not of as many long prompts."""
    lengths = (LONG[0], *([1] * 255))
    pooler, (hidden, batch) = make(), Prompts.draw(lengths).make_step(device)
    rows = torch.arange(len(lengths), device=hidden.device).repeat_interleave(torch.tensor(lengths, device=hidden.device))

    def take_mean() -> torch.Tensor:
        sums = torch.zeros(len(lengths), HIDDEN, device=hidden.device).index_add_(0, rows, hidden.float())
        return sums / batch.query_lens.unsqueeze(1)

    require_near_reference(lambda: pooler.pool(hidden, batch), take_mean, "pool of a long prompt and 255 short ones", times=10, extra=5e-3)


def check_steps_are_apart(make: Make, device: str) -> None:
    """The same prompts after steps of others, in the same slots and in the same memory."""
    pooler, first = make(), Prompts.draw(LENGTHS)
    expected = pool(pooler, first, device)
    hidden, batch = first.make_step(device)
    for seed in range(1, 4):
        other = Prompts.draw(LENGTHS, seed=seed)
        fresh = pool(make(), other, device)
        hidden.copy_(torch.cat(list(other.states)))
        require_equal(pooler.pool(hidden, batch).float().cpu(), fresh, "hidden states that are written where those before were")
        pool(pooler, Prompts.draw((7, 2), seed=seed), device)
    require_equal(pool(pooler, first, device), expected, "the prompts of the first step, after others")


def check_vectors_stay(make: Make, device: str) -> None:
    """A step's vectors are copied to the host while the next step runs: they are memory of their
    own, which neither new hidden states nor the next step change."""
    for lengths in (LENGTHS, (1,), (1, 1, 1)):
        pooler, prompts = make(), Prompts.draw(lengths)
        hidden, batch = prompts.make_step(device)
        vectors = pooler.pool(hidden, batch)
        before = vectors.clone()
        hidden.fill_(7.0)
        assert torch.equal(vectors, before), "the vectors are a view of the hidden states, which the next step overwrites"
        pooler.pool(hidden, batch)
        assert torch.equal(vectors, before), "the next step wrote to the vectors of the step before"


def check_poolers_are_apart(make: Make, device: str) -> None:
    """Two poolers of other sizes in one process, in turn."""
    small, large = make(8), make(96)
    prompts = {8: Prompts.draw(LENGTHS, 8), 96: Prompts.draw(LENGTHS, 96)}
    alone = {hidden: pool(make(hidden), each, device) for hidden, each in prompts.items()}
    for _ in range(2):
        for hidden, pooler in ((8, small), (96, large)):
            require_equal(pool(pooler, prompts[hidden], device), alone[hidden], f"of two poolers the one of hidden size {hidden}")


def check_results_repeat(make: Make, device: str) -> None:
    pooler, prompts = make(), Prompts.draw(LENGTHS)
    results = [pool(pooler, prompts, device) for _ in range(3)]
    assert all(torch.equal(each, results[0]) for each in results), "the same step has other vectors when it is pooled again"


def check_work_is_done_in_batches(make: Make, device: str) -> None:
    """As many calls of torch for 64 prompts as for 4, and none that waits for the device."""
    pooler, counts = make(), []
    for size in (4, 64):
        hidden, batch = Prompts.draw([3] * size).make_step(device)
        pooler.pool(hidden, batch)  # what a pooler prepares once
        with TorchCalls() as calls:
            pooler.pool(hidden, batch)
        assert not calls.waits, f"pool waits for the device by {', '.join(sorted(calls.waits))}"
        counts.append(calls.count)
    assert counts[1] <= counts[0], f"pool calls torch {counts[0]} times for 4 prompts and {counts[1]} times for 64"


def check_process_and_memory(make: Make, device: str) -> None:
    """Hundreds of steps leave the process alone, and no memory behind."""
    sizes, pooler = [], make()
    with unchanged_process("pool changed"):
        for step in range(NUM_STEPS):
            pool(pooler, Prompts.draw([1 + step % 9] * (1 + step % 3), seed=step), device)
            if step % (NUM_STEPS // 2) == NUM_STEPS // 2 - 1:
                sizes.append(count_elements(pooler))
    assert sizes[1] <= sizes[0] + 20, f"it holds {sizes[0]} objects after {NUM_STEPS // 2} steps, and {sizes[1]} after {NUM_STEPS}"


def check_last_token_alone_is_read(make: Make, device: str) -> None:
    """A record without `whole_prompts`: the states of all other tokens may be anything."""
    pooler, prompts = make(), Prompts.draw(LENGTHS)
    expected = pool(pooler, prompts, device)
    states = [torch.cat((torch.full_like(each[:-1], torch.nan), each[-1:])) for each in prompts.states]
    require_equal(pool(pooler, replace(prompts, states=states), device), expected, "prompts whose tokens but the last one are NaN")


def check_last_chunks_have_vectors(make: Make, device: str) -> None:
    """A record without `whole_prompts`: rows of prompts that are not complete have no vector, and
    there may be no other rows."""
    pooler, rng = make(), random.Random(5)
    for _ in range(4):
        lasts = [rng.random() < 0.5 for _ in LENGTHS]
        prompts = Prompts.draw(LENGTHS, lasts=lasts)
        complete = [row for row, last in enumerate(lasts) if last]
        expected = pool(make(), prompts.choose(complete), device) if complete else torch.empty(0, HIDDEN)
        vectors = pool(pooler, prompts, device)
        if complete:
            require_equal(vectors, expected, "complete prompts beside chunks of others")
    pool(pooler, Prompts.draw((4, 9), lasts=[False, False]), device)
