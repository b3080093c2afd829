"""The door of a node with a stand-in for vLLM's engine behind it: which policy it holds, and who is let in."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from grpo_orch.policies.serving.canary import Canary, token_ids_for
from grpo_orch.policies.serving.wire import HEADER_BOOT, HEADER_POLICY, MODEL, EngineStats, LoadPolicy, ProvePolicy
from grpo_orch.tasks.rollout.vllm.guard import Guard, Message, change_adapter, drop_adapter
from grpo_orch.tasks.rollout.vllm.server import read_metrics

TEXT = token_ids_for(500)
LOGPROBS = [-3.0 - (number % 7) / 2 for number in range(len(TEXT) - 1)]
CANARY = Canary(TEXT, [*LOGPROBS], "float32", 2)


@dataclass
class FakeEngine:
    """vLLM's engine and its server. After a reload it computes `off` beside what the trainer did, and
    after changes `off_changed`; each of two workers answers what `says` has by the method's name."""

    off: float = 0.0
    off_changed: float = 0.0
    says: dict[str, list[Any]] = field(default_factory=dict)
    status: int = 200
    broken: bool = False
    context: int = 256
    blocks: int | None = None
    refuses: str = ""  # an adapter, for this reason
    adapters: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False
    number: int = 0
    computing: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def config(self) -> Any:
        model = SimpleNamespace(max_model_len=self.context, dtype="torch.float32", quantization=None)
        cache = SimpleNamespace(cache_dtype="auto", num_gpu_blocks=self.blocks, block_size=16)
        return SimpleNamespace(
            model_config=model,
            cache_config=cache,
            scheduler_config=SimpleNamespace(max_num_seqs=64),
            parallel_config=SimpleNamespace(data_parallel_size=2),
        )

    @property
    def state(self) -> Any:
        client = SimpleNamespace(
            engine_core=SimpleNamespace(pause_scheduler_async=self._pause),
            collective_rpc=self._collective_rpc,
            resume_generation=self._resume,
            remove_lora=self._remove_lora,
            model_config=self.config.model_config,
            vllm_config=self.config,
        )
        models = SimpleNamespace(lora_requests=self.adapters, load_lora_adapter=self._load_lora)
        return SimpleNamespace(engine_client=client, openai_serving_models=models)

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")

    async def _resume(self) -> None:
        self.calls.append("resume")

    async def _collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        named = method in ("reload_all", "unmatched_layers")
        self.calls.append(f"{method} {args[0]}" if named else method)
        self.changed = {"reload_all": False, "apply_deltas": True}.get(method, self.changed)
        lists: list[Any] = [[], []]
        return self.says.get(method, lists if method in ("missing_weights", "unmatched_layers") else ["", ""])

    async def _remove_lora(self, number: int) -> None:
        self.calls.append(f"remove {number}")

    async def _load_lora(self, wanted: Any) -> Any:
        """Number adapters as vLLM does."""
        assert MODEL not in self.adapters
        assert not wanted.load_inplace
        if self.refuses:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
        self.number += 1
        self.calls.append(f"load {wanted.lora_path}")
        self.adapters[wanted.lora_name] = SimpleNamespace(lora_int_id=self.number, path=wanted.lora_path)
        return "Success"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/metrics":
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"vllm:num_requests_running 0"})
            return
        messages = [await receive()]
        while messages[-1]["more_body"]:
            messages.append(await receive())
        body = json.loads(b"".join(message["body"] for message in messages))
        self.calls.append("compute")
        self.bodies.append(body)
        if "prompt_logprobs" in body:
            self.computing.set()
            await self.go_on.wait()
            with pytest.raises(TimeoutError):  # vLLM listens for the asker's going away while it computes
                await asyncio.wait_for(receive(), 0.01)
        if self.broken:
            raise ValueError("Out of range float values are not JSON compliant: nan")
        off = self.off_changed if self.changed else self.off
        tokens = list(zip(body["prompt"][1:], LOGPROBS, strict=False))
        rows = [None, *({str(token): {"logprob": value + off}} for token, value in tokens)]
        said = json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": said})


class Door:
    """The guard, asked as a server asks it."""

    def __init__(self, vllm: FakeEngine) -> None:
        self._guard = Guard(vllm)
        self._app = SimpleNamespace(state=vllm.state)

    async def load(
        self,
        version: str,
        canary: Canary | None = CANARY,
        *,
        adapter: bool = False,
        base: str = "",
        path: str = "/there",
    ) -> tuple[int, str]:
        body = msgspec.json.encode(LoadPolicy(version, path, canary, adapter, base, ["/delta"], ["a", "b"]))
        return await self._asked("PUT", "/grpo/policy", {"Authorization": "Bearer agent"}, body)

    async def is_bare(self, token: str) -> int:
        return (await self._asked("PUT", "/grpo/bare", {"Authorization": f"Bearer {token}"}, b"{}"))[0]

    async def prove(self, version: str) -> tuple[int, str]:
        body = msgspec.json.encode(ProvePolicy(version, "/there", 0, 64))
        return await self._asked("PUT", "/grpo/proof", {"Authorization": "Bearer agent"}, body)

    async def complete(
        self, policy: str, token: str = "run", body: bytes = b'{"prompt": [1, 2]}'
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}", HEADER_BOOT: "boot", HEADER_POLICY: policy}
        return await self._asked("POST", "/v1/completions", headers, body)

    async def ask(self, path: str, bearer: str, host: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        return await self._asked("GET", path, headers, b"", host)

    async def _asked(
        self, method: str, path: str, headers: dict[str, str], body: bytes, host: str = "127.0.0.1"
    ) -> tuple[int, str]:
        status, said = 0, b""

        pieces = [body[:9], body[9:]]

        async def receive() -> Message:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Message) -> None:
            nonlocal status, said
            status = message.get("status", status)
            said += message.get("body", b"")

        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": encoded,
            "client": (host, 1),
            "server": ("10.0.0.1", 2),
            "app": self._app,
        }
        await self._guard(scope, receive, send)
        return status, said.decode()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKEN", "run"), ("NODE_SECRET", "agent"), ("BOOT", "boot")):
        monkeypatch.setenv(f"GRPO_ORCH_{name}", value)


async def test_no_request_is_admitted_while_the_canary_runs() -> None:
    vllm = FakeEngine()
    door = Door(vllm)
    loading = asyncio.ensure_future(door.load("0-1@a"))
    await vllm.computing.wait()
    for policy in ("0-1@a", "0-0@a", "None"):
        assert (await door.complete(policy))[0] == 409
    assert vllm.calls == ["pause abort True", "reload_all /there", "resume", "compute"]
    vllm.go_on.set()
    assert await loading == (204, "")
    assert (await door.complete("0-1@a"))[0] == 200
    asked = vllm.bodies[0]
    assert (asked["prompt"], asked["prompt_logprobs"], asked["max_tokens"]) == (TEXT, 0, 1)


@pytest.mark.parametrize(
    ("vllm", "why"),
    [
        (FakeEngine(off=1.0), "log-probabilities"),
        (FakeEngine(status=400), "the engine failed to compute the canary: 400"),
        (FakeEngine(status=500), "the engine failed to compute the canary: 500"),
        (FakeEngine(broken=True), "the engine failed to compute the canary: 500 Out of range float values"),
        (FakeEngine(context=8), "too few to compare"),
    ],
)
async def test_node_without_proof_holds_nothing(vllm: FakeEngine, why: str) -> None:
    vllm.go_on.set()
    door = Door(vllm)
    assert await door.load("0-0@a", canary=None) == (204, "")
    status, said = await door.load("0-1@a")
    assert status == 422
    assert why in said
    for policy in ("0-1@a", "0-0@a", "None"):
        assert (await door.complete(policy))[0] == 409
    assert vllm.calls.count("compute") == 1


async def test_engine_without_weights_is_polled_until_complete() -> None:
    vllm = FakeEngine(says={"missing_weights": [[], ["lm_head.weight", "model.norm.weight"]]})
    vllm.go_on.set()
    door = Door(vllm)
    assert await door.is_bare("run") == 404
    assert await door.is_bare("agent") == 204
    status, said = await door.load("0-0@a")
    assert (status, said) == (422, "the first policy has no weights for lm_head.weight and 1 more")
    assert (await door.complete("0-0@a"))[0] == 409
    assert "compute" not in vllm.calls
    vllm.says.clear()
    assert await door.load("0-1@a") == (204, "")
    assert await door.load("0-2@a") == (204, "")
    assert vllm.calls.count("missing_weights") == 2


async def test_a_short_context_takes_the_beginning_of_the_text() -> None:
    vllm = FakeEngine(context=24)
    vllm.go_on.set()
    assert await Door(vllm).load("0-1@a") == (204, "")
    assert vllm.bodies[0]["prompt"] == TEXT[:23]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1, 2]}',  # which vLLM takes for its first name, that of the bare weights
        b'{"prompt": [1, 2], "model": "base"}',
        b'{"prompt": [1, 2], "model": "policy", "model": "base"}',
        b'{"prompt": [1, 2], "model": null}',
        b'{"prompt": [1, 2], "model": ""}',
        b'{"prompt": [1, 2], "model": ["policy"]}',
        b"policy",
    ],
)
async def test_bare_weights_are_refused_next_to_an_adapter(body: bytes) -> None:
    vllm = FakeEngine()
    door = Door(vllm)
    assert await door.load("0-1@a", canary=None, adapter=True) == (204, "")
    assert (await door.complete("0-1@a", body=body))[0] == 404
    assert vllm.bodies == []
    whole = {"model": "policy", "prompt": [1, 2]}
    assert (await door.complete("0-1@a", body=json.dumps(whole).encode()))[0] == 200
    assert vllm.bodies == [whole]
    assert (await door.complete("0-0@a", body=json.dumps(whole).encode()))[0] == 409


TRIAL = ["follow_loader", "apply_deltas", "compute", "reload_all /there", "compute"]


@pytest.mark.parametrize(
    ("vllm", "why", "calls"),
    [
        (FakeEngine(), "", [*TRIAL, "follow_loader", "find_difference", "compute"]),
        (
            FakeEngine(says={"follow_loader": ["", "w goes through add"]}),
            "cannot trace vLLM's loader of this model: w goes through add",
            ["follow_loader", "reload_all /there", "compute"],
        ),
        (
            FakeEngine(off_changed=1e-6),
            "the engine computes different log-probabilities after a delta than after a full load",
            [*TRIAL, "compute"],
        ),
        (
            FakeEngine(says={"find_difference": ["", "w"]}),
            "after a full load the parameters of w differ from the file",
            [*TRIAL, "follow_loader", "find_difference", "compute"],
        ),
    ],
)
async def test_engine_after_trial_serves_what_it_reloaded(vllm: FakeEngine, why: str, calls: list[str]) -> None:
    vllm.go_on.set()
    door = Door(vllm)
    assert await door.load("0-0@a", canary=None) == (204, "")
    vllm.calls.clear()
    assert await door.load("0-1@b", base="0-0@a") == (200, why)
    assert [call for call in vllm.calls if not call.startswith(("pause", "resume"))] == calls
    assert not vllm.changed
    assert (await door.complete("0-1@b"))[0] == 200


@pytest.mark.parametrize(("base", "status"), [("0-0@a", 204), ("0-0@c", 400)])
async def test_deltas_apply_only_to_their_base(base: str, status: int) -> None:
    vllm = FakeEngine()
    vllm.go_on.set()
    door = Door(vllm)
    assert await door.load("0-1@b", base="0-0@a", path="") == (
        400,
        "the delta is based on 0-0@a, but the engine holds None",
    )
    assert await door.load("0-0@a", canary=None) == (204, "")
    assert (await door.load("0-1@b", base=base, path=""))[0] == status
    assert vllm.calls.count("apply_deltas") == (status == 204)
    assert (await door.complete("0-1@b"))[0] == (200 if status == 204 else 409)


@pytest.mark.parametrize(
    ("version", "differs", "status", "then"),
    [("0-0@a", ["", ""], 200, 200), ("0-0@a", ["", "w"], 422, 409), ("0-1@b", ["", "w"], 204, 200)],
)
async def test_engine_that_differs_from_its_file_serves_no_request(
    version: str, differs: list[str], status: int, then: int
) -> None:
    door = Door(FakeEngine(says={"find_difference": differs}))
    assert await door.load("0-0@a", canary=None) == (204, "")
    assert (await door.prove(version))[0] == status
    assert (await door.complete("0-0@a"))[0] == then


async def test_the_adapter_before_is_out_before_the_next_is_in() -> None:
    vllm = FakeEngine()
    assert await change_adapter(vllm.state, "/a") == ""
    assert await change_adapter(vllm.state, "/b") == ""
    assert vllm.calls == [
        *("pause abort True", "load /a", "resume", "unmatched_layers 1"),
        *("pause abort True", "remove 1", "load /b", "resume", "unmatched_layers 2"),
    ]
    assert vllm.adapters[MODEL].path == "/b"
    vllm.refuses = "LoRA rank 9 is greater than max_lora_rank 8."
    assert await change_adapter(vllm.state, "/c") == f"vLLM refused the adapter: {vllm.refuses}"
    assert vllm.adapters == {}
    assert vllm.calls[-1] == "resume"
    vllm.refuses = ""
    assert await change_adapter(vllm.state, "/d") == ""
    for _ in range(2):
        await drop_adapter(vllm.state)
    assert (vllm.adapters, vllm.calls[-2:]) == ({}, ["unmatched_layers 3", "remove 3"])


@pytest.mark.parametrize(
    ("workers", "layer"),
    [
        ([[]], ""),
        ([["lm_head"]], "lm_head"),
        ([["lm_head"], ["lm_head"]], "lm_head"),
        ([["layers.1.q_proj"], ["layers.0.q_proj"]], ""),  # each has the half of the layers
        ([["layers.1.q_proj", "lm_head"], ["layers.0.q_proj", "lm_head"]], "lm_head"),
        ([[], None], "any layer"),
    ],
)
async def test_adapter_with_unplaced_part_is_removed(workers: list[list[str] | None], layer: str) -> None:
    vllm = FakeEngine(says={"unmatched_layers": workers})
    why = await change_adapter(vllm.state, "/a")
    assert bool(why) == bool(layer)
    assert layer in why
    assert (MODEL in vllm.adapters) is not bool(layer)
    assert ("remove 1" in vllm.calls) is bool(layer)


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


def test_vllms_counts_are_summed_over_engines() -> None:
    one = ENGINE % {"n": 1}
    assert read_metrics(one) == EngineStats(3, 2, 0.91, 1, 1_200_034)
    assert read_metrics(one + ENGINE % {"n": 2}) == EngineStats(6, 4, 0.92, 2, 2_400_068)


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "-1.0", "1e+300"])
def test_invalid_count_is_ignored(number: str) -> None:
    text = ENGINE % {"n": 1}
    for line in [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]:
        assert read_metrics(text.replace(line, f"{line.rpartition(' ')[0]} {number}")) is None
    for line in [line for line in text.splitlines() if line.startswith(("vllm:num_requests_waiting{", "vllm:kv"))]:
        said = read_metrics(text.replace(line, f"{line.rpartition(' ')[0]} {number}"))
        assert said is not None
        assert (said.waiting, said.kv_usage) in {(0, 0.91), (2, 0.0)}


@pytest.mark.parametrize("text", ["", "vllm:", "vllm:num_requests_running", "<html>", "python_info 1.0"])
def test_invalid_metrics_text_is_ignored(text: str) -> None:
    assert read_metrics(text) is None


@pytest.mark.parametrize(("blocks", "kv_tokens"), [(1000, 16_000), (None, 0)])
@pytest.mark.parametrize(
    ("path", "bearer", "host", "status"),
    [
        ("/metrics", "run", "10.0.0.9", 200),
        ("/metrics", "agent", "127.0.0.1", 200),
        ("/metrics", "agent", "10.0.0.9", 401),
        ("/metrics", "", "127.0.0.1", 401),
        ("/metrics/", "run", "10.0.0.9", 404),
        ("/grpo/engine", "agent", "127.0.0.1", 200),
        ("/grpo/engine", "run", "127.0.0.1", 404),
        ("/grpo/engine", "", "127.0.0.1", 401),
    ],
)
async def test_engine_stats_are_for_agent_and_gateway_only(
    path: str, bearer: str, host: str, status: int, blocks: int | None, kv_tokens: int
) -> None:
    found, said = await Door(FakeEngine(blocks=blocks)).ask(path, bearer, host)
    assert found == status
    if status == 200 and path == "/grpo/engine":
        assert json.loads(said) == {"max_requests": 128, "kv_tokens": kv_tokens}
