"""How long a step takes when its members have the new weights one after another.

Run by `python -m benchmarks.rig.gateway.skew`.

Four equal servers, the slower the more requests they have, are ready at once, 20 ms apart or 1.5 s apart. The
ideal is the division that has all of them done at the same time, known beforehand. No server computes prompts.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.rig.gateway.balancers import START_S, TOKEN, start_gateway
from benchmarks.rig.gateway.fakes import compile_programs
from benchmarks.rig.gateway.load import make_stand
from benchmarks.rig.gateway.namespace import namespace
from grpo_orch.policies.serving.wire import Batch, BatchLine, CompletionRequest, PolicyRef

SKEWS_S = (0.0, 0.02, 1.5)
HOSTS = tuple(f"127.0.0.{number}" for number in range(21, 25))
REQUESTS, GROUP, TOKENS = 256, 8, 400
STEP_US, DOUBLING = 10_000, 64
PROMPT = 512
LOAD_S = 0.5  # of the first
WARM_STEPS, WARM_TOKENS = 2, 200


@dataclass(frozen=True, slots=True)
class Skewed:
    """One step. `ideal_s` and `took_s` are from the moment at which the first member is ready."""

    skew_s: float
    ideal_s: float
    took_s: float
    sent: tuple[int, ...]  # requests, to each server
    moved: int
    tokens_replayed: int


def ideal_s(skew_s: float) -> float:
    """When all are done that begin `skew_s` apart, each request staying where it was begun."""
    alone_s = TOKENS * STEP_US / 1e6
    # Member i has n_i requests, REQUESTS in all, and is done at i * skew + alone * (1 + n_i / DOUBLING).
    return min(
        (alone_s * (REQUESTS / DOUBLING + count) + skew_s * sum(range(count))) / count
        for count in range(1, len(HOSTS) + 1)
    )


def measure(folder: Path) -> list[Skewed]:
    """Run a few steps at each skew, and tell of the last. Raises RuntimeError."""
    return [_measure(skew_s, folder / f"skew-{skew_s:g}") for skew_s in SKEWS_S]


def _measure(skew_s: float, folder: Path) -> Skewed:
    with namespace("bench-skew"), ExitStack() as exits:
        stand = make_stand(folder, HOSTS, exits, step_us=STEP_US, pinned=False, doubling=DOUBLING)
        running = start_gateway(stand, [LOAD_S + number * skew_s for number in range(len(HOSTS))])
        headers = {"Authorization": f"Bearer {TOKEN}"}
        base = f"http://{running.host}:{running.port}"
        http = exits.enter_context(httpx.Client(base_url=base, headers=headers, timeout=60.0, trust_env=False))
        deadline_s = time.monotonic() + START_S
        while len(http.get("/members").json()["members"]) < len(HOSTS):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the members did not come: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        for number in range(WARM_STEPS):
            _step(http, 2 + number, WARM_TOKENS)
        before, served = _counts(http), [fake.counts().requests for fake in stand.fakes]
        took_s = _step(http, 2 + WARM_STEPS, TOKENS) - LOAD_S
        moved, replayed = (after - was for after, was in zip(_counts(http), before, strict=True))
        sent = tuple(fake.counts().requests - was for fake, was in zip(stand.fakes, served, strict=True))
        return Skewed(skew_s, ideal_s(skew_s), took_s, sent, moved, replayed)


def _counts(http: httpx.Client) -> tuple[int, int]:
    """Requests that moved, tokens that were replayed for it; since the gateway's start."""
    found = [0, 0]
    for line in http.get("/metrics").text.splitlines():
        for place, name in enumerate(("grpo_gateway_handovers_total{", "grpo_gateway_tokens_replayed_total ")):
            if line.startswith(name):
                found[place] += int(float(line.rpartition(" ")[2]))
    return found[0], found[1]


def _step(http: httpx.Client, number: int, tokens: int) -> float:
    """Have one step made, at a version of its own. Returns how long it took. Raises RuntimeError."""
    version = f"0-{number}"
    requests = [CompletionRequest(n, [n // GROUP] * PROMPT, seed=n) for n in range(REQUESTS)]
    sampling = {"temperature": 1.0, "max_tokens": tokens}
    batch = Batch(PolicyRef(version, f"policies/{version}"), sampling, requests, deadline_s=60.0)
    begun_s, finished = time.monotonic(), 0
    with http.stream("POST", "/v1/rollouts", content=msgspec.json.encode(batch)) as answer:
        for text in answer.iter_lines():
            line = msgspec.json.decode(text, type=BatchLine)
            if line.error is not None:
                raise RuntimeError(line.error)
            finished += line.completion is not None
    if finished != REQUESTS:
        raise RuntimeError(f"{finished} of {REQUESTS} completions came: {answer.status_code}")
    return time.monotonic() - begun_s


def main() -> None:
    compile_programs()
    with tempfile.TemporaryDirectory() as name:
        for one in measure(Path(name)):
            print(f"skew {one.skew_s:g} s: {one.took_s:.2f} s, {one.took_s / one.ideal_s:.3f} times the ideal;")
            print(f"  requests sent {one.sent}, {one.moved} moved, {one.tokens_replayed} tokens computed again")


if __name__ == "__main__":
    main()
