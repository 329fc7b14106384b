"""The table of benchmarks/peers.py, from what it keeps as JSON."""

from __future__ import annotations

import statistics
from typing import Any

_FOUR_BITS = ("openvino", "llama")
_OURS = ("ours", "ours-speculating", "command")
_MIB = 2**20


def as_markdown(found: dict[str, Any]) -> str:
    """All of it."""
    levels = sorted({each["concurrency"] for each in found["rounds"]})
    if found["settings"]["kind"] == "short job":
        return _short_job(found)
    parts = [_level(found, level) for level in levels]
    return "\n".join([*parts, _engines(found)])


def speed(turn: dict[str, Any] | None) -> float | None:
    """Tokens a second, None where there is no answer."""
    if turn is None or "error" in turn:
        return None
    return float(turn["tokens"] / turn["seconds"])


def ratio(rounds: list[dict[str, Any]], above: str, below: str) -> float | None:
    """Median over the rounds that both have."""
    pairs = [(speed(r["turns"].get(above)), speed(r["turns"].get(below))) for r in rounds]
    return _median([a / b for a, b in pairs if a and b])


def fastest(rounds: list[dict[str, Any]], *, four_bits: bool) -> str | None:
    """The peer with the highest median speed, of those that compute in bf16 or of all."""
    names = {name for each in rounds for name in each["turns"]} - set(_OURS)
    medians = {
        name: _median([speed(each["turns"].get(name)) for each in rounds])
        for name in names
        if four_bits or not _is_four_bits(name)
    }
    known = {name: value for name, value in medians.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else None


def _is_four_bits(name: str) -> bool:
    return name.startswith(_FOUR_BITS)


def _median(values: list[Any]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _rounds(found: dict[str, Any], level: int) -> list[dict[str, Any]]:
    return [each for each in found["rounds"] if each["concurrency"] == level]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _level(found: dict[str, Any], level: int) -> str:
    rounds = _rounds(found, level)
    names = sorted({name for each in rounds for name in each["turns"]}, key=_order)
    head = (
        "| engine | weights | tokens/s | over our plain | ours over it | cores | others' | note |"
    )
    lines = [f"## {level} at once, {len(rounds)} rounds", "", head, "|" + "---|" * 8]
    lines += [_row(rounds, name) for name in names]
    return "\n".join([*lines, "", *_verdicts(rounds), ""])


def _order(name: str) -> tuple[int, str]:
    return (_OURS.index(name) if name in _OURS else len(_OURS), name)


def _row(rounds: list[dict[str, Any]], name: str) -> str:
    turns = [each["turns"][name] for each in rounds if name in each["turns"]]
    cells = [
        name,
        "4 bits" if _is_four_bits(name) else "bf16",
        _number(_median([speed(turn) for turn in turns]), 1),
        _number(ratio(rounds, name, "ours")),
        _number(ratio(rounds, "ours-speculating", name)),
        _number(_median([turn.get("cores") for turn in turns])),
        _number(_median([turn.get("others") for turn in turns])),
        _note(turns),
    ]
    return "| " + " | ".join(cells) + " |"


def _note(turns: list[dict[str, Any]]) -> str:
    said = [turn.get("error") or turn.get("note") for turn in turns]
    notes = sorted({str(each).replace("|", "/")[:200] for each in said if each})
    tau = _median([turn.get("tau") for turn in turns])
    over = [t["step"] / t["floor"] for t in turns if t.get("step") and t.get("floor")]
    notes += [f"τ {tau:.2f}"] if tau else []
    notes += [f"step {_number(_median(over))} times its matrix products"] if over else []
    return "; ".join(notes)


def _verdicts(rounds: list[dict[str, Any]]) -> list[str]:
    lines = []
    for four_bits, words in ((False, "fastest bf16 peer"), (True, "fastest peer of any precision")):
        peer = fastest(rounds, four_bits=four_bits)
        if peer is not None:
            value = _number(ratio(rounds, "ours-speculating", peer))
            lines.append(f"- speculating over the {words} ({peer}): **{value}**")
    plain = _number(ratio(rounds, "ours", "vllm"))
    lines += [f"- plain over vLLM plain: **{plain}**"] if plain else []
    command = _number(ratio(rounds, "command", "ours-speculating"))
    lines += (
        [f"- the command over the bare engine, start-up left out: {command}"] if command else []
    )
    return [*lines, *_same_texts(rounds)]


def _same_texts(rounds: list[dict[str, Any]]) -> list[str]:
    pairs = [
        tuple(each["turns"].get(name, {}).get("digest") for name in _OURS[:2]) for each in rounds
    ]
    whole = [(plain, drafted) for plain, drafted in pairs if plain and drafted]
    same = sum(plain == drafted for plain, drafted in whole)
    return [f"- rounds whose texts are the same with and without drafts: {same} of {len(whole)}"]


def _engines(found: dict[str, Any]) -> str:
    lines = ["## Processes", "", "| engine | start-up, s | peak memory, MiB |", "|---|---|---|"]
    facts = dict(found["engines"])
    turns = [each["turns"]["command"] for each in found["rounds"] if "command" in each["turns"]]
    if any("startup_s" in turn for turn in turns):
        facts["command"] = {
            "startup_s": _median([turn.get("startup_s") for turn in turns]),
            "peak_bytes": max(turn.get("peak_bytes", 0) for turn in turns),
        }
    for name in sorted(facts, key=_order):
        startup = _number(facts[name].get("startup_s"), 1)
        lines.append(f"| {name} | {startup} | {facts[name].get('peak_bytes', 0) / _MIB:.0f} |")
    return "\n".join([*lines, ""])


def _short_job(found: dict[str, Any]) -> str:
    settings, rounds = found["settings"], found["rounds"]
    lines = [
        f"## {settings['rows']} rows, {settings['new_tokens']} new tokens, {len(rounds)} rounds",
        "",
        "| | tokens/s | with start-up | start-up, s | cores | others' |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("ours-speculating", "command"):
        turns = [t for each in rounds if "error" not in (t := each["turns"].get(name, {})) and t]
        whole = [t["tokens"] / (t["seconds"] + t["startup_s"]) for t in turns if "startup_s" in t]
        startup = [turn.get("startup_s") for turn in turns]
        if name in found["engines"]:
            startup = [found["engines"][name].get("startup_s")]
        cells = [name, _number(_median([speed(turn) for turn in turns]), 1)]
        cells += [_number(_median(whole), 1), _number(_median(startup), 1)]
        cells += [_number(_median([turn.get(k) for turn in turns])) for k in ("cores", "others")]
        lines.append("| " + " | ".join(cells) + " |")
        lines += [f"| {name}: {t['error']} |" for r in rounds if "error" in (t := r["turns"][name])]
    value = _number(ratio(rounds, "command", "ours-speculating"))
    return "\n".join([*lines, "", f"- the command over the bare engine: **{value}**", ""])
