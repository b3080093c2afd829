"""What the test asks of the rig: what instances there are, and faults."""

from __future__ import annotations

from typing import Any

from flask import Flask, jsonify, request

from tests.rigs.sky.cloud import Cloud


def control_app(cloud: Cloud) -> Flask:
    app = Flask("control")

    @app.get("/instances")
    def instances() -> Any:
        return jsonify([_describe(instance) for instance in cloud.instances.values()])

    @app.post("/instances/<instance_id>/preempt")
    def preempt(instance_id: str) -> Any:
        cloud.preempt(instance_id, float(request.args["grace_s"]))
        return "", 204

    @app.post("/instances/<instance_id>/crash")
    def crash(instance_id: str) -> Any:
        cloud.power_off(instance_id)
        return "", 204

    @app.post("/capacity/<zone>/<market>/<state>")
    def capacity(zone: str, market: str, state: str) -> Any:
        change = cloud.full.discard if state == "some" else cloud.full.add
        change((zone, market))
        return "", 204

    return app


def _describe(instance: Any) -> dict[str, Any]:
    return {
        "id": instance.id,
        "state": instance.state,
        "market": "spot" if instance.lifecycle == "spot" else "on-demand",
        "zone": instance.placement.zone,
        "type": instance.instance_type,
        "private_ip": instance.private_ip,
        "public_ip": instance.public_ip,
        "tags": {tag["key"]: tag["value"] for tag in instance.get_tags()},
    }
