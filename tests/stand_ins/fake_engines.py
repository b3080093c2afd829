"""The real agent of a rollout machine beside stand-ins for vLLM: `python -m tests.stand_ins.fake_engines agent`.

Each server is a process as vLLM's is, with a child of its own in another session, as vLLM's engine is. It answers
as `tests.stand_ins.fake_vllm` does, and what the agent asks of the guard. Its weights are a policy's label.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from aiohttp import web

from checkpoint.store.codec import to_json
from policies.serving.wire import LoadPolicy
from tasks.rollout import agent
from tasks.rollout.vllm import server as vllm_server
from tasks.rollout.vllm.server import EngineLimits
from tests.stand_ins.fake_vllm import FakeNode, completion

OPTIONS = {
    "event_s": 0.01,
    "status": 0,
    "breaks": "",
    "seen": os.devnull,
    "no_done": False,
    "stalls": 0,
    "hangs": 0,
}


class FakeEngine(FakeNode):
    """One server beside the agent."""

    def __init__(self) -> None:
        super().__init__(argparse.Namespace(**OPTIONS))
        self.boot_id, self.secret = os.environ[vllm_server.BOOT_ENV], os.environ["GRPO_ORCH_NODE_SECRET"]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Of the agent, which shows this boot's secret."""
        if request.headers.get("Authorization") != f"Bearer {self.secret}":
            return await self.complete(request) if request.method == "POST" else await self.health(request)
        match request.path:
            case "/grpo/policy":
                wanted = msgspec.json.decode(await request.read(), type=LoadPolicy)
                assert list(Path(wanted.path).glob("*.safetensors"))
                self.policy = wanted.version
                return web.Response(status=204)
            case "/v1/completions":
                body: dict[str, Any] = await request.json()
                tokens, _, _ = completion(body, body["prompt"])
                return web.json_response({"choices": [{"token_ids": tokens}]})
            case "/grpo/bare":
                return web.Response(status=204)
            case "/grpo/engine":
                return web.Response(body=to_json(EngineLimits(8, 4096)))
            case "/metrics":
                return web.Response(text="vllm:num_requests_running 0\n")
        return web.Response(status=404)


async def serve(host: str, port: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", FakeEngine().answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()


def main() -> int:
    if sys.argv[1] == "serve":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    with patch.object(vllm_server, "argv_of", _argv), patch.object(agent, "check_versions"):
        return agent.main()


def _argv(_: object, host: str, port: int, *__: object, **___: object) -> list[str]:
    return ["-m", "tests.stand_ins.fake_engines", "serve", host, str(port)]


if __name__ == "__main__":
    sys.exit(main())
