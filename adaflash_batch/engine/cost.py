"""What a step takes, learnt while steps run: the price that drafts are weighed against.

A step's seconds are the sum of three parts: drafting (by requests drafted for), the target's pass
with verification (by tokens, rows of logits and context work), and the rest (by requests). Each
is a CostCurve of a machine of constant speed; what else runs on the machine is one factor on all of
them, a median of what the target's passes took of late over what the curve says. No clock is read.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from adaflash_batch.durable import write_whole
from adaflash_batch.engine.cost_curve import CostCurve, Floats

_FORMAT = 1
# The slowness of a step is the median of the window that it stands in the middle of; that of what
# comes next is the last window's.
_WINDOW = 15
_HALF = _WINDOW // 2
_ENOUGH = 16
_MOST_UNSETTLED = 24
_KEPT_PER_BIN = 8
_MOST = 1e15  # no seconds or keys read are more
_WORKS = {"target": 2, "draft": 0, "rest": 0}


class _Unsettled(NamedTuple):
    """An observation made at a slowness that is not certain yet.

    step: passes of the target before it.
    """

    step: int
    curve: CostCurve
    place: tuple[int, int]
    seconds: float


class StepCost:
    """Predicts seconds of steps. All predictions are for the machine as busy as it is at present.

    They never fall where tokens, requests, rows or context grow, and are never negative; nothing
    costs anything before it was observed.

    Args:
        about: machine and model, in words; what was saved about others is not restored.

    Attributes:
        slowness: what steps take of late over what they would on the machine of the curves.
    """

    def __init__(self, about: str = "") -> None:
        self.about = about
        self._num_passes = 0
        self._begin({name: CostCurve(works) for name, works in _WORKS.items()})

    def _begin(self, curves: dict[str, CostCurve]) -> None:
        """With what these know, on a machine as busy as it was."""
        self._curves, self.slowness = curves, 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._unsettled: deque[_Unsettled] = deque()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._begin({name: CostCurve(works) for name, works in _WORKS.items()})

    def change_pace(self, ratio: float) -> None:
        """Everything takes so many times as long as predicted, from now on."""
        self.slowness *= ratio
        self._ratios.extend([self.slowness] * _WINDOW)

    @property
    def is_known(self) -> bool:
        """Whether enough passes of the target were seen for its predictions to be believed."""
        return self._curves["target"].num_seen >= _ENOUGH

    def observe_target(self, tokens: int, rows: int, context: int, seconds: float) -> None:
        """Take in a pass with its verification.

        Args:
            tokens: that entered the target.
            rows: of them whose logits were wanted.
            context: sum over the tokens of the keys that each attends to.
            seconds: what it took.
        """
        if tokens < 1 or not _is_time(seconds):
            return
        curve, work = self._curves["target"], (rows, context)
        ratio = self.slowness
        if curve.is_near(tokens):  # else nothing tells a slow machine from a dear step
            ratio = seconds / max(float(curve.seconds(tokens, work)), 1e-12)
        self._ratios.append(ratio)
        self.slowness = statistics.median(self._ratios)
        self._num_passes += 1
        self._settle()
        self._add(curve, tokens, work, seconds)

    def observe_draft(self, requests: int, seconds: float) -> None:
        """Take in a drafter's pass for so many requests."""
        if requests >= 1 and _is_time(seconds):
            self._add(self._curves["draft"], requests, (), seconds)

    def forget_drafts(self) -> None:
        """What drafting takes is to be learnt anew."""
        self._curves["draft"] = CostCurve(_WORKS["draft"])

    def observe_rest(self, requests: int, seconds: float) -> None:
        """Take in what else a step of so many requests took."""
        if requests >= 1 and _is_time(seconds):
            self._add(self._curves["rest"], requests, (), seconds)

    def target(self, tokens: npt.ArrayLike, rows: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """Seconds of passes of the target; arrays that broadcast together (`observe_target`)."""
        return self.slowness * self._curves["target"].seconds(tokens, (rows, context))

    def draft(self, requests: npt.ArrayLike) -> Floats:
        """Seconds of drafting for so many requests; none takes none."""
        return self._of("draft", requests)

    def rest(self, requests: npt.ArrayLike) -> Floats:
        """Seconds of all else in a step of so many requests; none takes none."""
        return self._of("rest", requests)

    def draft_at(self, requests: int) -> float:
        """`draft` of one number."""
        return self._at("draft", requests)

    def rest_at(self, requests: int) -> float:
        """`rest` of one number."""
        return self._at("rest", requests)

    def _at(self, name: str, requests: int) -> float:
        return self.slowness * self._curves[name].at(requests) if requests > 0 else 0.0

    def _of(self, name: str, requests: npt.ArrayLike) -> Floats:
        counts = np.asarray(requests)
        return np.where(counts > 0, self.slowness * self._curves[name].seconds(counts), 0.0)

    def _add(self, curve: CostCurve, count: int, work: Sequence[float], seconds: float) -> None:
        if len(self._unsettled) >= _MOST_UNSETTLED:  # no pass of the target comes to settle them
            oldest = self._unsettled.popleft()
            oldest.curve.settle(oldest.place, oldest.seconds / self.slowness)
        place = curve.add(count, work, seconds / self.slowness)
        self._unsettled.append(_Unsettled(self._num_passes, curve, place, seconds))

    def _settle(self) -> None:
        """Say what the steps took whose window is full."""
        while self._unsettled and self._unsettled[0].step + _HALF <= self._num_passes:
            _, curve, place, seconds = self._unsettled.popleft()
            curve.settle(place, seconds / self.slowness)

    def state(self) -> dict[str, Any]:
        """What is known, as plain JSON; of a bin of counts only the last that was observed."""
        parts = {
            name: [[_short(each) for each in row] for row in self._rows(curve)]
            for name, curve in self._curves.items()
        }
        return {"format": _FORMAT, "about": self.about, "parts": parts}

    def _rows(self, curve: CostCurve) -> list[list[float]]:
        kept = curve.rows(_KEPT_PER_BIN)
        return [[count, seconds * self.slowness, *work] for count, seconds, *work in kept]

    def restore(self, state: object) -> str | None:
        """Begin with what another knew, on a machine as busy as it was last.

        Returns why it is of no use, in which case nothing changes; None where all is well.
        """
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            return "it is not a record of step costs of this version"
        if state.get("about") != self.about:
            return f"it is about {state.get('about')}, not about {self.about}"
        curves = {name: CostCurve(works) for name, works in _WORKS.items()}
        for name, curve in curves.items():
            if not _refill(curve, state.get("parts"), name, _WORKS[name]):
                return f"its part {name} is damaged"
        self._begin(curves)
        return None

    def save(self, path: Path) -> None:
        """Write `state` in place of what the file held, which stays whole till then."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.state(), separators=(",", ":")).encode())

    def load(self, path: Path) -> str | None:
        """`restore` from a file; a damaged or a foreign one changes nothing. See there."""
        try:
            return self.restore(json.loads(path.read_bytes()))
        except OSError as error:
            return f"it cannot be read ({error.strerror})"
        except (ValueError, RecursionError):
            return "it is not JSON"


def _refill(curve: CostCurve, parts: object, name: str, num_works: int) -> bool:
    """Whether a part's observations were all as they should be; they are in the curve then."""
    rows = parts.get(name) if isinstance(parts, Mapping) else None
    if not isinstance(rows, list):
        return False
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 + num_works:
            return False
        if not all(isinstance(each, int | float) and 0 <= each < _MOST for each in row):
            return False
        count, seconds, *work = row
        if count < 1 or seconds == 0:
            return False
        curve.settle(curve.add(round(count), work, seconds), seconds)
    return True


def _is_time(seconds: float) -> bool:
    return 0.0 < seconds < math.inf


def _short(number: float) -> float:
    """Enough digits for a measurement; whole numbers stay exact."""
    return float(f"{number:.10g}") if number.is_integer() else float(f"{number:.4g}")
