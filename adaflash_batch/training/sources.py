"""What a training is made from, and what that says of its folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaflash_batch import model_files, models
from adaflash_batch.training.beginning import origin_of
from adaflash_batch.training.claims import StoreSettings, settings_of
from adaflash_batch.training.parts import count_layers, tapped_layers
from adaflash_batch.training.plan import TrainingPlan
from adaflash_batch.training.prompts import PromptFiles


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompts, target, and the drafter to begin from, found but not loaded.

    Attributes:
        files: the prompts.
        model: folder of the target.
        num_layers: of the target.
        layers: of the target that the drafter reads.
        digests: of prompts and target.
        origin: what to say of the drafter that it begins from, see `origin_of`.
    """

    plan: TrainingPlan
    files: PromptFiles
    model: Path
    num_layers: int
    layers: tuple[int, ...]
    digests: dict[str, object]
    origin: dict[str, object] | None

    @staticmethod
    def of(plan: TrainingPlan, notify: Callable[[str], None]) -> Sources:
        """Find them. Raises AdaflashError for what cannot be found or read."""
        origin = origin_of(plan)
        files = PromptFiles.open(
            plan.prompts,
            plan.prompt_column,
            plan.messages_column,
            held_out=plan.held_out,
            seed=plan.seed,
        )
        model = models.locate(plan.model, notify=notify)
        num_layers = count_layers(model, plan.model)
        digests: dict[str, object] = {"model": model_files.model_identity(model)}
        digests["prompts"] = files.digests()
        layers = tapped_layers(plan, num_layers)
        return Sources(plan, files, model, num_layers, layers, digests, origin)

    def facts(self, settings: StoreSettings) -> dict[str, object]:
        """What decides the weights, with a store of these settings."""
        own: dict[str, object] = {"concurrency": settings.concurrency}
        own["begin_from"] = self.origin and self.origin["identity"]
        return self.plan.facts() | self.digests | own

    def stored_facts(self) -> dict[str, object]:
        """What decides the texts."""
        return self.plan.stored_facts() | self.digests

    def store_settings(self, notify: Callable[[str], None]) -> StoreSettings:
        """How the plan's store is filled: as it was begun, or as the plan asks for."""
        asked = StoreSettings(self.layers, self.plan.concurrency)
        settings = settings_of(self.plan.store, self.stored_facts(), asked, self.num_layers)
        if settings.concurrency != asked.concurrency:
            notify(
                f"{self.plan.store} goes on with the --concurrency that it was begun with, "
                f"{settings.concurrency}"
            )
        return settings
