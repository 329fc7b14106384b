"""Keeps what the target computes of each request while it decodes, for those that learn from it.

# F features (tapped layers side by side), H hidden size, N pages of KV memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import Trajectory
from adaflash_batch.kernels.page_size import PAGE
from adaflash_batch.request import Request


@dataclass(slots=True, eq=False)
class Recording:
    """The states of one request so far, in memory for its longest; on the target's device.

    Attributes:
        features: [longest, F], of positions 0, 1, ...
        last_hidden: [longest - first_hidden, H], of positions first_hidden, ...
        num_features: rows that are filled.
        num_hidden: likewise.
    """

    features: Tensor
    last_hidden: Tensor
    num_features: int = 0
    num_hidden: int = 0


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
    """

    def __init__(
        self,
        target: Target,
        layer_ids: tuple[int, ...],
        emit: Callable[[Trajectory], None],
        wanted: Callable[[], bool],
        num_pages: int = 0,
    ) -> None:
        self.wanted = wanted
        self._target = target
        self._layer_ids = layer_ids
        self._emit = emit
        target.tap(layer_ids)
        target.tap_head()
        # Of what pages hold that requests share: [N * PAGE, F], handed over as it is filled.
        self._shared = self._empty(num_pages * PAGE, target.hidden_size * len(layer_ids))

    def begin(self, prompt_length: int, longest: int) -> Recording:
        """Memory for a request; the system hands it over only as it is filled."""
        size, num_layers = self._target.hidden_size, len(self._layer_ids)
        return Recording(
            features=self._empty(longest, size * num_layers),
            last_hidden=self._empty(longest + 1 - prompt_length, size),
        )

    def _empty(self, rows: int, columns: int) -> Tensor:
        # Not made in inference mode: a trainer is to compute gradients from it.
        with torch.inference_mode(False):
            dtype, device = self._target.dtype, self._target.device
            return torch.empty(rows, columns, dtype=dtype, device=device)

    def share(self, rows: Tensor, places: Tensor) -> None:
        """Keep what the last pass computed of these packed rows, beside the pages they are in.

        Args:
            places: where: page times PAGE, and the place in it.
        """
        self._shared[places] = self._target.tapped(self._layer_ids, rows)

    def recall(self, recording: Recording, pages: Sequence[int], count: int) -> None:
        """Fill in what others computed: the features of `count` tokens in these pages."""
        begin, whole = recording.num_features, torch.tensor(pages[: count // PAGE])
        found = self._shared.view(-1, PAGE, self._shared.shape[1])[whole].flatten(0, 1)
        recording.features[begin:count] = found[begin:]
        recording.num_features = count

    def record(self, pieces: Sequence[Piece]) -> None:
        """Copy what the last forward pass computed of these pieces."""
        if not pieces:
            return
        # A preempted request is computed anew: what is known already stays as it was.
        fresh = [max(p.position + p.num_kept - p.recording.num_features, 0) for p in pieces]
        ends = [p.row + p.num_kept for p in pieces]
        rows = [torch.arange(end - new, end) for end, new in zip(ends, fresh, strict=True)]
        features = self._target.tapped(self._layer_ids, torch.cat(rows))
        for piece, part in zip(pieces, features.split(fresh), strict=True):  # type: ignore[no-untyped-call]
            recording = piece.recording
            assert recording.num_features >= piece.position, "a gap in the features"
            begin, recording.num_features = recording.num_features, piece.position + piece.num_kept
            recording.num_features = max(begin, recording.num_features)
            recording.features[begin : recording.num_features] = part
        self._record_hidden(pieces)

    def _record_hidden(self, pieces: Sequence[Piece]) -> None:
        hidden = self._target.head_input()
        for piece in pieces:
            recording, begin = piece.recording, piece.recording.num_hidden
            recording.num_hidden = end = begin + piece.num_chosen
            recording.last_hidden[begin:end] = hidden[piece.choice_row :][: piece.num_chosen]

    def finish(self, recording: Recording, request: Request, token_ids: Sequence[int]) -> None:
        """Hand over a finished request."""
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
