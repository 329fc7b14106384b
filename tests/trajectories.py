"""Small random trajectories, and the blocks made of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from nets import TINY, random_drafter, random_rows
from torch import Tensor

from adaflash_batch.adapt.block_attention import forward_blocks
from adaflash_batch.adapt.blocks import Blocks, pack_features, sample_blocks
from adaflash_batch.adapt.optimise import DrafterTrainer
from adaflash_batch.adapt.publishing import MailboxPublisher
from adaflash_batch.adapt.replay import ReplayPool
from adaflash_batch.adapt.scoring import Scorer
from adaflash_batch.adapt.trainer import OnlineTrainer, RoundPlan
from adaflash_batch.drafter.config import DrafterConfig
from adaflash_batch.exchange import Trajectory, TrajectoryMailbox, WeightsMailbox
from adaflash_batch.request import RowKey


def trajectory(row: int, length: int = 20, config: DrafterConfig = TINY) -> Trajectory:
    generator = torch.Generator().manual_seed(row)
    return Trajectory(
        key=RowKey(0, row, 0),
        token_ids=torch.randint(0, config.vocab_size, (length,), generator=generator),
        prompt_length=5,
        features=random_rows(length - 1, config.num_features, torch.float32, row),
        last_hidden=random_rows(length - 5, config.hidden_size, torch.float32, row + 100),
        first_hidden=4,
    )


def of_size(row: int, num_bytes: int) -> Trajectory:
    """One whose tensors take this much memory, and say nothing."""
    nothing = torch.empty(0, dtype=torch.uint8)
    states = torch.empty(num_bytes, 1, dtype=torch.uint8)
    return Trajectory(RowKey(0, row, 0), nothing, 1, states, None, 0)


TRAJECTORIES = [trajectory(row, 15 + row) for row in range(6)]
TABLE = random_rows(TINY.vocab_size, TINY.hidden_size, torch.float32, 77)


def blocks_of(config: DrafterConfig) -> tuple[Blocks, Tensor, Tensor]:
    """(blocks, output of the net, teacher rows) of some trajectories, float64."""
    chosen = [trajectory(row, 14 + row, config) for row in range(3)]
    blocks = sample_blocks(chosen, config, 4.0, 20, torch.Generator().manual_seed(0))
    net, features = random_drafter(config), pack_features(blocks, chosen).double()
    embeddings = TABLE.double()[blocks.token_ids.flatten()]
    hidden = forward_blocks(net, blocks, features, embeddings).detach()
    teacher = torch.cat([t.last_hidden for t in chosen if t.last_hidden is not None]).double()
    return blocks, hidden, teacher


_CYCLE = (3, 17, 42, 8, 61)


def learner(core: DrafterTrainer, scorer: Scorer) -> tuple[OnlineTrainer, WeightsMailbox]:
    """A trainer that has taken in thirty texts, and where what it publishes goes."""
    plenty = 2**26
    sizes = {"recent_bytes": plenty, "replay_bytes": plenty, "held_back_bytes": plenty}
    inbox, outbox = TrajectoryMailbox(plenty), WeightsMailbox()
    plan = RoundPlan(updates=25, batch=4, rate=1e-2, least_new=8, least_held_back=3, seed=5)
    pool = ReplayPool(seed=1, held_back_share=0.3, **sizes)
    trainer = OnlineTrainer(core, inbox, pool, scorer, MailboxPublisher(outbox), plan)
    for each in map(repeating, range(30)):
        inbox.put(each)
    trainer.collect()
    return trainer, outbox


def repeating(row: int, length: int = 25) -> Trajectory:
    """A text that goes round a few tokens, so that a drafter can learn all of it."""
    tokens = torch.tensor([_CYCLE[(row + place) % len(_CYCLE)] for place in range(length)])
    return replace(trajectory(row, length), token_ids=tokens, last_hidden=TABLE[tokens[5:]])
