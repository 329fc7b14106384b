"""Ours against everything else that decodes on this machine, interleaved, in one run.

Usage:
    python benchmarks/peers.py [--vllm-python PYTHON] [--llama-server PATH --gguf FILE]
        [--openvino-python PYTHON --openvino-model DIR] [--only NAME ...] [--prompts FILE ...]
        [--concurrency 1 8 32 64 128] [--rounds 3] [--json FILE] [--table FILE] [--seconds N]
    python benchmarks/peers.py --short-job [--rows 2000] [--rounds 3] ...

Demo model, 2 threads, greedy, 128 new tokens, end-of-sequence ignored. Every engine has a process
of its own and is stopped between its turns; in a round each decodes the same fresh prompts once,
all of them at once, and the next round begins with another engine. `command` is
`adaflash-batch run` from Parquet to Parquet with the same drafts as `ours-speculating`, started
anew for each turn.
Figures are medians of the rounds, ratios medians of the rounds' ratios.

--short-job decodes many short rows (32 new tokens, 64 at once) by bare engine and command.

Every turn is kept in the JSON file as soon as its round is whole; the same command goes on where an
earlier one was ended, or did not begin a round that would have lasted beyond --seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from command_turns import Command
from decode import encoded
from peers_report import as_markdown
from turns import EngineDied, Worker

from adaflash_batch import models

_HERE = Path(__file__).parent
_DATA = _HERE.parent / "data"
_ONE_ONLY = {"transformers-lookup"}  # those that draft for one request at a time
_WARM_UP, _WARM_UP_NEW = 16, 4  # tokens of prompts, and new ones
_SHORT_NEW, _SHORT_RUNNING = 32, 64


class Results:
    """What was measured so far, on disk after every round."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = {"settings": settings, "engines": {}, "rounds": []}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))
            if self.found["settings"] != settings:
                raise SystemExit(f"{path} was measured with other settings: name another file")

    def lacks(self, concurrency: int, turn: int, names: list[str]) -> bool:
        """Whether a round is missing, or one of these engines in it."""
        found = self._find(concurrency, turn)
        return found is None or not set(names) <= found["turns"].keys()

    def add(self, concurrency: int, turn: int, turns: dict[str, Any], seconds: float) -> None:
        """Keep a round."""
        earlier = self._find(concurrency, turn)
        if earlier is not None:
            self.found["rounds"].remove(earlier)
        row = {"concurrency": concurrency, "round": turn, "seconds": seconds, "turns": turns}
        self.found["rounds"].append(row)
        self.save()

    def note_engine(self, name: str, **facts: Any) -> None:
        """Keep what is known of an engine: of memory the most, of start-ups the newest."""
        engine = self.found["engines"].setdefault(name, {})
        facts["peak_bytes"] = max(facts.get("peak_bytes", 0), engine.get("peak_bytes", 0))
        engine.update(facts)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is not None:
            scratch = self.path.with_suffix(".part")
            scratch.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            scratch.replace(self.path)

    def expected_s(self, concurrency: int) -> float:
        """About how long a round takes at this level, by those of this or of a smaller one."""
        known = [each for each in self.found["rounds"] if each["concurrency"] <= concurrency]
        if not known:
            return 0.0
        nearest = max(each["concurrency"] for each in known)
        longest = max(each["seconds"] for each in known if each["concurrency"] == nearest)
        return float(longest) * (1 if nearest == concurrency else 2)

    def _find(self, concurrency: int, turn: int) -> dict[str, Any] | None:
        rounds = self.found["rounds"]
        same = (r for r in rounds if (r["concurrency"], r["round"]) == (concurrency, turn))
        return next(same, None)


class Prompts:
    """Prompts as texts and as tokens; no round sees those of another one."""

    def __init__(self, model: Path, files: list[Path], count: int) -> None:
        columns = [pq.read_table(f, columns=["prompt"])["prompt"].to_pylist() for f in files]
        # One of each file in turn, as long as they last.
        longest = max(map(len, columns))
        rows = [column[i] for i in range(longest) for column in columns if i < len(column)]
        if len(rows) < count:
            raise SystemExit(f"{count} prompts are needed, the files have {len(rows)}")
        self.texts: list[str] = rows[:count]
        self.ids, self.templated = encoded(model, self.texts)

    @staticmethod
    def place(concurrency: int, turn: int, rounds: int) -> slice:
        """Of a round; those of levels that are powers of two do not overlap."""
        begin = rounds * (concurrency - 1) + turn * concurrency
        return slice(begin, begin + concurrency)

    @property
    def longest(self) -> int:
        """Tokens."""
        return max(map(len, self.ids))


class Field:
    """The engines, started when they are needed first and ended after their last turn."""

    def __init__(self, options: argparse.Namespace, arguments: list[str], results: Results) -> None:
        self._options, self._arguments, self._results = options, arguments, results
        self._workers: dict[str, Worker] = {}
        self._errors: dict[str, str] = {}
        self._logs = Path(tempfile.mkdtemp(prefix="peers-logs-"))
        self.command = Command(
            options.model, options.drafter, options.threads, self._logs / "command.log"
        )

    def ask(self, name: str, question: dict[str, Any]) -> dict[str, Any]:
        """An engine's answer, with what it took of the machine, or why there is none."""
        try:
            answer, use = self._worker(name).measure(question)
        except EngineDied as error:
            self.end(name)
            self._errors.setdefault(name, str(error))
            print(f"  {name}: {error}", flush=True)
            return {"error": str(error)}
        self._results.note_engine(name, peak_bytes=self._workers[name].peak_bytes)
        return answer | {"cores": use.cores, "others": use.others}

    def warm_up(self, name: str, ids: list[list[int]], texts: list[str]) -> None:
        """First use at so many requests is in nobody's time."""
        if name == "command":
            return
        short = [each[:_WARM_UP] for each in ids]
        self.ask(name, {"prompts": short, "texts": texts, "max_new_tokens": _WARM_UP_NEW})

    def end(self, name: str) -> None:
        """It has no more turns."""
        if name in self._workers:
            self._workers.pop(name).end()

    def close(self) -> None:
        """End all."""
        for name in list(self._workers):
            self.end(name)

    def _worker(self, name: str) -> Worker:
        if name in self._errors:
            raise EngineDied(self._errors[name])
        if name not in self._workers:
            python = _python(name, self._options)
            worker = Worker(name, python, self._arguments, self._logs / f"{name}.log")
            self._workers[name] = worker
            self._results.note_engine(name, startup_s=round(worker.startup_s, 2))
            print(f"  {name}: ready after {worker.startup_s:.1f} s", flush=True)
        return self._workers[name]


def _python(name: str, options: argparse.Namespace) -> str:
    kind = name.partition("-")[0]
    given = {"vllm": options.vllm_python, "openvino": options.openvino_python}
    return str(given.get(kind) or sys.executable)


def engine_names(options: argparse.Namespace) -> list[str]:
    """Those that can be measured with what was named."""
    names = ["ours", "ours-speculating", "command"]
    names += ["transformers", "transformers-continuous", "transformers-lookup"]
    if options.vllm_python:
        names += ["vllm", "vllm-lookup", *(["vllm-draft"] if options.draft else [])]
    if options.openvino_python and options.openvino_model:
        names += ["openvino", "openvino-lookup"]
    if options.llama_server and options.gguf:
        names += ["llama", "llama-lookup"]
    wanted = options.only or names
    unknown = set(wanted) - {*names, "vllm-compiled"}
    if unknown:
        raise SystemExit(f"{sorted(unknown)[0]} is unknown, or lacks an option: {', '.join(names)}")
    return list(wanted)


def _at(names: list[str], concurrency: int) -> list[str]:
    return [name for name in names if concurrency == 1 or name not in _ONE_ONLY]


def measure(
    field: Field, names: list[str], prompts: Prompts, results: Results, options: argparse.Namespace
) -> None:
    """All rounds that are missing."""
    began, warm = time.monotonic(), set[tuple[str, int]]()
    for concurrency in options.concurrency:
        here = _at(names, concurrency)
        for turn in range(options.rounds):
            if not results.lacks(concurrency, turn, here):
                continue
            elapsed = time.monotonic() - began
            if elapsed + results.expected_s(concurrency) > options.seconds:
                raise SystemExit("there is no time for another round: the same command goes on")
            place = Prompts.place(concurrency, turn, options.rounds)
            for name in here:
                if (name, concurrency) not in warm:
                    field.warm_up(name, prompts.ids[place], prompts.templated[place])
                    warm.add((name, concurrency))
            then = time.monotonic()
            turns = round_of(field, here, turn, prompts, place, options.max_new_tokens)
            results.add(concurrency, turn, turns, time.monotonic() - then)
            _say(concurrency, turn, turns)
        for name in set(here) & _ONE_ONLY:
            field.end(name)


def round_of(
    field: Field, names: list[str], turn: int, prompts: Prompts, place: slice, most: int
) -> dict[str, Any]:
    """Everybody's answer on the same prompts."""
    turns, first = {}, turn % len(names)
    for name in [*names[first:], *names[:first]]:
        ids, texts = prompts.ids[place], prompts.texts[place]
        if name == "command":
            turns[name] = _command_turn(field, texts, most)
            continue
        question = {"prompts": ids, "texts": prompts.templated[place], "max_new_tokens": most}
        turns[name] = field.ask(name, question)
        if name == "ours" and "error" not in turns[name]:
            turns[name]["floor"] = field.ask(name, {"floor": len(ids)}).get("seconds")
        wanted = len(ids) * most
        if turns[name].get("tokens", wanted) != wanted:
            turns[name]["note"] = f"{turns[name]['tokens']} tokens came, {wanted} were asked for"
    return turns


def _command_turn(field: Field, texts: list[str], most: int, running: int = 0) -> dict[str, Any]:
    try:
        return field.command.turn(texts, running or len(texts), most)
    except EngineDied as error:
        print(f"  command: {error}", flush=True)
        return {"error": str(error)}


def measure_short_job(field: Field, prompts: Prompts, results: Results, rounds: int) -> None:
    """The bare engine and the command on the same short rows."""
    names = ["ours-speculating", "command"]
    for turn in range(rounds):
        if not results.lacks(_SHORT_RUNNING, turn, names):
            continue
        then, turns = time.monotonic(), {}
        for name in names if turn % 2 == 0 else names[::-1]:
            if name == "command":
                turns[name] = _command_turn(field, prompts.texts, _SHORT_NEW, _SHORT_RUNNING)
                continue
            question = {"prompts": prompts.ids, "max_new_tokens": _SHORT_NEW}
            turns[name] = field.ask(name, question)
            field.end(name)  # the texts of these rows are not to be looked up in another round
        results.add(_SHORT_RUNNING, turn, turns, time.monotonic() - then)
        _say(_SHORT_RUNNING, turn, turns)


def _say(concurrency: int, turn: int, turns: dict[str, Any]) -> None:
    speeds = {
        name: "error" if "error" in each else round(each["tokens"] / each["seconds"], 1)
        for name, each in sorted(turns.items())
    }
    print(json.dumps({"concurrency": concurrency, "round": turn, **speeds}), flush=True)


def worker_arguments(options: argparse.Namespace, context: int) -> list[str]:
    """Of every engine's process."""
    most = _SHORT_RUNNING if options.short_job else max(options.concurrency)
    arguments = ["--model", str(options.model), "--threads", str(options.threads)]
    arguments += ["--context", str(context), "--most", str(most), "--drafter", str(options.drafter)]
    for name in ("draft", "gguf", "openvino_model"):
        if getattr(options, name):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return arguments + (["--server", str(options.llama_server)] if options.llama_server else [])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    drafter = _DATA / "drafters" / "smollm2-135m-instruct"
    parser.add_argument("--model", default=models.DEFAULT_MODEL)
    parser.add_argument("--drafter", type=Path, default=drafter)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[_DATA / "prompts.parquet"])
    parser.add_argument("--vllm-python", help="Python of a virtual environment with vLLM")
    parser.add_argument("--openvino-python", help="the same with OpenVINO GenAI")
    parser.add_argument("--openvino-model", type=Path, help="the model in OpenVINO's format")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="the model in llama.cpp's format")
    parser.add_argument("--draft", type=Path, help="a small model that drafts for vLLM")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="engines to measure")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--short-job", action="store_true")
    parser.add_argument("--rows", type=int, default=2000, help="of --short-job")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--json", type=Path, help="keep the results there and go on from there")
    parser.add_argument("--table", type=Path, help="write the table there too")
    options = parser.parse_args()
    options.model = models.locate(options.model, notify=print)
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same where rounds are added to earlier ones."""
    return {
        "kind": "short job" if options.short_job else "rounds",
        "prompts": [file.name for file in options.prompts],
        "rounds": options.rounds,
        "new_tokens": _SHORT_NEW if options.short_job else options.max_new_tokens,
        "threads": options.threads,
        "rows": options.rows if options.short_job else None,
    }


def main() -> None:
    """Run the command line."""
    options = parse()
    names = engine_names(options)
    results = Results(options.json, settings_of(options))
    last = Prompts.place(max(options.concurrency), options.rounds - 1, options.rounds)
    count = options.rows if options.short_job else last.stop
    prompts = Prompts(options.model, options.prompts, count)
    # Room behind the completion for the drafts of those that verify past its end.
    context = prompts.longest + results.found["settings"]["new_tokens"] + 16
    field = Field(options, worker_arguments(options, context), results)
    try:
        if options.short_job:
            measure_short_job(field, prompts, results, options.rounds)
        else:
            measure(field, names, prompts, results, options)
    finally:
        with suppress(ProcessLookupError):
            field.close()
        results.save()
        table = as_markdown(results.found)
        print(table)
        if options.table:
            options.table.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
