"""Whether drafting pays: the gate, fed with steps of a machine that is made up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from tiny import always_wrong, as_requests, decode, random_prompts, replaying, texts

from adaflash_batch.engine.gate import SpeculationGate
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Sampling


@dataclass
class Machine:
    """Steps with drafts take `price` times a plain one and emit τ tokens a request."""

    price: float
    tau: float
    running: int = 4
    gate: SpeculationGate = field(default_factory=SpeculationGate)
    seconds: float = 0.0
    tokens: float = 0.0

    def step(self) -> bool:
        drafted = self.gate.opens(self.running)
        taken = self.price if drafted else 1.0
        self.seconds += taken
        self.tokens += self.running * (self.tau if drafted else 1.0)
        if drafted:
            for request in range(self.running):
                # As many accept one token more as make the mean.
                whole, part = divmod(self.tau - 1.0, 1.0)
                self.gate.count(1, int(whole) + (request < part * self.running))
        self.gate.observe(taken, drafted=drafted)
        return drafted

    def run(self, steps: int) -> float:
        """Share of the steps that drafted."""
        return sum(self.step() for _ in range(steps)) / steps

    def speed(self) -> float:
        """Tokens a second over those of plain decoding."""
        return self.tokens / self.seconds / self.running


@pytest.mark.parametrize(("price", "tau"), [(1.5, 1.0), (3.0, 2.0), (1.2, 1.0), (6.0, 1.0)])
def test_what_does_not_pay_is_hardly_ever_done(price: float, tau: float) -> None:
    machine = Machine(price, tau)
    machine.run(100)
    assert machine.run(4000) < 0.02
    assert machine.speed() > 0.97


def test_what_pays_goes_on() -> None:
    machine = Machine(1.5, 2.5)
    assert machine.run(4000) > 0.98
    assert machine.speed() > 0.98 * 2.5 / 1.5


def test_a_drafter_that_got_better_is_noticed() -> None:
    machine = Machine(2.0, 1.25)
    machine.run(3000)
    machine.tau = 3.0
    machine.gate.expect_change()
    machine.run(200)
    assert machine.run(500) > 0.95


def test_a_drafter_that_got_worse_is_noticed_without_being_told() -> None:
    machine = Machine(1.5, 2.5)
    machine.run(1000)
    machine.tau = 1.0
    machine.run(400)
    assert machine.run(1000) < 0.05


def test_each_load_is_judged_by_itself() -> None:
    few, gate = Machine(1.1, 2.0, running=1), SpeculationGate()
    many = Machine(3.0, 2.0, running=64, gate=gate)
    few.gate = gate
    for _ in range(20):
        few.run(100)
        many.run(100)
    assert few.run(100) > 0.9
    assert many.run(100) < 0.1


def test_the_price_is_the_ratio_of_medians() -> None:
    machine = Machine(1.75, 2.0)
    assert machine.gate.price is None
    machine.run(100)
    assert machine.gate.price == 1.75


def test_the_gate_changes_no_text_and_skips_the_drafter(llama: Target) -> None:
    requests = as_requests(random_prompts(6, seed=5), Sampling(max_new_tokens=150))
    plain = texts(decode(llama, requests))

    def tokens_so_far() -> float:
        """Time passes by the tokens that went through the model."""
        return float(llama.num_forward_tokens)

    wrong, gate = always_wrong(requests, plain), SpeculationGate()
    done = decode(llama, requests, drafter=wrong, gate=gate, clock=tokens_so_far)
    assert texts(done) == plain
    assert gate.num_closed > 100 > wrong.num_calls > 0
    assert any(completion.counts.drafted for completion in done.values())
    right, gate, ticks = replaying(requests, plain), SpeculationGate(), itertools.count()
    done = decode(llama, requests, drafter=right, gate=gate, clock=lambda: float(next(ticks)))
    assert texts(done) == plain
    assert gate.num_closed < 0.2 * right.num_calls
