"""Each part of the family against its formula written as loops; growing; gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CAUSAL, DFLASH2, DSPARK, TINY, packed_block, random_drafter, random_rows
from torch import Tensor

from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.drafter.convolution import BlockConvolution
from adaflash_batch.drafter.growing import grow_dflash2
from adaflash_batch.drafter.markov import MarkovHead
from adaflash_batch.drafter.model import DFlash, initialise
from adaflash_batch.drafter.selector import CandidateSelector, best_candidates
from adaflash_batch.errors import ConfigError

V, H, R, N, B = 23, 6, 4, 5, 3  # vocabulary, hidden, rank, slots, blocks
GATED = dataclasses.replace(DSPARK, markov_head_type="gated")
RNN = dataclasses.replace(DSPARK, markov_head_type="rnn", confidence_head_with_markov=False)


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.7, generator=generator)


def head_of(
    config: DrafterConfig, dtype: torch.dtype = torch.float64
) -> Callable[[Tensor], Tensor]:
    weight = random_rows(config.vocab_size, config.hidden_size, dtype, seed=77)
    return lambda rows: rows @ weight.T


@pytest.mark.parametrize(("taps", "group"), [(2, 3), (3, 2), (1, 6), (5, 1)])
def test_the_convolution_is_a_loop_over_slots_taps_and_channels(taps: int, group: int) -> None:
    convolution = BlockConvolution(H, taps, group).double()
    randomise(convolution)
    base, projection = convolution.base_kernel, convolution.kernel_projection.weight
    x = random_rows(2 * N, H, torch.float64, 1)

    def loop(z: Tensor, side: int) -> Tensor:
        result = torch.zeros_like(z)
        for row in range(len(z)):
            for tap in range(taps):
                if row % N < tap:  # the slots before the anchor are zeros
                    continue
                for channel in range(H):
                    index = (side * taps + tap) * (H // group) + channel // group
                    delta = float(projection[index] @ x[row])
                    coefficient = float(base[side, tap, channel]) + delta
                    result[row, channel] += coefficient * float(z[row - tap, channel])
        return result

    def sublayer(y: Tensor) -> Tensor:
        return (3 * y).tanh()

    with torch.no_grad():
        expected = loop(sublayer(loop(x, 0)), 1)
        torch.testing.assert_close(
            convolution.around(sublayer, x, N), expected, atol=1e-12, rtol=1e-12
        )


def test_no_slot_sees_a_later_one_or_another_block_through_the_convolution() -> None:
    convolution = BlockConvolution(H, 2, 2).double()
    randomise(convolution)
    x = random_rows(2 * N, H, torch.float64, 1)
    with torch.no_grad():
        before = convolution.around(torch.tanh, x, N)
        x[N] += 1.0
        changed = (convolution.around(torch.tanh, x, N) != before).any(dim=-1)
    assert changed.tolist() == [False] * N + [True] * 3 + [False] * 2


def loop_markov(
    head: MarkovHead, kind: str, hidden: Tensor, logits: Tensor, anchor: int
) -> tuple[list[int], list[Tensor]]:
    """(drafts, biases) of one block, from the formulas."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    state, previous = torch.zeros(R, dtype=torch.float64), anchor
    drafts, biases = [], []
    for h, unary in zip(hidden, logits, strict=True):
        embedded = w1[previous]
        if kind == "vanilla":
            latent = embedded
        elif kind == "gated":
            assert head.gate_proj is not None
            gate = head.gate_proj.weight @ torch.cat((h, embedded)) + head.gate_proj.bias
            latent = embedded / (1 + torch.exp(-gate))
        else:
            assert head.joint_proj is not None
            joined = torch.cat((state, embedded, h))
            joined = head.joint_proj.weight @ joined + head.joint_proj.bias
            keep = 1 / (1 + torch.exp(-joined[:R]))
            state = keep * state + (1 - keep) * torch.tanh(joined[R : 2 * R])
            latent = torch.tanh(joined[2 * R :])
        biases.append(w2 @ latent)
        previous = int((unary + biases[-1]).argmax())
        drafts.append(previous)
    return drafts, biases


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_follows_its_formula(kind: str) -> None:
    head = MarkovHead(V, H, R, kind).double()
    randomise(head)
    hidden = random_rows(B * N, H, torch.float64, 1).view(B, N, H)
    logits = random_rows(B * N, V, torch.float64, 2).view(B, N, V)
    anchors = torch.tensor([3, 0, 22])
    with torch.no_grad():
        drafts = head.walk(hidden, logits, anchors)
        previous = torch.cat((anchors[:, None], drafts[:, :-1]), dim=1)
        bias = head.bias(hidden, previous)
        for block in range(B):
            anchor = int(anchors[block])
            expected = loop_markov(head, kind, hidden[block], logits[block], anchor)
            assert drafts[block].tolist() == expected[0]
            torch.testing.assert_close(bias[block], torch.stack(expected[1]))
    assert (drafts != logits.argmax(-1)).any()
    assert torch.equal((logits + bias).argmax(-1), drafts)


def brute_force_walk(
    selector: CandidateSelector, hidden: Tensor, logits: Tensor, anchor: int, top_k: int
) -> list[int]:
    """Every pair of candidates scored by itself."""
    a, b = selector.predecessor_codebook.tolist(), selector.successor_codebook.tolist()
    path = [anchor]
    for h, unary in zip(hidden, logits.tolist(), strict=True):
        g = (selector.hidden_projection.weight @ h).tolist()
        candidates = sorted(range(len(unary)), key=lambda c: (-unary[c], c))[:top_k]
        scores = {
            c: unary[c] + sum(a[path[-1]][r] * g[r] * b[c][r] for r in range(R)) for c in candidates
        }
        path.append(max(candidates, key=lambda c: scores[c]))
    return path[1:]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, V), whole=st.booleans())
def test_the_selectors_walk_is_the_brute_force_one(seed: int, top_k: int, whole: bool) -> None:
    """Whole numbers make equal scores, where the first candidate wins."""
    selector = CandidateSelector(V, H, R)
    randomise(selector, seed)
    hidden = random_rows(B * N, H, torch.float32, seed + 1).view(B, N, H)
    logits = random_rows(B * N, V, torch.float32, seed + 2).view(B, N, V)
    if whole:
        logits, hidden, top_k = logits.round(), hidden.round(), V
        for parameter in selector.parameters():
            parameter.data.round_()
    anchors = torch.tensor([1, 5, 9])
    with torch.no_grad():
        best, candidates = best_candidates(logits, top_k)
        drafts = selector.walk(hidden, best, candidates, anchors)
        for block in range(B):
            anchor = int(anchors[block])
            expected = brute_force_walk(selector, hidden[block], logits[block], anchor, top_k)
            assert drafts[block].tolist() == expected


def test_the_walk_is_greedy_and_depends_on_what_was_chosen() -> None:
    selector = CandidateSelector(V, H, R)
    randomise(selector)
    hidden = random_rows(N, H, torch.float32, 1)[None]
    best, candidates = best_candidates(random_rows(N, V, torch.float32, 2)[None], 16)
    with torch.no_grad():
        paths = {
            tuple(selector.walk(hidden, best, candidates, torch.tensor([anchor]))[0].tolist())
            for anchor in range(V)
        }
        unary = tuple(best.argmax(-1)[0].tolist())
    assert len(paths) == 3
    assert unary not in paths


def test_candidates_come_best_first_and_lowest_id_first_among_equals() -> None:
    values = torch.tensor([[2.0, 5.0, 5.0, -1.0, 5.0, 2.0]])
    best, ids = best_candidates(values, 5)
    assert ids.tolist() == [[1, 2, 4, 0, 5]]
    assert best.tolist() == [[5.0, 5.0, 5.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    "config", [TINY, DSPARK, GATED, RNN, DFLASH2, CAUSAL], ids=lambda c: c.member
)
def test_what_is_proposed(config: DrafterConfig) -> None:
    model, head = random_drafter(config), head_of(config)
    hidden = random_rows(B * 5, config.hidden_size, torch.float64, 4)
    anchors = torch.tensor([1, 50, 99])
    with torch.no_grad():
        drafts = model.propose(hidden, anchors, head)
        logits = head(hidden).view(B, 5, -1)
        if config.member == "DFlash":
            expected = logits[:, 1:].argmax(-1)
        elif config.member == "DSpark":
            assert model.markov_head is not None
            expected = model.markov_head.walk(hidden.view(B, 5, -1), logits, anchors)
        else:
            assert model.candidate_selector is not None
            scaled = 9 * torch.tanh(0.6 * logits[:, 1:].float() / 9)
            best, candidates = best_candidates(scaled, 7)
            rows = hidden.view(B, 5, -1)[:, 1:]
            expected = model.candidate_selector.walk(rows, best, candidates, anchors)
    assert drafts.shape == (B, config.num_drafts)
    assert drafts.dtype == torch.int64
    assert torch.equal(drafts, expected)
    assert torch.equal(drafts, model.propose(hidden, anchors, head))


def test_a_grown_drafter_drafts_exactly_what_the_ungrown_one_does() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        net = random_drafter(TINY, dtype)
        grown = grow_dflash2(net, torch.Generator().manual_seed(5))
        assert (grown.config.member, grown.config.num_drafts) == ("DFlash 2", 4)
        assert {parameter.dtype for parameter in grown.parameters()} == {dtype}
        with torch.no_grad():
            contexts = [net.context(random_rows(n, 144, dtype, n)) for n in (9, 0)]
            blocks = [random_rows(5, 48, dtype, 60 + n) for n in (9, 0)]
            before = packed_block(net, contexts, blocks, [0, 4])
            after = packed_block(grown.fuse(), contexts, blocks, [0, 4])
            assert torch.equal(after, before)
            anchors = torch.tensor([3, 4])
            drafts = grown.propose(after, anchors, head_of(TINY, dtype))
            assert torch.equal(drafts, net.propose(before, anchors, head_of(TINY, dtype)))
            # Whole numbers make equal logits.
            assert torch.equal(
                grown.propose(after, anchors, lambda rows: head_of(TINY)(rows.double()).round()),
                net.propose(before, anchors, lambda rows: head_of(TINY)(rows.double()).round()),
            )


def test_growing_depends_on_the_generator_only_and_leaves_the_net_alone() -> None:
    net = random_drafter(TINY, torch.float32)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    grown = [grow_dflash2(net, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    books = [one.state_dict()["candidate_selector.predecessor_codebook"] for one in grown]
    assert torch.equal(books[0], books[1])
    assert not torch.equal(books[0], books[2])
    assert 0.018 < books[0].std().item() < 0.022
    with torch.no_grad():
        for parameter in grown[0].parameters():
            parameter.add_(1.0)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("config", [DSPARK, DFLASH2], ids=["dspark", "dflash2"])
def test_only_dflash_grows(config: DrafterConfig) -> None:
    with pytest.raises(ConfigError, match=f"a {config.member} drafter cannot grow"):
        grow_dflash2(random_drafter(config), torch.Generator())


def test_growing_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="conv_group_size 7 does not divide hidden_size 48"):
        grow_dflash2(random_drafter(TINY), torch.Generator(), conv_group_size=7)


def teacher_forced_loss(model: DFlash, labels: Tensor) -> Tensor:
    """A loss that every part of the net has a share in. labels: ids [1, N + 1], anchor first."""
    config, head = model.config, head_of(model.config, model.fc.weight.dtype)
    dtype = model.fc.weight.dtype
    context = model.context(random_rows(6, config.num_features, dtype, 5))
    embeddings = random_rows(5, config.hidden_size, dtype, 6)
    rows = model.drafting_rows(packed_block(model, [context], [embeddings], [0]))
    previous, wanted = labels[:, :-1], labels[:, 1:]
    logits = model.scaled(head(rows))
    loss = torch.zeros(())
    if model.markov_head is not None:
        logits = logits + model.markov_head.bias(rows, previous)
    if model.confidence_head is not None:
        loss = loss + model.confidence(rows, previous).float().square().sum()
    if model.candidate_selector is not None:
        every = torch.arange(config.vocab_size).expand(*wanted.shape, -1)
        logits = logits + model.candidate_selector.edges(rows, previous, every)
    return loss + F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


@pytest.mark.parametrize("config", [TINY, DSPARK, GATED, RNN, DFLASH2, CAUSAL])
def test_gradients_reach_every_parameter(config: DrafterConfig) -> None:
    model = random_drafter(config)
    labels = torch.arange(config.num_drafts + 1)[None] * 3
    torch.autograd.backward(teacher_forced_loss(model, labels))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_a_grown_drafter_learns_with_all_of_its_parts() -> None:
    net = random_drafter(TINY, torch.float32)
    grown = grow_dflash2(net, torch.Generator().manual_seed(5))
    optimiser = torch.optim.SGD(grown.parameters(), lr=0.5)
    labels = torch.arange(5)[None] * 3
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = teacher_forced_loss(grown, labels)
        torch.autograd.backward(loss)
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    fresh = grow_dflash2(net, torch.Generator().manual_seed(5)).state_dict()
    for name, tensor in grown.state_dict().items():
        assert not torch.equal(tensor, fresh[name]), name


def test_new_parts_begin_without_effect() -> None:
    plain = initialise(TINY, torch.Generator().manual_seed(3))
    for config in (DSPARK, DFLASH2):
        config = dataclasses.replace(config, input_embedding_scale=1.0)
        model = initialise(config, torch.Generator().manual_seed(3))
        model.load_state_dict(plain.state_dict(), strict=False)
        embeddings = random_rows(5, 48, torch.float32, 6)
        contexts = [random_rows(4, 48, torch.float32, 7)]
        with torch.no_grad():
            hidden = packed_block(model, contexts, [embeddings], [0])
            assert torch.equal(hidden, packed_block(plain, contexts, [embeddings], [0]))
            head = head_of(config, torch.float32)
            drafts = model.propose(hidden, torch.tensor([8]), head)
            assert torch.equal(drafts, head(model.drafting_rows(hidden)).argmax(-1))
        biases = [p for name, p in model.named_parameters() if name.endswith(".bias")]
        assert all(not bias.any() for bias in biases)


def test_the_confidence_head_reads_the_state_and_the_token_before() -> None:
    model = random_drafter(DSPARK)
    rows = random_rows(5, 48, torch.float64, 1)[None]
    previous = torch.tensor([[4, 9, 1, 0, 99]])
    assert model.markov_head is not None
    assert model.confidence_head is not None
    weight, bias = model.confidence_head.proj.weight[0], model.confidence_head.proj.bias[0]
    with torch.no_grad():
        found = model.confidence(rows, previous)[0]
        for slot in range(5):
            embedded = model.markov_head.markov_w1.weight[previous[0, slot]]
            expected = weight @ torch.cat((rows[0, slot], embedded)) + bias
            assert math.isclose(found[slot], expected, abs_tol=1e-12)
    alone = random_drafter(RNN).confidence(rows, previous)
    assert alone.shape == (1, 5)
