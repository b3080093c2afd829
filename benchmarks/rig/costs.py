"""What a balancer costs while nothing fails: CPU time per token, added latency, short requests a second.

The balancer has one processor, stand-ins and client the other. All stand in front of the same stand-ins and take
turns, so that the machine's mood meets all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.rig.gateway.balancers import PORT, Running, Stand, System
from benchmarks.rig.gateway.load import Answer, Call, make_stand, start, warm_up
from benchmarks.rig.gateway.namespace import namespace

HOSTS = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
TOKENS = {64: 900, 1024: 150}  # a stream, by the number of streams
INTERVALS = (1, 8, 32)
TOKENS_PER_S = 40_000  # of all streams together; an H200 makes some 30,000
SHORT_REQUESTS, SHORT_TOKENS, SHORT_AT_A_TIME = 12_000, 8, 1024
TURNS = 2
DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One turn. Latency is what request and answer took beyond the time that they were with the server."""

    cpu_us: float  # per token or per request
    latency_ms: float  # of half of the requests
    latency_99_ms: float
    per_s: float  # requests
    failed: int


@dataclass
class Costs:
    """By system, and by streams and interval; a figure each turn. `missing` says why one could not be measured."""

    streams: dict[str, dict[tuple[int, int], list[Cost]]] = field(default_factory=dict)
    short: dict[str, list[Cost]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def measure(streaming: Sequence[System], whole: Sequence[System], folder: Path) -> Costs:
    """Measure each system of `streaming` with streams, and of `whole` with short requests."""
    costs = Costs()
    folder.mkdir()
    with namespace("bench-gateway-costs"), ExitStack() as exits:
        stand = make_stand(folder / "servers", HOSTS, exits, step_us=0, pinned=True)
        sides = list(_started(streaming, stand, folder, costs))
        for turn, (streams, interval) in product(range(TURNS), product(TOKENS, INTERVALS)):
            for fake in stand.fakes:
                fake.set_pace(1_000_000 * streams // TOKENS_PER_S, interval)
            for system, side, running in reversed(sides) if turn % 2 else sides:
                cost = _streams(system, side, running, streams)
                costs.streams.setdefault(system.name, defaultdict(list))[streams, interval].append(cost)
        for fake in stand.fakes:
            fake.set_pace(0, 1)
        asked = {system.name: system for system in whole}
        for turn in range(TURNS):
            for system, side, running in reversed(sides) if turn % 2 else sides:
                cost = _short(asked[system.name], side, running)
                costs.short.setdefault(system.name, []).append(cost)
    return costs


def _started(
    systems: Sequence[System], stand: Stand, folder: Path, costs: Costs
) -> Iterator[tuple[System, Stand, Running]]:
    for number, system in enumerate(systems):
        side = replace(stand, folder=folder / str(number), port=PORT + 10 * number)
        side.folder.mkdir()
        try:
            yield system, side, start(system, side)
        except RuntimeError as error:
            costs.missing[system.name] = str(error)


def _streams(system: System, stand: Stand, running: Running, streams: int) -> Cost:
    warm_up(stand, system, running, streams)
    return _cost(system, stand, running, streams, TOKENS[streams], streams, streams * TOKENS[streams])


def _short(system: System, stand: Stand, running: Running) -> Cost:
    return _cost(system, stand, running, SHORT_REQUESTS, SHORT_TOKENS, SHORT_AT_A_TIME, SHORT_REQUESTS)


def _cost(
    system: System, stand: Stand, running: Running, requests: int, tokens: int, at_a_time: int, units: int
) -> Cost:
    finished = [fake.counts().finished for fake in stand.fakes]
    call = Call(stand, system, running, system.asks(requests, tokens), at_a_time, DEADLINE_S)
    cpu_s = running.cpu_s()
    call.wait()
    cpu_s = running.cpu_s() - cpu_s
    answers = call.answers()
    at_servers_s = {
        seed: (finished_ns - received_ns) / 1e9
        for fake, count in zip(stand.fakes, finished, strict=True)
        for seed, received_ns, finished_ns in fake.finished_since(count)
    }
    added_ms = sorted(
        1e3 * (took_s(answer) - at_servers_s[seed]) for seed, answer in enumerate(answers) if answer.right
    )
    if not added_ms:
        raise RuntimeError(f"{system.name}: not one of {requests} requests was answered")
    return Cost(
        cpu_us=1e6 * cpu_s / units,
        latency_ms=median(added_ms),
        latency_99_ms=added_ms[int(0.99 * len(added_ms))],
        per_s=requests / (max(answer.done_s or 0.0 for answer in answers) - call.begun_s),
        failed=sum(not answer.right for answer in answers),
    )


def took_s(answer: Answer) -> float:
    assert answer.done_s is not None
    return answer.done_s - answer.begun_s
