"""The door of a node with a stand-in for vLLM behind it: when a policy is let out, and when it is not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from policies.serving.canary import Canary, token_ids_for
from policies.serving.wire import HEADER_BOOT, HEADER_POLICY, LoadPolicy, ProvePolicy
from tasks.rollout.vllm import guard as vllm_guard
from tasks.rollout.vllm.asgi import Message
from tasks.rollout.vllm.guard import Guard

TEXT = token_ids_for(500)
LOGPROBS = [-3.0 - (number % 7) / 2 for number in range(len(TEXT) - 1)]
CANARY = Canary(TEXT, [*LOGPROBS], "float32", 2)


@dataclass
class FakeVllm:
    """An engine and the server in front of it. After a reload it computes `off` beside what the trainer did, and
    after changes `off_changed`; each of two workers answers what `says` has by the method's name."""

    off: float = 0.0
    off_changed: float = 0.0
    says: dict[str, list[str]] = field(default_factory=dict)
    status: int = 200
    broken: bool = False
    context: int = 256
    awaited: list[list[str]] = field(default_factory=list)  # by worker, what a load leaves without weights
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False
    computing: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def engine(self) -> Any:
        async def pause_scheduler_async(mode: str, clear_cache: bool) -> None:
            self.calls.append(f"pause {mode} {clear_cache}")

        async def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            self.calls.append(f"{method} {args[0]}" if method == "reload_all" else method)
            self.changed = {"reload_all": False, "apply_deltas": True}.get(method, self.changed)
            return self.awaited if method == "not_loaded" else self.says.get(method, ["", ""])

        async def resume_generation() -> None:
            self.calls.append("resume")

        model = SimpleNamespace(max_model_len=self.context, dtype="torch.float32", quantization=None)
        config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"))
        return SimpleNamespace(
            engine_core=SimpleNamespace(pause_scheduler_async=pause_scheduler_async),
            collective_rpc=collective_rpc,
            resume_generation=resume_generation,
            model_config=model,
            vllm_config=config,
        )

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
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

    def __init__(self, vllm: FakeVllm) -> None:
        self._guard = Guard(vllm)
        self._app = SimpleNamespace(state=SimpleNamespace(engine_client=vllm.engine))

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

    async def _asked(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str]:
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
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "app": self._app,
        }
        await self._guard(scope, receive, send)
        return status, said.decode()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKEN", "run"), ("NODE_SECRET", "agent"), ("BOOT", "boot")):
        monkeypatch.setenv(f"GRPO_ORCH_{name}", value)


def test_nobody_is_let_in_while_the_canary_is_computed_and_the_engine_has_no_other_work() -> None:
    async def story() -> None:
        vllm = FakeVllm()
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

    asyncio.run(story())


@pytest.mark.parametrize(
    ("vllm", "why"),
    [
        (FakeVllm(off=1.0), "log-probabilities"),
        (FakeVllm(status=400), "the engine does not compute the canary: 400"),
        (FakeVllm(status=500), "the engine does not compute the canary: 500"),
        (FakeVllm(broken=True), "the engine does not compute the canary: 500 Out of range float values"),
        (FakeVllm(context=8), "prove nothing"),
    ],
)
def test_without_a_proof_the_node_holds_nothing_not_even_what_it_held(vllm: FakeVllm, why: str) -> None:
    async def story() -> None:
        vllm.go_on.set()
        door = Door(vllm)
        assert await door.load("0-0@a", canary=None) == (204, "")
        status, said = await door.load("0-1@a")
        assert status == 422
        assert why in said
        for policy in ("0-1@a", "0-0@a", "None"):
            assert (await door.complete(policy))[0] == 409
        assert vllm.calls.count("compute") == 1

    asyncio.run(story())


def test_an_engine_without_weights_is_asked_whether_it_has_them_all_until_it_has() -> None:
    async def story() -> None:
        vllm = FakeVllm(awaited=[[], ["lm_head.weight", "model.norm.weight"]])
        vllm.go_on.set()
        door = Door(vllm)
        assert await door.is_bare("run") == 404
        assert await door.is_bare("agent") == 204
        status, said = await door.load("0-0@a")
        assert (status, said) == (422, "without weights after its first policy: lm_head.weight and 1 more")
        assert (await door.complete("0-0@a"))[0] == 409
        assert "compute" not in vllm.calls
        vllm.awaited = [[], []]
        assert await door.load("0-1@a") == (204, "")
        assert await door.load("0-2@a") == (204, "")
        assert vllm.calls.count("not_loaded") == 2

    asyncio.run(story())


def test_a_short_context_takes_the_beginning_of_the_text() -> None:
    async def story() -> None:
        vllm = FakeVllm(context=24)
        vllm.go_on.set()
        assert await Door(vllm).load("0-1@a") == (204, "")
        assert vllm.bodies[0]["prompt"] == TEXT[:23]

    asyncio.run(story())


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
def test_beside_an_adapter_nobody_asks_for_the_bare_weights(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def takes_it(_state: Any, _path: str) -> str:
        return ""

    monkeypatch.setattr(vllm_guard, "change_adapter", takes_it)

    async def story() -> None:
        vllm = FakeVllm()
        door = Door(vllm)
        assert await door.load("0-1@a", canary=None, adapter=True) == (204, "")
        assert (await door.complete("0-1@a", body=body))[0] == 404
        assert vllm.bodies == []
        whole = {"model": "policy", "prompt": [1, 2]}
        assert (await door.complete("0-1@a", body=json.dumps(whole).encode()))[0] == 200
        assert vllm.bodies == [whole]
        assert (await door.complete("0-0@a", body=json.dumps(whole).encode()))[0] == 409

    asyncio.run(story())


TRIAL = ["follow_loader", "apply_deltas", "compute", "reload_all /there", "compute"]


@pytest.mark.parametrize(
    ("vllm", "why", "calls"),
    [
        (FakeVllm(), "", [*TRIAL, "follow_loader", "differs", "compute"]),
        (
            FakeVllm(says={"follow_loader": ["", "w goes through add"]}),
            "vLLM's loader of this model cannot be followed: w goes through add",
            ["follow_loader", "reload_all /there", "compute"],
        ),
        (
            FakeVllm(off_changed=1e-6),
            "with weights that were overwritten it does not compute what it does with reloaded ones",
            [*TRIAL, "compute"],
        ),
        (
            FakeVllm(says={"differs": ["", "w"]}),
            "after a reload w is not in the parameters as it is in the file",
            [*TRIAL, "follow_loader", "differs", "compute"],
        ),
    ],
)
def test_after_a_trial_the_engine_serves_what_it_reloaded_whatever_came_of_it(
    vllm: FakeVllm, why: str, calls: list[str]
) -> None:
    async def story() -> None:
        vllm.go_on.set()
        door = Door(vllm)
        assert await door.load("0-0@a", canary=None) == (204, "")
        vllm.calls.clear()
        assert await door.load("0-1@b", base="0-0@a") == (200, why)
        assert [call for call in vllm.calls if not call.startswith(("pause", "resume"))] == calls
        assert not vllm.changed
        assert (await door.complete("0-1@b"))[0] == 200

    asyncio.run(story())


@pytest.mark.parametrize(("base", "status"), [("0-0@a", 204), ("0-0@c", 400)])
def test_changes_are_put_only_upon_what_they_are_to(base: str, status: int) -> None:
    async def story() -> None:
        vllm = FakeVllm()
        vllm.go_on.set()
        door = Door(vllm)
        assert await door.load("0-1@b", base="0-0@a", path="") == (
            400,
            "the changes are to 0-0@a, and this holds None",
        )
        assert await door.load("0-0@a", canary=None) == (204, "")
        assert (await door.load("0-1@b", base=base, path=""))[0] == status
        assert vllm.calls.count("apply_deltas") == (status == 204)
        assert (await door.complete("0-1@b"))[0] == (200 if status == 204 else 409)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("version", "differs", "status", "then"),
    [("0-0@a", ["", ""], 200, 200), ("0-0@a", ["", "w"], 422, 409), ("0-1@b", ["", "w"], 204, 200)],
)
def test_an_engine_that_differs_from_its_file_serves_nobody(
    version: str, differs: list[str], status: int, then: int
) -> None:
    async def story() -> None:
        door = Door(FakeVllm(says={"differs": differs}))
        assert await door.load("0-0@a", canary=None) == (204, "")
        assert (await door.prove(version))[0] == status
        assert (await door.complete("0-0@a"))[0] == then

    asyncio.run(story())
