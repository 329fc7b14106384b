"""States leave a device in order, in bounded memory, and no request is handed over in part."""

from __future__ import annotations

from typing import Any

import torch
from test_device_passes import GREEDY
from tiny import as_requests, random_prompts, tiny_model
from torch import Tensor

from adaflash_batch.engine.capture import Capture
from adaflash_batch.engine.decoder import Decoder
from adaflash_batch.engine.outlet import DeviceOutlet
from adaflash_batch.engine.target import Target
from adaflash_batch.exchange import Trajectory


class SlowLink:
    """Copies that are whole only when somebody waits for them, or after so many others."""

    def __init__(self, lag: int = 10**9) -> None:
        self.lag, self.num_sent, self.num_waits = lag, 0, 0

    def send(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        self.num_sent += 1
        copies = tuple(torch.full_like(tensor, float("nan")) for tensor in tensors)
        return copies, (self.num_sent, copies, tuple(tensor.clone() for tensor in tensors))

    def wait(self, mark: Any) -> None:
        self.num_waits += 1
        _, copies, tensors = mark
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    def is_reached(self, mark: Any) -> bool:
        return bool(self.num_sent - mark[0] >= self.lag)


def test_nothing_overtakes_and_room_is_bounded() -> None:
    link, seen = SlowLink(), list[object]()
    outlet = DeviceOutlet(link, torch.from_numpy, most_waiting=40)
    row = torch.ones(4)
    assert outlet.take((row,), lambda x: seen.append(x.tolist()), waits=False)
    outlet.then(lambda: seen.append("after the first"))
    assert outlet.take((row * 2,), lambda x: seen.append(x.tolist()), waits=False)
    assert not outlet.take((row * 3,), lambda x: seen.append(x.tolist()), waits=False)
    outlet.drain()
    assert seen == []
    assert outlet.take((row * 4,), lambda x: seen.append(x.tolist()), waits=True)
    assert seen == [[1.0] * 4]
    outlet.drain(to_the_end=True)
    assert seen == [[1.0] * 4, "after the first", [2.0] * 4, [4.0] * 4]
    outlet.then(lambda: seen.append("at once"))
    assert seen[-1] == "at once"


def trajectories(outlet: DeviceOutlet | None, *, keeps_all: bool = True) -> list[Trajectory]:
    target, kept = Target.of(tiny_model("llama"), "tiny", kernels="torch"), list[Trajectory]()
    decoder = Decoder(target, kv_tokens=4096, max_running=3)
    decoder.capture((0, 2), kept.append)
    pages = 4096 // 32
    decoder._keeping.capture = Capture(
        target, (0, 2), kept.append, lambda: True, pages, keeps_all=keeps_all, outlet=outlet
    )
    for request in as_requests(random_prompts(5, seed=2, longest=70), GREEDY):
        decoder.add(request)
    while decoder.has_work:
        decoder.step()
    return sorted(kept, key=lambda each: each.key)


def test_late_copies_make_the_same_trajectories() -> None:
    expected = trajectories(None)
    for link in (SlowLink(lag=2), SlowLink()):
        found = trajectories(DeviceOutlet(link, torch.from_numpy))
        assert [each.key for each in found] == [each.key for each in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.token_ids, theirs.token_ids)
            assert torch.equal(mine.features, theirs.features)
            assert mine.last_hidden is not None
            assert theirs.last_hidden is not None
            assert torch.equal(mine.last_hidden, theirs.last_hidden)


def test_without_room_requests_are_left_out_or_the_decode_waits() -> None:
    expected, room = trajectories(None), 16000
    link = SlowLink()
    waited = trajectories(DeviceOutlet(link, torch.from_numpy, room))
    assert [each.key for each in waited] == [each.key for each in expected]
    assert link.num_waits > 0
    some = trajectories(DeviceOutlet(SlowLink(lag=1), torch.from_numpy, room), keeps_all=False)
    assert 0 < len(some) < len(expected)
    whole = {each.key: each for each in expected}
    for each in some:
        assert torch.equal(each.features, whole[each.key].features)
