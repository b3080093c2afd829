"""The account's process, in the rig's namespace: AWS's interfaces, the metadata service and the control port.

Usage: python -m tests.rigs.sky.server CONFIG, JSON with `folder`, `image`, `home`, `binds`, `links`. Says "ready".
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

from flask import Flask, Response, abort, jsonify, request
from moto.server import ThreadedMotoServer
from werkzeug.serving import make_server

from tests.rigs.sky.account import AWS_PORT, furnish
from tests.rigs.sky.cloud import Cloud, install
from tests.rigs.sky.machine import Hardware
from tests.rigs.sky.network import HOST_ADDRESS, METADATA_ADDRESS

CONTROL_PORT = 5601


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    folder, image, home = (Path(config[name]) for name in ("folder", "image", "home"))
    binds = tuple(Path(bind) for bind in config["binds"])
    hardware = Hardware(folder, image, binds, config["links"], home)
    cloud = Cloud(hardware)
    install(cloud)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    ThreadedMotoServer(HOST_ADDRESS, AWS_PORT, verbose=False).start()
    _serve(METADATA_ADDRESS, 80, metadata_app(cloud))
    _serve("127.0.0.1", CONTROL_PORT, control_app(cloud))
    furnish()
    print("ready", flush=True)
    threading.Event().wait()


def _serve(host: str, port: int, app: Any) -> None:
    server = make_server(host, port, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


# What the test asks of the rig: what instances there are, and faults.


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
        "private_ip": instance.private_ip,
        "tags": {tag["key"]: tag["value"] for tag in instance.get_tags()},
    }


# The instance metadata service, version 2: the little of it that nodes ask. Who asks is told by the address.


def metadata_app(cloud: Cloud) -> Flask:
    app = Flask("metadata")
    tokens: dict[str, str] = {}  # with the instance that it was made for

    def caller() -> Any:
        for instance in cloud.instances.values():
            if instance.state == "running" and request.remote_addr in (instance.private_ip, instance.public_ip):
                return instance
        abort(404)

    @app.put("/latest/api/token")
    def token() -> Response:
        if "X-aws-ec2-metadata-token-ttl-seconds" not in request.headers:
            abort(400)
        new = secrets.token_urlsafe()
        tokens[new] = caller().id
        return Response(new, mimetype="text/plain")

    @app.before_request
    def check() -> None:
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if request.method == "GET" and tokens.get(token) != caller().id:
            abort(401)

    @app.get("/latest/meta-data/spot/instance-action")
    def instance_action() -> Response:
        return jsonify(cloud.notices.get(caller().id) or abort(404))

    return app


if __name__ == "__main__":
    main()
