"""What a drafter is trained for, and how much of its logits may be held meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from adaflash_batch.errors import ConfigError
from adaflash_batch.kernels.opd_loss import LossKind, Terms
from adaflash_batch.kernels.vocabulary_loss import WORTH_ROWS, rows_of_whole

LengthLabel = Literal["hindsight", "truncated"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a drafter is trained for. Raises ConfigError for values out of range.

    At every position, with p the target's distribution, q the drafter's, y the hard label, at
    temperature 1:

        ce          -log q(y)
        forward_kl  sum_v p(v) log(p(v) / q(v))                         (OSD, arXiv 2310.07177)
        opd         ce_weight * ce
                    + (1 - ce_weight) * sum_v min(q(v) log(q(v) / p(v)), clip)
                                                            (AdaFlash, arXiv 2607.19223)

    Attributes:
        kind: which of them.
        ce_weight: share of the cross-entropy in `opd`; the authors run 0.8.
        clip: nats, the most that one vocabulary entry adds to the reverse KL, before anything is
            normalised; None is off. From above only: entries where q < p are negative and stay, so
            the clipped sum of a position can be below 0. A clipped entry has no gradient.
        chunk_rows: positions whose logits are held at a time, at the most.
        logit_bytes: of logits and their gradients, what may be held at a time. Where fewer than
            chunk_rows positions fit, chunks have as many as do; where those are fewer than
            WORTH_ROWS (kernels/vocabulary_loss.py), they have chunk_rows again and the
            vocabulary is cut up as well, but for losses with a bias.
        length_label: what a length head learns: `hindsight`, the whole truth; `truncated`, for
            comparison and of AdaFlash's head alone, only what the width that it asks for would
            show.
    """

    kind: LossKind = "opd"
    ce_weight: float = 0.8
    clip: float | None = None
    chunk_rows: int = 256
    logit_bytes: int = 256 << 20
    length_label: LengthLabel = "hindsight"

    def __post_init__(self) -> None:
        if self.kind not in ("ce", "forward_kl", "opd"):
            raise ConfigError(f"loss is {self.kind!r}, it must be ce, forward_kl or opd")
        if not 0.0 <= self.ce_weight <= 1.0:
            raise ConfigError(f"ce_weight is {self.ce_weight}, it must be between 0 and 1")
        if self.clip is not None and not self.clip > 0.0:
            raise ConfigError(f"clip is {self.clip} nats, it must be above 0")
        if self.length_label not in ("hindsight", "truncated"):
            raise ConfigError(
                f"length_label is {self.length_label!r}, it must be hindsight or truncated"
            )
        if self.chunk_rows < 1:
            raise ConfigError(f"chunk_rows is {self.chunk_rows}, it must be 1 or more")
        if self.logit_bytes < 1:
            raise ConfigError(f"logit_bytes is {self.logit_bytes}, it must be 1 or more")

    def positions_at_once(self, weight: Tensor, *, has_bias: bool) -> tuple[int, bool]:
        """How many positions of a head's `weight` are a chunk, and whether it is of the
        vocabulary, too."""
        fitting = rows_of_whole(len(weight), weight.element_size(), self.logit_bytes)
        if has_bias or fitting >= min(self.chunk_rows, WORTH_ROWS):
            return min(self.chunk_rows, max(fitting, 1)), False
        return self.chunk_rows, True

    @property
    def terms(self) -> Terms:
        """What is summed up at a position."""
        return Terms(self.kind, self.shares, self.clip)

    @property
    def shares(self) -> tuple[float, float]:
        """How much cross-entropy and divergence count."""
        return {
            "ce": (1.0, 0.0),
            "forward_kl": (0.0, 1.0),
            "opd": (self.ce_weight, 1.0 - self.ce_weight),
        }[self.kind]
