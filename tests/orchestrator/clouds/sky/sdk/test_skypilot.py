"""SkyPilot's adapter without a cloud, in a process with a home of its own: what it asks for, and whom."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from tests.orchestrator.clouds.sky.sdk.story import needs_sky, run
from tests.rigs.sky.home import make_home, make_outside

pytestmark = needs_sky


def test_a_task_keeps_alternatives_and_hides_secrets(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        places = [{"infra": "aws/us-east-1"}, {"infra": "gcp", "labels": {"team": "b"}}]
        given = dict(any_of=places, use_spot=True, labels={"team": "a"})
        some, ordered = (skypilot._task("n-1", work(**given)), skypilot._task("n-1", work(ordered=places)))
        print(json.dumps({
            "any": sorted([str(one.cloud), one.region, one.use_spot, one.labels] for one in some.resources),
            "ordered": [str(one.cloud) for one in ordered.resources],
            "types": [type(task.resources).__name__ for task in (some, ordered)],
            "kept": repr(some.to_yaml_config(use_user_specified_yaml=True)),
            "sent": some.to_yaml_config()["secrets"],
            "untouched": places[1]["labels"],
        }))
        """,
    )
    assert found["any"] == [
        ["AWS", "us-east-1", True, {"team": "a", "grpo-orch": "n-1"}],
        ["GCP", None, True, {"team": "b", "grpo-orch": "n-1"}],
    ]
    assert found["ordered"] == ["AWS", "GCP"]
    assert found["types"] == ["set", "list"]
    assert "sesame" not in found["kept"]
    assert found["sent"] == {"TOKEN": "open-sesame"}
    assert found["untouched"] == {"team": "b"}


def test_pods_hook_reaches_skypilots_server_and_pod_waits(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        from dataclasses import replace
        from sky.clouds import kubernetes

        hook = {"run": "true", "events": ["preemption"], "timeout": 60}
        wanted = work(any_of=[{"infra": "k8s/mine"}, {"infra": "aws"}], cpus=4)
        asked = skypilot._task("n-1", replace(wanted, hooks=(hook,))).to_yaml_config()
        task = skypilot.sky.Task.from_yaml_config(asked)
        print(json.dumps({
            "pod": [[kubernetes._compute_preemption_hook_timeout(one.hooks), one.hooks] for one in task.resources],
            "none": [one.hooks for one in skypilot._task("n-1", wanted).resources],
        }))
        """,
    )
    hook = {"run": "true", "events": ["preemption"], "timeout": 60}
    assert found == {"pod": [[60, [hook]]] * 2, "none": [None] * 2}


def test_the_runs_machines_have_a_security_group_of_their_own(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        skypilot.SkyPilot("grpo-a")
        skypilot.SkyPilot("grpo-controller-a")
        said = {"unnamed": sent()["aws"]["security_group_name"]}
        for kind, named in {"one": "mine", "some": [{"team-*": "mine"}]}.items():
            skypilot._overlay.close()
            with open(os.path.expanduser("~/.sky/config.yaml"), "w") as config:
                json.dump({"aws": {"security_group_name": named}}, config)
            skypilot.skypilot_config.reload_config()
            skypilot.SkyPilot("grpo-a")
            said[kind] = sent()["aws"]["security_group_name"]

        asked, left = [], ["sg-1 is in use"]
        skypilot._requests.query = lambda *_: ["AWS"]  # what the API server calls enabled
        regions = {"Regions": [{"RegionName": "east"}, {"RegionName": "west"}]}
        aws.Account._drop_groups = lambda _, *given: asked.append([sorted(given[0]), given[1]]) or left
        sky = skypilot.SkyPilot("grpo-a")
        sky._aws._client = lambda _: skypilot.SimpleNamespace(describe_regions=lambda: regions)
        try:
            sky.drop_group(["aws/us-east-1/us-east-1a", "gcp"], -1.0)
        except CloudUnavailable as error:
            said["left"] = str(error)
        left.clear()
        for places in ([None], ["gcp/us-east1", "kubernetes/a/b"]):
            sky.drop_group(places, 0.0)
        print(json.dumps(said | {"asked": asked}))
        """,
    )
    assert found["unnamed"] == [{"grpo-a*": "grpo-a"}, {"grpo-controller-a*": "grpo-controller-a"}]
    assert found["one"] == "mine"  # what the user names is kept to
    assert found["some"] == [{"team-*": "mine"}, {"grpo-a*": "grpo-a"}]
    assert "AWS did not delete security group grpo-a, which costs nothing: sg-1 is in use" in found["left"]
    assert found["asked"] == [[["us-east-1"], "grpo-a"], [["east", "west"], "grpo-a"], [[], "grpo-a"]]


def test_credentials_of_clouds_that_a_run_does_not_use_stay_home(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    make_home(tmp_path, "https://ec2.us-east-1.amazonaws.com", tmp_path / "wheels")
    for name in (".config/gcloud/credentials.db", ".azure/msal_token_cache.json", ".kube/config"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    found = run(
        tmp_path,
        """
        import contextlib, io
        from pathlib import Path
        from moto import mock_aws
        from orchestrator.clouds.sky.work import unused_clouds
        from sky import clouds
        from sky.backends import backend_utils
        from sky.utils import yaml_utils

        def shipped():
            # What SkyPilot would put on a machine on AWS.
            machine = skypilot.sky.Resources(infra="aws/us-east-1/us-east-1a", instance_type="m6i.large")
            place = clouds.Region("us-east-1"), [clouds.Zone("us-east-1a")]
            with contextlib.redirect_stdout(io.StringIO()):
                written = backend_utils.write_cluster_config(
                    machine, 1, "aws-ray.yml.j2", "grpo-a-trainer-0-1", Path("/wheel"), "hash", *place, dryrun=True
                )
            files = yaml_utils.read_yaml(written["ray"])["file_mounts"]
            return sorted(name for name in files if not name.startswith(("~/.sky/", "~/.ssh/")))

        with mock_aws():
            before = shipped()
            skypilot.SkyPilot("grpo-a", unused_clouds(["aws/us-east-1"], "s3://bucket/run"))
            after = shipped()
        print(json.dumps({"before": before, "after": after, "azure": sent()["azure"]["remote_identity"]}))
        """,
    )
    assert found["before"] == [
        "~/.azure/msal_token_cache.json",
        "~/.config/gcloud/credentials.db",
        "~/.kube/config",
    ]
    assert found["after"] == []
    assert found["azure"] == "NO_UPLOAD"


def test_clusters_of_all_users_and_unrecorded_ones_are_listed(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    make_home(tmp_path, "http://127.0.0.1:9", tmp_path / "wheels")
    found = run(
        tmp_path,
        """
        from orchestrator.clouds.sky.records import Instance
        from sky import core, global_user_state, models
        from sky.backends import CloudVmRayResourceHandle

        def launched(user, name):
            os.environ["SKYPILOT_USER_ID"] = user
            global_user_state.add_or_update_user(models.User(user, user))
            machine = skypilot.sky.Resources(infra="aws/us-east-1", instance_type="m6i.large")
            handle = CloudVmRayResourceHandle(cluster_name=name, cluster_name_on_cloud=name, cluster_yaml=None,
                                              launched_nodes=1, launched_resources=machine)
            global_user_state.add_or_update_cluster(name, handle, requested_resources={machine}, ready=True)

        skypilot._requests.query = lambda submit, _: submit()
        skypilot.sdk.status = lambda *given, **words: core.status(
            **dict(zip(("cluster_names", "refresh"), given)), **words
        )
        launched("aaaa", "grpo-r-trainer-0-i1")
        launched("bbbb", "grpo-other-trainer-0-i1")
        sky = skypilot.SkyPilot("grpo-r")
        aws.query_cloud = lambda _: [
            Instance("i-1", name, "us-east-1", "us-east-1b", "m6i.large", True, "up", "198.18.0.7")
            for name in ("grpo-r-trainer-0-i1", "grpo-r-rollout-0-i1")
        ]
        skypilot.sdk.enabled_clouds = lambda: ["AWS"]
        (one,) = [sky.as_cluster(found) for found in sky.unrecorded("grpo-r-", ["aws/us-east-1"])]
        print(json.dumps({
            "clusters": [cluster.name for cluster in sky.clusters("grpo-r-")],
            "record": skypilot._record("grpo-r-trainer-0-i1", 1.0) is not None,
            "unrecorded": [one.name, one.unrecorded, one.infra, one.price_usd_per_h, one.on_demand_usd_per_h],
            "of other clouds": sky.unrecorded("grpo-r-", ["gcp"]),
        }))
        """,
    )
    assert found == {
        "clusters": ["grpo-r-trainer-0-i1"],
        "record": True,
        "unrecorded": ["grpo-r-rollout-0-i1", True, "aws/us-east-1/us-east-1b", 0.035, 0.096],
        "of other clouds": [],
    }


def test_remote_api_server_outage_starts_no_local_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = run(
            tmp_path,
            """
            asked = {}
            sky = skypilot.SkyPilot()
            for name, call in {
                "silent": lambda: sky.confirm("n-1", 0.5),
                "clusters": lambda: sky.clusters(""),
            }.items():
                try:
                    call()
                except CloudUnavailable as error:
                    asked[name] = str(error)
            print(json.dumps(asked))
            """,
            SKYPILOT_API_SERVER_ENDPOINT=f"http://me:open-sesame@127.0.0.1:{port}",
        )
    assert found["silent"].startswith("SkyPilot did not complete the request within 0.5 s")
    assert f"127.0.0.1:{port} does not answer" in found["clusters"]
    assert "sesame" not in json.dumps(found)
    assert not (tmp_path / ".sky" / "api_server" / "server.log").exists()


def test_launch_sets_autodown_and_all_cluster_states_are_known(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        import inspect
        from dataclasses import replace
        from sky.utils.status_lib import ClusterStatus
        from orchestrator.clouds.sky import records

        asked, launch = [], skypilot.sdk.launch
        skypilot._requests.perform = lambda submit, _: (submit(), None)
        skypilot.cluster_at = lambda *_: None
        def told(task, **given):
            inspect.signature(launch).bind(task, **given)  # SkyPilot's own knows such arguments
            asked.append(given)

        skypilot.sdk.launch = told
        sky = skypilot.SkyPilot(None)
        sky.launch("grpo-a-trainer-0-i1", replace(work(), idle_min=30), 1.0)
        sky.launch("grpo-controller-a", work(), 1.0)
        unknown = [state.value for state in ClusterStatus if state.value not in records._STATES]
        print(json.dumps({"asked": asked, "unknown": unknown}))
        """,
    )
    ends, stays = found["asked"]
    assert (ends["idle_minutes_to_autostop"], ends["down"]) == (30, True)
    assert stays == {"cluster_name": "grpo-controller-a"}
    assert found["unknown"] == []


def test_quota_is_zero_only_if_the_cloud_reports_it(tmp_path: Path) -> None:
    make_outside(tmp_path, "http://127.0.0.1:9")
    codes = "InstanceType,SpotInstanceCode,OnDemandInstanceCode\np5.48xlarge,L-1,L-2\ng5.xlarge,,L-4\n"
    (tmp_path / ".sky/catalogs/v8/aws/instance_quota_mapping.csv").write_text(codes)
    found = run(
        tmp_path,
        """
        from botocore.awsrequest import AWSResponse
        from botocore.exceptions import NoCredentialsError
        from botocore.session import Session
        from orchestrator.clouds.sky.records import SkyOffer

        quotas = {"L-1": 0.0, "L-2": 96.0}
        skypilot.CHECK_TIMEOUT_S = 1e4  # a busy machine is no answer

        def client(service, region_name):
            # AWS itself: it checks what it is asked, and answers.
            made = Session().create_client(service, region_name, aws_access_key_id="a", aws_secret_access_key="b")

            def answer(params, **_):
                if params["QuotaCode"] not in quotas:
                    raise NoCredentialsError()
                return AWSResponse("", 200, {}, None), {"Quota": {"Value": quotas[params["QuotaCode"]]}}

            made.meta.events.register("before-call.service-quotas.GetServiceQuota",
                                      lambda params, **_: answer(json.loads(params["body"])))
            return made

        skypilot.aws.client = client
        sky = skypilot.SkyPilot()

        def has(kind, spot):
            return sky.has_quota(SkyOffer("aws/us-east-1", kind, "", spot, 1.0))

        print(json.dumps({
            "zero": has("p5.48xlarge", True), "some": has("p5.48xlarge", False),
            "no code": has("g5.xlarge", True), "no answer": has("g5.xlarge", False),
            "no row": has("m6i.large", True),
        }))
        """,
    )
    assert found == {"zero": False, "some": True, "no code": True, "no answer": True, "no row": True}
