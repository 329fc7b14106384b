"""Jobs of tiny models that learn from the first rows on, also in processes that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from folders import Listener, parts, read_rows, run, tiny_drafter_folder, tiny_model_folder
from folders import write_rows as write

from adaflash_batch.drafter.versions import VersionStore
from adaflash_batch.shards.footer import PartFooter
from adaflash_batch.shards.writer import part_name
from adaflash_batch.summary import Summary

NUM_ROWS = 48
CHUNK = 4
# Holds back two rows in every ten, wherever a job goes on.
SEED = 19203
UPDATES = 6
# A round after every 8 texts or so, and never a wait.
QUICK: dict[str, object] = {
    "adapt.when": "always",
    "adapt.share": 1.0,
    "adapt.fresh": 8,
    "adapt.updates": UPDATES,
    "adapt.batch": 6,
    "adapt.anchors": 8,
    "adapt.rate": 2e-3,
    "adapt.pull": 0.0,
    "speculation.when": "always",
}
_WORDS = ("tell", "me", "why", "rain", "sings", "to", "an", "old", "tin", "roof")


class Workplace:
    """A folder with a model, a drafter and prompts; and the jobs that were run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.drafter = folder / "model", folder / "drafter"
        self.shard = folder / "in.parquet"

    @classmethod
    def make(cls, folder: Path) -> Workplace:
        """Write model, drafter and prompts."""
        place = cls(folder)
        tiny_model_folder(place.model)
        tiny_drafter_folder(place.drafter)
        prompts = [
            " ".join(_WORDS[(row * row + step) % len(_WORDS)] for step in range(1 + row % 4))
            for row in range(NUM_ROWS)
        ]
        write(place.shard, prompts)
        return place

    def out(self, name: str) -> Path:
        """Where a job leaves its parts."""
        return self.folder / name

    def restored(self, name: str) -> Path:
        """Where a job that is watched leaves what its trainer went on from."""
        return self.folder / f"{name}.safetensors"

    def run(
        self, name: str, keys: dict[str, object] | None = None, listener: Listener | None = None
    ) -> Summary:
        """Run a job, or what is missing of it; a key of None is not given."""
        usual: dict[str, object] = {
            "output.chunk_rows": CHUNK,
            "engine.concurrency": 6,
            "sampling.n": 2,
            "sampling.max_new_tokens": 12,
            "sampling.seed": SEED,
            "speculation.drafter": str(self.drafter),
        }
        given = {key: value for key, value in (usual | (keys or {})).items() if value is not None}
        return run(self.shard, self.model, self.out(name), given, listener=listener)

    def texts(self, name: str) -> list[dict[str, Any]]:
        """All that must not depend on a drafter."""
        return read_rows(self.out(name), without=("timing", "spec"))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All output rows."""
        return read_rows(self.out(name))

    def store(self, name: str) -> VersionStore:
        """The versions that a job keeps beside its parts."""
        return VersionStore(self.out(name) / "_adaflash" / "drafter")

    def footers(self, name: str) -> list[PartFooter]:
        """Of the parts, as they were committed."""
        metadata = [pq.read_metadata(part).metadata for part in parts(self.out(name))]
        found = [PartFooter.from_metadata(each) for each in metadata]
        return sorted((f for f in found if f is not None), key=lambda footer: footer.sequence)

    def drafted(self, name: str, footer: PartFooter) -> list[tuple[int, int]]:
        """First and last version of each row of a part."""
        part = self.out(name) / part_name(footer.shard_index, footer.chunk_index)
        specs = pq.read_table(part).column("spec").to_pylist()
        return [(spec["drafter_first"], spec["drafter_last"]) for spec in specs]
