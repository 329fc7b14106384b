"""Which drafts are verified: no choice changes a text, and what does not pay is left."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    BLOCK,
    ScriptedDrafter,
    always_wrong,
    as_requests,
    decode,
    guessing,
    random_prompts,
    replaying,
    texts,
    tiny_model,
)

from adaflash_batch.engine.cost import StepCost
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.drafting import Draft, DraftBatch
from adaflash_batch.engine.hindsight import Guess, Outcome, Prospect
from adaflash_batch.engine.lookup import Lookup
from adaflash_batch.engine.policy import Policy, WidthPolicy
from adaflash_batch.engine.pricing import Ledger
from adaflash_batch.engine.target import Target
from adaflash_batch.kernels.paged_attention import PackedStep
from adaflash_batch.request import RowKey, Sampling
from adaflash_batch.stats import SpeculationCounts

NEW = 48
PAYS = Policy("survival", only_if_it_pays=True)


@pytest.fixture(scope="module")
def llama() -> Target:
    return Target.of(tiny_model("llama"), "tiny llama")


class Machine:
    """A clock of a machine whose steps take `fixed` and for each token that enters `each`."""

    def __init__(self, target: Target, fixed: float = 0.02, each: float = 0.001) -> None:
        self._target, self._fixed, self._each = target, fixed, each
        self._now, self._seen = 0.0, target.num_forward_tokens

    def __call__(self) -> float:
        # Every reading is a little later, and later by a pass if there was one.
        num_tokens = self._target.num_forward_tokens
        passed, self._seen = num_tokens - self._seen, num_tokens
        self._now += 1e-6 + (self._fixed + self._each * passed if passed > 0 else 0.0)
        return self._now

    def pass_time(self, seconds: float) -> None:
        self._now += seconds


class Telling:
    """Guesses, and says of every draft whether it is right: as well as it can be known."""

    def __init__(self, inner: ScriptedDrafter, truth: ScriptedDrafter) -> None:
        self._inner, self._truth = inner, truth
        self.version, self.block_size = inner.version, inner.block_size
        self.tapped_layers = inner.tapped_layers
        self.absorb, self.adopt = inner.absorb, inner.adopt

    def draft(self, batch: DraftBatch) -> list[Draft]:
        pairs = zip(self._inner.draft(batch), self._truth.draft(batch), strict=True)
        return [Draft(a.token_ids, list(_survival(a.token_ids, b.token_ids))) for a, b in pairs]


def _survival(drafts: Sequence[int], truth: Sequence[int]) -> Any:
    right = (float(a == b) for a, b in zip(drafts, truth, strict=True))
    return itertools.accumulate(right, min)


def together(counts: Any) -> SpeculationCounts:
    total = SpeculationCounts()
    for each in counts:
        total.add(each.counts)
    return total


@pytest.mark.parametrize("widths", ["survival", "adaflash", "fixed"])
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_policy_changes_a_text(
    llama: Target, widths: WidthPolicy, pays: bool, looks_up: bool, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=NEW, temperature=temperature, repetition_penalty=1.1)
    requests = as_requests(random_prompts(9, longest=20), sampling)
    plain = texts(decode(llama, requests))
    done = decode(
        llama,
        requests,
        drafter=guessing(requests, plain, 0.8),
        lookup=Lookup(max_tokens=1000) if looks_up else None,
        policy=Policy(widths, only_if_it_pays=pays),
        clock=Machine(llama),
        max_running=4,
    )
    assert texts(done) == plain


def test_no_token_but_known_ones_and_chosen_drafts_enters_the_target(llama: Target) -> None:
    requests = as_requests(random_prompts(8, longest=12), Sampling(max_new_tokens=NEW))
    plain = texts(decode(llama, requests))
    guesser, truth = guessing(requests, plain, 0.8), replaying(requests, plain)
    telling = Telling(guesser, truth)
    decoder = Decoder(
        llama,
        drafter=lambda num_pages: telling,
        policy=PAYS,
        clock=Machine(llama),
        kv_tokens=4096,
        max_running=4,
    )
    decoder.profile()
    for request in requests:
        decoder.add(request)
    before, done = llama.num_forward_tokens, []
    while decoder.has_work:
        done += decoder.step()
    counts = together(done)
    passed = llama.num_forward_tokens - before
    assert passed == decoder.num_prefilled + counts.steps + counts.verified
    # What is known to be wrong is not verified: nothing is padded to the widest of a batch.
    assert counts.verified == counts.accepted > 0
    assert len([width for width, steps in enumerate(counts.verified_hist) if steps]) > 2
    assert {done.key: done.token_ids for done in done} == plain


def test_what_is_never_right_is_hardly_drafted(llama: Target) -> None:
    requests = as_requests(random_prompts(8, longest=12), Sampling(max_new_tokens=150))
    plain = texts(decode(llama, requests))
    wrong = always_wrong(requests, plain)
    done = decode(
        llama,
        requests,
        drafter=wrong,
        cost=known_cost(),
        policy=PAYS,
        clock=Machine(llama),
        max_running=4,
    )
    counts = together(done.values())
    assert texts(done) == plain
    assert counts.verified < 0.05 * counts.steps
    assert wrong.num_calls < 0.1 * counts.steps


def test_what_is_right_is_verified(llama: Target) -> None:
    requests = as_requests(random_prompts(8, longest=12), Sampling(max_new_tokens=100))
    plain = texts(decode(llama, requests))
    right = replaying(requests, plain)
    done = decode(
        llama, requests, drafter=right, cost=known_cost(), policy=PAYS, clock=Machine(llama)
    )
    emitted = together(done.values()).emitted_per_step
    assert emitted is not None
    assert emitted > 0.9 * BLOCK


def known_cost() -> StepCost:
    """Of a machine on which a step of four tokens takes hardly more than one of one."""
    cost = StepCost()
    for _ in range(6):
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            cost.observe_target(tokens, tokens, 20 * tokens, 0.2 + 0.01 * tokens)
            cost.observe_draft(tokens, 0.05)
            cost.observe_rest(tokens, 0.01)
    return cost


def test_lookups_alone_are_weighed_by_every_policy(llama: Target) -> None:
    """Of fixed widths, too: dear tokens are not verified, cheap ones are."""
    requests = as_requests([[5, 6, 7, 8, 9] * 4 for _ in range(6)], Sampling(max_new_tokens=NEW))
    plain = texts(decode(llama, requests))
    for each, pays in ((0.001, True), (10.0, False)):
        cost = StepCost()
        for tokens in (1, 2, 3, 4, 6, 8) * 6:
            cost.observe_target(tokens, tokens, 20 * tokens, 0.2 + each * tokens)
        done = decode(
            llama,
            requests,
            lookup=Lookup(max_tokens=1000),
            policy=Policy("fixed", only_if_it_pays=True),
            cost=cost,
            clock=Machine(llama, each=each),
            max_running=1,
        )
        counts = together(done.values())
        assert texts(done) == plain
        assert (counts.lookup_accepted > NEW) == pays


def test_looked_up_drafts_are_counted_as_such(llama: Target) -> None:
    prompts = [[5, 6, 7, 8, 9] * 4 for _ in range(6)]
    requests = as_requests(prompts, Sampling(max_new_tokens=NEW))
    plain = texts(decode(llama, requests))
    lookup = Lookup(max_tokens=1000)
    done = decode(llama, requests, lookup=lookup, policy=Policy("fixed"), max_running=1)
    counts = together(done.values())
    assert texts(done) == plain
    assert counts.lookup_steps == counts.drafting > 0
    assert counts.lookup_accepted == counts.accepted > 3 * NEW, "all but the first are known"
    assert counts.lookup_verified == counts.verified
    assert counts.drafter_first is None
    assert counts.emitted_per_block_step is None


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_hindsight_tells_what_a_full_verification_accepts(
    text: list[int], guess: list[int], seed: int
) -> None:
    """In whatever pieces the text comes, and once."""
    dice, prospect, prompt = random.Random(seed), Prospect(), [1]
    prospect.expect(Guess("block", guess, [0.5] * len(guess)), len(prompt))
    outcomes: list[Outcome] = []
    at = 0
    while at < len(text):
        at = min(at + dice.randint(1, 4), len(text))
        outcomes += prospect.outcomes(prompt + text[:at], is_over=at == len(text))
    pairs = zip(guess, text, strict=False)
    accepted = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    (outcome,) = outcomes
    assert outcome.accepted == accepted
    is_wrong = accepted < min(len(guess), len(text))
    assert (outcome.accepted < outcome.known) == is_wrong
    if not is_wrong:
        assert outcome.known == min(len(guess), len(text))


def test_a_price_of_drafts_that_a_busier_machine_left_is_not_believed(llama: Target) -> None:
    """At that price none would be made, so nothing would ever show that it is wrong."""
    decoder = Decoder(
        llama,
        drafter=lambda num_pages: ScriptedDrafter(lambda key, position: [1, 1, 1, 1]),
        clock=Machine(llama),
        kv_tokens=4096,
        max_running=4,
    )
    decoder.profile()
    before, known = float(decoder.cost.draft(1)), float(decoder.cost.target(4, 4, 128))
    for _ in range(30):
        decoder.cost.observe_draft(1, 1000.0)
    assert float(decoder.cost.draft(1)) > 500.0
    decoder.profile()
    assert float(decoder.cost.draft(1)) == pytest.approx(before, rel=0.5, abs=1e-3)
    assert float(decoder.cost.target(4, 4, 128)) == pytest.approx(known, rel=0.5)


def barred_steps(ledger: Ledger, most: int = 5000) -> int:
    """How many steps come without drafts from now on."""
    return next(count for count in range(most) if not ledger.bars())


@pytest.mark.parametrize("decoding", [1, 8, 128])
def test_what_came_of_drafts_decides_whatever_was_promised(decoding: int) -> None:
    """A step of half more time that brings a third more loses; each time it rests for longer."""
    ledger, bars = Ledger(), []
    for _ in range(4):
        for _ in range(1000):
            ledger.note(decoding, decoding + round(decoding * 0.3), 0.15, 0.1)
            if (count := barred_steps(ledger)) > 0:
                bars.append(count)
                break
    assert bars == [63, 127, 255, 511]
    for _ in range(1000):
        ledger.note(decoding, 2 * decoding, 0.15, 0.1)
        assert not ledger.bars()


def test_a_busy_moment_is_no_loss_and_few_requests_are_not_judged_by_chance() -> None:
    dice, ledger = random.Random(0), Ledger()
    for step in range(6000):  # 1.9 tokens in 1.5 times the time, as luck has it
        seconds = 5.0 if step % 300 == 7 else 0.15
        ledger.note(1, 1 + (dice.random() < 0.3) * 3, seconds, 0.1)
        assert not ledger.bars()


def test_steps_that_lose_are_followed_by_plain_ones(llama: Target) -> None:
    """Whatever drafts promise."""
    requests = as_requests(random_prompts(1), Sampling(max_new_tokens=90))
    texts_of = texts(decode(llama, requests))
    truth = next(iter(texts_of.values()))
    start = len(requests[0].token_ids)

    def right(key: RowKey, position: int) -> list[int]:
        return (truth[position - start + 1 :] + [0] * 4)[:4]

    decoder = Decoder(
        llama,
        drafter=lambda num_pages: ScriptedDrafter(right),
        policy=PAYS,
        cost=known_cost(),
        clock=Machine(llama),
        kv_tokens=4096,
    )
    ledger = decoder.speculator._ledger
    while ledger._left == 0:
        ledger.note(8, 8, 0.2, 0.1)
    ledger._left = 41
    decoder.add(requests[0])
    for _ in range(41):
        decoder.step()
    assert decoder.num_generated == 41, "something was verified"
    for _ in range(4):
        decoder.step()
    assert decoder.num_generated > 45


class Slow(ScriptedDrafter):
    """Takes in a token in a second of a machine's time."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(lambda key, position: [1, 1, 1, 1])
        self._machine = machine

    def absorb(self, step: PackedStep, positions: torch.Tensor, features: torch.Tensor) -> None:
        super().absorb(step, positions, features)
        self._machine.pass_time(float(len(positions)))


@pytest.mark.parametrize(("num_waiting", "is_price"), [(3, True), (20, False)])
def test_only_what_a_step_leaves_to_absorb_is_a_price_of_drafts(
    llama: Target, num_waiting: int, is_price: bool
) -> None:
    """A prompt, or what came since drafts were last made, is absorbed once."""
    machine = Machine(llama)
    prompts = [list(range(1, num_waiting + 1))]
    decoder = Decoder(llama, drafter=lambda num_pages: Slow(machine), clock=machine, kv_tokens=4096)
    for request in as_requests(prompts, Sampling(max_new_tokens=3)):
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    assert (float(decoder.cost.draft(1)) > 1.0) == is_price


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_was_kept_of_passes_is_forgotten_where_the_machine_contradicts_it(
    llama: Target, slower: float
) -> None:
    """A machine that was busy for passes of some sizes alone, whatever it does to all alike."""
    decoder = Decoder(llama, lookup=Lookup(max_tokens=99), clock=Machine(llama), kv_tokens=4096)
    decoder.profile()
    known = [float(decoder.cost.target(size, size, 32 * size)) for size in (2, 8, 24)]
    state = decoder.cost.state()
    for row in state["parts"]["target"]:
        row[1] *= slower * (5.0 if 5 <= row[0] <= 14 else 1.0)
    state["parts"]["target"].append([2000.0, 60.0, 1.0, 1.0])
    assert decoder.cost.restore(state) is None
    assert float(decoder.cost.target(8, 8, 256)) > 1.5 * slower * known[1]
    decoder.profile()
    found = [float(decoder.cost.target(size, size, 32 * size)) for size in (2, 8, 24)]
    assert found == pytest.approx(known, rel=0.2)
    assert float(decoder.cost.target(2000, 1, 1)) < 30.0, "it is still believed"


def test_what_agrees_is_kept(llama: Target) -> None:
    decoder = Decoder(llama, lookup=Lookup(max_tokens=99), clock=Machine(llama), kv_tokens=4096)
    decoder.profile()
    state = decoder.cost.state()
    for row in state["parts"]["target"]:
        row[1] *= 3.0
    state["parts"]["target"].append([2000.0, 60.0, 1.0, 1.0])
    assert decoder.cost.restore(state) is None
    decoder.profile()
    # A third of it: all of it was found on a machine that was as slow.
    assert float(decoder.cost.target(2000, 1, 1)) == pytest.approx(20.0, rel=0.3)


def test_profiling_leaves_texts_alone_and_knows_the_costs(llama: Target) -> None:
    requests = as_requests(random_prompts(4), Sampling(max_new_tokens=20))
    plain = texts(decode(llama, requests))
    decoder = Decoder(llama, lookup=Lookup(max_tokens=99), kv_tokens=4096, max_running=4)
    before = llama.num_forward_tokens
    decoder.profile()
    assert llama.num_forward_tokens == before, "they are counted as work of nobody"
    assert decoder.cost.is_known
    for request in requests:
        decoder.add(request)
    done: dict[RowKey, list[int]] = {}
    while decoder.has_work:
        done |= {each.key: each.token_ids for each in decoder.step()}
    assert done == plain
