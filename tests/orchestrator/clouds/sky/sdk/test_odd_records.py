"""One record of many that SkyPilot cannot read, or cannot price: the others are seen, and it is not lost."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from tests.orchestrator.clouds.sky.sdk.story import needs_sky, run
from tests.rigs.sky.home import make_outside

pytestmark = needs_sky

# SkyPilot's own database, server's answer and client's decoding, without the HTTP in between.
SERVED = """
    import sqlite3
    from types import SimpleNamespace
    from grpo_orch.orchestrator.clouds.sky import calls
    from grpo_orch.orchestrator.clouds.sky.records import Instance
    from sky import core, global_user_state, models
    from sky.backends import CloudVmRayResourceHandle
    from sky.server.requests.serializers import decoders, encoders

    warned, said, changed = [], {}, {}
    structlog.configure(processors=[lambda _, __, event: warned.append([event["event"], event["subject"]]) or ""],
                        logger_factory=structlog.ReturnLoggerFactory())

    def get(asked):
        answer = json.loads(json.dumps(encoders.get_encoder("sky.status")(core.status(**asked))))
        for one in answer:
            one.update(changed.get(one["name"], {}))
        return decoders.get_decoder("sky.status")(answer)

    skypilot.QUERY_TIMEOUT_S = calls.FIND_TIMEOUT_S = 1e4  # a busy machine is no server that is away
    os.environ["SKYPILOT_USER_ID"] = "aaaa"
    global_user_state.add_or_update_user(models.User("aaaa", "aaaa"))
    skypilot._requests.ensure_server = lambda: None
    skypilot._requests._sdk = SimpleNamespace(get=get, api_cancel=lambda *_, **__: None)
    skypilot.sdk.status = lambda names, **words: {"cluster_names": names, **words}

    def handle_of(name, machine):
        return CloudVmRayResourceHandle(cluster_name=name, cluster_name_on_cloud=name, cluster_yaml=None,
                                        launched_nodes=1, launched_resources=machine)

    def launched(name, instance_type="m6i.2xlarge", **machine):
        place = {"infra": "aws/us-east-1/use1-az1", "instance_type": instance_type}
        machine = skypilot.sky.Resources(**place, **machine)
        global_user_state.add_or_update_cluster(name, handle_of(name, machine), requested_resources={machine},
                                                ready=True)

    def spoil(name, column, value):
        with sqlite3.connect(os.path.expanduser("~/.sky/state.db")) as database:
            done = database.execute(f"UPDATE clusters SET {column} = ? WHERE name = ?", (value, name))
            assert done.rowcount == 1

    def seen(prefix):
        return {one.name.removeprefix(prefix): [one.state, one.infra, one.price_usd_per_h, one.on_demand_usd_per_h]
                for one in skypilot.SkyPilot("grpo-r").clusters(prefix)}
"""
UNREAD = """
    for name in ("a-0", "a-1", "a-2", "a-3", "old"):
        launched(name)
    spoil("old", "handle", b"not a pickle")
    said["another's"] = seen("a-")
    spoil("a-0", "handle", b"not a pickle")
    spoil("a-1", "status", "REBOOTING")
    said["its own"] = [seen("a-"), seen("a-")]
    said["recorded"] = sorted(record.name for record in skypilot._records("a-"))
"""
HALF_READ = """
    names = ["state", "handle", "machine", "form", "whole"]
    for name in names:
        launched(f"b-{name}")
    changed["b-state"] = {"status": "REBOOTING"}
    changed["b-handle"] = {"handle": "bm90IGEgcGlja2xl"}
    changed["b-machine"] = {"handle": encoders.pickle_and_encode(handle_of("b-machine", None))}
    changed["b-form"] = {"nodes": "many"}
    said["half read"] = seen("b-")
    sky = skypilot.SkyPilot("grpo-r")
    sky.clusters("b-")
    said["asked"] = [sky.has_machines(f"b-{name}") for name in names]
"""
UNPRICED = """
    launched("c-0")
    launched("c-1", "g6.only-spot", use_spot=True)
    launched("c-2", "m6i.large", use_spot=True)

    def elsewhere(kind, region):
        found = sky.as_cluster(Instance("i-1", f"{kind} {region}", region, "z", kind, True, "up", None))
        return [found.infra, found.machine, found.price_usd_per_h, found.on_demand_usd_per_h]

    said["unpriced"] = [seen("c-"), seen("c-")]
    said["elsewhere"] = [elsewhere("z9.huge", "us-east-1"), elsewhere("m6i.large", "xx-1"),
                         elsewhere("m6i.large", "us-east-1")]
"""
TWICE = """
    def away(*_):
        raise OSError("no route to host")

    def offered(enabled, **wanted):
        try:
            return sorted(one.infra for one in skypilot._offers(wanted, True, enabled))
        except (OSError, skypilot.CloudRefused) as error:
            return str(error)

    skypilot.registry.CLOUD_REGISTRY.from_str("kubernetes").get_feasible_launchable_resources = away
    said["spot"] = [offered(["aws"], accelerators="A10G:1", infra="aws/us-east-1") for _ in range(2)]
    said["anywhere"] = offered(["kubernetes", "aws"], accelerators="A10G:1")
    said["away"] = offered(["kubernetes"], accelerators="A10G:1")
    print(json.dumps(said | {"warned": warned}))
"""
WHOLE = ["up", "aws/us-east-1/use1-az1", 0.384, 0.384]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all stories tell: SkyPilot takes seconds to import."""
    home = tmp_path_factory.mktemp("home")
    make_outside(home, "http://127.0.0.1:9")  # without credentials zones are called by their ids
    file = home / ".sky/catalogs/v8/aws/vms.csv"
    with file.open() as text:
        known = list(csv.DictReader(text))
    like = {row["InstanceType"]: row for row in reversed(known)}
    odd = [
        like["m6i.large"] | {"AvailabilityZone": "use1-az6", "Price": ""},
        like["g5.xlarge"] | {"InstanceType": "g6.only-spot", "AcceleratorName": "L4", "Price": ""},
        like["g5.xlarge"] | {"SpotPrice": "0.41"},
    ]
    with file.open("a", newline="") as text:
        csv.DictWriter(text, known[0]).writerows(odd)
    return run(home, SERVED, UNREAD, HALF_READ, UNPRICED, TWICE)


def warned_once(found: dict[str, Any], event: str) -> list[str]:
    what: list[str] = [what for kind, what in found["warned"] if kind == event]
    assert len(what) == len(set(what))
    return sorted(what)


def test_unreadable_record_hides_no_other_machine(found: dict[str, Any]) -> None:
    assert found["another's"] == dict.fromkeys("0123", WHOLE)
    unread = ["starting", "", None, 0.0]
    assert found["its own"] == [dict(zip("0123", [unread, unread, WHOLE, WHOLE], strict=True))] * 2
    assert found["recorded"] == ["a-0", "a-1", "a-2", "a-3"]
    assert warned_once(found, "cluster_record_unreadable") == ["a-0", "a-1", "b-form"]


def test_newer_servers_record_is_read_as_far_as_possible(found: dict[str, Any]) -> None:
    assert found["half read"] == {
        "whole": WHOLE,
        "state": ["starting", *WHOLE[1:]],
        "handle": ["up", "", None, 0.0],
        "machine": ["up", "", None, 0.0],
        "form": ["starting", "", None, 0.0],
    }
    assert set(found["asked"]) == {None}  # nothing is concluded
    assert warned_once(found, "cluster_record_incomplete") == ["b-handle", "b-state"]


def test_a_machine_without_a_price_costs_no_more_than_its_price(found: dict[str, Any]) -> None:
    place = WHOLE[:2]
    assert found["unpriced"] == [{"0": WHOLE, "1": [*place, 0.42, 0.0], "2": [*place, 0.035, 0.096]}] * 2
    assert found["elsewhere"] == [
        ["aws/us-east-1/z", "z9.huge", None, 0.0],
        ["aws/xx-1/z", "m6i.large", None, 0.0],
        ["aws/us-east-1/z", "m6i.large", 0.035, 0.0],
    ]
    assert "c-1 on demand" in warned_once(found, "price_unknown")


def test_duplicate_catalog_row_costs_only_its_zone(found: dict[str, Any]) -> None:
    others = ["aws/us-east-1/use1-az2", "aws/us-east-1/use1-az4"]
    assert found["spot"] == [others] * 2
    assert found["anywhere"] == [*others, "aws/us-west-2/usw2-az1", "aws/us-west-2/usw2-az2"]
    assert "aws/us-east-1/use1-az1 g5.xlarge spot" in warned_once(found, "price_unknown")


def test_unreachable_cloud_hides_no_other(found: dict[str, Any]) -> None:
    assert found["anywhere"]
    assert "no route to host" in found["away"]
    assert warned_once(found, "cloud_query_failed") == ["kubernetes"]
