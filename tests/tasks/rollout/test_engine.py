"""What an engine says of itself: read as vLLM writes it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from policies.serving.wire import EngineWord
from tasks.rollout.vllm.asgi import Message, Receive, Scope, Send
from tasks.rollout.vllm.guard import Guard, engine_limits
from tasks.rollout.vllm.server import read_metrics

ENGINE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="%(n)s",model_name="policy"} 3.0
vllm:num_requests_waiting{engine="%(n)s",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="%(n)s",model_name="policy",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="%(n)s",model_name="policy"} 0.9%(n)s
vllm:num_preemptions_total{engine="%(n)s",model_name="policy"} 1.0
vllm:num_preemptions_created{engine="%(n)s",model_name="policy"} 1.7e+09
vllm:prompt_tokens_total{engine="%(n)s",model_name="a model, with {odd} name"} 1.2e+06
vllm:generation_tokens_total{engine="%(n)s",model_name="policy"} 34.0
vllm:time_to_first_token_seconds_bucket{engine="%(n)s",le="0.001",model_name="policy"} NaN
"""


def test_what_vllm_counts_is_read_and_several_engines_are_one() -> None:
    one = ENGINE % {"n": 1}
    assert read_metrics(one) == EngineWord(3, 2, 0.91, 1, 1_200_034)
    assert read_metrics(one + ENGINE % {"n": 2}) == EngineWord(6, 4, 0.92, 2, 2_400_068)


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "-1.0", "1e+300"])
def test_what_is_no_count_is_taken_for_nothing(number: str) -> None:
    text = ENGINE % {"n": 1}
    for line in [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]:
        assert read_metrics(text.replace(line, f"{line.rpartition(' ')[0]} {number}")) is None
    for line in [line for line in text.splitlines() if line.startswith(("vllm:num_requests_waiting{", "vllm:kv"))]:
        said = read_metrics(text.replace(line, f"{line.rpartition(' ')[0]} {number}"))
        assert said is not None
        assert (said.waiting, said.kv_usage) in {(0, 0.91), (2, 0.0)}


@pytest.mark.parametrize("text", ["", "vllm:", "vllm:num_requests_running", "<html>", "python_info 1.0"])
def test_what_is_no_such_text_says_nothing(text: str) -> None:
    assert read_metrics(text) is None


@pytest.mark.parametrize(("blocks", "kv_tokens"), [(1000, 16_000), (None, 0)])
def test_limits_come_from_the_engines_own_configuration(blocks: int | None, kv_tokens: int) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
        parallel_config=SimpleNamespace(data_parallel_size=2),
    )
    assert json.loads(engine_limits(config)) == {"max_requests": 2048, "kv_tokens": kv_tokens}


@pytest.mark.parametrize(
    ("path", "bearer", "host", "status"),
    [
        ("/metrics", "token", "10.0.0.9", 200),
        ("/metrics", "node-secret", "127.0.0.1", 200),
        ("/metrics", "node-secret", "10.0.0.9", 401),
        ("/metrics", "", "127.0.0.1", 401),
        ("/metrics/", "token", "10.0.0.9", 404),
        ("/grpo/engine", "node-secret", "127.0.0.1", 200),
        ("/grpo/engine", "token", "127.0.0.1", 404),
        ("/grpo/engine", "", "127.0.0.1", 401),
    ],
)
def test_the_engines_numbers_are_for_agent_and_gateway_alone(
    path: str, bearer: str, host: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TOKEN", "token"), ("NODE_SECRET", "node-secret"), ("BOOT", "b")):
        monkeypatch.setenv(f"GRPO_ORCH_{name}", value)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=None, block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=128),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config)))
    said: list[Message] = []

    async def vllm(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["path"] == "/metrics"
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"vllm:num_requests_running 0"})

    async def send(message: Message) -> None:
        said.append(message)

    async def receive() -> Message:
        raise AssertionError("it has no body")

    headers = [(b"authorization", f"Bearer {bearer}".encode())] if bearer else []
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "app": app}
    scope |= {"client": (host, 5), "server": ("10.0.0.1", 8000)}
    asyncio.run(Guard(vllm)(scope, receive, send))
    assert said[0]["status"] == status
    if status == 200 and path == "/grpo/engine":
        assert json.loads(said[1]["body"]) == {"max_requests": 128, "kv_tokens": 0}
