"""The instance metadata service, version 2: the little of it that nodes ask. Who asks is told by the address."""

from __future__ import annotations

import secrets
from typing import Any

from flask import Flask, Response, abort, jsonify, request

from tests.rigs.sky.cloud import Cloud


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

    @app.get("/latest/meta-data/instance-id")
    def instance_id() -> Response:
        return Response(caller().id, mimetype="text/plain")

    @app.get("/latest/meta-data/spot/instance-action")
    def instance_action() -> Response:
        return jsonify(_notice())

    @app.get("/latest/meta-data/spot/termination-time")
    def termination_time() -> Response:
        return Response(_notice()["time"], mimetype="text/plain")

    def _notice() -> dict[str, str]:
        return cloud.notices.get(caller().id) or abort(404)

    return app
