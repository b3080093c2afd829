"""The samples' pages over HTTP: what is wanted is there, every name leads to it, and all of it is text."""

from __future__ import annotations

from orchestrator.web.pages import SAMPLES_ON_A_PAGE as ON_A_PAGE
from tests.generators.samples import group, handed_over, sample, store_step
from tests.orchestrator.web.test_site import HOSTILE, Client, browse, check_headers, run_of


def test_groups_filters_and_names_that_last() -> None:
    world = run_of()
    for policy in ("0-4", "0-9"):
        store_step(
            world.store,
            policy,
            group("what is 1 + 1?", handed_over("it is two"), sample("3", 0.0, cut=True)),
            group("what is 2 + 2?", sample("4", 1.0), sample("it is 5", 0.25)),
        )

    async def story(client: Client) -> None:
        async def told(**query: str) -> list[str]:
            answer = await client.get("/samples", params={"format": "json", **query})
            assert answer.status == 200, await answer.text()
            found = await answer.json()
            return [one["link"] for each in found["groups"] for one in each["completions"]]

        drawn = await client.get("/samples")
        check_headers(drawn)
        text = await drawn.text()
        for part in (
            "Step 0-10",
            "Prompt 1",
            "what is 2 + 2?",
            'href="/samples/0-10/1/0"',
            "cut",
            "1 handed over",
        ):
            assert part in text, part
        assert 'it i<mark title="it left rollout-1-i1 after 3 tokens">⇥</mark>s two' in text
        assert 'step=0-5">← 0-5</a>' in text
        assert await told() == ["0-10/0/0", "0-10/0/1", "0-10/1/0", "0-10/1/1"]
        assert await told(step="5", order="worst") == ["0-5/0/1", "0-5/1/1", "0-5/0/0", "0-5/1/0"]
        assert await told(order="best", search="IT IS") == ["0-10/0/0", "0-10/1/1"]
        assert await told(low="0.2", high="0.6") == ["0-10/0/0", "0-10/1/1"]
        assert await told(only="cut") == ["0-10/0/1"]
        assert await told(only="handed_over", node="rollout-1-i1", policy="0-4") == ["0-10/0/0"]
        assert await told(policy="0-9") == []
        one = await (await client.get("/samples/0-5/0/0", params={"format": "json"})).json()
        assert one["completion"]["completion"][0]["text"] == "it is two"
        whole = await (await client.get("/samples/0-5/0/0")).text()
        assert "it i" in whole
        assert "what is 1 + 1?" in whole
        for path, status in (
            ("/samples?step=7", 404),
            ("/samples?step=x", 404),
            ("/samples?order=dear", 400),
            ("/samples?low=much", 400),
            ("/samples/0-5/9/0", 404),
            ("/samples/0-5/0/2", 404),
            ("/samples/0-6/0/0", 404),
            ("/samples/a/b/c", 404),
        ):
            refused = await client.get(path)
            assert refused.status == status, path
        assert "the nearest are 0-5, 0-10" in await (await client.get("/samples?step=7")).text()

    browse(world, story)


def test_a_run_without_samples_says_so() -> None:
    async def story(client: Client) -> None:
        assert "no step has been scored yet" in await (await client.get("/samples")).text()

    browse(run_of(), story)


def test_hostile_completions_are_text() -> None:
    world = run_of()
    names = {"node": HOSTILE[:300], "policy": HOSTILE[:300]}
    made = [sample(HOSTILE + "the end", n / 100, **names) for n in range(ON_A_PAGE + 3)]
    store_step(world.store, "0-4", group(HOSTILE, *made, sample("", None, refused=HOSTILE)))

    async def story(client: Client) -> None:
        for path in ("/samples", "/samples?first=32", "/samples/0-5/0/0", f"/samples?search={'%3Cb%3E' * 9}"):
            drawn = await (await client.get(path)).text()
            assert "<script>alert" not in drawn
            assert not set("\x1b\u202e\u2066") & set(drawn)
            assert len(drawn) < 400_000
        shown = await (await client.get("/samples/0-5/0/0")).text()
        assert "&lt;script&gt;alert(1)&lt;/script&gt;‹U+001B›[2J‹U+202E›gpj.exe‹U+2066›" in shown
        assert "x" * 1999 in shown
        assert "the end" in shown
        pages = await (await client.get("/samples")).text()
        assert "further" in pages

    browse(world, story)
