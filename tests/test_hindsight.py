"""The committed text tells what a whole verification of any block would have accepted, exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from tiny import BLOCK, VOCABULARY, ScriptedDrafter, as_requests, decode, random_prompts, texts

from adaflash_batch.drafter.length import is_ended, num_accepted, sufficient_share, truncated
from adaflash_batch.engine.policy import Policy
from adaflash_batch.engine.target import Target
from adaflash_batch.request import Completion, Request, RowKey, Sampling

NUM_DRAFTS = BLOCK - 1
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=24),
    "sampled": Sampling(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=3),
}
Place = tuple[RowKey, int]


@dataclass(slots=True)
class Asked:
    """The places that a decode drafted at, in order, and what came of them."""

    places: list[Place]
    completions: dict[RowKey, Completion]

    def accepted(self) -> dict[Place, int]:
        """What was accepted of each block but the last of a text: the next one's place tells."""
        found: dict[Place, int] = {}
        last: dict[RowKey, int] = {}
        for key, place in self.places:
            if key in last:
                found[key, last[key]] = place - last[key] - 1
            last[key] = place
        return found


def asking(
    target: Target,
    requests: Sequence[Request],
    propose: Callable[[RowKey, int], list[int]],
    width: int | None = None,
) -> Asked:
    places: list[Place] = []

    def noting(key: RowKey, place: int) -> list[int]:
        places.append((key, place))
        return propose(key, place)

    done = decode(target, requests, drafter=ScriptedDrafter(noting), policy=Policy(most=width))
    return Asked(places, done)


def blocks_at(known: dict[RowKey, list[int]], right: float) -> Callable[[RowKey, int], list[int]]:
    """Blocks that follow from their place alone, right for a while."""

    def propose(key: RowKey, place: int) -> list[int]:
        dice = random.Random(f"{key.row} {place}")
        true = [*known[key], *([0] * BLOCK)][place + 1 : place + BLOCK]
        return [t if dice.random() < right else (t + 1) % VOCABULARY for t in true]

    return propose


def verified_whole(
    target: Target,
    requests: Sequence[Request],
    propose: Callable[[RowKey, int], list[int]],
    wrong: Callable[[RowKey, int], list[int]],
) -> dict[Place, int]:
    """What verifications of whole blocks accept at every place, as the decoder does it.

    Between the blocks of one decode only wrong drafts are made, so that each decode comes to every
    fifth place and all of them together to all.
    """
    found: dict[Place, int] = {}
    for phase in range(BLOCK):

        def some(key: RowKey, place: int, phase: int = phase) -> list[int]:
            return (propose if place % BLOCK == phase else wrong)(key, place)

        asked = asking(target, requests, some)
        found |= {p: count for p, count in asked.accepted().items() if p[1] % BLOCK == phase}
    return found


@pytest.mark.parametrize("width", [1, 2, NUM_DRAFTS])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_hindsight_is_what_a_whole_verification_would_have_accepted(
    llama: Target, sampling: Sampling, width: int
) -> None:
    requests = as_requests(random_prompts(6), sampling)
    plain = texts(decode(llama, requests))
    whole = {r.key: [*r.token_ids, *plain[r.key]] for r in requests}
    propose = blocks_at(whole, right=0.75)
    logged = verified_whole(llama, requests, propose, blocks_at(whole, right=0.0))
    narrow = asking(llama, requests, propose, width)
    assert texts(narrow.completions) == plain
    seen = narrow.accepted()
    compared: list[int] = []
    for key, place in narrow.places:
        committed = whole[key][place + 1 : place + BLOCK]
        pairs = zip(propose(key, place), [*committed, *([-1] * BLOCK)], strict=False)
        accepted = num_accepted(torch.tensor([[a == b for a, b in pairs]]))
        ended = bool(is_ended(accepted, torch.tensor([len(committed)])))
        if (key, place) not in logged:  # no block followed, which would tell
            assert ended or place + int(accepted) + 3 >= len(whole[key])
            continue
        assert int(accepted) == logged[key, place]
        assert int(truncated(accepted, torch.tensor([width]))) == seen[key, place]
        share = float(sufficient_share(accepted, NUM_DRAFTS))
        assert share == pytest.approx((logged[key, place] + 1) / BLOCK)
        compared.append(int(accepted))
    assert len(compared) > 40
    assert set(compared) >= {0, 1, 2, 3, 4}
