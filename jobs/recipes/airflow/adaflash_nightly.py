"""DAG for Airflow 3: completions of each night's prompts. Goes, with batch_command.py, to the DAGs.

The worker's PATH has `adaflash-batch`; the paths below are on a file system that it shares with
what writes the prompts. A night whose folder is missing fails: there should have been prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator
from batch_command import BatchCommand, Verdict, verdict

try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
except ImportError:  # Airflow 3.0 and 3.1
    from airflow.exceptions import AirflowException, AirflowFailException


class AdaflashBatchOperator(BaseOperator):
    """`adaflash-batch` with these arguments; its last line on stdout becomes the task's XCom."""

    template_fields = ("arguments",)

    def __init__(self, *, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arguments = arguments
        self._command: BatchCommand | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run it; raise what makes Airflow try again, or not."""
        self._command = BatchCommand(["adaflash-batch", *self.arguments])
        code, summary = self._command.run(self.log.info)
        outcome = verdict(code)
        said = f"exit code {code}: {outcome.value} {summary.get('message') or ''}".rstrip()
        if outcome is Verdict.RUN_AGAIN:
            raise AirflowException(said)
        if outcome is Verdict.GIVE_UP:
            raise AirflowFailException(said)
        if outcome is Verdict.DONE_WITH_ROW_ERRORS:
            self.log.warning(said)
        return summary

    def on_kill(self) -> None:
        """Cleared, marked or timed out: the run stops in order, after the task's end if need be."""
        if self._command is not None:
            self._command.stop()


with DAG(
    dag_id="adaflash_nightly",
    schedule="0 1 * * *",
    start_date=datetime(2026, 11, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
):
    complete = AdaflashBatchOperator(
        task_id="complete",
        arguments=[
            "run",
            "/srv/adaflash/prompts/{{ ds }}",
            "--config=/srv/adaflash/jobs/nightly.toml",
            "--out=/srv/adaflash/completions/{{ ds }}",
            "--drafter=/srv/adaflash/data/drafters/smollm2-135m-instruct",
            "--drafter-store=/srv/adaflash/drafters",
            "--grace=60",
        ],
        retries=10,
        retry_delay=timedelta(minutes=5),
    )
