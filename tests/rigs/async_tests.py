"""Tests that are coroutines: each runs on an event loop of its own, inside the environments that it asks for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from tests.budget import HANG_S


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_run(pyfuncitem.obj, arguments))
    return True


async def _run(test: Callable[..., Coroutine[Any, Any, None]], arguments: dict[str, Any]) -> None:
    """Run it within what its fixtures have made and not yet entered, for HANG_S at most."""
    async with asyncio.timeout(HANG_S), AsyncExitStack() as stack:
        for argument in arguments.values():
            if isinstance(argument, AbstractAsyncContextManager):
                await stack.enter_async_context(argument)
        await test(**arguments)
