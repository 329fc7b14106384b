"""Keeps what the target computes of each request while it decodes, for those that learn from it.

# F features (tapped layers side by side), H hidden size, N pages of KV memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaflash_batch.engine.outlet import Outlet, outlet_of
from adaflash_batch.engine.packing import ranges
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import Trajectory
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Request

_HOST = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Recording:
    """The states of one request so far, in the host's memory for its longest.

    The numbers of rows tell what is there or on its way.

    Attributes:
        features: [longest, F], of positions 0, 1, ...
        last_hidden: [longest - first_hidden, H], of positions first_hidden, ...
        num_features: rows that are filled.
        num_hidden: likewise.
        is_lost: whether some of it found no room on its way: nothing becomes of it.
    """

    features: Tensor
    last_hidden: Tensor
    num_features: int = 0
    num_hidden: int = 0
    is_lost: bool = False


class Piece(NamedTuple):
    """A request's part in a forward pass, of which `num_kept` tokens stay in its text.

    row: the packed row of its first token.
    position: that token's position.
    choice_row: the first of the rows that the lm_head was given of it.
    num_chosen: how many of these rows, from the first, chose a token of the text or would have.
    """

    recording: Recording
    row: int
    position: int
    num_kept: int
    choice_row: int
    num_chosen: int


class Capture:
    """Fills recordings from the passes of a decode and hands over trajectories; runs no pass.

    Args:
        target: whose states are kept.
        layer_ids: decoder layers whose outputs are the features.
        emit: takes the trajectory of every request that finishes without an error.
        wanted: whether the states of a request that comes now are wanted.
        num_pages: N where requests share pages, else 0.
        keeps_all: whether the decode waits where states come faster than they can leave the device;
            else requests are left out: first those that come, then those whose states find no room.
        outlet: the way of states to the host; None takes that of the target's device.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: tuple[int, ...],
        emit: Callable[[Trajectory], None],
        wanted: Callable[[], bool],
        num_pages: int = 0,
        *,
        keeps_all: bool = True,
        outlet: Outlet | None = None,
    ) -> None:
        self._wanted = wanted
        self._keeps_all = keeps_all
        self._outlet = outlet_of(target.device) if outlet is None else outlet
        self._target = target
        self._layer_ids = layer_ids
        self._emit = emit
        target.tap(layer_ids)
        target.tap_head()
        # Of what pages hold that requests share: [N * PAGE, F], handed over as it is filled.
        size = target.hidden_size * len(layer_ids)
        self._shared = self._empty(num_pages * PAGE, size, target.device)

    def wants(self) -> bool:
        """Whether the states of a request that comes now are to be kept."""
        return self._wanted() and (self._keeps_all or not self._outlet.is_busy)

    def begin(self, prompt_length: int, longest: int) -> Recording:
        """Memory for a request; the system hands it over only as it is filled."""
        size, num_layers = self._target.hidden_size, len(self._layer_ids)
        return Recording(
            features=self._empty(longest, size * num_layers, _HOST),
            last_hidden=self._empty(longest + 1 - prompt_length, size, _HOST),
        )

    def _empty(self, rows: int, columns: int, device: torch.device) -> Tensor:
        # Not made in inference mode: a trainer is to compute gradients from it.
        with torch.inference_mode(False):
            return torch.empty(rows, columns, dtype=self._target.dtype, device=device)

    def share(self, rows: Tensor, places: Tensor) -> None:
        """Keep what the last pass computed of these packed rows, beside the pages they are in.

        Args:
            places: where: page times PAGE, and the place in it.
        """
        self._shared[places] = self._target.tapped(self._layer_ids, rows)

    def recall(self, recording: Recording, pages: Sequence[int], count: int) -> None:
        """Fill in what others computed: the features of `count` tokens in these pages."""
        if recording.is_lost:
            return
        begin = recording.num_features
        whole = self._target.upload(np.array(pages[: count // PAGE], dtype=np.int64))
        found = self._shared.view(-1, PAGE, self._shared.shape[1])[whole].flatten(0, 1)
        recording.num_features = count

        def fill(features: Tensor) -> None:
            recording.features[begin:count] = features

        if not self._outlet.take((found[begin:],), fill, waits=self._keeps_all):
            recording.is_lost = True

    def record(self, pieces: Sequence[Piece]) -> None:
        """Copy what the last forward pass computed of these pieces."""
        self._outlet.drain()
        pieces = [piece for piece in pieces if not piece.recording.is_lost]
        if not pieces:
            return
        counts = [_num_fresh(piece) for piece in pieces]
        ends = [piece.row + piece.num_kept for piece in pieces]
        rows = ranges(np.array(ends) - np.array(counts), np.array(counts))
        features = self._target.tapped(self._layer_ids, self._target.upload(rows))
        choice_rows, num_chosen = zip(*((p.choice_row, p.num_chosen) for p in pieces), strict=True)
        hidden, firsts = self._outlet.pick(self._target.head_input(), choice_rows, num_chosen)
        places = list(map(_advance, pieces, counts))

        def fill(features: Tensor, hidden: Tensor) -> None:
            parts = features.split(counts)  # type: ignore[no-untyped-call]
            for piece, part, first, at in zip(pieces, parts, firsts, places, strict=True):
                states = piece.recording
                states.features[at.features : at.features + len(part)] = part
                count = piece.num_chosen
                states.last_hidden[at.hidden : at.hidden + count] = hidden[first : first + count]

        if not self._outlet.take((features, hidden), fill, waits=self._keeps_all):
            for piece in pieces:
                piece.recording.is_lost = True

    def finish(self, recording: Recording, request: Request, token_ids: Sequence[int]) -> None:
        """Hand over a finished request, once all of it is there."""
        self._outlet.then(lambda: self._hand_over(recording, request, token_ids))

    def flush(self) -> None:
        """Wait for what is on its way."""
        self._outlet.drain(to_the_end=True)

    def _hand_over(self, recording: Recording, request: Request, token_ids: Sequence[int]) -> None:
        if recording.is_lost:
            return
        with torch.inference_mode(False):
            tokens = torch.tensor(token_ids)
            # Copied: whoever keeps a trajectory must not keep memory for the longest one.
            features = recording.features[: recording.num_features].clone()
            last_hidden = recording.last_hidden[: recording.num_hidden].clone()
        self._emit(
            Trajectory(
                key=request.key,
                token_ids=tokens,
                prompt_length=len(request.token_ids),
                features=features,
                last_hidden=last_hidden,
                first_hidden=len(request.token_ids) - 1,
            )
        )


class _Place(NamedTuple):
    """Rows of a recording where a piece begins."""

    features: int
    hidden: int


def _num_fresh(piece: Piece) -> int:
    # A preempted request is computed anew: what is known already stays as it was.
    return max(piece.position + piece.num_kept - piece.recording.num_features, 0)


def _advance(piece: Piece, num_fresh: int) -> _Place:
    """Where a piece goes; the recording counts it from now on."""
    recording = piece.recording
    place = _Place(recording.num_features, recording.num_hidden)
    assert place.features >= piece.position, "a gap in the features"
    recording.num_features += num_fresh
    recording.num_hidden += piece.num_chosen
    return place
